"""Models in files, and exchange of weights and models with torch_geometric.

sage, gcn, gat, gatv2 and gin name their parameters as torch_geometric.nn.models.{GraphSAGE, GCN, GAT, GIN} do, for
``jk=None``; single layers of all kinds load each other's ``state_dict`` directly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import EdgeType
from gnnfleet.nn.config import ModelConfig
from gnnfleet.nn.model import GNN
from gnnfleet.nn.pyg.module import PygModule
from gnnfleet.nn.sign import SignModel

SHARED_MODELS = ("sage", "gcn", "gat", "gatv2", "gin")
_ARGUMENTS = ("in_channels", "out_channels", "edge_types", "num_nodes", "target", "edge_dim", "edge_weight")


def save_model(model: torch.nn.Module, path: str | Path) -> None:
    """Write a built-in model to a safetensors file, with its configuration as JSON in the metadata."""
    if not isinstance(model, GNN | SignModel) or model.decoder is not None:
        raise ConfigError(
            "a file describes the built-in models of nodes only: save the weights of others with "
            "torch.save(model.state_dict(), path), and build the model before you load them"
        )
    about = {"config": model.config.model_dump(), **{name: getattr(model, name) for name in _ARGUMENTS}}
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, path, metadata={"gnnfleet": json.dumps(about)})


def load_model(path: str | Path) -> GNN | SignModel:
    """Read a model that ``save_model`` wrote, in evaluation mode; raises InputError for other files."""
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})["gnnfleet"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about["edge_types"] = [EdgeType(*kind) for kind in about["edge_types"]]
        config = ModelConfig(**about.pop("config"))
        model = (SignModel if config.name == "sign" else GNN)(config, **about).to(next(iter(weights.values())).dtype)
        model.load_state_dict(weights)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{path} is not a model that gf.nn.save_model wrote: {error}") from error
    return model.eval()


def to_pyg(model: torch.nn.Module) -> torch.nn.Module:
    """The torch_geometric model with the same weights and outputs; the module itself if it came from there.

    Raises ConfigError for models that torch_geometric does not have.
    """
    if isinstance(model, PygModule):
        return model.module
    if not isinstance(model, GNN) or model.config.input_dropout or model.config.input_norm != "none":
        raise ConfigError(f"torch_geometric has no {type(model).__name__} like this, or none that changes its input")
    weights, config = to_pyg_state(model), model.config
    try:
        import torch_geometric.nn as pyg
    except ImportError as error:
        raise ConfigError("torch_geometric is not installed: pip install 'gnnfleet[pyg]'") from error
    is_pool, norm = config.aggr == "pool", config.norm
    attention = {"v2": config.name == "gatv2", "heads": config.heads, "residual": config.residual}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "sage": (pyg.GraphSAGE, {"aggr": "max" if is_pool else config.aggr, "project": is_pool}),
        "gcn": (pyg.GCN, {}),
        "gin": (pyg.GIN, {"train_eps": config.train_eps}),
    }
    kind, options = kinds.get(
        config.name, (pyg.GAT, {**attention, "edge_dim": (model.edge_dim or 0) + model.edge_weight or None})
    )
    norms = (
        {} if norm == "none" else {"norm": f"{norm}_norm", "norm_kwargs": {"mode": "node"} if norm == "layer" else {}}
    )
    sizes = (model.in_channels, config.hidden, config.layers, model.out_channels)
    net = kind(*sizes, dropout=config.dropout, act=config.act, **norms, **options)
    if kind is pyg.GAT:
        width = config.hidden if config.layers > 1 else model.in_channels
        heads = config.out_heads or config.heads
        net.convs[-1] = net.init_conv(width, model.out_channels, **{**options, "heads": heads})
        for conv in net.convs:
            conv.dropout = config.dropout if config.attention_dropout is None else config.attention_dropout
    net.to(next(iter(weights.values())).dtype).load_state_dict(weights)
    trained: torch.nn.Module = net.train(model.training)
    return trained


def load_pyg_state(model: GNN, state: Mapping[str, Tensor]) -> None:
    """Copy a torch_geometric ``state_dict`` into ``model``; raises ConfigError unless all names and shapes match."""
    weights = _shared_state(model)
    missing, unexpected = sorted(weights.keys() - state.keys()), sorted(state.keys() - weights.keys())
    if missing or unexpected:
        differences = "; ".join(
            f"{verb} {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
            for verb, names in (("lacks", missing), ("also has", unexpected))
            if names
        )
        raise ConfigError(f"the weights are not those of a {model.config.name} like this one: the state {differences}")
    for name, tensor in weights.items():
        if state[name].shape != tensor.shape:
            shapes = f"{list(tensor.shape)}, found {list(state[name].shape)}"
            raise ConfigError(f"{name} must be {shapes}: set hidden, layers and heads as in the other model")
    for name, tensor in weights.items():
        tensor.copy_(state[name])


def to_pyg_state(model: GNN) -> dict[str, Tensor]:
    """Copy of the weights as a ``state_dict`` for the torch_geometric model of the same widths."""
    return {name: tensor.clone() for name, tensor in _shared_state(model).items()}


def _shared_state(model: GNN) -> dict[str, Tensor]:
    name = model.config.name
    if name not in SHARED_MODELS:
        raise ConfigError(
            f"torch_geometric has no model like {name}: weights of {', '.join(SHARED_MODELS)} can be exchanged"
        )
    if model.embeddings:
        raise ConfigError("torch_geometric has no models with learnable node embeddings: set embedding = 0")
    if model.edge_dim and name in ("sage", "gin"):
        raise ConfigError(f"torch_geometric's {name} model reads no edge features: set edge_features = false")
    if name == "gcn" and model.config.residual:
        raise ConfigError("torch_geometric's GCN has no residual: set residual = false to exchange weights")
    return dict(model.state_dict())
