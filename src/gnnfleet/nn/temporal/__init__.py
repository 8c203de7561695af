"""Models for event streams: memory cells, attention, decoders. Memory tables and streams belong to the strategy."""

from gnnfleet.nn.temporal.attention import EventBlock, Hop
from gnnfleet.nn.temporal.model import EventDims, TemporalModel

__all__ = ["EventBlock", "EventDims", "Hop", "TemporalModel"]
