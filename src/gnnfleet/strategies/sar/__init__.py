"""Exact full batch over ranks: remote blocks aggregated a group at a time, freed, rebuilt in backward (SAR)."""
