"""Schema of the configuration of a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, SerializeAsAny, field_validator

from gnnfleet.errors import ConfigError, suggest
from gnnfleet.nn.config import ModelConfig
from gnnfleet.nn.link_config import LinkConfig
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.registry import find_spec
from gnnfleet.strategies.spec import StrategySpec
from gnnfleet.tasks.train_options import TrainConfig
from gnnfleet.units import OptionalSize, parse_size

SettingsTree = dict[str, Any]

DEFAULT_SILENCE_LIMIT = 10.0


class ReportConfig(BaseModel, frozen=True, extra="forbid"):
    """Measurements and outputs besides the metrics."""

    memory: bool = False  # one more, untimed epoch under torch's profiler for peak_tensors
    tensorboard: bool = False
    trace: bool = False  # steps, exchanges and waits of all workers in trace.json, for Perfetto


class RunConfig(BaseModel, frozen=True, extra="forbid"):
    """Everything that decides the result of a run, given the graph."""

    strategy: SerializeAsAny[StrategyConfig]
    model: ModelConfig = Field(default_factory=lambda: ModelConfig.model_validate({}))
    train: TrainConfig = Field(default_factory=TrainConfig)
    report: ReportConfig = Field(default_factory=ReportConfig)
    link: LinkConfig = Field(default_factory=LinkConfig)
    task: Literal["node", "link", "edge"] = "node"
    workers: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    auto_defaults: bool = True  # settings that the user left open are chosen for the graph (nodes, built-in models)
    check: bool = True  # compare layers and parts of a torch_geometric module with the whole before training
    precision: Literal["float32", "bf16", "float64"] = "float32"
    memory: OptionalSize = None  # budget per worker: sar keeps within it, plans that exceed it are rejected
    # Activations of an evaluation; larger layers are evaluated in chunks of rows. No more than ``memory``.
    evaluation_memory: Annotated[int, BeforeValidator(parse_size)] = 4 << 30
    # Seconds without a heartbeat after which a rank is declared dead. tma has strategy.silence.
    silence_limit: float = Field(default=DEFAULT_SILENCE_LIMIT, ge=3)
    partition: str | None = None  # assigns nodes to workers; None leaves it to the strategy
    # Number of a split of the store, or a rule that splits nodes (0.6/0.2/0.2, 20-per-class) or links.
    split: int | str = 0

    @property
    def spec(self) -> StrategySpec[Any]:
        return find_spec(self.strategy.name)

    @property
    def evaluation_limit(self) -> int:
        return self.evaluation_memory if self.memory is None else min(self.memory, self.evaluation_memory)

    @field_validator("partition")
    @classmethod
    def _check_partitioner(cls, method: str | None) -> str | None:
        from gnnfleet.graph.partition.assign import PARTITIONERS

        if method is not None and method not in PARTITIONERS:
            raise ConfigError(f"no partitioner {method!r}: {suggest(method, PARTITIONERS)}")
        return method
