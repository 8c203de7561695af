"""Ways to distribute training: one folder per strategy, each with a ``SPEC``."""
