"""Layers in stages, chunks of nodes streamed through them; one optimizer step per epoch.

Rank stage·W + way: the ways of a stage are neighbours, so that rows of every layer stay near and only the thin traffic
from stage to stage goes far. A stage holds the tables, activations and optimizer state of its own layers; features are
read by the first, labels by the last. Ranks beyond the grid that was planned wait.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from gnnfleet.comm.code import Code
from gnnfleet.comm.reduce import gather_rows, sum_gradients, sum_over_ranks
from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError
from gnnfleet.graph.chunks import Layout
from gnnfleet.graph.places import Places, take_rows
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.schedule import draw_schedule
from gnnfleet.report.traffic import Traffic
from gnnfleet.sharded.chunk import ChunkView
from gnnfleet.sharded.mirrors import Mirrors
from gnnfleet.sharded.stream import Stream, Turn
from gnnfleet.sharded.way import Way, slots_of
from gnnfleet.strategies.base import (
    PRECISIONS,
    PRIVATE,
    Job,
    Prediction,
    State,
    StepRecord,
    load_optimizer,
    make_optimizer,
    optimizer_tensors,
)
from gnnfleet.strategies.inputs import aggregate_once, wants_aggregate
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.exchange import Neighbour
from gnnfleet.strategies.pipe.guard import Compared, Guard
from gnnfleet.strategies.pipe.plan import Candidate, Forecast, choose, forecast
from gnnfleet.strategies.pipe.probe import Found, owners, probe_layers, probe_network
from gnnfleet.strategies.pipe.schedule import Span, bubble, order_of
from gnnfleet.strategies.pipe.stage import Inputs, Loss, Stage
from gnnfleet.strategies.task import Batch, Take, Task

_CUT = "cut"
_GUARD = "guard"


class PipeStrategy:
    """All ranks make and call it together."""

    is_behind = False
    elsewhere = ()

    def __init__(self, config: PipeConfig, job: Job) -> None:
        config.check(job.task)
        self._config, self._job, self._world = config, job, job.world
        self._aside = replace(job.world, traffic=Traffic())  # words that are no part of training
        self.model = job.model
        self._layouts = _layouts(config, job)
        self._found = self._probe()
        self.forecast = self._plan()
        self.grid = self.forecast.candidate
        self._layout = self._layout_of(self.grid.ways)
        self._stage_number, self._way_number = divmod(job.world.rank, self.grid.ways)
        self._works = job.world.rank < self.grid.workers
        names = [name for name, _ in self.model.named_parameters()]
        self._owners = owners(self._found.parameters, self.forecast.layers, names)
        self._optimizer = make_optimizer(self.model, job.train)
        self._guard = Guard.begin(config.guard, config.tolerance, 0)
        self._is_warm = not config.warm  # whether there is a history, be it of zeros
        self._known: tuple[Tensor, Tensor] | None = None
        self._spans: list[Span] = []
        self._cosine: float | None = None  # of the last epoch, where gradients were compared
        self._count = len(job.task.trained(job.seed, 0))
        if self._works:
            self._settle()

    # -- what is where --

    def _probe(self) -> Found:
        """The layers, on a part of the graph; a single stage needs to know nothing."""
        layout = self._layouts[-1]
        way = Way(self._job.graph, layout, self._world.rank % layout.ways)
        cached = wants_aggregate(self._config.cache_inputs, hides=self._job.task.hides)
        return probe_layers(
            self._world,
            self.model,
            way,
            self._features(way),
            precision=self._job.precision,
            cached=cached,
            number=self._world.rank // layout.ways,
        )

    def _plan(self) -> Forecast:
        """The grid: the only one there is, or what is predicted to be the fastest."""
        job, workers = self._job, self._world.size
        grids = [
            Candidate(layout.ways, workers // layout.ways, layout.chunks, (layout.copies, layout.copies))
            for layout in self._layouts
        ]
        if self._config.ways == "auto" and workers > 1:
            grids.append(Candidate(1, 1, 1))
        layers = self.model.num_layers
        fit = [grid for grid in grids if grid.stages <= layers and (grid.is_exact or not self.model.batch_norm)]
        if not fit:
            raise ConfigError(self._refusal(grids[0], layers))
        machine = probe_network(self._world, self._found.crowding)
        size = {
            "rows": job.graph.num_nodes,
            "weights": sum(parameter.nbytes for parameter in self.model.parameters()),
            "wire": 2 if self._config.wire == "bf16" else 1,
        }
        best, lines = choose([forecast(self._found.layers, grid, machine, **size) for grid in fit])
        if len(fit) > 1:
            rate = f"{machine.bandwidth / 1e6:.0f} MB/s between workers"
            for line in [*lines, f"  measured: {rate}, layers take {machine.crowding:.1f}× as long when all work"]:
                job.say(line)
        # Clocks differ, so what the first found holds for all.
        word = json.dumps([fit.index(best.candidate), [[each.start, each.stop] for each in best.layers]])
        number, spans = json.loads(self._tell(word.encode())[0])
        return replace(best, candidate=fit[number], layers=tuple(range(*span) for span in spans))

    def _refusal(self, grid: Candidate, layers: int) -> str:
        if grid.stages > layers:
            return f"{grid.stages} stages need as many layers, the model has {layers}: use fewer workers or more ways"
        return "batch norm looks at all nodes at once: set model.norm=layer, or strategy.chunks as many as ways"

    def _layout_of(self, ways: int) -> Layout:
        if self.grid.chunks == 1 and self._layouts[0].chunks != 1:  # one worker, all of the graph
            order = torch.arange(self._job.graph.num_nodes)
            return Layout(order, torch.tensor([0, len(order)]), 1)
        return next(layout for layout in self._layouts if layout.ways == ways)

    def _settle(self) -> None:
        """Make what this rank works with."""
        job, config, grid = self._job, self._config, self.grid
        line = [self._stage_number * grid.ways + way for way in range(grid.ways)]
        self._ways = job.world.among("pipe/ways", line)
        column = [stage * grid.ways + self._way_number for stage in range(grid.stages)]
        # Parameters that layers of several stages use have gradients from all of these.
        self._tied = [name for name, stages in self._owners.items() if len(stages) > 1]
        self._column = job.world.among("pipe/stages", column) if self._tied else World()
        self._way = Way(job.graph, self._layout, self._way_number)
        code = Code(config.wire)
        mirrors, exact = Mirrors(self._ways, self._way, code), Mirrors(self._ways, self._way)
        stream = Stream(self._way, mirrors, config.gradient, remembers=grid.slots > 1 or grid.ways > 1)
        self._stream = stream
        self._views = [ChunkView.open(chunk, stream) for chunk in self._way.chunks]
        self._whole = self._views[0] if grid.slots == 1 else ChunkView.open(self._way.whole, stream)
        plain = Stream(self._way, exact, remembers=False)
        self._plain = self._whole.during(self._every_way(-1, 0), plain)
        self._stage = Stage(
            self.model,
            self.forecast.layers[self._stage_number],
            self._stage_number,
            self._way_number,
            self._neighbour(-1, code),
            self._neighbour(1, code),
            self._inputs(),
            job.precision,
        )
        self._exact = replace(self._stage, before=self._neighbour(-1, Code()), after=self._neighbour(1, Code()))
        self._own = [
            parameter for name, parameter in self.model.named_parameters() if self._stage_number in self._owners[name]
        ]

    def _neighbour(self, step: int, code: Code) -> Neighbour | None:
        stage = self._stage_number + step
        if not 0 <= stage < self.grid.stages:
            return None
        return Neighbour(self._world, stage * self.grid.ways + self._way_number, code)

    def _features(self, way: Way) -> Tensor:
        nodes = self._job.graph.nodes[way.kind]
        x = torch.empty(nodes.count, 0) if nodes.x is None else nodes.x
        return x[way.layout.order[way.low : way.high]].to(PRECISIONS[self._job.precision])

    def _inputs(self) -> Inputs | None:
        if self._stage_number:
            return None
        x, wanted = self._features(self._way), self._config.cache_inputs
        near = None
        if wants_aggregate(wanted, hides=self._job.task.hides):
            self._plain.stream.begin(self._slots(None))
            near = aggregate_once(wanted, self.model, self._plain.at(training=False), x)
        return Inputs(x, near if isinstance(near, Tensor) else None)

    @property
    def _is_last(self) -> bool:
        return self._works and self._stage_number == self.grid.stages - 1

    @property
    def _speaker(self) -> int:
        """The rank that knows the output: the first of the last stage."""
        return (self.grid.stages - 1) * self.grid.ways

    @cached_property
    def _task(self) -> Task:
        """The items of this way, on the last stage."""
        ids = self._layout.order[self._way.low : self._way.high]
        return self._job.task.share(self._ways, {self._way.kind: ids})

    @cached_property
    def _places(self) -> Places:
        return Places(self._layout.order[self._way.low : self._way.high])

    # -- steps --

    def steps(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        if first:
            return  # there is one
        started = time.perf_counter()
        self._known = None
        loss = self._learn(epoch)
        yield StepRecord(epoch, 0, loss, self._count, time.perf_counter() - started)

    def _learn(self, epoch: int) -> float:
        """One optimizer step; the loss of all items."""
        exact = self._guard.level == "exact" or self.grid.is_exact
        compares = not exact and self._guard.is_due(epoch)
        if not exact and not self._is_warm:
            self._pass(epoch, exact=True, learns=self._config.gradient != "double", adopts=True)
            self._is_warm = True
        self._spans, self._cosine = [], None
        loss = self._pass(epoch, exact=exact, adopts=self._refreshes(epoch), spans=self._spans)
        if compares:
            loss = self._compare(epoch, loss)
        self._step()
        total = sum_over_ranks(self._aside, torch.tensor(loss, dtype=torch.float64))
        return float(total)

    def _refreshes(self, epoch: int) -> bool:
        """Whether the rows of an epoch become the history."""
        return self._guard.level == "planned" and (epoch + 1) % self._config.refresh == 0

    def _pass(
        self, epoch: int, *, exact: bool, adopts: bool, learns: bool = True, spans: list[Span] | None = None
    ) -> float:
        """Gradients of this stage, summed over its ways, in place of those before; this rank's share of the loss."""
        self.model.zero_grad(set_to_none=True)
        if not self._works:
            return 0.0
        key = DrawKey(self._job.seed, epoch, 0)
        views, slots = self._turns(epoch, exact=exact)
        self._stream.begin(slots, adopts=adopts)
        loss = self._loss(epoch, key) if learns else None
        found = self._stage.run(views, key, loss=loss, spans=spans)
        self._stream.finish()
        if learns:
            sum_gradients(self._ways, self._own)
            self._sum_tied()
        return 0.0 if found is None else float(found)

    def _turns(self, epoch: int, *, exact: bool) -> tuple[list[ChunkView], Tensor]:
        """The chunks of an epoch in order, and when each place of the layout is worked on."""
        grid, config = self.grid, self._config
        if exact:
            return [self._whole.during(self._every_way(-1 if grid.slots > 1 else 0, 0))], self._slots(None)
        orders = [order_of(self._job.seed, epoch, way, grid.slots, shuffle=config.shuffle) for way in range(grid.ways)]
        turns = [Turn(slot, tuple(order[slot] for order in orders)) for slot in range(grid.slots)]
        own = orders[self._way_number]
        return [self._views[chunk].during(turn) for chunk, turn in zip(own, turns, strict=True)], self._slots(orders)

    def _every_way(self, chunk: int, slot: int) -> Turn:
        return Turn(slot, (chunk,) * self.grid.ways)

    def _slots(self, orders: Sequence[Sequence[int]] | None) -> Tensor:
        if orders is None or self.grid.slots == 1:
            return torch.zeros(len(self._layout.order), dtype=torch.int64)
        return slots_of(orders, self._layout)

    def _loss(self, epoch: int, key: DrawKey) -> Loss:
        """What the output of a way costs; stages before the last do not call it."""
        batch: list[Batch] = []
        if self._is_last:
            batch.append(self._task.batch(self._task.trained(self._job.seed, epoch), key))
        return lambda rows: self._task.loss(self._taking(rows), batch[0]) / self._count

    def _sum_tied(self) -> None:
        named = dict(self.model.named_parameters())
        sum_gradients(self._column, [named[name] for name in self._tied])

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
        self._guard, text = self._guard.after(epoch, Compared(cosine, loss, whole))
        self._cosine = cosine
        if text:
            self._job.say(text)
        return exact

    def _first_of_stage(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that this rank speaks for: of those that several have, one does."""
        if not self._works or self._way_number:
            return {}
        named = self.model.named_parameters()
        return {name: parameter for name, parameter in named if self._owners[name][0] == self._stage_number}

    def _step(self) -> None:
        clip = self._job.train.clip
        if clip:
            grads = [p.grad.double().square().sum() for p in self._first_of_stage().values() if p.grad is not None]
            total = sum_over_ranks(self._aside, torch.stack([torch.zeros((), dtype=torch.float64), *grads]).sum())
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), clip, total.sqrt())
        if self._works:
            self._optimizer.step()

    def counts(self) -> dict[str, float]:
        """How long stages were idle for want of chunks, from their processor time; what the guard has found."""
        found = {"bubble": bubble(self._every_span(), self.grid.stages)} if self.grid.stages > 1 else {}
        return found if self._cosine is None else {**found, "cosine": self._cosine}

    def _every_span(self) -> list[Span]:
        own = json.dumps([list(vars(span).values()) for span in self._spans]).encode()
        return [Span(*words) for text in self._tell(own) for words in json.loads(text)]

    def pages(self) -> dict[str, str]:
        """A picture of the last epoch: who worked on which chunk when."""
        if self._world.size == 1:
            return {}
        spans = self._every_span()
        return {"schedule.svg": draw_schedule(spans, self.grid.stages, self.grid.ways)} if spans else {}

    # -- exact rows --

    def evaluate(self, split: str) -> dict[str, float]:
        if not len(self._job.task.items(split)):
            raise ConfigError(f"the {split} split is empty: choose another --split")
        found: dict[str, float] = {}
        with torch.no_grad():
            out = self._outputs()[0]
            if self._is_last:
                found = self._task.measure(self._taking(out), split)
        heard: dict[str, float] = json.loads(self._tell(json.dumps(found).encode())[self._speaker])
        return heard

    def validate(self) -> dict[str, float]:
        return self.evaluate("val")

    def predict(self, *, embeddings: bool = False) -> Prediction:
        every = self._job.graph.num_nodes if self._world.is_first else 0
        return self.rows(torch.arange(every), embeddings=embeddings)

    def rows(self, ids: Tensor, *, embeddings: bool = False) -> Prediction:
        logits, inputs = self._outputs()
        return Prediction(self._fetch(logits, ids), self._fetch(inputs, ids) if embeddings else None)

    def exact(self) -> Take:
        out = self._outputs()[0]
        return lambda kind, ids: self._fetch(out, ids)

    def _fetch(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Rows by store id from whoever has them, the ways of the last stage."""
        asked = gather_rows(self._aside, ids)
        every = torch.cat(asked)
        width = int(self._tell(str(int(rows.shape[1])).encode())[self._speaker])
        found = torch.zeros(len(every), width, dtype=PRECISIONS[self._job.precision])
        if self._is_last:
            place = self._layout.place[every]
            here = ((place >= self._way.low) & (place < self._way.high)).nonzero()[:, 0]
            found[here] = rows[place[here] - self._way.low].to(found.dtype)
        start = sum(len(other) for other in asked[: self._world.rank])
        return sum_over_ranks(self._aside, found)[start : start + len(ids)]

    def _outputs(self) -> tuple[Tensor, Tensor]:
        """(output, what the last layer read) of the rows of this way, on the last stage; kept until weights change."""
        if self._known is None:
            self._known = torch.empty(0, 0), torch.empty(0, 0)
            if self._works:
                self._plain.stream.begin(self._slots(None))
                self._known = self._exact.infer(self._plain)
        return self._known

    def _taking(self, out: Tensor) -> Take:
        def take(kind: str, ids: Tensor) -> Tensor:
            return take_rows(out, self._places.rows(ids)).to(PRECISIONS[self._job.precision])

        return take

    # -- state --

    def state_dict(self) -> State:
        """All ranks call it: each tells what its stage has learnt, and all have all of it after."""
        mine = self._first_of_stage()
        weights = self.model.state_dict()
        own = {f"model/{name}": weights[name] for name in weights if name in mine or self._keeps(name)}
        remembered = optimizer_tensors(self.model, self._optimizer)
        own |= {f"optimizer/{key}": value for key, value in remembered.items() if key.rpartition("/")[0] in mine}
        learnt: State = {"model": {}, "optimizer": {}}
        flat = {name: tensor.detach().contiguous() for name, tensor in own.items()}
        for text in self._tell(tensors_to_bytes(flat)):
            for key, tensor in tensors_from_bytes(text).items():
                part, _, name = key.partition("/")
                learnt[part][name] = tensor
        self.model.load_state_dict(learnt["model"])
        return {"model": dict(self.model.state_dict()), "optimizer": learnt["optimizer"], PRIVATE: self._private()}

    def _keeps(self, buffer: str) -> bool:
        """Whether this rank speaks for a buffer: that of a module with parameters of its own goes with them."""
        if not self._works or self._way_number or buffer in self._owners:
            return False
        module = buffer.rpartition(".")[0]
        beside = [stages[0] for name, stages in self._owners.items() if name.rpartition(".")[0] == module]
        return self._stage_number == (beside[0] if beside else 0)

    def _private(self) -> dict[str, Tensor]:
        """History and guard; another grid has no use for them."""
        found = {_CUT: self._cut(), _GUARD: torch.tensor(self._guard.state())}
        if self._works and self.grid.slots > 1:
            found |= self._stream.state_dict()
        return found

    def _cut(self) -> Tensor:
        grid = self.grid
        return torch.tensor([grid.ways, grid.stages, grid.chunks, *(each.stop for each in self.forecast.layers)])

    def load_state_dict(self, state: State) -> None:
        self._known = None
        self.model.load_state_dict(state["model"])
        if "optimizer" not in state:
            return
        load_optimizer(self.model, self._optimizer, state["optimizer"])
        private = dict(state.get(PRIVATE, {}))
        cut, guard = private.pop(_CUT, None), private.pop(_GUARD, None)
        fits = cut is not None and torch.equal(cut, self._cut())
        if not all(text == b"1" for text in self._tell(b"1" if fits else b"0")):
            self._job.say("this grid of workers is not the one the run began with: its history is made anew")
            return
        if guard is not None:
            self._guard = self._guard.resumed(guard.tolist())
        self._is_warm = True
        if self._works:
            self._stream.load_state_dict(private)

    def close(self) -> None:
        self._known = None

    def _tell(self, word: bytes) -> list[bytes]:
        """What every rank says."""
        own = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        return [bytes(each.numpy().tobytes()) for each in gather_rows(self._aside, own)]


def _layouts(config: PipeConfig, job: Job) -> list[Layout]:
    if job.layouts is None:
        raise ConfigError("this strategy works on chunks of a graph, found none: use gnnfleet train")
    wanted = config.candidates(job.world.size, stays=job.task.stays)
    return [layout for layout in job.layouts if (layout.ways, layout.chunks) in wanted]
