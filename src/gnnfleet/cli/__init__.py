"""One module per group of commands; each defines functions that cli.py hangs into the application.

torch and the kernels are imported inside the functions, so that ``--help`` answers at once.
"""
