"""Training in one process, full batch or sampled. Evaluation is exact in both modes.

Rows may be in cluster order internally; results are in store order. Draws go by store id, so the order affects rounding
only.
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
from gnnfleet.graph.reorder import cluster_order, limit_destinations, reordered_view
from gnnfleet.graph.sampling.batches import count_batches, epoch_batches
from gnnfleet.graph.sampling.loader import FeatureGather, prepare_backward
from gnnfleet.graph.sampling.prefetch import auto_depth, prefetch_items
from gnnfleet.graph.sampling.sampler import NeighborSampler
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.base import Aggregate
from gnnfleet.nn.layerwise import layer_bytes, layerwise_inference
from gnnfleet.ops.draws import DrawKey
from gnnfleet.ops.gather import gather
from gnnfleet.strategies.batch_inputs import (
    PreparedBatch,
    X,
    aggregate_tables,
    concat_columns,
    precompute_aggregate,
    read_inputs,
    should_cache_aggregate,
)
from gnnfleet.strategies.job import Job, autocast
from gnnfleet.strategies.local.config import LocalConfig
from gnnfleet.strategies.optim import load_optimizer, make_optimizer, optimizer_tensors
from gnnfleet.strategies.protocol import Prediction, Reporting, State, StepRecord
from gnnfleet.strategies.sampling_options import check_fanouts_per_layer, parse_fanouts
from gnnfleet.tasks.base import Batch, RowLookup, Scores

# Below this number of nodes the features fit the CPU caches and clustering costs more than it gains.
REORDER_MIN_NODES = 50_000


class LocalStrategy(Reporting):
    """The reference that every other strategy on static graphs is compared with."""

    def __init__(self, config: LocalConfig, job: Job) -> None:
        self.model = job.model
        self._config, self._job = config, job
        self._optimizer = make_optimizer(self.model, job.train)
        self._target = job.task.target
        self._reads_rows = config.is_sampled or self.model.is_precomputed
        self._order = self._choose_order()
        self._aggregated = self._precompute()
        self._sampled = MiniBatchMaker(config, job, self._aggregated) if self._reads_rows else None
        if self._sampled is None:
            _ = self._last_view, self._x  # computed before the first step is timed
            self._aggregated, self.__dict__["_x"] = concat_columns(self._aggregated, self._x)
        self._cached_outputs: tuple[Any, Any] | None = None  # exact output and last input of the current weights

    @cached_property
    def steps_per_epoch(self) -> int:
        return max(1, count_batches(len(self._job.task.train_items(self._job.seed, 0)), self._config.batch_size))

    def train_epoch(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        started = time.perf_counter()
        with closing(self._batches(epoch, first)) as batches:
            for step, inputs in enumerate(batches, first):
                self._cached_outputs = None
                loss = self._step(inputs)
                yield StepRecord(epoch, step, loss, len(inputs.batch.items), time.perf_counter() - started)
                started = time.perf_counter()

    def _batches(self, epoch: int, first: int) -> Generator[PreparedBatch]:
        """The inputs of an epoch's steps, from step ``first`` on."""
        if self._sampled is not None:
            yield from self._sampled.epoch(epoch, first)
            return
        task, seed = self._job.task, self._job.seed
        train_items = task.train_items(seed, epoch)
        for step, items in epoch_batches(train_items, self._config.batch_size, seed=seed, epoch=epoch, first=first):
            batch = task.batch(items, DrawKey(seed, epoch, step))
            view = task.mask_edges(self._view, batch)
            last = view if self._last_view is self._view else task.mask_edges(self._last_view, batch)
            views = [view.with_step(key=batch.key)] * (self.model.num_layers - 1) + [last.with_step(key=batch.key)]
            yield PreparedBatch(batch, views, self._x, self._aggregated)

    def _step(self, inputs: PreparedBatch) -> float:
        """Take one optimizer step; the mean loss of the batch."""
        loss = self._loss(inputs) / len(inputs.batch.items)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._job.train.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._job.train.clip)
        self._optimizer.step()
        return float(loss.detach())

    def _loss(self, inputs: PreparedBatch) -> Tensor:
        """The loss summed over the items of a batch."""
        self.model.train()
        with autocast(self._job.precision):
            out = self.model(inputs.views, inputs.x, aggregated=inputs.aggregated)
            return self._job.task.loss(self._row_lookup(out, inputs.views[-1]), inputs.batch)

    def gradients(self, epoch: int, max_batches: int | None = None) -> tuple[float, int, dict[str, Tensor]]:
        """(mean loss, items, {parameter: gradient of that mean}) over the first batches of an epoch, without clipping.

        Draws are those of the epoch's steps. Weights, running statistics and the optimizer stay unchanged.
        """
        named = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        sums = {name: torch.zeros_like(weight) for name, weight in named.items()}
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        total, count = 0.0, 0
        if len(self._job.task.train_items(self._job.seed, epoch)):
            with closing(self._batches(epoch, 0)) as batches:
                for inputs in islice(batches, max_batches):
                    loss = self._loss(inputs)
                    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
                    for grad_sum, grad in zip(sums.values(), grads, strict=True):
                        grad_sum += 0 if grad is None else grad
                    total, count = total + float(loss.detach()), count + len(inputs.batch.items)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])
        return total / max(count, 1), count, {name: grad_sum / max(count, 1) for name, grad_sum in sums.items()}

    def evaluate(self, split: str) -> Scores:
        if not len(self._job.task.items(split)):
            raise ConfigError(f"the {split} split is empty: choose another --split")
        with torch.no_grad():
            return self._job.task.measure(self.exact_lookup(), split)

    def exact_lookup(self) -> RowLookup:
        return self._row_lookup(self._outputs()[0], self._view)

    def predict(self, *, embeddings: bool = False) -> Prediction:
        return self.predict_nodes(torch.arange(self._job.graph.nodes[self._target].count), embeddings=embeddings)

    def predict_nodes(self, ids: Tensor, *, embeddings: bool = False) -> Prediction:
        view = self._view.for_type(self._target)
        logits, inputs = (rows[self._target] if isinstance(rows, dict) else rows for rows in self._outputs())
        return Prediction(view.gather_rows(logits, ids), view.gather_rows(inputs, ids) if embeddings else None)

    def state_dict(self) -> State:
        return {"model": dict(self.model.state_dict()), "optimizer": optimizer_tensors(self.model, self._optimizer)}

    def load_state_dict(self, state: State) -> None:
        self._cached_outputs = None
        self.model.load_state_dict(state["model"])
        if "optimizer" in state:
            load_optimizer(self.model, self._optimizer, state["optimizer"])

    def close(self) -> None:
        self._cached_outputs = None

    def _outputs(self) -> tuple[Any, Any]:
        """(output, input of the last layer), exact; cached until the weights change."""
        if self._cached_outputs is None:
            self.model.eval()
            limit = self._job.evaluation_memory
            with torch.no_grad(), autocast(self._job.precision):
                by_layer = not (self.model.reads_whole_graph or self.model.is_precomputed)
                if by_layer and layer_bytes(self._view, self._width()) > limit:
                    self._cached_outputs = layerwise_inference(
                        self.model, self._view, self._x, target=self._target, limit=limit
                    )
                else:
                    self._cached_outputs = self.model.exact(self._view, self._x, aggregated=self._aggregated)
        return self._cached_outputs

    def _row_lookup(self, out: Any, view: LocalView) -> RowLookup:
        """Rows of a view's output by store id, in the precision of the loss."""

        def lookup(kind: str, ids: Tensor) -> Tensor:
            rows: Tensor = out[kind] if isinstance(out, dict) else out
            return view.for_type(kind).gather_rows(rows, ids).to(self._job.dtype)

        return lookup

    def _width(self) -> int:
        tables = self._x.values() if isinstance(self._x, dict) else [self._x]
        return max([self.model.width, *(int(x.shape[1]) for x in tables)])

    @cached_property
    def _view(self) -> LocalView:
        """The whole graph; sampled training needs it for evaluation only."""
        graph = self._job.graph
        return LocalView.of_graph(graph) if self._order is None else reordered_view(graph, self._order)

    @cached_property
    def _x(self) -> Any:
        """The model's input: a tensor, or one per node type; of width 0 for types without features."""
        tables = {}
        for kind, nodes in self._job.graph.nodes.items():
            x = torch.empty(nodes.count, 0) if nodes.x is None else nodes.x
            x = x.to(self._job.dtype)
            tables[kind] = x if self._order is None else x[self._order[kind]]
        return tables if len(tables) > 1 else tables[self._target]

    def _precompute(self) -> Aggregate | None:
        """The first layer's aggregate of all rows, if the config and the model allow caching it."""
        job, option = self._job, self._config.cache_inputs
        if job.aggregated is not None:
            return job.aggregated
        hides, relations = job.task.masks_edges, len(job.graph.edges)
        is_allowed = should_cache_aggregate(option, self.model, hides=hides, relations=relations)
        if not is_allowed or (option == "auto" and not self._fits_memory()):
            return None
        return precompute_aggregate(option, self.model, self._view, self._x)

    def _fits_memory(self) -> bool:
        """True if ``auto`` may cache aggregates: for sampled training they have to be small."""
        graph = self._job.graph
        widths = {kind: 0 if nodes.x is None else int(nodes.x.shape[1]) for kind, nodes in graph.nodes.items()}
        numbers = sum(graph.nodes[kind.dst].count * widths[kind.src] for kind in graph.edges)
        is_small = numbers * self._job.dtype.itemsize <= self._job.evaluation_memory
        return is_small or self._config.fanouts is None or self.model.is_precomputed

    def _choose_order(self) -> dict[str, Tensor] | None:
        order, is_sampled = self._config.order, self._reads_rows
        if order == "auto":
            order = "cluster" if self._job.graph.num_nodes > REORDER_MIN_NODES and not is_sampled else "store"
        if order == "cluster" and is_sampled:
            raise ConfigError("strategy.order=cluster is for full batch and models that read neighbours: leave it out")
        if order == "store":
            return None
        self._job.progress.stage("cluster order")
        rows = cluster_order(self._job.graph)
        # Rows that the loss may read come first: the last layer then computes only these (``_last_view``).
        reach = self._job.task.reachable_mask()
        if reach is not None:
            target_rows = rows[self._target]
            is_read = reach[target_rows]
            rows[self._target] = torch.cat([target_rows[is_read], target_rows[~is_read]])
        return rows

    @cached_property
    def _last_view(self) -> LocalView:
        """The view of a step's last layer, with only the rows that the loss may read as destinations.

        All rows with batch norm, which reads all of them, and for a single layer, whose aggregate covers all rows.
        """
        reach = self._job.task.reachable_mask()
        if self._order is None or reach is None or self.model.batch_norm or self.model.num_layers == 1:
            return self._view
        return limit_destinations(self._view, self._target, int(reach.sum()))


