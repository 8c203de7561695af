"""Your own training loop over ranks: ``gf.Fleet`` and ``gf.launch``."""
