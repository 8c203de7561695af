"""The edges of a view as index tensors, for code that gathers rows by them, as torch_geometric does.

Sources are rows of ``fetch(x)``: the local rows first, then copies of the remote rows that local edges read.
E edges, N_src local source rows, M rows after ``fetch``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.views.view_base import Degrees


def _same_rows(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, eq=False)
class EdgeList:
    """Edges in the order of (destination, store edge id), so that sums over them do not depend on the partition."""

    index: Tensor  # [2, E] int64: sources as rows of fetch(x), destinations as local rows
    edge_ids: Tensor  # [E] int64 store edge ids
    source_ids: Tensor  # [N_src] int64 store ids of the local source rows
    num_dst: int
    num_fetched: int  # M
    weight: Tensor | None = None  # [E]
    attr: Tensor | None = None  # [E, F]
    edge_type: EdgeType | None = None  # None: edges of several types
    view_order: Tensor | None = None  # [E] positions here of the view's edges; None: the same order
    fetch: Callable[[Tensor], Tensor] = _same_rows
    """Collective. [N_src, F] → [M, F], differentiable."""
    send_back: Callable[[Tensor], Tensor] = _same_rows
    """Collective. The transpose of ``fetch``: [M, F] → [N_src, F], remote rows are added to those of their owners."""
    fetched_degree: Degrees | None = None
    """Collective. [M] numbers in the whole graph of the rows of ``fetch(x)``; None if in-edges of all are listed."""
    sampling_scale: Callable[[], Tensor] | None = None
    """[N_dst] edges in the store per listed edge; None unless edges are a uniform sample."""

    @property
    def is_bipartite(self) -> bool:
        """True if sources and destinations are of two node types, so that their row numbers are unrelated."""
        return self.edge_type is not None and self.edge_type.src != self.edge_type.dst

    @property
    def has_remote_sources(self) -> bool:
        return self.fetch is not _same_rows
