"""The knobs of ``tma``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gnnfleet.errors import ConfigError
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.sampling_options import DEFAULT_BATCH, DEFAULT_FANOUT, AutoSwitch, FanoutOption

PARTITIONER_OF_SCHEME = {"random": "random", "super": "super", "psgd-pa": "mincut", "llcg": "mincut"}
"""How nodes are dealt in each scheme, unless the user says."""

CORRECTION_STEPS = 2
"""Steps of the coordinator after each round of ``llcg``."""


class TmaConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Trainers that exchange no node data: each has the subgraph of its own nodes and trains at its own pace; a
    coordinator averages their weights from time to time. A round is to tma what an epoch is to other strategies.
    """

    name: Literal["tma"] = "tma"
    # random: RandomTMA; super: SuperTMA; psgd-pa: parts with few cut edges; llcg: the same, corrected by steps on the
    # whole graph. --partition says otherwise.
    scheme: Literal["random", "super", "psgd-pa", "llcg"] = "super"
    interval: float = Field(default=10.0, gt=0)  # seconds of a round
    steps: int = Field(
        default=0, ge=0
    )  # of each trainer in a round, in place of ``interval``: the same bits every time
    # Neighbours drawn per node, the hop next to the seeds first, −1 for all; by SRC:RELATION:DST where they differ.
    # By default 10 in every hop.
    fanouts: FanoutOption = None
    full: bool = False  # every step on the trainer's whole subgraph instead of sampled blocks
    replace: bool = False  # whether a neighbour may be drawn twice
    batch: int = Field(default=DEFAULT_BATCH, ge=0)  # items of a trainer's step; 0: all
    cache_inputs: AutoSwitch = "auto"  # the first layer's aggregate of all neighbours in the part, computed once
    # Super-nodes that are dealt; 0: a tenth of the nodes, at most 15,000; auto: measured before training.
    clusters: Literal["auto"] | Annotated[int, Field(ge=0)] = 0
    weighting: Literal["uniform", "edges", "steps"] = "uniform"  # what a trainer counts in the average
    optimizer: Literal["local", "average", "reset"] = "local"  # what becomes of its memory when weights are averaged
    combine: Literal["mean", "soft_medoid"] = "mean"  # soft_medoid: trainers far from the others count less
    temperature: float = Field(default=1.0, gt=0)  # of soft_medoid, in units of the mean distance
    momentum: float = Field(default=0.0, ge=0, lt=1)  # of the average's own movement from round to round
    correction: int | None = Field(default=None, ge=0)  # steps on the whole graph after each round; llcg: 2
    correction_lr: float = Field(default=0.0, ge=0)  # 0: train.lr
    remote_negatives: int = Field(
        default=0, ge=0
    )  # nodes of all parts that come with each round, as more negatives for links
    repartition_every: int = Field(default=0, ge=0)  # rounds until nodes are dealt anew; 0: never
    # What becomes of the nodes of a trainer that has ended for good, or was silent for ``give_up``: others take them
    # over, or nobody trains on them any more.
    on_trainer_loss: Literal["reassign", "drop"] = "reassign"
    quorum: int = Field(default=1, ge=1)  # trainers without whom a round is not closed
    deadline: float = Field(default=60.0, gt=0)  # seconds a round waits for a trainer that is late
    silence: float = Field(default=10.0, gt=0)  # seconds without a sign of life after which a trainer is left out
    launcher: Literal["process", "ray"] = "process"  # how trainers are started: as processes here, or as Ray actors
    listen: str = ""  # HOST:PORT that trainers on other machines reach the coordinator at; by default only this machine
    local_trainers: int | None = Field(default=None, ge=0)  # how many of the workers are started here; the others join
    give_up: float = Field(
        default=300.0, gt=0
    )  # seconds without a quorum, or without the coordinator, that end the run; of silence, after which nodes are dealt

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
        """Settings of strategy local on a trainer's subgraph, or of the coordinator on the whole graph."""
        settings = {"name": "local", **self.model_dump(include={"batch", "cache_inputs"})}
        if self.full:
            return settings
        return {**settings, "fanouts": self.fanouts or (DEFAULT_FANOUT,) * layers, "replace": self.replace}

    @property
    def correction_steps(self) -> int:
        return self.correction if self.correction is not None else CORRECTION_STEPS if self.scheme == "llcg" else 0

    def check_workers(self, workers: int) -> None:
        if self.quorum > workers:
            raise ConfigError(f"strategy.quorum={self.quorum} asks for more trainers than --workers {workers}")
        if self.local_trainers is not None and self.local_trainers > workers:
            raise ConfigError(f"strategy.local_trainers={self.local_trainers} is more than --workers {workers}")
