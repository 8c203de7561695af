"""RingView: the verbs of a GraphView on a graph spread over ranks.

Each rank calls each verb, in the same order, with rows of its own nodes. Results and gradients are those of
``LocalView`` on the whole graph, to rounding; draws go by store id and store edge id. Rows of other ranks are in memory
a group at a time. Whatever decides what travels (who needs a gradient, whose weights) is the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gnnfleet.comm.halo_exchange import Ring
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.graph.views.view import MANY
from gnnfleet.sharded.full_batch.active_rows import Flow
from gnnfleet.sharded.full_batch.partition_blocks import Part
from gnnfleet.sharded.full_batch.partitioned_view import MergedOnce, PartView
from gnnfleet.sharded.full_batch.row_lookup import Owners, take_ring


@dataclass(frozen=True, eq=False, kw_only=True)
class RingView(PartView):
    """This rank's part of a graph."""

    ring: Ring
    owners: Owners

    @classmethod
    def open(cls, shard: Shard, ring: Ring, flow: Flow | None = None) -> RingView:
        """All ranks call it together, each with the shard of its rank; with ``flow`` rows lie in its order."""
        assert (shard.part, shard.parts) == (ring.world.rank, ring.world.size), "one part for every rank"
        part = Part(shard if flow is None else flow.whole())
        owners = Owners(shard, part, ring)
        return cls(part=part, ring=ring, owners=owners, nodes=part.nodes, relations=part.edges, merged=MergedOnce(part))

    def of_layer(self, flow: Flow, index: int) -> RingView:
        """What a layer sees that need not compute all rows; all ranks call it together."""
        shard = flow.layer(index, self.ring)
        if shard is None:
            return self
        part = Part(shard, of=self.part, num_dst=shard.num_dst)
        many = flow.totals[index] > MANY * flow.totals[index + 1]
        return replace(
            self, part=part, nodes=part.nodes, relations=part.edges, merged=MergedOnce(part), many_sources=many
        )

    def _visits(self) -> Ring:
        return self.ring

    def take(self, x: Tensor, store_ids: Tensor) -> Tensor:
        self._check_rows("x", x, self._kind)
        return take_ring(self.ring, self.owners, self._kind, x, ids=store_ids, places=self.nodes[self._kind].places)

    def sum_over_nodes(self, t: Tensor) -> Tensor:
        return self.ring.total(t)
