"""RingView: the verbs of a GraphView on a partitioned graph.

All ranks call the same verbs in the same order, with rows of their own nodes. Results and gradients are those of
``LocalView`` on the whole graph, to rounding; draws go by store id and store edge id. Remote rows are in memory one
group at a time. All ranks must agree on the tensors that need gradients and on the use of weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gnnfleet.comm.halo_exchange import RingExchange
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.graph.views.view import MANY_SOURCES
from gnnfleet.sharded.full_batch.active_rows import ActiveRows
from gnnfleet.sharded.full_batch.partition_blocks import PartitionBlocks
from gnnfleet.sharded.full_batch.partitioned_view import PartitionedView
from gnnfleet.sharded.full_batch.row_lookup import OwnershipMap, lookup_rows


@dataclass(frozen=True, eq=False, kw_only=True)
class RingView(PartitionedView):
    """This rank's partition of a graph. All verbs are collective."""

    ring: RingExchange
    owners: OwnershipMap

    @classmethod
    def open(cls, shard: Shard, ring: RingExchange, active_rows: ActiveRows | None = None) -> RingView:
        """Collective. Each rank passes its own shard. With ``active_rows`` the rows of the view are in its order."""
        assert (shard.part, shard.parts) == (ring.world.rank, ring.world.size), "one partition for every rank"
        blocks = PartitionBlocks(shard if active_rows is None else active_rows.all_active())
        return cls(
            blocks=blocks,
            ring=ring,
            owners=OwnershipMap(shard, blocks, ring),
            nodes=blocks.nodes,
            relations=blocks.edges,
        )

    def for_layer(self, active_rows: ActiveRows, index: int) -> RingView:
        """Collective. The view of a layer that computes only its active rows."""
        shard = active_rows.layer(index, self.ring)
        if shard is None:
            return self
        blocks = PartitionBlocks(shard, of=self.blocks, num_dst=shard.num_dst)
        return replace(
            self,
            blocks=blocks,
            nodes=blocks.nodes,
            relations=blocks.edges,
            has_many_sources=active_rows.totals[index] > MANY_SOURCES * active_rows.totals[index + 1],
        )

    def _exchange(self) -> RingExchange:
        return self.ring

    def gather_rows(self, x: Tensor, store_ids: Tensor) -> Tensor:
        self._check_rows("x", x, self._kind)
        kind = self._kind
        return lookup_rows(self.ring, self.owners, kind, x, ids=store_ids, index=self.nodes[kind].row_index)

    def sum_over_nodes(self, t: Tensor) -> Tensor:
        return self.ring.sum_over_ranks(t)
