"""Settings of a model: the same names in a TOML file, on the command line (``--set model.hidden=64``) and in Python
(``gf.nn.SAGE(hidden=64)``)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gnnfleet.errors import ConfigError, suggest

HETERO_MODELS = ("hetero-sage", "hetero-gat", "hetero-gatv2", "hetero-gin", "hgt")
"""Models with a linear map by node type before the first layer and after the last; rgcn takes several types, too."""

MODELS = ("sage", "gcn", "gat", "gatv2", "gin", "rgcn", *HETERO_MODELS, "gcn2", "res+", "sign")
TEMPORAL_MODELS = ("tgn", "tgn-id", "tgat")
"""Models for event streams."""

LIVE = "live:"
"""Beginning of the name of a module that a Python program passed to gf.train."""

TEMPORAL_DEFAULTS: dict[str, Any] = {"hidden": 100, "layers": 1, "heads": 2, "dropout": 0.2, "pairs": True}
"""Defaults of temporal models where they differ from those of the other models."""


class ModelConfig(BaseModel):
    """Settings of a model. The description of a field names the models that read it; others ignore it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field("sage", description=f"one of {', '.join(MODELS + TEMPORAL_MODELS)}, or file.py:factory")
    hidden: int = Field(256, ge=1, description="width of the hidden layers (of all heads together)")
    layers: int = Field(3, ge=1, le=255, description="rounds of message passing; sign: of linear maps")
    dropout: float = Field(0.5, ge=0, lt=1, description="after each hidden layer; in gat and gatv2 also on attention")
    input_dropout: float = Field(0.0, ge=0, lt=1, description="on the input features")
    input_norm: Literal["none", "sum", "standardize"] = Field(
        "none", description="sum: rows sum to 1 in magnitude; standardize: columns have mean 0 and deviation 1"
    )
    attention_dropout: float | None = Field(
        None, ge=0, lt=1, description="gat, gatv2, also as hetero-…, hgt: on attention; default: dropout, hgt: 0"
    )
    norm: Literal["none", "layer", "batch"] = Field("none", description="between a layer and its activation")
    act: Literal["relu", "elu"] = Field("relu", description="activation of the hidden layers")
    embedding: int = Field(0, ge=0, description="width of learnable node embeddings beside the features; 0 = none")
    aggr: Literal["mean", "max", "pool"] = Field(
        "mean", description="sage, hetero-sage (without pool): how neighbours are combined"
    )
    heads: int = Field(4, ge=1, description="gat, gatv2, also as hetero-…, hgt, tgn, tgat: attention heads")
    out_heads: int | None = Field(
        None, ge=1, description="gat, gatv2: heads of the last layer, averaged; default: heads"
    )
    residual: bool = Field(
        False, description="gcn, gat, gatv2: add a linear map of the destination row; hetero-…, hgt: add the row"
    )
    edge_features: bool = Field(
        True, description="sage, gin, gat, gatv2, res+, temporal: use edge features if there are any"
    )
    edge_weight: bool = Field(
        True, description="all but hgt, hetero-gat…, temporal, sage with max or pool: use edge weights if there are any"
    )
    hops: int | None = Field(
        None, ge=0, le=16, description="sign: edges of the longest path; default: 3, with several edge types 2"
    )
    train_eps: bool = Field(False, description="gin, hetero-gin: learn eps, the weight of the destination row")
    bases: int = Field(0, ge=0, description="rgcn: basis matrices shared by all edge types; 0 = one matrix per type")
    alpha: float = Field(0.1, ge=0, le=1, description="gcn2: share of the first layer's rows")
    theta: float = Field(0.5, gt=0, description="gcn2: how fast weight matrices approach the identity with depth")
    shared_weights: bool = Field(True, description="gcn2: one weight matrix for both terms")
    neighbours: int = Field(10, ge=1, le=1000, description="tgn, tgat: latest events of a node that a layer reads")
    pairs: bool = Field(
        False, description="temporal: give the link decoder features of the pair, such as how often and when it met"
    )
    time_width: int = Field(100, ge=1, description="temporal: number of cosines in the time encoding")
    clock: Literal["fixed", "learnt"] = Field(
        "fixed", description="temporal: frequencies of these cosines, fixed or learnt"
    )
    execution: Literal["auto", "layers", "whole"] = Field(
        "auto", description="file.py:factory: run a torch_geometric module layer by layer or whole; auto: by a check"
    )
    propagate: Literal["auto", "plain", "chunked", "rebuilt", "routed"] = Field(
        "auto",
        description="file.py:factory: how a torch_geometric module computes messages; auto: plain, or by --memory",
    )
    settings: dict[str, Any] = Field(default_factory=dict, description="file.py:factory: settings of a custom model")

    @property
    def file(self) -> Path | None:
        """Python file of a custom model."""
        return Path(self.name.rpartition(":")[0]) if self.is_custom and not self.is_live else None

    @property
    def is_custom(self) -> bool:
        """True for models from a file, and for modules of the running program."""
        return self.name not in MODELS + TEMPORAL_MODELS

    @property
    def is_live(self) -> bool:
        return self.name.startswith(LIVE)

    @property
    def is_relational(self) -> bool:
        """True for models of several node or edge types."""
        return self.name in ("rgcn", *HETERO_MODELS)

    @property
    def uses_edge_features(self) -> bool:
        """True if a layer reads edge features; a custom model is assumed to."""
        readers = ("sage", "gin", "gat", "gatv2", "res+", *TEMPORAL_MODELS)
        return self.is_custom or (self.edge_features and self.name in readers)

    @property
    def uses_edge_weight(self) -> bool:
        """True if a layer reads edge weights; a custom model is assumed to."""
        others = ("hgt", "hetero-gat", "hetero-gatv2", *TEMPORAL_MODELS)
        is_maximum = self.name in ("sage", "hetero-sage") and self.aggr != "mean"
        return self.is_custom or (self.edge_weight and self.name not in others and not is_maximum)

    @property
    def is_temporal(self) -> bool:
        return self.name in TEMPORAL_MODELS

    @property
    def factory(self) -> str:
        return self.name.rpartition(":")[2]

    @property
    def label(self) -> str:
        """Name of the model, without the folders of a file; the class of a live module."""
        if self.is_live:
            return self.name.split(":")[1]
        return self.name if self.file is None else f"{self.file.name}:{self.factory}"

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if re.search(r"\.py(:|$)", name):
            file, _, factory = name.rpartition(":")
            if not file.endswith(".py") or not factory.isidentifier():
                raise ConfigError(f"a custom model is named file.py:factory, found {name!r}")
            return f"{Path(file).expanduser().resolve()}:{factory}"  # absolute: a run may be opened from another folder
        if name not in MODELS + TEMPORAL_MODELS and not re.fullmatch(rf"{LIVE}\w+:\d+", name):
            models = MODELS + TEMPORAL_MODELS
            raise ConfigError(f"there is no model {name!r}: {suggest(name.lower(), [*models, 'file.py:factory'])}")
        return name

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        concatenates_heads = (self.name in ("gat", "gatv2") and self.layers > 1) or self.name in ("tgn", "tgat")
        concatenates_heads |= self.name in ("hetero-gat", "hetero-gatv2", "hgt")
        if concatenates_heads and self.hidden % self.heads:
            raise ConfigError(f"hidden must be a multiple of heads, found {self.hidden} and {self.heads}")
        if self.name == "hetero-sage" and self.aggr == "pool":
            raise ConfigError("hetero-sage aggregates by mean or max, found pool: set model.aggr")
        if self.settings and self.file is None:
            raise ConfigError(f"model.settings is only for custom models (file.py:factory); {self.name} has none")
        return self


