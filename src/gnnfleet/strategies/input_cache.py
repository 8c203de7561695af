"""What strategies do with static features: aggregate them once, lay them side by side with their aggregate."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.base import Aggregate, Model

CacheInputs = Literal["auto"] | bool

# Above this many edge types, a row of aggregated inputs for each of them takes too much memory to be kept unasked.
MAX_CACHED_RELATIONS = 8


def should_cache_aggregate(wanted: CacheInputs, *, hides: bool) -> bool:
    """Whether to try: what is aggregated beforehand would include edges that are hidden later. Raises ConfigError."""
    if hides and wanted is True:
        raise ConfigError("strategy.cache_inputs=true would show hidden edges: use it with link.exclude=none")
    return bool(wanted) and not hides


def precompute_aggregate(wanted: CacheInputs, model: Model, view: GraphView, x: Any) -> Aggregate | None:
    """The first layer's aggregate of all rows, where the model allows it; raises ConfigError where it has to."""
    found = model.precompute(view, x)
    if wanted is True and found is None:
        raise ConfigError(
            "this model does not allow strategy.cache_inputs=true: its first layer reads neighbours through "
            "parameters, learnable rows or dropout"
        )
    return found


def concat_columns(near: Aggregate | None, x: Any) -> tuple[Aggregate | None, Any]:
    """Features and their aggregate as columns of one tensor: a layer that multiplies both makes one product of them."""
    if not isinstance(near, Tensor) or not isinstance(x, Tensor) or near.dtype != x.dtype:
        return near, x
    both, width = torch.cat([near, x], 1), near.shape[1]
    return both[:, :width], both[:, width:]
