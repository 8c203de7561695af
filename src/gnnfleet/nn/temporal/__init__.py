"""Models for event streams: memory cells, attention, decoders. Memory tables and streams belong to the strategy."""