def make_config(name: str, **settings: Any) -> ModelConfig:
    """Build a configuration from keywords; raises ConfigError that suggests the nearest name for an unknown one."""
    try:
        return ModelConfig(name=name, **settings)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else "model"
        if first["type"] != "extra_forbidden":
            text = first["msg"]
            raise ConfigError(f"{key}: {text[:1].lower()}{text[1:]}, found {first['input']!r}") from error
        raise ConfigError(f"a model has no setting {key!r}: {suggest(key, ModelConfig.model_fields)}") from error


def _constructor(name: str, description: str, **defaults: Any) -> Callable[..., ModelConfig]:
    def make(**settings: Any) -> ModelConfig:
        return make_config(name, **{**defaults, **settings})

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"{description} Options: docs/models.md."
    return make


SAGE = _constructor("sage", "GraphSAGE.")
GCN = _constructor("gcn", "Graph convolutional network.")
GAT = _constructor("gat", "Graph attention network.")
GATv2 = _constructor("gatv2", "Graph attention network with dynamic attention.")
GIN = _constructor("gin", "Graph isomorphism network.")
RGCN = _constructor("rgcn", "Relational graph convolutional network, for several node or edge types.")
HeteroSAGE = _constructor("hetero-sage", "GraphSAGE with weights by relation, for several node or edge types.")
HeteroGAT = _constructor("hetero-gat", "GAT with weights and a softmax by relation, for several node or edge types.")
HeteroGATv2 = _constructor("hetero-gatv2", "GATv2 with weights and a softmax by relation.")
HeteroGIN = _constructor("hetero-gin", "GIN with weights by relation, for several node or edge types.")
HGT = _constructor("hgt", "Heterogeneous graph transformer: one softmax over all relations into a node.")
GCN2 = _constructor("gcn2", "GCNII: deep GCN with initial residual and identity mapping.")
ResPlus = _constructor("res+", "DeeperGCN: pre-activation residual blocks with softmax aggregation.")
SIGN = _constructor("sign", "SIGN: hops of the features are computed once; training needs no neighbours.")
TGN = _constructor("tgn", "TGN: a memory per node, and attention over its latest events.", **TEMPORAL_DEFAULTS)
TGAT = _constructor("tgat", "TGAT: temporal attention without memory.", **TEMPORAL_DEFAULTS)
