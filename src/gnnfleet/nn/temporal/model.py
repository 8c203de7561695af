"""Temporal models: TGN, its ablation without attention, and TGAT, which has no memory.

Two verbs, both functions of what they are given: ``update`` makes memories of mails, ``embed`` makes embeddings of
memories. The tables of memories and mails are the strategy's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.nn.config import ModelConfig
from gnnfleet.nn.temporal.attention import TemporalAttention
from gnnfleet.nn.temporal.block import EventBlock
from gnnfleet.nn.temporal.cell import MemoryCell
from gnnfleet.nn.temporal.decoders import ClassDecoder, EventDecoder
from gnnfleet.nn.temporal.pairs import NUM_FEATURES
from gnnfleet.nn.temporal.time_encoding import TimeEncoding
from gnnfleet.ops.draws import DrawKey
from gnnfleet.ops.rounded_matmul import linear_float32


@dataclass(frozen=True)
class EventDims:
    """What of a model the data decides."""

    edge: int = 0  # features of an event
    static: int = 0  # columns that are known of every node
    given: bool = False  # whether features are among them, which nobody made to be added to memories
    classes: int = 0  # of events; 0 where links are predicted
    mean_time_gap: float = 1.0  # the time between two events, on average
    time_span: float = 1e9  # the time that all of them take


class TemporalModel(torch.nn.Module):
    """h = s' + P x of memories s' and static rows x; embeddings by attention over the latest events; a decoder.

    ``tgn`` has memory and attention, ``tgn-id`` takes h itself for the embedding, ``tgat`` has no memory: h = P x.
    Rows that were learnt to stand in memories' place, and nothing else, go without P.
    """

    def __init__(self, config: ModelConfig, sizes: EventDims) -> None:
        super().__init__()
        width = config.hidden
        self.config, self.dims, self.width = config, sizes, width
        self.has_memory, self.has_attention = config.name != "tgat", config.name != "tgn-id"
        self.cell = MemoryCell(width, sizes.edge, self._clock()) if self.has_memory else None
        mapped = sizes.static > 0 and (sizes.given or sizes.static != width)
        self.static = torch.nn.Linear(sizes.static, width) if mapped else None
        self.layers = torch.nn.ModuleList(
            TemporalAttention(width, sizes.edge, self._clock(), heads=config.heads, dropout=config.dropout, layer=layer)
            for layer in range(config.layers if self.has_attention else 0)
        )
        self.decoder = (
            ClassDecoder(width, sizes.classes)
            if sizes.classes
            else EventDecoder(width, NUM_FEATURES if config.pairs else 0)
        )

    def _clock(self) -> TimeEncoding:
        config, sizes = self.config, self.dims
        return TimeEncoding(config.time_width, sizes.mean_time_gap, sizes.time_span, learnt=config.clock == "learnt")

    @property
    def uses_pair_features(self) -> bool:
        """Whether the decoder wants to know what two nodes had to do with each other."""
        return isinstance(self.decoder, EventDecoder) and self.decoder.pair is not None

    @property
    def num_hops(self) -> int:
        return len(self.layers)

    @property
    def neighbours(self) -> int:
        """Events of a node that a layer looks at."""
        return self.config.neighbours if self.has_attention else 0

    def update(self, mail: Tensor, edge: Tensor | None, since: Tensor, memory: Tensor) -> Tensor:
        """[n, D] new memories of nodes with a mail; ``since`` [n] is the time from the mail before to this one."""
        assert self.cell is not None, "tgat has no memory"
        made: Tensor = self.cell(mail, edge, since, memory)
        return made

    def combine_static(self, memory: Tensor | None, static: Tensor | None, *, rows: int) -> Tensor:
        """[rows, D] what attention reads of nodes: memory and what is known of them, zeros without either."""
        if static is None:
            return next(self.parameters()).new_zeros(rows, self.width) if memory is None else memory
        known = static if self.static is None else linear_float32(self.static, static)
        return known if memory is None else memory + known

    def embed(self, block: EventBlock, h: Tensor, key: DrawKey) -> Tensor:
        """[Q, D] of the block's last queries, from h [R, D] of its nodes."""
        if not self.has_attention:
            return h[block.hops[-1].query]
        for layer, hop in zip(self.layers, block.hops, strict=True):
            h = layer(hop, h, block.features, key)
        return h
