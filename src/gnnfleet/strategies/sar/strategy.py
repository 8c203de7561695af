"""Exact full batch over ranks: each has the rows and in-edges of its part, and equal weights.

A step runs the model on a RingView; each rank's loss is the sum over its own items divided by the count of all, so
gradients summed over ranks are those of one process. Weights and optimizer state are on every rank; features, learnable
rows of nodes, labels, edges and activations on their owner's only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.code import Code
from gnnfleet.comm.exchange import Ring
from gnnfleet.comm.reduce import clip_gradients, gather_rows, sum_gradients, sum_over_ranks
from gnnfleet.errors import ConfigError, PartitionError
from gnnfleet.graph.places import take_rows
from gnnfleet.nn.base import Aggregate, Model
from gnnfleet.nn.embedding import rows_by_owner
from gnnfleet.ops import buffers
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.memory import rss
from gnnfleet.report.traffic import Traffic
from gnnfleet.sharded.flow import Flow
from gnnfleet.sharded.ring import RingView
from gnnfleet.sharded.scout import scout
from gnnfleet.strategies.base import (
    IDS,
    OWN,
    PRECISIONS,
    Job,
    Prediction,
    State,
    StepRecord,
    load_optimizer,
    make_optimizer,
    optimizer_tensors,
    products,
)
from gnnfleet.strategies.inputs import CACHED_RELATIONS, aggregate_once, side_by_side, wants_aggregate
from gnnfleet.strategies.sar.budget import Choice, Given, Needs, choose
from gnnfleet.strategies.sar.config import SarConfig
from gnnfleet.strategies.task import Take


class SarStrategy:
    """All ranks make and call it together."""

    def __init__(self, config: SarConfig, job: Job) -> None:
        if job.shard is None:
            raise ConfigError("strategy sar works on a part of a partitioned graph, found none: use gnnfleet train")
        config.check(job.task)
        self.model = job.model
        self._config, self._job, self._world = config, job, job.world
        # Evaluation fetches one group ahead of the one it works on, whatever steps may do.
        ring = Ring(job.world, _number(config.group, 1), _number(config.prefetch, 1), buffers.empty)
        self._code = Code(config.wire)
        self._flow = self._find_flow(replace(ring, world=replace(job.world, traffic=Traffic())))
        self._view = RingView.open(job.shard, ring, self._flow)
        self._check_parts()
        self._task = job.task.share(job.world, {kind: rows.node_ids for kind, rows in self._view.nodes.items()})
        self._target = job.task.target
        self._optimizer = make_optimizer(self.model, job.train)
        self._ids = rows_by_owner(self.model)
        named = dict(self.model.named_parameters())
        self._rows = [named[name] for name in self._ids]
        self._common = [parameter for name, parameter in named.items() if name not in self._ids]
        self._aggregated, self._x = side_by_side(*self._inputs())
        self._known: tuple[Any, Any] | None = None  # exact output and last input of the present weights

    def steps(self, epoch: int) -> Iterator[StepRecord]:
        views = self._views
        started = time.perf_counter()
        self._known = None
        self._code.begin()
        items = self._task.trained(self._job.seed, epoch)
        count = self._count(items)
        batch = self._task.batch(items, DrawKey(self._job.seed, epoch, 0))
        self.model.train()
        with products(self._job.precision):
            x, near = self._step_inputs
            out = self.model([view.at(key=batch.key) for view in views], x, aggregated=near)
        loss = self._task.loss(self._taking(out, stays=self._task.stays), batch) / count
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        sum_gradients(self._world, self._common)
        if self._job.train.clip:
            clip_gradients(self._world, self._common, self._rows, highest=self._job.train.clip)
        self._optimizer.step()
        total = float(sum_over_ranks(self._world, loss.detach()))
        yield StepRecord(epoch, 0, total, count, time.perf_counter() - started)

    def evaluate(self, split: str) -> dict[str, float]:
        if not self._count(self._task.items(split)):
            raise ConfigError(f"the {split} split is empty: choose another --split")
        with torch.no_grad():
            return self._task.measure(self._taking(self._outputs()[0], stays=self._task.stays), split)

    def exact(self) -> Take:
        return self._taking(self._outputs()[0], stays=False)

    def predict(self, *, embeddings: bool = False) -> Prediction:
        every = self._view.owners.counts[self._target] if self._world.is_first else 0
        return self.rows(torch.arange(every), embeddings=embeddings)

    def rows(self, ids: Tensor, *, embeddings: bool = False) -> Prediction:
        view = self._view.of(self._target)
        logits, inputs = (rows[self._target] if isinstance(rows, dict) else rows for rows in self._outputs())
        return Prediction(view.take(logits, ids), view.take(inputs, ids) if embeddings else None)

    def state_dict(self) -> State:
        weights, remembered = dict(self.model.state_dict()), optimizer_tensors(self.model, self._optimizer)
        own: dict[str, Tensor] = {}
        for name, ids in self._ids.items():
            words = [key for key in remembered if key.startswith(f"{name}/")]
            own |= {name: weights.pop(name), name + IDS: ids, **{key: remembered.pop(key) for key in words}}
        found = {"model": weights, "optimizer": remembered}
        return {**found, OWN: own} if own else found

    def load_state_dict(self, state: State) -> None:
        self._known = None
        own = dict(state.get(OWN, {}))
        for name, ids in self._ids.items():
            if name in state["model"]:  # written by one process: all rows
                own |= {name: state["model"][name][ids], name + IDS: ids}
            assert torch.equal(own[name + IDS], ids), "rows of other nodes"
        self.model.load_state_dict({**state["model"], **{name: own[name] for name in self._ids}})
        if "optimizer" in state:
            remembered = {key: rows for key, rows in own.items() if "/" in key and not key.endswith(IDS)}
            load_optimizer(self.model, self._optimizer, {**state["optimizer"], **remembered})

    def close(self) -> None:
        self._known = None

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

    def _find_flow(self, ring: Ring) -> Flow | None:
        """Which rows the layers of a step have to compute; None for all. Batch norm looks at all rows of a layer."""
        assert self._job.shard is not None
        reach = self._job.task.reach()
        if not self._config.flow or reach is None or self.model.batch_norm:
            return None
        shard, target = self._job.shard, self._job.task.target
        wanted = {kind: torch.zeros(shard.nodes(kind).count, dtype=torch.bool) for kind in shard.node_types}
        wanted[target] = reach[shard.nodes(target).store_ids]
        return Flow.find(shard, ring, wanted, self.model.num_layers)

    @cached_property
    def _views(self) -> list[RingView]:
        """What each layer of a step sees."""
        choice, layers = self._choose(), range(self.model.num_layers)
        views = [self._view if self._flow is None else self._view.of_layer(self._flow, index) for index in layers]
        ring = Ring(self._world, choice.group, choice.prefetch, buffers.empty, self._code)
        return [replace(view, ring=ring, keep=index in choice.keep) for index, view in enumerate(views)]

    def _choose(self) -> Choice:
        """How steps run: as the config says, the rest by what ``memory`` allows; raises ConfigError when nothing
        fits."""
        config, layers = self._config, range(self.model.num_layers)
        if self._job.memory is None:
            keep = tuple(layers) if config.keep is True else ()
            return Choice(_number(config.group, 1), _number(config.prefetch, 1), keep)
        given = Given(
            group=None if config.group == "auto" else config.group,
            prefetch=None if config.prefetch == "auto" else config.prefetch,
            keep=None if config.keep == "auto" else config.keep,
        )
        choice, why = choose(self._needs(), self._job.memory, self._world.size, given, self._highest)
        self._job.say(why)
        return choice

    def _needs(self) -> Needs:
        assert self._job.shard is not None
        wanted, dtype = self._config.cache_inputs, PRECISIONS[self._job.precision]

        def precompute(model: Model, view: RingView, x: Any) -> Aggregate | None:
            return None if self._aggregated is None else aggregate_once(wanted, model, view, x)

        with products(self._job.precision):
            sketch = scout(self.model, self._job.shard, dtype, precompute)
        rows = sum(len(rows.node_ids) for rows in self._view.nodes.values())
        if self._flow is not None:  # a layer holds the rows of its level
            made = self._flow.totals[1:]
            rows = int(rows * sum(made) / len(made) / max(1.0, float(sum(self._view.owners.counts.values()))))
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        # Gradients, and what Adam remembers of each weight twice.
        return Needs(rss(), sketch.tensors(rows) + 3 * weights, sketch, lambda way: self._view.part.routes(*way))

    def _highest(self, value: float) -> float:
        """Over all ranks."""
        own = torch.tensor([[value]], dtype=torch.float64)
        return float(torch.cat(gather_rows(replace(self._world, traffic=Traffic()), own)).max())

    @cached_property
    def _step_inputs(self) -> tuple[Any, Aggregate | None]:
        """What the first layer of a step reads: the first rows of features and of their aggregate."""
        first, near = self._views[0], self._aggregated
        if isinstance(near, Tensor):
            near = near[: first.num_dst]
        elif near is not None:
            near = {kind: rows[: first.num_dst_of(kind.dst)] for kind, rows in near.items()}
        if isinstance(self._x, dict):
            return {kind: rows[: len(first.nodes[kind].node_ids)] for kind, rows in self._x.items()}, near
        return self._x[: len(first.nodes[self._target].node_ids)], near

    def _inputs(self) -> tuple[Aggregate | None, Any]:
        """(the first layer's aggregate where it is kept, x as the model takes it: of width 0 without features)."""
        assert self._job.shard is not None
        dtype = PRECISIONS[self._job.precision]
        found = {}
        for kind in self._view.node_types:
            nodes = self._job.shard.nodes(kind)
            rows = torch.empty(nodes.count, 0) if nodes.x is None else nodes.x
            found[kind] = (rows if self._flow is None else rows[self._flow.order[kind]]).to(dtype)
        x = found if len(found) > 1 else found[self._target]
        wanted = self._config.cache_inputs
        few = len(self._view.edge_types) <= CACHED_RELATIONS or wanted is True
        if not few or not wants_aggregate(wanted, hides=False):
            return None, x
        return aggregate_once(wanted, self.model, self._view, x), x

    def _outputs(self) -> tuple[Any, Any]:
        """(output, what the last layer read) of own rows, exact; kept until the weights change."""
        if self._known is None:
            self.model.eval()
            with products(self._job.precision):
                self._known = self.model.exact(self._view, self._x, aggregated=self._aggregated)
        return self._known

    def _taking(self, out: Any, *, stays: bool) -> Take:
        """Rows of output by store id, in the precision of the loss; with ``stays`` of own nodes, without a word to
        others."""

        def take(kind: str, ids: Tensor) -> Tensor:
            rows: Tensor = out[kind] if isinstance(out, dict) else out
            view = self._view.of(kind)
            found = take_rows(rows, view.nodes[kind].places.rows(ids)) if stays else view.take(rows, ids)
            return found.to(PRECISIONS[self._job.precision])

        return take


def _number(word: int | str, otherwise: int) -> int:
    return otherwise if isinstance(word, str) else word
