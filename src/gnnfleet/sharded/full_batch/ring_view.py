"""RingView: the verbs of a GraphView on a graph spread over ranks.

Each rank calls each verb, in the same order, with rows of its own nodes. Results and gradients are those of
``LocalView`` on the whole graph, to rounding; draws go by store id and store edge id. Rows of other ranks are in memory
a group at a time. Whatever decides what travels (who needs a gradient, whose weights) is the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gnnfleet.comm.halo_exchange import RingExchange
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.graph.views.view import MANY_SOURCES
from gnnfleet.sharded.full_batch.active_rows import ActiveRows
from gnnfleet.sharded.full_batch.partition_blocks import PartitionBlocks
from gnnfleet.sharded.full_batch.partitioned_view import LazyMergedEdges, PartitionedView
from gnnfleet.sharded.full_batch.row_lookup import OwnershipMap, lookup_rows


@dataclass(frozen=True, eq=False, kw_only=True)
class RingView(PartitionedView):
    """This rank's part of a graph."""

    ring: RingExchange
    owners: OwnershipMap

    @classmethod
    def open(cls, shard: Shard, ring: RingExchange, flow: ActiveRows | None = None) -> RingView:
        """All ranks call it together, each with the shard of its rank; with ``flow`` rows lie in its order."""
        assert (shard.part, shard.parts) == (ring.world.rank, ring.world.size), "one part for every rank"
        part = PartitionBlocks(shard if flow is None else flow.all_active())
        owners = OwnershipMap(shard, part, ring)
        return cls(
            blocks=part, ring=ring, owners=owners, nodes=part.nodes, relations=part.edges, merged=LazyMergedEdges(part)
        )

    def for_layer(self, flow: ActiveRows, index: int) -> RingView:
        """What a layer sees that need not compute all rows; all ranks call it together."""
        shard = flow.layer(index, self.ring)
        if shard is None:
            return self
        part = PartitionBlocks(shard, of=self.blocks, num_dst=shard.num_dst)
        many = flow.totals[index] > MANY_SOURCES * flow.totals[index + 1]
        return replace(
            self,
            blocks=part,
            nodes=part.nodes,
            relations=part.edges,
            merged=LazyMergedEdges(part),
            has_many_sources=many,
        )

    def _exchange(self) -> RingExchange:
        return self.ring

    def gather_rows(self, x: Tensor, store_ids: Tensor) -> Tensor:
        self._check_rows("x", x, self._kind)
        return lookup_rows(
            self.ring, self.owners, self._kind, x, ids=store_ids, places=self.nodes[self._kind].row_index
        )

    def sum_over_nodes(self, t: Tensor) -> Tensor:
        return self.ring.sum_over_ranks(t)
