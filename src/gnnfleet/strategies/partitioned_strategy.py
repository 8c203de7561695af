"""What strategies whose ranks each have a part of the graph share: the view, the task's share, exact rows, state.

Weights and optimizer state are on every rank; features, learnable rows of nodes, labels and edges with their owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.collectives import clip_gradients, sum_gradients, sum_over_ranks
from gnnfleet.errors import ConfigError, PartitionError
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.graph.views.row_index import take_rows
from gnnfleet.nn.base import Aggregate
from gnnfleet.nn.embedding import embedding_ids
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.strategies.input_cache import (
    MAX_CACHED_RELATIONS,
    CacheInputs,
    precompute_aggregate,
    should_cache_aggregate,
)
from gnnfleet.strategies.job import PRECISIONS, Job, autocast
from gnnfleet.strategies.optim import load_optimizer, make_optimizer, optimizer_tensors
from gnnfleet.strategies.protocol import IDS_SUFFIX, SHARDED, Prediction, Reporting, State
from gnnfleet.tasks.base import RowLookup


class PartitionedStrategy(Reporting):
    """The base of such strategies; all ranks make and call it together. ``steps`` is what they differ in.

    ``order`` says which row of the part lies where in the view, by node type; None: as in the part.
    """

    def __init__(
        self, job: Job, view: RingView, *, cache_inputs: CacheInputs, order: Mapping[str, Tensor] | None = None
    ) -> None:
        self.model = job.model
        self._job, self._world, self._view = job, job.world, view
        self._check_parts()
        self._task = job.task.shard(job.world, {kind: rows.node_ids for kind, rows in view.nodes.items()})
        self._target = job.task.target
        self._optimizer = make_optimizer(self.model, job.train)
        self._ids = embedding_ids(self.model)
        named = dict(self.model.named_parameters())
        self._rows = [named[name] for name in self._ids]
        self._common = [parameter for name, parameter in named.items() if name not in self._ids]
        self._order = order
        self._aggregated = self._aggregate(cache_inputs)
        self._known: tuple[Any, Any] | None = None  # exact output and last input of the present weights

    def evaluate(self, split: str) -> dict[str, float]:
        if not self._count(self._task.items(split)):
            raise ConfigError(f"the {split} split is empty: choose another --split")
        with torch.no_grad():
            return self._task.measure(self._taking(self._outputs()[0], stays=self._task.reads_only_local_rows), split)

    def validate(self) -> dict[str, float]:
        return self.evaluate("val")

    def exact_lookup(self) -> RowLookup:
        return self._taking(self._outputs()[0], stays=False)

    def predict(self, *, embeddings: bool = False) -> Prediction:
        every = self._view.owners.counts[self._target] if self._world.is_first else 0
        return self.predict_nodes(torch.arange(every), embeddings=embeddings)

    def predict_nodes(self, ids: Tensor, *, embeddings: bool = False) -> Prediction:
        view = self._view.for_type(self._target)
        logits, inputs = (rows[self._target] if isinstance(rows, dict) else rows for rows in self._outputs())
        return Prediction(view.gather_rows(logits, ids), view.gather_rows(inputs, ids) if embeddings else None)

    def state_dict(self) -> State:
        weights, remembered = dict(self.model.state_dict()), optimizer_tensors(self.model, self._optimizer)
        own: dict[str, Tensor] = {}
        for name, ids in self._ids.items():
            words = [key for key in remembered if key.startswith(f"{name}/")]
            own |= {name: weights.pop(name), name + IDS_SUFFIX: ids, **{key: remembered.pop(key) for key in words}}
        found = {"model": weights, "optimizer": remembered}
        return {**found, SHARDED: own} if own else found

    def load_state_dict(self, state: State) -> None:
        self._known = None
        own = dict(state.get(SHARDED, {}))
        for name, ids in self._ids.items():
            if name in state["model"]:  # written by one process: all rows
                own |= {name: state["model"][name][ids], name + IDS_SUFFIX: ids}
            assert torch.equal(own[name + IDS_SUFFIX], ids), "rows of other nodes"
        self.model.load_state_dict({**state["model"], **{name: own[name] for name in self._ids}})
        if "optimizer" in state:
            remembered = {key: rows for key, rows in own.items() if "/" in key and not key.endswith(IDS_SUFFIX)}
            load_optimizer(self.model, self._optimizer, {**state["optimizer"], **remembered})

    def close(self) -> None:
        self._known = None

    def _backward_and_step(self, loss: Tensor) -> float:
        """One optimizer step on this rank's share of a mean loss; the whole of it."""
        self._known = None
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        sum_gradients(self._world, self._common)
        if self._job.train.clip:
            clip_gradients(self._world, self._common, self._rows, max_norm=self._job.train.clip)
        self._optimizer.step()
        return float(sum_over_ranks(self._world, loss.detach()))

    def _count(self, items: Tensor) -> int:
        """How many items all ranks have together."""
        return int(sum_over_ranks(self._world, torch.tensor(len(items))))

    def _check_parts(self) -> None:
        """Links may be trained on fewer edges than the store has, or on more: the parts must be of those."""
        graph = self._job.graph
        own = torch.tensor([edges.num_edges for edges in self._view.relations.values()])
        found = dict(zip(self._view.edge_types, sum_over_ranks(self._world, own).tolist(), strict=True))
        expected = {kind: edges.count for kind, edges in graph.edges.items()}
        nodes = {kind: table.count for kind, table in graph.nodes.items()}
        if found != expected or dict(self._view.owners.counts) != nodes:
            raise PartitionError(
                f"expected parts of a graph of {graph.num_edges} edges, found {sum(found.values())}: "
                "partition the graph that is trained on"
            )

    def _aggregate(self, wanted: CacheInputs) -> Aggregate | None:
        """The first layer's aggregate, where it is kept."""
        few = len(self._view.edge_types) <= MAX_CACHED_RELATIONS or wanted is True
        if not few or not should_cache_aggregate(wanted, hides=self._task.masks_edges):
            return None
        return precompute_aggregate(wanted, self.model, self._view, self._x)

    @cached_property
    def _x(self) -> Any:
        """x as the model takes it: a tensor, or one per node type; of width 0 where there are no features."""
        shard, found = require_shard(self._job), {}
        for kind in self._view.node_types:
            nodes = shard.nodes(kind)
            rows = torch.empty(nodes.count, 0) if nodes.x is None else nodes.x
            rows = rows if self._order is None else rows[self._order[kind]]
            found[kind] = self._converted(rows)
        return found if len(found) > 1 else found[self._target]

    def _converted(self, rows: Tensor) -> Tensor:
        """Features in the precision of the run."""
        return rows.to(PRECISIONS[self._job.precision])

    def _outputs(self) -> tuple[Any, Any]:
        """(output, what the last layer read) of own rows, exact; kept until the weights change."""
        if self._known is None:
            self.model.eval()
            with autocast(self._job.precision):
                self._known = self.model.exact(self._view, self._x, aggregated=self._aggregated)
        return self._known

    def _taking(self, out: Any, *, stays: bool) -> RowLookup:
        """Rows of output by store id, in the precision of the loss; with ``stays`` of own nodes, without a word to
        others."""

        def take(kind: str, ids: Tensor) -> Tensor:
            rows: Tensor = out[kind] if isinstance(out, dict) else out
            view = self._view.for_type(kind)
            found = take_rows(rows, view.nodes[kind].row_index.rows(ids)) if stays else view.gather_rows(rows, ids)
            return found.to(PRECISIONS[self._job.precision])

        return take


def require_shard(job: Job) -> Shard:
    """This rank's part; raises ConfigError where there is none."""
    if job.context.shard is None:
        raise ConfigError("this strategy works on a part of a partitioned graph, found none: use gnnfleet train")
    return job.context.shard
