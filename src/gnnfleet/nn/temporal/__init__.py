"""Models of streams of events: cells and attention, no tables and no streams."""

from gnnfleet.nn.temporal.block import EventBlock, Hop
from gnnfleet.nn.temporal.model import EventDims, TemporalModel

__all__ = ["EventBlock", "EventDims", "Hop", "TemporalModel"]