class MiniBatchMaker:
    """Prepares the batches of an epoch. ``aggregated`` has a row per node, in store order. Raises ConfigError."""

    def __init__(self, config: LocalConfig, job: Job, aggregated: Aggregate | None) -> None:
        self._config, self._job, self._aggregated = config, job, aggregated
        fanouts = parse_fanouts(config.fanouts, job.model.num_layers)
        self._sampler = NeighborSampler(job.graph, fanouts, replace=config.replace)
        self._features = {kind: nodes.x for kind, nodes in job.graph.nodes.items() if nodes.x is not None}
        self._readers = {kind: FeatureGather(x) for kind, x in self._features.items()}
        self._aggregates = {(kind, name): rows for kind, name, rows in aggregate_tables(aggregated, job.task.target)}
        check_fanouts_per_layer(len(self._sampler.hops), job.model.num_layers)

    def epoch(self, epoch: int, first: int = 0) -> Generator[PreparedBatch]:
        depth = self._config.prefetch
        if depth == "auto":
            nbytes = sum(x.numel() * x.element_size() for x in self._features.values())
            depth = auto_depth(nbytes, processes=self._job.processes)
        return prefetch_items(self._batches(epoch, first), depth)

    def _batches(self, epoch: int, first: int) -> Generator[PreparedBatch]:
        task, seed = self._job.task, self._job.seed
        items = task.train_items(seed, epoch)
        for step, batch_items in epoch_batches(items, self._config.batch_size, seed=seed, epoch=epoch, first=first):
            yield self._prepare(task.batch(batch_items, DrawKey(seed, epoch, step)))

    def _prepare(self, batch: Batch) -> PreparedBatch:
        blocks = self._sampler.blocks(batch.seeds, batch.key, skip_last_hop=self._aggregated is not None)
        views = [self._job.task.mask_edges(view, batch) for view in blocks]
        prepare_backward(views)

        def read(kind: str, table: str, *, out: Tensor | None = None) -> Tensor:
            ids = views[0].nodes[kind].node_ids
            if table == X:
                return self._readers[kind](ids, out=out)
            return gather(self._aggregates[kind, table], ids, out=out)

        dtype: torch.dtype = self._job.dtype
        return read_inputs(batch, views, read, features=self._features, aggregated=self._aggregated, dtype=dtype)
