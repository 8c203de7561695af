"""Base of strategies whose ranks each have a partition of the graph: view, items, exact outputs, state.

Weights and optimizer state are on every rank; features, embedding rows, labels and edges with their owner.
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
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.base import Aggregate
from gnnfleet.nn.embedding import embedding_ids
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.strategies.batch_inputs import CacheInputs, precompute_aggregate, should_cache_aggregate
from gnnfleet.strategies.job import Job, autocast
from gnnfleet.strategies.optim import load_optimizer, make_optimizer, optimizer_tensors
from gnnfleet.strategies.protocol import IDS_SUFFIX, SHARDED, Prediction, Reporting, State
from gnnfleet.tasks.base import RowLookup, Scores


class PartitionedStrategy(Reporting):
    """All methods are collective, the constructor included; subclasses add ``train_epoch``.

    ``order`` has, by node type, the partition's row at each row of the view; None: rows are as in the partition.
    """

    def __init__(
        self, job: Job, view: RingView, *, cache_inputs: CacheInputs, order: Mapping[str, Tensor] | None = None
    ) -> None:
        self.model = job.model
        self._job, self._world, self._view = job, job.world, view
        self._check_partitions()
        self._task = job.task.shard(job.world, {kind: rows.node_ids for kind, rows in view.nodes.items()})
        self._target = job.task.target
        self._optimizer = make_optimizer(self.model, job.train)
        self._ids = embedding_ids(self.model)
        named = dict(self.model.named_parameters())
        self._embeddings = [named[name] for name in self._ids]
        self._replicated = [parameter for name, parameter in named.items() if name not in self._ids]
        self._order = order
        self._aggregated = self._aggregate(cache_inputs)
        self._cached_outputs: tuple[Any, Any] | None = None  # exact output and last input of the current weights

    def evaluate(self, split: str) -> Scores:
        if not self._count(self._task.items(split)):
            raise ConfigError(f"the {split} split is empty: choose another --split")
        with torch.no_grad():
            local_only = self._task.reads_only_local_rows
            return self._task.measure(self._row_lookup(self._outputs()[0], self._view, local_only=local_only), split)

    def exact_lookup(self) -> RowLookup:
        return self._row_lookup(self._outputs()[0], self._view)

    def predict(self, *, embeddings: bool = False) -> Prediction:
        count = self._view.owners.counts[self._target] if self._world.is_first else 0
        return self.predict_nodes(torch.arange(count), embeddings=embeddings)

    def predict_nodes(self, ids: Tensor, *, embeddings: bool = False) -> Prediction:
        view = self._view.for_type(self._target)
        logits, inputs = (rows[self._target] if isinstance(rows, dict) else rows for rows in self._outputs())
        return Prediction(view.gather_rows(logits, ids), view.gather_rows(inputs, ids) if embeddings else None)

    def state_dict(self) -> State:
        weights, optimizer = dict(self.model.state_dict()), optimizer_tensors(self.model, self._optimizer)
        sharded: dict[str, Tensor] = {}
        for name, ids in self._ids.items():
            sharded |= {name: weights.pop(name), name + IDS_SUFFIX: ids}
            sharded |= {key: optimizer.pop(key) for key in list(optimizer) if key.startswith(f"{name}/")}
        state = {"model": weights, "optimizer": optimizer}
        return {**state, SHARDED: sharded} if sharded else state

    def load_state_dict(self, state: State) -> None:
        self._cached_outputs = None
        sharded = dict(state.get(SHARDED, {}))
        for name, ids in self._ids.items():
            if name in state["model"]:  # written by one process: all rows
                sharded |= {name: state["model"][name][ids], name + IDS_SUFFIX: ids}
            assert torch.equal(sharded[name + IDS_SUFFIX], ids), "rows of other nodes"
        self.model.load_state_dict({**state["model"], **{name: sharded[name] for name in self._ids}})
        if "optimizer" in state:
            row_state = {key: rows for key, rows in sharded.items() if "/" in key and not key.endswith(IDS_SUFFIX)}
            load_optimizer(self.model, self._optimizer, {**state["optimizer"], **row_state})

    def close(self) -> None:
        self._cached_outputs = None

    def _backward_and_step(self, loss: Tensor) -> float:
        """Take one optimizer step on this rank's share of a mean loss; returns the mean loss."""
        self._cached_outputs = None
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        sum_gradients(self._world, self._replicated)
        if self._job.train.clip:
            clip_gradients(self._world, self._replicated, self._embeddings, max_norm=self._job.train.clip)
        self._optimizer.step()
        return float(sum_over_ranks(self._world, loss.detach()))

    def _count(self, items: Tensor) -> int:
        """The number of items of all ranks."""
        return int(sum_over_ranks(self._world, torch.tensor(len(items))))

    def _check_partitions(self) -> None:
        """Raise PartitionError for partitions of another graph: links may be trained on fewer or more edges."""
        graph, kinds = self._job.graph, self._view.edge_types
        local_edges = torch.tensor([edges.num_edges for edges in self._view.relations.values()])
        num_edges = dict(zip(kinds, sum_over_ranks(self._world, local_edges).tolist(), strict=True))
        expected = {kind: edges.count for kind, edges in graph.edges.items()}
        num_nodes = {kind: table.count for kind, table in graph.nodes.items()}
        if num_edges != expected or dict(self._view.owners.counts) != num_nodes:
            raise PartitionError(
                f"expected parts of a graph of {graph.num_edges} edges, found {sum(num_edges.values())}: "
                "partition the graph that is trained on"
            )

    def _aggregate(self, option: CacheInputs) -> Aggregate | None:
        relations = len(self._view.edge_types)
        if should_cache_aggregate(option, self.model, hides=self._task.masks_edges, relations=relations):
            return precompute_aggregate(option, self.model, self._view, self._x)
        return None

    @cached_property
    def _x(self) -> Any:
        """The model's input: a tensor, or one per node type; of width 0 for types without features."""
        shard, tables = require_shard(self._job), {}
        for kind in self._view.node_types:
            nodes = shard.nodes(kind)
            rows = torch.empty(nodes.count, 0) if nodes.x is None else nodes.x
            tables[kind] = self._converted(rows if self._order is None else rows[self._order[kind]])
        return tables if len(tables) > 1 else tables[self._target]

    def _converted(self, rows: Tensor) -> Tensor:
        """Features in the precision of the run."""
        return rows.to(self._job.dtype)

    def _outputs(self) -> tuple[Any, Any]:
        """(output, input of the last layer) of local rows, exact; cached until the weights change."""
        if self._cached_outputs is None:
            self.model.eval()
            with autocast(self._job.precision):
                self._cached_outputs = self.model.exact(self._view, self._x, aggregated=self._aggregated)
        return self._cached_outputs

    def _row_lookup(self, out: Any, view: GraphView, *, local_only: bool = False) -> RowLookup:
        """Rows of a view's output by store id, in the precision of the loss. ``local_only``: without communication."""

        def lookup(kind: str, ids: Tensor) -> Tensor:
            rows: Tensor = out[kind] if isinstance(out, dict) else out
            if local_only:
                rows = take_rows(rows, self._view.nodes[kind].row_index.rows(ids))
            else:
                rows = view.for_type(kind).gather_rows(rows, ids)
            return rows.to(self._job.dtype)

        return lookup


def require_shard(job: Job) -> Shard:
    """This rank's partition; raises ConfigError if there is none."""
    if job.context.shard is None:
        raise ConfigError("this strategy needs a part of a partitioned graph, found none: use gnnfleet train")
    return job.context.shard
