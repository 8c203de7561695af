"""Exponential moving average (EMA) of the weights.

An evaluation replays all memories with one set of weights. The EMA moves little from step to step, while the last
weights of an epoch depend on its last batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

STEPS = "average/steps"
"""Key of the number of steps in ``RAW_WEIGHTS`` of a state."""

_WARMUP_STEPS = 9
"""Early on the EMA covers about a tenth of all steps so far."""


class WeightEMA:
    """EMA of the parameters of a model with ``decay`` per step; 0 disables it."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._parameters, self._decay = dict(model.named_parameters()), decay
        self._mean: list[Tensor] = []  # empty before the first step
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        if not self._decay:
            return
        weights = [weight.detach() for weight in self._parameters.values()]
        self._mean = self._mean or [weight.clone() for weight in weights]
        self._steps += 1
        torch._foreach_lerp_(self._mean, weights, 1 - min(self._decay, self._steps / (self._steps + _WARMUP_STEPS)))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the weights of the model by their EMA within the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        if self._mean:
            for index, weight in enumerate(self._parameters.values()):
                weight.data, self._mean[index] = self._mean[index], weight.data

    def state(self) -> dict[str, Tensor]:
        """Raw weights and number of steps, for a state whose model is the EMA; empty without an EMA."""
        if not self._mean:
            return {}
        weights = {name: weight.detach() for name, weight in self._parameters.items()}
        return {**weights, STEPS: torch.tensor(self._steps)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore from a model that holds the EMA and the raw weights in ``state``, which may be empty."""
        self._mean, self._steps = [], 0
        if state and self._decay:
            self._mean = [weight.detach().clone() for weight in self._parameters.values()]
            self._steps = int(state[STEPS])
            for name, weight in self._parameters.items():
                weight.copy_(state[name])
