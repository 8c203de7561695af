"""Import and export weights of torch_geometric models, without importing torch_geometric.

sage, gcn, gat, gatv2 and gin name their parameters as torch_geometric.nn.models.{GraphSAGE, GCN, GAT, GIN} do, for
``jk=None``; single layers of all kinds load each other's ``state_dict`` directly.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.nn.model import GNN

SHARED_MODELS = ("sage", "gcn", "gat", "gatv2", "gin")


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
    if name == "gcn" and model.config.residual:
        raise ConfigError("torch_geometric's GCN has no residual: set residual = false to exchange weights")
    return dict(model.state_dict())
