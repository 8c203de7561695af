"""Who works on which batch when: a pure function of rank and iteration, the same on every rank.

``share`` trainers take a piece each of one batch. ``lanes`` passes are in flight on one memory: a lane uses a batch in
as many iterations in a row as there are lanes, each time with other negatives, and lanes are one batch apart. So in
every iteration one batch is new: it is read after the batch before it was written. ``copies`` of the memory walk the
whole stream, evenly apart. In fill and drain trainers are idle: nothing is used or written twice. T batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnnfleet.comm.mesh import coordinates_of_rank


@dataclass(frozen=True)
class ParallelLayout:
    """How trainers are arranged."""

    batch_parallel: int = 1  # trainers of a batch
    epoch_parallel: int = 1  # passes over one memory at a time
    memory_parallel: int = 1  # memories

    @property
    def workers(self) -> int:
        return self.batch_parallel * self.epoch_parallel * self.memory_parallel

    @property
    def axes(self) -> dict[str, int]:
        """As a Grid takes them: trainers of a batch are neighbours, then those of a memory."""
        return {"copy": self.memory_parallel, "lane": self.epoch_parallel, "offset": self.batch_parallel}

    def __str__(self) -> str:
        return f"{self.batch_parallel} × {self.epoch_parallel} × {self.memory_parallel}"


@dataclass(frozen=True)
class IterationPlan:
    """What a trainer does in an iteration."""

    memory_copy: int
    sweep: int  # of its copy, from 0; the first one of most copies begins within the stream
    phase: int  # iterations into the sweep
    batch: int | None  # None: idle
    use: int = 0  # how often its lane has used the batch before: which negatives it takes
    number: int = 0  # of the pass over the stream that this use belongs to; no two uses of a batch have the same

    @property
    def is_first(self) -> bool:
        """Whether memory is read and written now, for all uses of the batch."""
        return self.batch is not None and self.use == 0

    @property
    def starts_sweep(self) -> bool:
        """Whether the copy starts anew: its memory is emptied before anyone reads it."""
        return self.phase == 0


@dataclass(frozen=True)
class Schedule:
    """``batches`` are those of a whole sweep, each as large as ``share`` trainers take together."""

    layout: ParallelLayout
    batches: int

    @property
    def sweep(self) -> int:
        """Iterations from one beginning of a copy to the next."""
        return self.batches + self.layout.epoch_parallel - 1

    def start(self, epoch: int) -> int:
        """The first iteration of an epoch, which has as many uses of batches as the stream has batches. Epochs of
        several lanes or copies are parts of a sweep."""
        return epoch * self.sweep // (self.layout.epoch_parallel * self.layout.memory_parallel)

    def begin_of(self, copy: int) -> int:
        """The phase in which a copy is in iteration 0."""
        return -copy * (self.sweep // self.layout.memory_parallel) % self.sweep

    def iteration_plan(self, rank: int, iteration: int) -> IterationPlan:
        """What a rank does in an iteration, counted from the start of training."""
        place = coordinates_of_rank(rank, self.layout.axes)
        copy, lane, lanes = place["copy"], place["lane"], self.layout.epoch_parallel
        sweep, phase = divmod(self.begin_of(copy) + iteration, self.sweep)
        use = (phase - lane) % lanes
        batch = phase - use
        # A lane that is past the first use of a batch when training begins has not read it.
        if not 0 <= batch < self.batches or use > iteration:
            return IterationPlan(copy, sweep, phase, None)
        return IterationPlan(copy, sweep, phase, batch, use, (sweep * self.layout.memory_parallel + copy) * lanes + use)
