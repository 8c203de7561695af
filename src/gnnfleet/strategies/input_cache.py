"""The first layer's aggregate of static features, computed once and cached."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.base import Aggregate, Model

CacheInputs = Literal["auto"] | bool

_MAX_CACHED_RELATIONS = 8
"""Edge types up to which ``auto`` caches an aggregate for each: more take too much memory."""


def should_cache_aggregate(option: CacheInputs, *, hides: bool, relations: int = 1) -> bool:
    """False if steps hide edges, which a cached aggregate would include; raises ConfigError if the option is true."""
    if hides and option is True:
        raise ConfigError("strategy.cache_inputs=true would show hidden edges: use it with link.exclude=none")
    if option == "auto" and relations > _MAX_CACHED_RELATIONS:
        return False
    return bool(option) and not hides


def precompute_aggregate(option: CacheInputs, model: Model, view: GraphView, x: Any) -> Aggregate | None:
    """The first layer's aggregate of all rows; None, or ConfigError if it was set, if the model does not allow it."""
    aggregate = model.precompute(view, x)
    if option is True and aggregate is None:
        raise ConfigError(
            "this model does not allow strategy.cache_inputs=true: its first layer reads neighbours through "
            "parameters, learnable rows or dropout"
        )
    return aggregate


def concat_columns(aggregated: Aggregate | None, x: Any) -> tuple[Aggregate | None, Any]:
    """(aggregate, features) as columns of one tensor: a layer that multiplies both computes one product."""
    if not isinstance(aggregated, Tensor) or not isinstance(x, Tensor) or aggregated.dtype != x.dtype:
        return aggregated, x
    both, width = torch.cat([aggregated, x], 1), aggregated.shape[1]
    return both[:, :width], both[:, width:]
