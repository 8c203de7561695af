"""Options of strategy ``tma``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gnnfleet.errors import ConfigError
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.sampling_options import DEFAULT_BATCH, DEFAULT_FANOUT, AutoSwitch, FanoutOption

PARTITIONER_OF_SCHEME = {"random": "random", "super": "super", "psgd-pa": "mincut", "llcg": "mincut"}
"""The default partitioner of each scheme."""

LLCG_CORRECTION_STEPS = 2


class TmaConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Independent trainers, each on the subgraph of its own nodes. A coordinator averages their weights in rounds.

    Trainers exchange no node data. A round takes the place of an epoch.
    """

    name: Literal["tma"] = "tma"
    # random: RandomTMA; super: SuperTMA; psgd-pa: partitions with few cut edges; llcg: the same, corrected by steps on
    # the whole graph. --partition overrides the partitioner.
    scheme: Literal["random", "super", "psgd-pa", "llcg"] = "super"
    interval: float = Field(default=10.0, gt=0)  # seconds of a round
    # Steps of each trainer in a round, instead of ``interval``; results are then reproducible. 0: timed rounds.
    steps: int = Field(default=0, ge=0)
    # Neighbours sampled per node, the hop next to the seeds first, −1 for all; by SRC:RELATION:DST where they differ.
    # 10 in every hop by default.
    fanouts: FanoutOption = None
    full: bool = False  # every step on the trainer's whole subgraph instead of sampled blocks
    replace: bool = False  # sample neighbours with replacement
    batch: int = Field(default=DEFAULT_BATCH, ge=0)  # items of a trainer's step; 0: all
    cache_inputs: AutoSwitch = "auto"  # cache the first layer's aggregate of all neighbours in the subgraph
    # Clusters that are assigned to trainers; 0: a tenth of the nodes, at most 15,000; auto: measured before training.
    clusters: Literal["auto"] | Annotated[int, Field(ge=0)] = 0
    weighting: Literal["uniform", "edges", "steps"] = "uniform"  # of trainers in the average
    # Optimizer state after a round: every trainer keeps its own (local), or it starts anew.
    optimizer: Literal["local", "reset"] = "local"
    correction: int | None = Field(default=None, ge=0)  # steps on the whole graph after each round; llcg: 2
    correction_lr: float = Field(default=0.0, ge=0)  # 0: train.lr
    # Nodes of all partitions sent with each round, as additional negatives for links.
    remote_negatives: int = Field(default=0, ge=0)
    # Nodes of a trainer that has exited, or was silent for ``give_up``: reassign them to the others, or drop them.
    on_trainer_loss: Literal["reassign", "drop"] = "reassign"
    quorum: int = Field(default=1, ge=1)  # updates that a round needs
    deadline: float = Field(default=60.0, gt=0)  # seconds that a round waits for a late trainer
    silence: float = Field(default=10.0, gt=0)  # seconds without a heartbeat after which a trainer is left out
    launcher: Literal["process", "ray"] = "process"  # trainers as processes of this machine, or as Ray actors
    listen: str = ""  # HOST:PORT for trainers on other machines; by default the coordinator is local
    local_trainers: int | None = Field(default=None, ge=0)  # trainers started here; the others join. Default: all
    # The run ends after these seconds without a quorum or a coordinator. A trainer silent for as long loses its nodes.
    give_up: float = Field(default=300.0, gt=0)

    @property
    def partitioner(self) -> str:  # type: ignore[override]
        return PARTITIONER_OF_SCHEME[self.scheme]

    @property
    def is_sampled(self) -> bool:
        return not self.full

    @property
    def batch_size(self) -> int:
        return self.batch

    @property
    def num_clusters(self) -> int:
        return 0 if self.clusters == "auto" else self.clusters

    @property
    def measures_clusters(self) -> bool:
        return self.clusters == "auto"

    def local_settings(self, layers: int) -> dict[str, Any]:
        """Settings of strategy ``local`` for a trainer's subgraph, and for corrections on the whole graph."""
        settings = {"name": "local", **self.model_dump(include={"batch", "cache_inputs"})}
        if self.full:
            return settings
        return {**settings, "fanouts": self.fanouts or (DEFAULT_FANOUT,) * layers, "replace": self.replace}

    @property
    def correction_steps(self) -> int:
        if self.correction is not None:
            return self.correction
        return LLCG_CORRECTION_STEPS if self.scheme == "llcg" else 0

    def check_workers(self, workers: int) -> None:
        if self.quorum > workers:
            raise ConfigError(f"strategy.quorum={self.quorum} asks for more trainers than --workers {workers}")
        if self.local_trainers is not None and self.local_trainers > workers:
            raise ConfigError(f"strategy.local_trainers={self.local_trainers} is more than --workers {workers}")
