"""One process: every step walks the whole graph, or sampled blocks of it. Evaluation is exact either way.

Rows may lie in cluster order; what leaves here is in store order. Draws go by store id, so order decides rounding only.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.reorder import cluster_order, ordered_view, with_destinations
from gnnfleet.graph.sampling.batches import batches
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.base import Aggregate
from gnnfleet.nn.layerwise import infer, layer_bytes
from gnnfleet.ops.draws import DrawKey
from gnnfleet.strategies.input_cache import CACHED_RELATIONS, aggregate_once, side_by_side, wants_aggregate
from gnnfleet.strategies.job import PRECISIONS, Job, products
from gnnfleet.strategies.local.config import LocalConfig
from gnnfleet.strategies.local.minibatches import SampledBatches
from gnnfleet.strategies.optim import load_optimizer, make_optimizer, optimizer_tensors
from gnnfleet.strategies.protocol import Prediction, State, StepRecord
from gnnfleet.strategies.sampling_options import Ready
from gnnfleet.tasks.base import Take

# Below this many nodes the features fit the caches and clustering costs more than it gains.
ORDER_NODES = 50_000


class LocalStrategy:
    """The oracle: what every other strategy on static graphs is compared with."""

    is_behind = False
    elsewhere = ()

    def __init__(self, config: LocalConfig, job: Job) -> None:
        self.model = job.model
        self._config, self._job = config, job
        self._optimizer = make_optimizer(self.model, job.train)
        self._target = job.task.target
        self._order = self._choose_order()
        self._aggregated = self._precompute()
        self._sampled = None if config.fanouts is None else SampledBatches(config, job, self._aggregated)
        if self._sampled is None:
            _ = self._last, self._x  # made now, not in the first step
            self._aggregated, self.__dict__["_x"] = side_by_side(self._aggregated, self._x)
        self._known: tuple[Any, Any] | None = None  # exact output and last input of the present weights

    def steps(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        started = time.perf_counter()
        with closing(self._batches(epoch, first)) as made:
            for step, ready in enumerate(made, first):
                self._known = None
                loss = self._step(ready)
                yield StepRecord(epoch, step, loss, len(ready.batch.items), time.perf_counter() - started)
                started = time.perf_counter()

    def _batches(self, epoch: int, first: int) -> Generator[Ready]:
        """What the steps of an epoch run on, from ``first`` on."""
        if self._sampled is not None:
            yield from self._sampled.epoch(epoch, first)
            return
        task, seed = self._job.task, self._job.seed
        every = task.trained(seed, epoch)
        for step, items in batches(every, self._config.batch_size, seed=seed, epoch=epoch, first=first):
            batch = task.batch(items, DrawKey(seed, epoch, step))
            seen = task.hide(self._view, batch)
            last = seen if self._last is self._view else task.hide(self._last, batch)
            views = [seen.at(key=batch.key)] * (self.model.num_layers - 1) + [last.at(key=batch.key)]
            yield Ready(batch, views, self._x, self._aggregated)

    def _step(self, ready: Ready) -> float:
        """The mean loss of a batch; the weights have changed after."""
        loss = self._loss(ready) / len(ready.batch.items)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._job.train.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._job.train.clip)
        self._optimizer.step()
        return float(loss.detach())

    def _loss(self, ready: Ready) -> Tensor:
        """The sum over the items of a batch."""
        self.model.train()
        with products(self._job.precision):
            out = self.model(ready.views, ready.x, aggregated=ready.aggregated)
            return self._job.task.loss(self._taking(out, ready.views[-1]), ready.batch)

    def gradients(self, epoch: int, most: int | None = None) -> tuple[float, int, dict[str, Tensor]]:
        """(mean loss, items, {parameter: gradient of that mean}) over the batches of an epoch, or the first ``most`` of
        them, at the present weights.

        Draws are those of the epoch's steps, nothing is clipped. Weights, running statistics and the optimizer stay
        as they are.
        """
        named = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        sums = {name: torch.zeros_like(weight) for name, weight in named.items()}
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        total, count = 0.0, 0
        if len(self._job.task.trained(self._job.seed, epoch)):
            with closing(self._batches(epoch, 0)) as made:
                for ready in islice(made, most):
                    loss = self._loss(ready)
                    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
                    for place, gradient in zip(sums.values(), found, strict=True):
                        place += 0 if gradient is None else gradient
                    total, count = total + float(loss.detach()), count + len(ready.batch.items)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])
        return total / max(count, 1), count, {name: place / max(count, 1) for name, place in sums.items()}

    def counts(self) -> dict[str, float]:
        return {}

    def pages(self) -> dict[str, str]:
        return {}

    def evaluate(self, split: str) -> dict[str, float]:
        if not len(self._job.task.items(split)):
            raise ConfigError(f"the {split} split is empty: choose another --split")
        with torch.no_grad():
            return self._job.task.measure(self.exact(), split)

    def validate(self) -> dict[str, float]:
        return self.evaluate("val")

    def exact(self) -> Take:
        return self._taking(self._outputs()[0], self._view)

    def predict(self, *, embeddings: bool = False) -> Prediction:
        logits, inputs = (self._only(rows) for rows in self._outputs())
        return Prediction(self._in_store(logits), self._in_store(inputs) if embeddings else None)

    def rows(self, ids: Tensor, *, embeddings: bool = False) -> Prediction:
        view = self._view.of(self._target)
        logits, inputs = (self._only(rows) for rows in self._outputs())
        return Prediction(view.take(logits, ids), view.take(inputs, ids) if embeddings else None)

    def state_dict(self) -> State:
        return {"model": dict(self.model.state_dict()), "optimizer": optimizer_tensors(self.model, self._optimizer)}

    def load_state_dict(self, state: State) -> None:
        self._known = None
        self.model.load_state_dict(state["model"])
        if "optimizer" in state:
            load_optimizer(self.model, self._optimizer, state["optimizer"])

    def close(self) -> None:
        self._known = None

    @property
    def _dtype(self) -> torch.dtype:
        return PRECISIONS[self._job.precision]

    def _outputs(self) -> tuple[Any, Any]:
        """(output, what the last layer read), exact; kept until the weights change."""
        if self._known is None:
            self.model.eval()
            limit = self._job.evaluation_memory
            with torch.no_grad(), products(self._job.precision):
                if layer_bytes(self._view, self._width()) > limit:
                    self._known = infer(self.model, self._view, self._x, target=self._target, limit=limit)
                else:
                    self._known = self.model.exact(self._view, self._x, aggregated=self._aggregated)
        return self._known

    def _taking(self, out: Any, view: LocalView) -> Take:
        """Rows of a view's output by store id, in the precision of the loss."""

        def take(kind: str, ids: Tensor) -> Tensor:
            rows: Tensor = out[kind] if isinstance(out, dict) else out
            return view.of(kind).take(rows, ids).to(self._dtype)

        return take

    def _only(self, rows: Any) -> Tensor:
        found: Tensor = rows[self._target] if isinstance(rows, dict) else rows
        return found

    def _width(self) -> int:
        given = self._x.values() if isinstance(self._x, dict) else [self._x]
        return max([self.model.width, *(int(x.shape[1]) for x in given)])

    @cached_property
    def _view(self) -> LocalView:
        """The whole graph; sampled training does without until it is evaluated."""
        graph = self._job.graph
        return LocalView.whole(graph) if self._order is None else ordered_view(graph, self._order)

    @cached_property
    def _x(self) -> Any:
        """x as the model takes it: a tensor, or one per node type; of width 0 where learnable rows stand in."""
        found = {}
        for kind, nodes in self._job.graph.nodes.items():
            x = torch.empty(nodes.count, 0) if nodes.x is None else nodes.x
            found[kind] = self._in_rows(kind, x.to(self._dtype))
        return found if len(found) > 1 else found[self._target]

    def _precompute(self) -> Aggregate | None:
        """The first layer's aggregate of all rows, where the config wants it and the model allows it."""
        task, wanted = self._job.task, self._config.cache_inputs
        if not wants_aggregate(wanted, hides=task.hides) or (wanted == "auto" and not self._affordable()):
            return None
        return aggregate_once(wanted, self.model, self._view, self._x)

    def _affordable(self) -> bool:
        """Whether aggregated inputs may be kept unasked: few edge types, and on sampled blocks within ``memory``."""
        graph = self._job.graph
        if len(graph.edges) > CACHED_RELATIONS:
            return False
        rows = sum(graph.nodes[kind.dst].count * self._wide(kind.src) for kind in graph.edges)
        return self._config.fanouts is None or rows * self._dtype.itemsize <= self._job.evaluation_memory

    def _wide(self, kind: str) -> int:
        x = self._job.graph.nodes[kind].x
        return 0 if x is None else int(x.shape[1])

    def _choose_order(self) -> dict[str, Tensor] | None:
        order, sampled = self._config.order, self._config.fanouts is not None
        if order == "auto":
            order = "cluster" if self._job.graph.num_nodes > ORDER_NODES and not sampled else "store"
        if order == "cluster" and sampled:
            raise ConfigError("strategy.order=cluster is for full batch: leave it out, or leave out strategy.fanouts")
        if order == "store":
            return None
        self._job.progress.stage("cluster order")
        found = cluster_order(self._job.graph)
        # Rows that the loss reads come first: the last layer then needs no others (``_last``).
        reach = self._job.task.reach()
        if reach is not None:
            wanted = reach[found[self._target]]
            found[self._target] = torch.cat([found[self._target][wanted], found[self._target][~wanted]])
        return found

    @cached_property
    def _last(self) -> LocalView:
        """What the last layer of a step sees: rows the loss may read as destinations, where they come first.

        Not under batch norm, which looks at all rows, and not in a single layer, whose aggregate is kept for all rows.
        """
        reach = self._job.task.reach()
        if self._order is None or reach is None or self.model.batch_norm or self.model.num_layers == 1:
            return self._view
        return with_destinations(self._view, self._target, int(reach.sum()))

    def _in_rows(self, kind: str, values: Tensor) -> Tensor:
        return values if self._order is None else values[self._order[kind]]

    def _in_store(self, rows: Tensor) -> Tensor:
        if self._order is None:
            return rows
        values = torch.empty_like(rows)
        values[self._order[self._target]] = rows
        return values
