"""Analyses beside training: comparison of runs, partition diagnosis, checks of the machine."""
