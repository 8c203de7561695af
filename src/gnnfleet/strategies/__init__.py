"""How training is distributed: one folder per strategy, each behind the few methods of base.Strategy."""
