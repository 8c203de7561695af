"""Memory-based models on streams of events: one process, or batch × epoch × memory parallel."""
