"""Layers in stages, chunks of nodes streamed through them; one optimizer step per epoch.

Rank stage·W + way: the ways of a stage are neighbours, so that rows of every layer stay near and only the thin traffic
from stage to stage goes far. A stage holds the tables, activations and optimizer state of its own layers; features are
read by the first, labels by the last. Ranks beyond the grid that was planned wait.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from itertools import chain

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from gnnfleet.comm.collectives import all_gather_bytes, all_gather_json, all_gather_rows, sum_over_ranks
from gnnfleet.errors import ConfigError
from gnnfleet.graph.partition.chunk_layout import ChunkLayout
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.timeline_svg import draw_schedule
from gnnfleet.strategies.job import PRECISIONS, Job
from gnnfleet.strategies.optim import load_optimizer, make_optimizer, optimizer_tensors
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.gradient_check import ExactnessMonitor, GradientComparison
from gnnfleet.strategies.pipe.grid_planner import (
    ClusterProfile,
    GridCandidate,
    GridEstimate,
    choose_grid,
    estimate_grid,
)
from gnnfleet.strategies.pipe.pipeline_rank import PipelineRank
from gnnfleet.strategies.pipe.profile import CpuShare, chunk_loads, profile_cluster, profile_model
from gnnfleet.strategies.pipe.schedule import ChunkSpan, bubble_share
from gnnfleet.strategies.pipe.stage import LossFn
from gnnfleet.strategies.protocol import RANK_LOCAL, Prediction, State, StepRecord
from gnnfleet.tasks.base import Batch, RowLookup
from gnnfleet.units import format_size

_CUT, _LAYOUT = "cut", "layout"  # what the history of a rank goes with
_GUARD = "guard"
"""A part of the state, which is the same on all ranks: any number of workers goes on with it."""


class PipeStrategy:
    """All ranks make and call it together."""

    has_newer_weights = False
    external_workers = ()

    def __init__(self, config: PipeConfig, job: Job) -> None:
        config.check_task(job.task)
        self._config, self._job, self._world = config, job, job.world
        self._aside = job.world.uncounted()  # words that are no part of training
        self.model = job.model
        self._layouts = _layouts(config, job)
        grids = self._candidates()
        self._cpu = CpuShare.detect(self._aside)
        self._cost = profile_model(config, job, self._layouts[-1], self._cpu)
        # Without a choice of grids nothing depends on the links.
        self._cluster = profile_cluster(self._aside, self._cpu) if len(grids) > 1 else ClusterProfile()
        self._forecasts = [self._estimate_grid(grid) for grid in grids]  # the same on all ranks
        self._optimizer = make_optimizer(self.model, job.train)
        self._monitor = ExactnessMonitor.begin(config.exactness_check_every, config.tolerance, 0)
        self._is_warm = not config.warmup_history  # whether there is a history, be it of zeros
        self._cosine: float | None = None  # of the last epoch, where gradients were compared
        self._count = len(job.task.train_items(job.seed, 0))
        self._grids = 0
        self._open_grid(self._plan())
        if job.memory is not None:
            size = format_size(job.memory)
            job.log_user(f"pipe does not keep within --memory {size}: gnnfleet plan says what its workers would need")

    # -- what is where --

    def _candidates(self) -> list[GridCandidate]:
        """Every grid that fits; raises ConfigError if none does."""
        workers, layers = self._world.size, self.model.num_layers
        grids = [
            GridCandidate(layout.partitions, workers // layout.partitions, layout.chunks, layout.halo_rows)
            for layout in self._layouts
        ]
        if self._config.graph_parallel == "auto" and workers > 1:
            grids.append(GridCandidate(1, 1, 1))
        fit = [grid for grid in grids if grid.stages <= layers and (grid.is_exact or not self.model.batch_norm)]
        if not fit:
            raise ConfigError(_refusal(grids[0], layers))
        return fit

    def _estimate_grid(self, grid: GridCandidate) -> GridEstimate:
        graph = self._job.graph
        loads = chunk_loads(graph, self._layout(grid))
        return estimate_grid(self._cost, grid, self._cluster, rows=graph.num_nodes, loads=loads)

    def _plan(self) -> GridEstimate:
        """The fastest grid by estimate; the choice is shown to the user."""
        best, lines = choose_grid(self._forecasts)
        if len(self._forecasts) > 1:
            bandwidth, slowdown = self._cluster.bandwidth / 1e6, self._cluster.oversubscription
            lines.append(f"  measured: {bandwidth:.0f} MB/s between workers; {slowdown:.1f} threads per core")
            for line in lines:
                self._job.log_user(line)
        return best

    def _open_grid(self, plan: GridEstimate) -> None:
        """Take up a place in a grid; whatever there was of another is let go."""
        self.grid_estimate, self.grid = plan, plan.candidate
        self._known: tuple[Tensor, Tensor] | None = None
        self._spans: list[ChunkSpan] = []
        self._owners = self._cost.owners(plan.layers)
        self._pipeline_rank: PipelineRank | None = None
        if self._world.rank < self.grid.workers:
            self._use(self._cpu.threads_alone if self.grid.workers < self._world.size else self._cpu.threads)
            layout, number = self._layout(self.grid), self._grids
            self._pipeline_rank = PipelineRank(self._config, self._job, plan, layout, self._owners, number=number)
        self._grids += 1

    def _use(self, threads: int) -> None:
        """Who works alone has the threads of those that wait on its machine."""
        if self._cpu.threads_alone != self._cpu.threads:
            torch.set_num_threads(threads)

    def _layout(self, grid: GridCandidate) -> ChunkLayout:
        for layout in self._layouts:
            if (layout.partitions, layout.chunks) == (grid.graph_parallel, grid.chunks):
                return layout
        # One worker, all of the graph: neighbours lie near each other as they do in chunks.
        order = self._layouts[0].order
        return ChunkLayout(order, torch.tensor([0, len(order)]), 1)

    @property
    def _first_rank(self) -> int:
        """The rank that knows the output: the first of the last stage."""
        return (self.grid.stages - 1) * self.grid.graph_parallel

    # -- steps --

    def train_epoch(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        if first:
            return  # there is one
        started = time.perf_counter()
        self._known = None
        loss = self._learn(epoch)
        yield StepRecord(epoch, 0, loss, self._count, time.perf_counter() - started)

    def _learn(self, epoch: int) -> float:
        """One optimizer step; the loss of all items."""
        exact = self._monitor.level == "exact" or self.grid.is_exact
        compares = not exact and self._monitor.is_due(epoch)
        if not exact and not self._is_warm:
            self._pass(epoch, exact=True, learns=self._config.gradient != "double", adopts=True)
            self._is_warm = True
        self._spans, self._cosine = [], None
        loss = self._pass(epoch, exact=exact, adopts=self._refreshes(epoch), spans=self._spans)
        if compares:
            loss = self._compare(epoch, loss)
        self._step()
        if compares and self._monitor.level == "exact":
            self._leave_pipeline()
        total = sum_over_ranks(self._aside, torch.tensor(loss, dtype=torch.float64))
        return float(total)

    def _refreshes(self, epoch: int) -> bool:
        """Whether the rows of an epoch become the history."""
        return self._monitor.level == "planned" and (epoch + 1) % self._config.refresh == 0

    def _pass(
        self, epoch: int, *, exact: bool, adopts: bool, learns: bool = True, spans: list[ChunkSpan] | None = None
    ) -> float:
        """Gradients of this stage, summed over its ways, in place of those before; this rank's share of the loss."""
        self.model.zero_grad(set_to_none=True)
        station = self._pipeline_rank
        if station is None:
            return 0.0
        key = DrawKey(self._job.seed, epoch, 0)
        views, slots = station.slots(epoch, exact=exact)
        station.history.begin(slots, adopts=adopts)
        loss = self._loss(station, epoch, key) if learns else None
        found = station.stage.run(views, key, loss=loss, spans=spans)
        station.history.finish()
        if learns:
            station.sum_gradients()
        return 0.0 if found is None else float(found)

    def _loss(self, station: PipelineRank, epoch: int, key: DrawKey) -> LossFn:
        """What the output of a way costs; stages before the last do not call it."""
        batch: list[Batch] = []
        if station.is_last:
            batch.append(station.task.batch(station.task.train_items(self._job.seed, epoch), key))
        return lambda rows: station.task.loss(station.row_lookup(rows), batch[0]) / self._count

    def _compare(self, epoch: int, loss: float) -> float:
        """An exact pass with the same weights and draws, whose gradients stay; history is then exact as well."""
        mine = self._first_of_stage()
        before = {name: parameter.grad for name, parameter in mine.items()}
        exact = self._pass(epoch, exact=True, adopts=True)
        pairs = [(before[name], parameter.grad) for name, parameter in mine.items()]
        sums = torch.zeros(5, dtype=torch.float64)
        for one, two in pairs:
            if one is not None and two is not None:
                one, two = one.double(), two.double()
                sums[:3] += torch.stack([(one * two).sum(), one.square().sum(), two.square().sum()])
        sums[3], sums[4] = loss, exact
        dot, first, second, loss, whole = sum_over_ranks(self._aside, sums).tolist()
        cosine = dot / max((first * second) ** 0.5, 1e-30)
        self._monitor, text = self._monitor.update(epoch, GradientComparison(cosine, loss, whole), self._exactly())
        self._cosine = cosine
        if text:
            self._job.log_user(text)
        return exact

    def _exact_grid(self) -> GridEstimate | None:
        """The fastest exact one that was planned with."""
        exact = [each for each in self._forecasts if each.candidate.is_exact]
        return min(exact, key=lambda each: (each.seconds, each.bytes)) if exact else None

    def _exactly(self) -> str:
        found = self._exact_grid()
        if found is not None:
            return str(found.candidate)
        return "chunks of a way as one, which is slower; strategy.graph_parallel=WORKERS is exact and side by side"

    def _leave_pipeline(self) -> None:
        """Go on in an exact grid, if there is one, with weights and what the optimizer remembers."""
        found = self._exact_grid()
        if found is not None and not self.grid.is_exact:
            state = self.state_dict()
            self._open_grid(found)
            load_optimizer(self.model, self._optimizer, state["optimizer"])

    def _first_of_stage(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that this rank speaks for: of those that several have, one does."""
        station = self._pipeline_rank
        if station is None or station.partition_number:
            return {}
        named = self.model.named_parameters()
        return {name: parameter for name, parameter in named if self._owners[name][0] == station.stage_number}

    def _step(self) -> None:
        clip = self._job.train.clip
        if clip:
            grads = [p.grad.double().square().sum() for p in self._first_of_stage().values() if p.grad is not None]
            total = sum_over_ranks(self._aside, torch.stack([torch.zeros((), dtype=torch.float64), *grads]).sum())
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), clip, total.sqrt())
        if self._pipeline_rank is not None:
            self._optimizer.step()

    def epoch_metrics(self) -> dict[str, float]:
        """How long stages were idle for want of chunks, from their processor time; what the guard has found."""
        found = {"bubble": bubble_share(self._every_span(), self.grid.stages)} if self.grid.stages > 1 else {}
        return found if self._cosine is None else {**found, "cosine": self._cosine}

    def _every_span(self) -> list[ChunkSpan]:
        own = [list(vars(span).values()) for span in self._spans]
        return [ChunkSpan(*fields) for spans in all_gather_json(self._aside, own) for fields in spans]

    def artifacts(self) -> dict[str, str]:
        """A picture of the last epoch: who worked on which chunk when."""
        if self._world.size == 1:
            return {}
        spans = self._every_span()
        return {"schedule.svg": draw_schedule(spans, self.grid.stages, self.grid.graph_parallel)} if spans else {}

    # -- exact rows --

    def evaluate(self, split: str) -> dict[str, float]:
        if not len(self._job.task.items(split)):
            raise ConfigError(f"the {split} split is empty: choose another --split")
        found: dict[str, float] = {}
        with torch.no_grad():
            out = self._outputs()[0]
            station = self._pipeline_rank
            if station is not None and station.is_last:
                found = station.task.measure(station.row_lookup(out), split)
        heard: dict[str, float] = all_gather_json(self._aside, found)[self._first_rank]
        return heard

    def validate(self) -> dict[str, float]:
        return self.evaluate("val")

    def predict(self, *, embeddings: bool = False) -> Prediction:
        every = self._job.graph.num_nodes if self._world.is_first else 0
        return self.predict_nodes(torch.arange(every), embeddings=embeddings)

    def predict_nodes(self, ids: Tensor, *, embeddings: bool = False) -> Prediction:
        logits, inputs = self._outputs()
        return Prediction(self._fetch(logits, ids), self._fetch(inputs, ids) if embeddings else None)

    def exact_lookup(self) -> RowLookup:
        out = self._outputs()[0]
        return lambda kind, ids: self._fetch(out, ids)

    def _fetch(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Rows by store id from whoever has them, the ways of the last stage."""
        asked = all_gather_rows(self._aside, ids)
        every = torch.cat(asked)
        width = all_gather_json(self._aside, int(rows.shape[1]))[self._first_rank]
        found = torch.zeros(len(every), width, dtype=PRECISIONS[self._job.precision])
        station = self._pipeline_rank
        if station is not None and station.is_last:
            place, way = station.layout.position[every], station.partition
            here = ((place >= way.low) & (place < way.high)).nonzero()[:, 0]
            found[here] = rows[place[here] - way.low].to(found.dtype)
        start = sum(len(other) for other in asked[: self._world.rank])
        return sum_over_ranks(self._aside, found)[start : start + len(ids)]

    def _outputs(self) -> tuple[Tensor, Tensor]:
        """(output, what the last layer read) of the rows of this way, on the last stage; kept until weights change."""
        if self._known is None:
            self._known = torch.empty(0, 0), torch.empty(0, 0)
            if self._pipeline_rank is not None:
                self._known = self._pipeline_rank.infer()
        return self._known

    # -- state --

    def state_dict(self) -> State:
        """All ranks call it: each tells what its stage has learnt, and all have all of it after."""
        mine, weights, twins = self._first_of_stage(), self.model.state_dict(), self._shared_names()
        once = [name for name in weights if name not in twins]
        own = {f"model/{name}": weights[name] for name in once if name in mine or self._keeps(name)}
        remembered = optimizer_tensors(self.model, self._optimizer)
        own |= {f"optimizer/{key}": value for key, value in remembered.items() if key.rpartition("/")[0] in mine}
        learnt: State = {"model": {}, "optimizer": {}}
        flat = {name: tensor.detach().contiguous() for name, tensor in own.items()}
        for text in all_gather_bytes(self._aside, tensors_to_bytes(flat)):
            for key, tensor in tensors_from_bytes(text).items():
                part, _, name = key.partition("/")
                learnt[part][name] = tensor
        told = learnt["model"]
        self.model.load_state_dict(told | {name: told[twins[name]] for name in weights if name in twins})
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": learnt["optimizer"],
            _GUARD: {_GUARD: torch.tensor(self._monitor.state(), dtype=torch.float64)},
            RANK_LOCAL: self._private(),
        }

    def _shared_names(self) -> dict[str, str]:
        """Second names of what layers share, each with its first, which is the one that stages are asked by."""
        first: dict[int, str] = {}
        every = chain(
            self.model.named_parameters(remove_duplicate=False), self.model.named_buffers(remove_duplicate=False)
        )
        return {name: known for name, tensor in every if (known := first.setdefault(id(tensor), name)) != name}

    def _keeps(self, buffer: str) -> bool:
        """Whether this rank speaks for a buffer: that of a module with parameters of its own goes with them."""
        station = self._pipeline_rank
        if station is None or station.partition_number or buffer in self._owners:
            return False
        module = buffer.rpartition(".")[0]
        beside = [stages[0] for name, stages in self._owners.items() if name.rpartition(".")[0] == module]
        return station.stage_number == (beside[0] if beside else 0)

    def _private(self) -> dict[str, Tensor]:
        """History; another grid, or the same one on other chunks, has no use for it."""
        found = {_CUT: self._cut()}
        if self.grid.chunks_per_partition > 1:
            found[_LAYOUT] = self._layout(self.grid).digest
            if self._pipeline_rank is not None:
                found |= self._pipeline_rank.history.state_dict()
        return found

    def _cut(self) -> Tensor:
        grid = self.grid
        return torch.tensor(
            [grid.graph_parallel, grid.stages, grid.chunks, *(each.stop for each in self.grid_estimate.layers)]
        )

    def load_state_dict(self, state: State) -> None:
        self._known = None
        self.model.load_state_dict(state["model"])
        # An optimizer that remembers nothing may have left no part.
        if "optimizer" not in state and _GUARD not in state:
            return
        load_optimizer(self.model, self._optimizer, state.get("optimizer", {}))
        private = dict(state.get(RANK_LOCAL, {}))
        cut, layout = (private.pop(word, torch.empty(0)).tolist() for word in (_CUT, _LAYOUT))
        known = self._return_to(cut, layout)
        if _GUARD in state:
            self._monitor = self._monitor.resumed(state[_GUARD][_GUARD].tolist(), anew=not known)
        if known:
            self._is_warm = True
            if self._pipeline_rank is not None:
                self._pipeline_rank.history.load_state_dict(private)
        else:
            self._job.log_user("workers or chunks are not those the run began with: its history is made anew")
        if self._monitor.level == "exact":
            self._leave_pipeline()

    def _return_to(self, cut: list[int], layout: list[int]) -> bool:
        """Take up the grid and the stages of a run that is gone on with, whatever is measured now; False: it had
        others than can be had here, or a history of other chunks."""
        ways, stages, chunks, *stops = cut or [0, 0, 0]
        wanted = [
            each
            for each in self._forecasts
            if (each.candidate.graph_parallel, each.candidate.stages, each.candidate.chunks) == (ways, stages, chunks)
            and (each.candidate.is_exact or self._layout(each.candidate).digest.tolist() == layout)
        ]
        word = [cut, bool(wanted)]  # of all ranks: none may go another way than the others
        words = all_gather_json(self._aside, word)
        if any(other != word for other in words) or not wanted or stops[-1] != self.model.num_layers:
            return False
        if cut != self._cut().tolist():
            layers = tuple(range(low, high) for low, high in zip([0, *stops[:-1]], stops, strict=True))
            self._open_grid(replace(wanted[0], layers=layers))
        return True

    def close(self) -> None:
        self._known = None
        self._use(self._cpu.threads)


def _layouts(config: PipeConfig, job: Job) -> list[ChunkLayout]:
    if job.context.layouts is None:
        raise ConfigError("this strategy works on chunks of a graph, found none: use gnnfleet train")
    wanted = config.layout_candidates(job.world.size, local_rows_only=job.task.reads_only_local_rows)
    return [layout for layout in job.context.layouts if (layout.partitions, layout.chunks) in wanted]


def _refusal(grid: GridCandidate, layers: int) -> str:
    if grid.stages > layers:
        return f"{grid.stages} stages need as many layers, the model has {layers}: use fewer workers or more ways"
    return "batch norm looks at all nodes at once: set model.norm=layer, or strategy.chunks as many as ways"
