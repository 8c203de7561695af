"""Description of a strategy: its settings and everything that other packages need to know about it.

``strategies/<name>/__init__.py`` exports ``SPEC``. Importing it loads neither torch nor the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from gnnfleet.strategies.config import StrategyConfig

if TYPE_CHECKING:
    from gnnfleet.strategies.estimates import CostEstimate
    from gnnfleet.strategies.protocol import Strategy

Settings = dict[str, Any]
"""The strategy group of a config as plain values, ``name`` included."""

C = TypeVar("C", bound=StrategyConfig)


def lazy(path: str) -> Callable[..., Any]:
    """A callable, named ``module:name``, whose module is imported when it is called."""
    module, _, name = path.partition(":")
    return lambda *args: getattr(import_module(module), name)(*args)


@dataclass(frozen=True, kw_only=True)
class StrategySpec(Generic[C]):
    config: type[C]
    build: Callable[[C, Any], Strategy]  # from a Job, or from an EventJob if ``input`` is events
    # single: one process. ranks: processes of one world. supervised: a coordinator and trainers that may fail or join.
    execution: Literal["single", "ranks", "supervised"] = "ranks"
    # Stored before training: a part for each rank, clusters for the coordinator, chunk layouts, or nothing.
    placement: Literal["none", "partition", "clusters", "chunks"] = "none"
    input: Literal["graph", "events"] = "graph"
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of a run, where they differ from those of RunConfig
    # Estimates the cost of every candidate of the open settings; None leaves the strategy out of plans.
    estimate: Callable[[C, Any], list[CostEstimate]] | None = None
    # (config, number of layers) to settings of one process that takes the same steps; None if there are none.
    reference: Callable[[C, int], Settings | None] = lambda config, layers: None
    # (settings, number of workers) to settings of another strategy that they stand for.
    expand: Callable[[Settings, Any], Settings] = lambda settings, workers: settings
    # (config, training items, workers) to settings that make an epoch one pass, if its length is free.
    one_pass: Callable[[C, int, int], Settings] | None = None
    # Reads settings that the strategy chose by itself from the rank-local part of its state.
    chosen: Callable[[Mapping[str, Any]], Settings] | None = None
    resumable: Sequence[str] = ()  # settings that a resumed run may change
    # Settings that a memory budget sets: ``memory`` if the strategy keeps within it, or else limits of single buffers.
    memory_settings: Sequence[str] = ("evaluation_memory",)

    @property
    def name(self) -> str:
        return str(self.config.model_fields["name"].default)
