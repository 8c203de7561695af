"""Partitioning: the part of every node, parts on disk, and layouts derived from them."""
