"""The Python face of the kernels: argument checks and allocation; the work is done in csrc/."""
