"""Optimizers: made from the options of training, their state saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gnnfleet.tasks.train_options import TrainConfig


def make_optimizer(model: torch.nn.Module, train: TrainConfig, *, fused: bool = False) -> torch.optim.Optimizer:
    """The optimizer a config asks for; ``fused`` makes short work of many small parameters."""
    parameters = list(model.parameters())
    how: dict[str, Any] = {"fused": True} if fused else {"foreach": False}
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=train.lr, weight_decay=train.weight_decay, momentum=train.momentum, **how)
    kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=train.lr, weight_decay=train.weight_decay, **how)


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What an optimizer remembers, as {parameter name/word: tensor}; settings come from the config."""
    return {
        f"{name}/{word}": value
        for name, parameter in model.named_parameters()
        for word, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The reverse of ``optimizer_tensors``; dtypes stay as they were saved."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, tensor in tensors.items():
        name, _, word = key.rpartition("/")
        optimizer.state[parameters[name]][word] = tensor.clone()
