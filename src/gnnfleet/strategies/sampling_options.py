"""What strategies that sample have in common: the words for fanouts, and a batch with everything a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from gnnfleet.errors import ConfigError

if TYPE_CHECKING:
    from gnnfleet.graph.sampling.sampler import Fanouts
    from gnnfleet.graph.views.local import LocalView
    from gnnfleet.nn.base import Aggregate, Features
    from gnnfleet.tasks.base import Batch

DEFAULT_BATCH = 1024
DEFAULT_FANOUT = 10
"""Neighbours drawn in every hop, unless the user says."""


def _check_fanouts(given: Any) -> Any:
    lists = list(given.values()) if isinstance(given, dict) else [given]
    if given is not None and not all(isinstance(one, list | tuple) and all(map(_is_whole, one)) for one in lists):
        raise ValueError(f"expected whole numbers, one per layer, as [15, 10, 5]; found {given!r}")
    return given


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_cached(given: Any) -> Any:
    if given not in ("auto", True, False):
        raise ValueError(f"expected auto, true or false; found {given!r}")
    return given


FanoutOption = Annotated[tuple[int, ...] | dict[str, tuple[int, ...]] | None, BeforeValidator(_check_fanouts)]
"""Neighbours drawn per node, the hop next to the seeds first, −1 for all; by SRC:RELATION:DST where they differ."""

AutoSwitch = Annotated[Literal["auto"] | bool, BeforeValidator(_check_cached)]


def fanouts_by_hop(words: tuple[int, ...] | dict[str, tuple[int, ...]]) -> Fanouts:
    """Fanouts as a sampler takes them; raises ConfigError for a name that is no edge type."""
    if isinstance(words, dict):
        from gnnfleet.graph.graph import EdgeType

        return {EdgeType.parse(name): counts for name, counts in words.items()}
    return words


def check_fanouts_per_layer(found: int, layers: int) -> None:
    """Raise ConfigError unless there is a fanout for every layer."""
    if found != layers:
        raise ConfigError(f"strategy.fanouts needs one number per layer, {layers}; found {found}")


@dataclass(frozen=True, eq=False)
class PreparedBatch:
    """A batch with everything the model takes."""

    batch: Batch
    views: Sequence[LocalView]
    x: Features
    aggregated: Aggregate | None
