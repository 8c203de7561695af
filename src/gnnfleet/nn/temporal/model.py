"""Temporal models: TGN, its ablation without attention, and TGAT, which has no memory.

Two pure functions: ``update`` computes memories from mails, ``embed`` computes embeddings from memories. The strategy
holds the tables of memories and mails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.nn.config import ModelConfig
from gnnfleet.nn.temporal.attention import EventBlock, TemporalAttention, TimeEncoding
from gnnfleet.nn.temporal.decoders import NUM_FEATURES, ClassDecoder, EventDecoder
from gnnfleet.ops.draws import DrawKey
from gnnfleet.ops.gru import gru
from gnnfleet.ops.rounded_matmul import linear_float32


class MemoryCell(torch.nn.Module):
    """s' = GRU([mail, e, Phi(time between the last two mails)], s), e the features of the mail's event.

    Weights are those of torch.nn.GRUCell.
    """

    def __init__(self, width: int, edge_width: int, time_encoding: TimeEncoding) -> None:
        super().__init__()
        self.clock, time_width = time_encoding, len(time_encoding.bias)
        bound = 1 / math.sqrt(width)
        self.weight_ih = _uniform(bound, 3 * width, 2 * width + edge_width + time_width)
        self.weight_hh = _uniform(bound, 3 * width, width)
        self.bias_ih = _uniform(bound, 3 * width)
        self.bias_hh = _uniform(bound, 3 * width)

    def forward(self, mail: Tensor, edge: Tensor | None, time_delta: Tensor, memory: Tensor) -> Tensor:
        """mails [n, 2 D], features [n, F], times [n], memories [n, D] → [n, D]."""
        # One product for inputs without gradients, another for time: gradients of mails are not computed.
        inputs = mail if edge is None else torch.cat([mail, edge], 1)
        weights = self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh
        return gru([inputs, self.clock(time_delta)], memory, weights)


def _uniform(bound: float, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))


@dataclass(frozen=True)
class EventDims:
    """Sizes of a model that depend on the data."""

    edge: int = 0  # features of an event
    static: int = 0  # static columns of every node
    has_features: bool = False  # static columns include node features
    classes: int = 0  # of events; 0: links are predicted
    mean_time_gap: float = 1.0  # mean time between two events
    time_span: float = 1e9  # time span of all events


class TemporalModel(torch.nn.Module):
    """h = s' + P x of memories s' and static rows x; z = attention over the latest events of h; a decoder of z.

    ``tgn`` (https://arxiv.org/abs/2006.10637) has memory and attention, ``tgn-id`` uses z = h, ``tgat``
    (https://arxiv.org/abs/2002.07962) has no memory: h = P x. A learnt static table alone is added without P.
    """

    def __init__(self, config: ModelConfig, dims: EventDims) -> None:
        super().__init__()
        width = config.hidden
        self.config, self.dims, self.width = config, dims, width
        self.has_memory, self.has_attention = config.name != "tgat", config.name != "tgn-id"
        self.cell = MemoryCell(width, dims.edge, self._time_encoding()) if self.has_memory else None
        mapped = dims.static > 0 and (dims.has_features or dims.static != width)
        self.static = torch.nn.Linear(dims.static, width) if mapped else None
        self.layers = torch.nn.ModuleList(
            TemporalAttention(
                width, dims.edge, self._time_encoding(), heads=config.heads, dropout=config.dropout, layer=layer
            )
            for layer in range(config.layers if self.has_attention else 0)
        )
        self.decoder = (
            ClassDecoder(width, dims.classes)
            if dims.classes
            else EventDecoder(width, NUM_FEATURES if config.pairs else 0)
        )

    def _time_encoding(self) -> TimeEncoding:
        config, dims = self.config, self.dims
        return TimeEncoding(config.time_width, dims.mean_time_gap, dims.time_span, learnt=config.clock == "learnt")

    @property
    def uses_pair_features(self) -> bool:
        """True if the decoder reads features of pairs."""
        return isinstance(self.decoder, EventDecoder) and self.decoder.pair is not None

    @property
    def num_hops(self) -> int:
        return len(self.layers)

    @property
    def neighbours(self) -> int:
        """Number of events of a node that a layer reads."""
        return self.config.neighbours if self.has_attention else 0

    def update(self, mail: Tensor, edge: Tensor | None, time_delta: Tensor, memory: Tensor) -> Tensor:
        """[n, D] new memories of nodes with a mail; ``time_delta`` [n] is the time between the last two mails."""
        assert self.cell is not None, "tgat has no memory"
        updated: Tensor = self.cell(mail, edge, time_delta, memory)
        return updated

    def combine_static(self, memory: Tensor | None, static: Tensor | None, *, rows: int) -> Tensor:
        """[rows, D] input of attention: memory plus static rows, zeros without either."""
        if static is None:
            return next(self.parameters()).new_zeros(rows, self.width) if memory is None else memory
        projected = static if self.static is None else linear_float32(self.static, static)
        return projected if memory is None else memory + projected

    def embed(self, block: EventBlock, h: Tensor, key: DrawKey) -> Tensor:
        """h [R, D] of the block's nodes → [Q, D] embeddings of the queries of its last hop."""
        if not self.has_attention:
            return h[block.hops[-1].query]
        for layer, hop in zip(self.layers, block.hops, strict=True):
            h = layer(hop, h, block.features, key)
        return h
