"""Base of the configs of all strategies."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel

from gnnfleet.tasks.base import Task


class StrategyConfig(BaseModel, frozen=True, extra="forbid"):
    """What the configs of all strategies have: the name they are chosen by."""

    uses_parts: ClassVar[bool] = False  # whether a partition of the graph means anything to it
    is_elastic: ClassVar[bool] = False  # whether workers are independent of each other, and may end or join any time
    partitioner: ClassVar[str] = "mincut"  # how nodes are dealt to workers unless the user says
    # What is kept in the store for it: a part for every worker, clusters that are dealt, layouts of chunks, or nothing.
    placement: ClassVar[Literal["parts", "clusters", "chunks", "none"]] = "parts"

    name: str

    @property
    def batch_size(self) -> int:
        """Items of a step; 0 for all."""
        return 0

    @property
    def num_clusters(self) -> int:
        """In how many clusters nodes are dealt by ``super``; 0 leaves it to the partitioner."""
        return 0

    @property
    def is_sampled(self) -> bool:
        """Whether a step walks sampled blocks, not the whole graph."""
        return False

    def layout_candidates(self, workers: int, *, local_rows_only: bool = True) -> list[tuple[int, int]]:
        """(ways, chunks) of the layouts it may want; ``stays``: as of the task."""
        return []

    def check_workers(self, workers: int) -> None:
        """Raise ConfigError for a number of workers that does not fit."""

    def check_task(self, task: Task) -> None:
        """Raise ConfigError for a task that this strategy cannot learn."""
