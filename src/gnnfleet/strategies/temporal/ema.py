"""A mean of weights over the latest steps, beside those that are trained.

Memories that are walked through with it are all made by one cell, and it moves little from step to step: the last
weights of an epoch are as good as their last batches happened to leave them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

STEPS = "average/steps"
"""How many steps it has seen, among the weights that are trained in a state."""

_SOON = 9
"""At first it is a mean over about a tenth of all steps so far."""


class WeightEMA:
    """Of the parameters of a model; ``keep`` is the share of it that a step leaves, 0 for none at all."""

    def __init__(self, model: torch.nn.Module, keep: float) -> None:
        self._parameters, self._decay = dict(model.named_parameters()), keep
        self._mean: list[Tensor] = []  # none before the first step
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """The weights have moved."""
        if not self._decay:
            return
        weights = [weight.detach() for weight in self._parameters.values()]
        self._mean = self._mean or [weight.clone() for weight in weights]
        self._steps += 1
        torch._foreach_lerp_(self._mean, weights, 1 - min(self._decay, self._steps / (self._steps + _SOON)))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the mean in place of its weights meanwhile."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        if self._mean:
            for place, weight in enumerate(self._parameters.values()):
                weight.data, self._mean[place] = self._mean[place], weight.data

    def state(self) -> dict[str, Tensor]:
        """The weights that are trained, where the model's are their mean; nothing where there is none."""
        if not self._mean:
            return {}
        weights = {name: weight.detach() for name, weight in self._parameters.items()}
        return {**weights, STEPS: torch.tensor(self._steps)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """The model has been given the mean; what is trained is in ``state``, if anything is."""
        self._mean, self._steps = [], 0
        if state and self._decay:
            self._mean = [weight.detach().clone() for weight in self._parameters.values()]
            self._steps = int(state[STEPS])
            for name, weight in self._parameters.items():
                weight.copy_(state[name])
