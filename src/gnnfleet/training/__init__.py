"""Training of a built run: the loop, checkpoints, the run directory and what is measured."""
