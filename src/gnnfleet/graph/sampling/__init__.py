"""Neighbour sampling and mini-batches in one process."""
