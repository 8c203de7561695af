"""Schedule of mini-batch, epoch and memory parallelism (DistTGL): a pure function of rank and iteration.

Mini-batch parallelism: i trainers share a batch. Epoch parallelism: j lanes work on one node memory, one batch apart; a
lane uses its batch in j consecutive iterations, each time with other negatives. So each memory has one new batch per
iteration, read after the previous one was written. Memory parallelism: k memories sweep over the stream, evenly
spaced. Lanes are idle while a sweep fills and drains: no batch is used or written twice. T batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnnfleet.comm.mesh import coordinates_of_rank


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of mini-batch × epoch × memory parallelism."""

    batch_parallel: int = 1  # trainers that share a batch
    epoch_parallel: int = 1  # lanes on one memory
    memory_parallel: int = 1  # copies of the memory

    @property
    def workers(self) -> int:
        return self.batch_parallel * self.epoch_parallel * self.memory_parallel

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the mesh: trainers of a batch have adjacent ranks, then those of a memory."""
        return {"memory": self.memory_parallel, "epoch": self.epoch_parallel, "batch": self.batch_parallel}

    def fits(self, requested: ParallelLayout) -> bool:
        """True if it has the degrees of ``requested`` other than 0."""
        return all(degree in (0, getattr(self, name)) for name, degree in vars(requested).items())

    def __str__(self) -> str:
        return f"{self.batch_parallel} × {self.epoch_parallel} × {self.memory_parallel}"


@dataclass(frozen=True)
class IterationPlan:
    memory_copy: int
    sweep: int  # of its memory, from 0; the first sweep of most memories starts within the stream
    phase: int  # iterations into the sweep
    batch: int | None  # None: idle
    use: int = 0  # number of earlier uses of the batch by its lane; selects the negatives
    pass_number: int = 0  # pass over the stream that this use belongs to; unique among the uses of a batch

    @property
    def is_first(self) -> bool:
        """True if memory is read and written in this iteration, for all uses of the batch."""
        return self.batch is not None and self.use == 0

    @property
    def starts_sweep(self) -> bool:
        """True if the memory is reset before it is read."""
        return self.phase == 0


@dataclass(frozen=True)
class Schedule:
    """Schedule of a layout; ``batches`` is the number of global batches of a sweep."""

    layout: ParallelLayout
    batches: int

    @property
    def sweep(self) -> int:
        """Number of iterations between two resets of a memory."""
        return self.batches + self.layout.epoch_parallel - 1

    def start(self, epoch: int) -> int:
        """First iteration of an epoch. An epoch uses as many batches as the stream has, so it is 1 / (j k) sweep."""
        return epoch * self.sweep // (self.layout.epoch_parallel * self.layout.memory_parallel)

    def initial_phase(self, memory_copy: int) -> int:
        """Phase of a memory in iteration 0."""
        return -memory_copy * (self.sweep // self.layout.memory_parallel) % self.sweep

    def iteration_plan(self, rank: int, iteration: int) -> IterationPlan:
        """Plan an iteration of a rank; iterations count from the start of training."""
        coordinates = coordinates_of_rank(rank, self.layout.axes)
        memory_copy, lane, lanes = coordinates["memory"], coordinates["epoch"], self.layout.epoch_parallel
        sweep, phase = divmod(self.initial_phase(memory_copy) + iteration, self.sweep)
        use = (phase - lane) % lanes
        batch = phase - use
        # A lane whose first use of a batch lies before the start of training has not read it.
        if not 0 <= batch < self.batches or use > iteration:
            return IterationPlan(memory_copy, sweep, phase, None)
        pass_number = (sweep * self.layout.memory_parallel + memory_copy) * lanes + use
        return IterationPlan(memory_copy, sweep, phase, batch, use, pass_number)
