"""Optimizers: built from the training options, their state saved and loaded; averages of weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from gnnfleet.tasks.train_options import TrainConfig

OptimizerKind = TypeVar("OptimizerKind", bound=torch.optim.Optimizer)


def make_optimizer(model: torch.nn.Module, train: TrainConfig, *, fused: bool = False) -> torch.optim.Optimizer:
    """Make the optimizer of a config; ``fused`` is faster for many small parameters."""
    parameters = list(model.parameters())
    options: dict[str, Any] = {"fused": True} if fused else {"foreach": False}
    options |= {"lr": train.lr, "weight_decay": train.weight_decay}
    if train.optimizer == "sgd":
        return SGD(parameters, momentum=train.momentum, **options)
    return (Adam if train.optimizer == "adam" else AdamW)(parameters, **options)


def _without_dynamo(kind: type[OptimizerKind]) -> type[OptimizerKind]:
    """Derive an optimizer without the decorators that import torch._dynamo, 0.7 s per process, for torch.compile."""
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), methods | {"step": torch.no_grad()(inspect.unwrap(kind.step))})


SGD = _without_dynamo(torch.optim.SGD)
Adam = _without_dynamo(torch.optim.Adam)
AdamW = _without_dynamo(torch.optim.AdamW)


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State of an optimizer as {parameter name/key: tensor}; its settings come from the config."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load what ``optimizer_tensors`` returned; dtypes stay as they were saved."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        optimizer.state[parameters[name]][key] = tensor.clone()


STEPS = "average/steps"
"""Key of the number of steps in ``RAW_WEIGHTS`` of a state."""

_WARMUP_STEPS = 9
"""Early on the EMA covers about a tenth of all steps so far."""


class WeightEMA:
    """Exponential moving average of the parameters of a model, with ``decay`` per step; 0 disables it.

    An evaluation replays all memories with one set of weights. The average moves little from step to step, while the
    last weights of an epoch depend on its last batches.
    """

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
