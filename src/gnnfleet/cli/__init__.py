"""The commands, one module each; ``main`` assembles them.

torch and the kernels are imported inside the functions, so that ``--help`` answers at once.
"""
