"""Python wrappers of the kernels in csrc/: argument checks and allocation."""
