"""Options of strategies that sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from gnnfleet.errors import ConfigError

if TYPE_CHECKING:
    from gnnfleet.graph.sampling.sampler import Fanouts

DEFAULT_BATCH = 1024
DEFAULT_FANOUT = 10
"""Neighbours sampled in every hop by default."""


def _check_fanouts(option: Any) -> Any:
    lists = list(option.values()) if isinstance(option, dict) else [option]
    if option is not None and not all(isinstance(hops, list | tuple) and all(map(_is_integer, hops)) for hops in lists):
        raise ValueError(f"expected whole numbers, one per layer, as [15, 10, 5]; found {option!r}")
    return option


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_switch(option: Any) -> Any:
    if option not in ("auto", True, False):
        raise ValueError(f"expected auto, true or false; found {option!r}")
    return option


FanoutOption = Annotated[tuple[int, ...] | dict[str, tuple[int, ...]] | None, BeforeValidator(_check_fanouts)]
"""Neighbours sampled per node, the hop next to the seeds first, −1 for all; by SRC:RELATION:DST where they differ."""

AutoSwitch = Annotated[Literal["auto"] | bool, BeforeValidator(_check_switch)]


def parse_fanouts(option: FanoutOption, layers: int) -> Fanouts:
    """Fanouts for a sampler, the default where none are set; raises ConfigError for a name that is no edge type."""
    if isinstance(option, dict):
        from gnnfleet.graph.graph import EdgeType

        return {EdgeType.parse(name): counts for name, counts in option.items()}
    return (DEFAULT_FANOUT,) * layers if option is None else option


def check_fanouts_per_layer(hops: int, layers: int) -> None:
    """Raise ConfigError unless there is a fanout for every layer."""
    if hops != layers:
        raise ConfigError(f"strategy.fanouts needs one number per layer, {layers}; found {hops}")
