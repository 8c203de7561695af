"""Optimizers: built from the training options, their state saved and loaded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
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
