"""Base of the settings of all strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

from pydantic import BaseModel

from gnnfleet.errors import ConfigError

if TYPE_CHECKING:
    from gnnfleet.nn.base import Model
    from gnnfleet.tasks.base import Task


class StrategyConfig(BaseModel, frozen=True, extra="forbid"):
    """Settings of a strategy; ``name`` selects it."""

    partitioner: ClassVar[str] = "mincut"  # the default of ``--partition``

    name: str

    def settings_with(self, **changes: Any) -> dict[str, Any]:
        """The options that differ from their defaults, and ``changes``."""
        return {**self.model_dump(exclude_defaults=True), "name": self.name, **changes}

    @property
    def batch_size(self) -> int:
        """Items of a step; 0 for all."""
        return 0

    @property
    def num_clusters(self) -> int:
        """Number of clusters that partitioner ``super`` makes; 0 leaves it to the partitioner."""
        return 0

    @property
    def measures_clusters(self) -> bool:
        """True if the number of clusters is measured before training."""
        return False

    @property
    def is_sampled(self) -> bool:
        """True if a step reads sampled blocks instead of the whole graph."""
        return False

    def layout_candidates(self, workers: int, *, local_rows_only: bool = True) -> list[tuple[int, int]]:
        """(graph-parallel replicas, chunks) of every chunk layout that training may use.

        ``local_rows_only`` is the task's ``reads_only_local_rows``.
        """
        return []

    def check_workers(self, workers: int) -> None:
        """Raise ConfigError for a number of workers that does not fit."""

    def check_task(self, task: Task) -> None:
        """Raise ConfigError for a task that this strategy does not support."""

    @property
    def runs_layers(self) -> bool:
        """True if layers run one by one, on sampled blocks or in stages."""
        return self.is_sampled

    def check_model(self, model: Model) -> None:
        """Raise ConfigError for a model that this strategy cannot run."""
        if model.reads_whole_graph and self.runs_layers:
            reason = getattr(model, "reason_whole", "") or "model.execution=whole"
            raise ConfigError(
                f"strategy {self.name} with these settings runs layers one by one, but the module runs as a whole "
                f"({reason}): use sar, local without strategy.fanouts, tma with strategy.full=true, or a gf.nn.Model"
            )


@runtime_checkable
class EventConfig(Protocol):
    """Settings that every strategy with ``input="events"`` has."""

    relation: str  # the edge type whose events are predicted; empty where only one has times

    @property
    def single_trainer(self) -> Self:
        """The same settings for one process."""

    def learns_static(self, features: bool) -> bool:
        """True if node embeddings are trained first; ``features``: the nodes have features."""
