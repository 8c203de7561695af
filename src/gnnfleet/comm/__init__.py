"""Ranks and tensors: who takes part, how rows and sums move between them, who is alive. Knows nothing of graphs."""
