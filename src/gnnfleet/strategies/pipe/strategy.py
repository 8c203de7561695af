"""Layers in stages, chunks of nodes streamed through them; one optimizer step per epoch.

Rank stage · W + partition: the graph-parallel ranks of a stage are neighbours, because they exchange rows of every
layer, and stages only rows of one. A stage holds history, activations and optimizer state of its own layers. The first
one reads features, the last one labels. Ranks beyond the chosen grid wait.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import astuple, replace
from itertools import chain

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from gnnfleet.comm.collectives import all_gather_bytes, all_gather_json, all_gather_rows, sum_over_ranks
from gnnfleet.errors import ConfigError
from gnnfleet.graph.partition.chunk_layout import ChunkLayout
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.timeline_svg import ChunkSpan, draw_schedule
from gnnfleet.strategies.job import Job
from gnnfleet.strategies.optim import load_optimizer, make_optimizer, optimizer_tensors
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.gradient_check import ExactnessMonitor
from gnnfleet.strategies.pipe.grid_planner import (
    ClusterProfile,
    GridCandidate,
    GridEstimate,
    choose_grid,
    estimate_grid,
    feasible_grids,
)
from gnnfleet.strategies.pipe.pipeline_rank import PipelineRank
from gnnfleet.strategies.pipe.profile import CpuShare, check_types, chunk_loads, profile_cluster, profile_model
from gnnfleet.strategies.pipe.schedule import bubble_share
from gnnfleet.strategies.protocol import RANK_LOCAL, Prediction, Reporting, State, StepRecord
from gnnfleet.tasks.base import RowLookup, Scores

# Keys of the state: the grid and the chunk layout of a rank's history, and the exactness monitor.
_GRID, _LAYOUT, _MONITOR = "cut", "layout", "guard"


class PipeStrategy(Reporting):
    """All methods are collective, the constructor included."""

    def __init__(self, config: PipeConfig, job: Job) -> None:
        config.check_task(job.task)
        check_types(job)
        self._config, self._job, self._world = config, job, job.world
        self._uncounted = job.world.uncounted()  # for messages that are not part of training
        self.model = job.model
        layouts = _usable_layouts(config, job)
        self._layouts = {GridCandidate.of(layout, self._world.size): layout for layout in layouts}
        if config.graph_parallel == "auto" and self._world.size > 1:
            order = layouts[0].order  # keeps neighbours close together
            self._layouts[GridCandidate(1, 1, 1)] = ChunkLayout(order, torch.tensor([0, len(order)]), 1)
        grids = feasible_grids(list(self._layouts), self.model.num_layers, batch_norm=self.model.batch_norm)
        self._cpu = CpuShare.detect(self._uncounted)
        self._cost = profile_model(config, job, layouts[-1], self._cpu)
        # A single grid needs no measurement of the links.
        cluster = profile_cluster(self._uncounted, self._cpu) if len(grids) > 1 else ClusterProfile()
        graph, cost = job.graph, self._cost
        self._estimates = [  # the same on all ranks
            estimate_grid(cost, grid, cluster, rows=graph.num_nodes, loads=chunk_loads(graph, self._layouts[grid]))
            for grid in grids
        ]
        self._optimizer = make_optimizer(self.model, job.train)
        self._monitor = ExactnessMonitor.begin(config.exactness_check_every, config.tolerance)
        self._has_history = not config.warmup_history  # zeros count as a history
        self._cosine: float | None = None  # of the last epoch, if gradients were compared
        self._count = len(job.task.train_items(job.seed, 0))
        self._num_grids = 0
        plan, lines = choose_grid(self._estimates)
        if len(grids) > 1:
            bandwidth, slowdown = cluster.bandwidth / 1e6, cluster.oversubscription
            lines.append(f"  measured: {bandwidth:.0f} MB/s between workers; {slowdown:.1f} threads per core")
            for line in lines:
                job.log_user(line)
        self._open_grid(plan)

    # -- grids --

    def _open_grid(self, plan: GridEstimate) -> None:
        """Take this rank's position in a grid, and drop everything of the previous grid."""
        self.grid_estimate, self.grid = plan, plan.candidate
        self._cached_outputs: tuple[Tensor, Tensor] | None = None
        self._spans: list[ChunkSpan] = []
        self._owners = self._cost.owners(plan.layers)
        self._pipeline_rank: PipelineRank | None = None
        if self._world.rank < self.grid.workers:
            # A single worker gets the threads of those that wait on its machine.
            self._set_threads(self._cpu.threads_alone if self.grid.workers < self._world.size else self._cpu.threads)
            layout, number = self._layouts[self.grid], self._num_grids
            self._pipeline_rank = PipelineRank(self._config, self._job, plan, layout, self._owners, number)
        self._num_grids += 1

    def _set_threads(self, threads: int) -> None:
        if self._cpu.threads_alone != self._cpu.threads:
            torch.set_num_threads(threads)

    def _exact_grid(self) -> GridEstimate | None:
        exact = [estimate for estimate in self._estimates if estimate.candidate.is_exact]
        return choose_grid(exact)[0] if exact else None

    def _open_exact_grid(self) -> None:
        """Continue with the same weights and optimizer state on an exact grid, if there is one."""
        plan = self._exact_grid()
        if plan is not None and not self.grid.is_exact:
            state = self.state_dict()
            self._open_grid(plan)
            load_optimizer(self.model, self._optimizer, state["optimizer"])

    # -- steps --

    def train_epoch(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        if first:
            return  # an epoch has one step
        started = time.perf_counter()
        self._cached_outputs = None
        loss = self._train_step(epoch)
        yield StepRecord(epoch, 0, loss, self._count, time.perf_counter() - started)

    def _train_step(self, epoch: int) -> float:
        """Make one optimizer step; returns the mean loss over all items."""
        exact = self._monitor.level == "exact" or self.grid.is_exact
        compares = not exact and self._monitor.is_due(epoch)
        if not exact and not self._has_history:
            self._run_pass(epoch, [], exact=True, updates_history=True, backward=self._config.gradient != "double")
            self._has_history = True
        self._spans, self._cosine = [], None
        refreshes = self._monitor.level == "planned" and (epoch + 1) % self._config.refresh == 0
        loss = self._run_pass(epoch, self._spans, exact=exact, updates_history=refreshes)
        if compares:
            loss = self._compare_gradients(epoch, loss)
        self._clip_and_step()
        if compares and self._monitor.level == "exact":
            self._open_exact_grid()
        return float(sum_over_ranks(self._uncounted, torch.tensor(loss, dtype=torch.float64)))

    def _run_pass(
        self, epoch: int, spans: list[ChunkSpan], *, exact: bool, updates_history: bool, backward: bool = True
    ) -> float:
        """Replace the gradients by those of a pass over all chunks; returns this rank's share of the loss."""
        self.model.zero_grad(set_to_none=True)
        rank = self._pipeline_rank
        if rank is None:
            return 0.0
        key = DrawKey(self._job.seed, epoch, 0)
        views, slots = rank.epoch_views(epoch, exact=exact)
        rank.history.begin(slots, updates_history=updates_history)
        loss_fn = rank.loss_fn(epoch, key, self._count) if backward and rank.is_last else None
        loss = rank.stage.run(views, key, spans, backward=backward, loss=loss_fn)
        rank.history.finish()
        if backward:
            rank.sum_gradients()
        return loss

    def _compare_gradients(self, epoch: int, loss: float) -> float:
        """Replace gradients and history by those of an exact pass with the same weights and draws; returns its loss."""
        parameters = self._reported_parameters()
        grads = {name: parameter.grad for name, parameter in parameters.items()}
        exact_loss = self._run_pass(epoch, [], exact=True, updates_history=True)
        sums = torch.zeros(5, dtype=torch.float64)
        for name, parameter in parameters.items():
            grad, exact_grad = grads[name], parameter.grad
            if grad is not None and exact_grad is not None:
                grad, exact_grad = grad.double(), exact_grad.double()
                sums[:3] += torch.stack([(grad * exact_grad).sum(), grad.square().sum(), exact_grad.square().sum()])
        sums[3], sums[4] = loss, exact_loss
        dot, square, exact_square, *losses = sum_over_ranks(self._uncounted, sums).tolist()
        self._cosine = dot / max((square * exact_square) ** 0.5, 1e-30)
        plan = self._exact_grid()
        self._monitor, text = self._monitor.update(
            epoch, self._cosine, losses[0], losses[1], "" if plan is None else str(plan.candidate)
        )
        if text:
            self._job.log_user(text)
        return exact_loss

    def _reports(self, name: str) -> bool:
        """True if this rank reports a parameter or buffer; exactly one rank reports each of them.

        It is on the first stage that uses the parameter, or the other parameters of the buffer's module.
        """
        rank, module = self._pipeline_rank, name.rpartition(".")[0]
        if rank is None or rank.partition_number:
            return False
        in_module = [stages for parameter, stages in self._owners.items() if parameter.rpartition(".")[0] == module]
        return rank.stage_number == self._owners.get(name, in_module[0] if in_module else [0])[0]

    def _reported_parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.model.named_parameters() if self._reports(name)}

    def _clip_and_step(self) -> None:
        clip = self._job.train.clip
        if clip:
            grads = [p.grad for p in self._reported_parameters().values() if p.grad is not None]
            squares = [torch.zeros((), dtype=torch.float64), *(grad.double().square().sum() for grad in grads)]
            total = sum_over_ranks(self._uncounted, torch.stack(squares).sum())
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), clip, total.sqrt())
        if self._pipeline_rank is not None:
            self._optimizer.step()

    def epoch_metrics(self) -> dict[str, float]:
        """Collective. The pipeline bubble, and the cosine of gradients if they were compared."""
        metrics = {"bubble": bubble_share(self._all_spans(), self.grid.stages)} if self.grid.stages > 1 else {}
        return metrics if self._cosine is None else {**metrics, "cosine": self._cosine}

    def _all_spans(self) -> list[ChunkSpan]:
        """Collective. The spans of all ranks in the last epoch."""
        by_rank = all_gather_json(self._uncounted, [astuple(span) for span in self._spans])
        return [ChunkSpan(*fields) for spans in by_rank for fields in spans]

    def artifacts(self) -> dict[str, str]:
        """Collective. A picture of the schedule of the last epoch."""
        if self._world.size == 1:
            return {}
        spans = self._all_spans()
        return {"schedule.svg": draw_schedule(spans, self.grid.stages, self.grid.graph_parallel)} if spans else {}

    # -- exact outputs --

    @property
    def _output_rank(self) -> int:
        """The first rank of the last stage."""
        return (self.grid.stages - 1) * self.grid.graph_parallel

    def evaluate(self, split: str) -> Scores:
        if not len(self._job.task.items(split)):
            raise ConfigError(f"the {split} split is empty: choose another --split")
        measures: Scores = {}
        with torch.no_grad():
            out, rank = self._outputs()[0], self._pipeline_rank
            if rank is not None and rank.is_last:
                measures = rank.task.measure(rank.row_lookup(out), split)
        return dict(all_gather_json(self._uncounted, measures)[self._output_rank])

    def predict(self, *, embeddings: bool = False) -> Prediction:
        count = self._job.graph.nodes[self._predicted_type].count if self._world.is_first else 0
        return self.predict_nodes(torch.arange(count), embeddings=embeddings)

    def predict_nodes(self, ids: Tensor, *, embeddings: bool = False) -> Prediction:
        logits, inputs = self._outputs()
        kind = self._predicted_type
        return Prediction(self._fetch(logits, kind, ids), self._fetch(inputs, kind, ids) if embeddings else None)

    @property
    def _predicted_type(self) -> str:
        graph = self._job.graph
        return graph.labelled_type or next(iter(graph.nodes))

    def exact_lookup(self) -> RowLookup:
        out = self._outputs()[0]
        return lambda kind, ids: self._fetch(out, kind, ids)

    def _fetch(self, rows: Tensor, kind: str, ids: Tensor) -> Tensor:
        """Collective. Rows by store id from the ranks of the last stage, whose partitions have ``rows``."""
        ids_by_rank = all_gather_rows(self._uncounted, ids)
        all_ids = torch.cat(ids_by_rank)
        width = all_gather_json(self._uncounted, int(rows.shape[1]))[self._output_rank]
        fetched = torch.zeros(len(all_ids), width, dtype=self._job.dtype)
        rank = self._pipeline_rank
        if rank is not None and rank.is_last:
            rows_of_ids = rank.rows_of(kind, all_ids)
            local = ((rows_of_ids >= 0) & (rows_of_ids < len(rows))).nonzero()[:, 0]
            fetched[local] = rows[rows_of_ids[local]].to(fetched.dtype)
        start = sum(map(len, ids_by_rank[: self._world.rank]))
        return sum_over_ranks(self._uncounted, fetched)[start : start + len(ids)]

    def _outputs(self) -> tuple[Tensor, Tensor]:
        """(output, input of the last layer) of the partition's rows, on the last stage; cached until weights change."""
        if self._cached_outputs is None:
            rank = self._pipeline_rank
            self._cached_outputs = (torch.empty(0, 0), torch.empty(0, 0)) if rank is None else rank.infer()
        return self._cached_outputs

    # -- state --

    def state_dict(self) -> State:
        """Collective. Each rank reports the state of its stage, and all ranks get the whole."""
        persistent = self.model.state_dict().keys()
        tensors: dict[str, Tensor] = dict(chain(self.model.named_parameters(), self.model.named_buffers()))
        optimizer = optimizer_tensors(self.model, self._optimizer)
        reported = {f"model/{name}": t for name, t in tensors.items() if name in persistent and self._reports(name)}
        reported |= {f"optimizer/{key}": t for key, t in optimizer.items() if self._reports(key.rpartition("/")[0])}
        gathered: State = {"model": {}, "optimizer": {}}
        content = tensors_to_bytes({name: tensor.detach().contiguous() for name, tensor in reported.items()})
        for rank_content in all_gather_bytes(self._uncounted, content):
            for key, tensor in tensors_from_bytes(rank_content).items():
                part, _, name = key.partition("/")
                gathered[part][name] = tensor
        with torch.no_grad():
            for name, tensor in gathered["model"].items():
                tensors[name].copy_(tensor)
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": gathered["optimizer"],
            _MONITOR: {_MONITOR: torch.tensor(self._monitor.state(), dtype=torch.float64)},
            RANK_LOCAL: self._rank_local_state(),
        }

    def _rank_local_state(self) -> dict[str, Tensor]:
        """The grid and the history, which is useless on another grid or with other chunks."""
        state = {_GRID: self._grid_state()}
        if not self.grid.is_exact:
            state[_LAYOUT] = self._layouts[self.grid].digest
            if self._pipeline_rank is not None:
                state |= self._pipeline_rank.history.state_dict()
        return state

    def _grid_state(self) -> Tensor:
        grid, layers = self.grid, self.grid_estimate.layers
        return torch.tensor([grid.graph_parallel, grid.stages, grid.chunks, *(stage.stop for stage in layers)])

    def load_state_dict(self, state: State) -> None:
        self._cached_outputs = None
        self.model.load_state_dict(state["model"])
        if "optimizer" not in state and _MONITOR not in state:
            return  # an optimizer without state may have no part
        load_optimizer(self.model, self._optimizer, state.get("optimizer", {}))
        history = dict(state.get(RANK_LOCAL, {}))
        grid, digest = (history.pop(key, torch.empty(0)).tolist() for key in (_GRID, _LAYOUT))
        is_same_grid = self._reopen_grid(grid, digest)
        if _MONITOR in state:
            self._monitor = self._monitor.resumed(state[_MONITOR][_MONITOR].tolist(), restart=not is_same_grid)
        if is_same_grid:
            self._has_history = True
            if self._pipeline_rank is not None:
                self._pipeline_rank.history.load_state_dict(history)
        else:
            self._job.log_user("Workers or chunks differ from those of the checkpoint. The history is rebuilt.")
        if self._monitor.level == "exact":
            self._open_exact_grid()

    def _reopen_grid(self, grid_state: list[int], digest: list[int]) -> bool:
        """Collective. Open the grid of a checkpoint, whatever is estimated now; False if it is not available."""
        shape, stops = grid_state[:3], grid_state[3:]
        estimates = [
            estimate
            for estimate in self._estimates
            if [estimate.candidate.graph_parallel, estimate.candidate.stages, estimate.candidate.chunks] == shape
            and (estimate.candidate.is_exact or self._layouts[estimate.candidate].digest.tolist() == digest)
        ]
        # All ranks must agree.
        local = [grid_state, bool(estimates)]
        is_agreed = all(other == local for other in all_gather_json(self._uncounted, local))
        if not is_agreed or not estimates or stops[-1] != self.model.num_layers:
            return False
        if grid_state != self._grid_state().tolist():
            layers = tuple(map(range, [0, *stops[:-1]], stops))
            self._open_grid(replace(estimates[0], layers=layers))
        return True

    def close(self) -> None:
        self._cached_outputs = None
        self._set_threads(self._cpu.threads)


def _usable_layouts(config: PipeConfig, job: Job) -> list[ChunkLayout]:
    if job.context.layouts is None:
        raise ConfigError("strategy pipe needs chunks of a graph, found none: use gnnfleet train")
    candidates = config.layout_candidates(job.world.size, local_rows_only=job.task.reads_only_local_rows)
    return [layout for layout in job.context.layouts if (layout.partitions, layout.chunks) in candidates]
