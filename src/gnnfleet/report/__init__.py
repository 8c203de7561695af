"""Progress, metrics, run records and the report page. Knows plain values only, no graphs."""
