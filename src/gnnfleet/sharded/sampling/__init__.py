"""Distributed neighbour sampling and the features it reads."""
