"""What a model is, before it knows a graph: a name and its sizes. Channels come from the graph."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from gnnfleet.errors import ConfigError

NAMES = ("sage", "gcn", "gat", "gatv2", "gin", "rgcn", "gcn2", "res+")


class ModelConfig(BaseModel, frozen=True, extra="forbid"):
    """Frozen; unknown words are errors. Fields that only some models read say which."""

    name: str = "sage"
    hidden: int = Field(256, ge=1, description="width of hidden layers; attention: all heads together")
    layers: int = Field(3, ge=1, description="number of layers")
    dropout: float = Field(0.5, ge=0, lt=1, description="after each hidden layer")
    input_dropout: float = Field(0.0, ge=0, lt=1, description="on the input features")
    norm: Literal["none", "layer", "batch"] = Field("none", description="after each hidden layer")
    aggr: Literal["mean", "sum", "max", "pool"] = Field("mean", description="sage: how neighbours are joined")
    heads: int = Field(4, ge=1, description="gat, gatv2: heads, side by side in hidden layers, averaged in the last")
    out_heads: int = Field(0, ge=0, description="gat, gatv2: heads of the last layer; 0 is as many as the others")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="gat, gatv2: on attention weights")
    residual: bool = Field(False, description="gat, gatv2: add a projection of the input to each layer")
    activation: Literal["relu", "elu"] = Field("relu", description="between layers")
    bases: int = Field(0, ge=0, description="rgcn: weights shared by relations; 0 is one per relation")
    alpha: float = Field(0.1, ge=0, le=1, description="gcn2: share of the first layer in each")
    theta: float = Field(0.5, gt=0, description="gcn2: how fast weights approach the identity with depth")
    embedding: int = Field(0, ge=0, description="width of learnable rows for nodes without features")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        name = values.get("name", "sage") if isinstance(values, dict) else "sage"
        if name not in NAMES:
            near = difflib.get_close_matches(str(name), NAMES, n=1, cutoff=0.4)
            raise ValueError(
                f"no model {name!r}: " + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(NAMES)}")
            )
        return values

    @model_validator(mode="after")
    def _divisible(self) -> ModelConfig:
        if self.name in ("gat", "gatv2") and self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        return self


def _named(name: str) -> Any:
    def make(**words: Any) -> ModelConfig:
        try:
            return ModelConfig(name=name, **words)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error

    make.__doc__ = f"A ``{name}`` model: see ModelConfig for the words."
    return make


SAGE, GCN, GAT, GATv2, GIN, RGCN, GCN2, ResPlus = (_named(name) for name in NAMES)
