"""The strategies there are. A strategy's code is loaded when it is chosen."""

from __future__ import annotations

import copy
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gnnfleet.errors import ConfigError
from gnnfleet.strategies.estimates import CostEstimate, PlanningContext
from gnnfleet.strategies.job import EventJob, Job
from gnnfleet.strategies.local.config import LocalConfig
from gnnfleet.strategies.macrobatch.config import MacrobatchConfig
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.protocol import Strategy
from gnnfleet.strategies.sampling_options import DEFAULT_FANOUT
from gnnfleet.strategies.sar.config import SarConfig
from gnnfleet.strategies.spec import StrategyConfig
from gnnfleet.strategies.temporal.config import TemporalConfig
from gnnfleet.strategies.tma.config import TmaConfig
from gnnfleet.tasks.link import LinkTask

if TYPE_CHECKING:
    from gnnfleet.strategies.temporal.estimate import EventPlanningContext

CONFIGS: dict[str, type[StrategyConfig]] = {
    "local": LocalConfig,
    "sar": SarConfig,
    "macrobatch": MacrobatchConfig,
    "tma": TmaConfig,
    "pipe": PipeConfig,
    "temporal": TemporalConfig,
}
AUTO = "auto"
"""Whatever a plan recommends: settled before a run, never the strategy of one."""


def find_config(name: str) -> type[StrategyConfig]:
    """The config class of a strategy; raises ConfigError listing what exists."""
    if name == AUTO:
        raise ConfigError(
            "strategy auto is planned on one machine before training: use gnnfleet train or gf.train with workers, or "
            "ask gnnfleet plan and name what it recommends"
        )
    if name not in CONFIGS:
        raise ConfigError(f"no strategy {name!r}; this version has {', '.join(CONFIGS)}")
    return CONFIGS[name]


def strategy_options(name: str) -> list[str]:
    """The words of a strategy's config; of ``auto`` those of all, and what is asked for."""
    if name != AUTO:
        return list(find_config(name).model_fields)
    return ["goal", *dict.fromkeys(word for kind in CONFIGS.values() for word in kind.model_fields)]


def make_strategy(config: StrategyConfig, job: Job) -> Strategy:
    """The strategy a config describes."""
    if isinstance(config, SarConfig):
        from gnnfleet.strategies.sar.strategy import SarStrategy

        return SarStrategy(config, job)
    if isinstance(config, PipeConfig):
        from gnnfleet.strategies.pipe.strategy import PipeStrategy

        return PipeStrategy(config, job)
    if isinstance(config, MacrobatchConfig):
        from gnnfleet.strategies.macrobatch.strategy import MacrobatchStrategy

        return MacrobatchStrategy(config, job)
    from gnnfleet.strategies.local.strategy import LocalStrategy

    if isinstance(config, TmaConfig):
        from gnnfleet.strategies.tma.strategy import TmaStrategy

        return TmaStrategy(config, job, _full_graph_strategy(job), _correction_strategy(config, job))
    assert isinstance(config, LocalConfig)
    return LocalStrategy(config, job)


def make_temporal(config: TemporalConfig, job: EventJob) -> Strategy:
    """The strategy for events."""
    from gnnfleet.strategies.temporal.strategy import TemporalStrategy

    return TemporalStrategy(config, job)


def reference_config(config: StrategyConfig, layers: int) -> StrategyConfig | None:
    """How one process takes the same steps as a strategy whose aim is to equal it; None for others."""
    if isinstance(config, TemporalConfig):  # those who share batches are one trainer; lanes and copies are not
        return (
            config.model_copy(update={"batch_parallel": 1})
            if (config.epoch_parallel, config.memory_parallel) == (1, 1)
            else None
        )
    if isinstance(config, MacrobatchConfig):
        fanouts = config.fanouts or (DEFAULT_FANOUT,) * layers
        return LocalConfig(
            fanouts=fanouts, replace=config.replace, batch=config.batch, cache_inputs=config.cache_inputs
        )
    return LocalConfig() if isinstance(config, SarConfig | PipeConfig) else None


def has_estimate(name: str) -> bool:
    """Whether a strategy says what its epochs take."""
    return find_spec(f"gnnfleet.strategies.{name}.estimate") is not None


def estimate_costs(config: StrategyConfig, outlook: PlanningContext | EventPlanningContext) -> list[CostEstimate]:
    """What a strategy says of its epochs; the one for events is told of its stream. Raises ConfigError."""
    found: list[CostEstimate] = import_module(f"gnnfleet.strategies.{config.name}.estimate").estimate(config, outlook)
    return found


def local_config(config: TmaConfig, layers: int) -> LocalConfig:
    """How a trainer walks its own subgraph, or the coordinator the whole graph."""
    if config.full:
        return LocalConfig(batch=config.batch, cache_inputs=config.cache_inputs)
    fanouts = config.fanouts or (DEFAULT_FANOUT,) * layers
    return LocalConfig(fanouts=fanouts, replace=config.replace, batch=config.batch, cache_inputs=config.cache_inputs)


def _full_graph_strategy(job: Job) -> Strategy:
    """What evaluates on the whole graph."""
    return make_strategy(LocalConfig(cache_inputs=False, order="store"), job)


def _correction_strategy(config: TmaConfig, job: Job) -> Strategy | None:
    """What trains a copy of the model on the whole graph."""
    if not config.correction_steps or job.message_store is None:
        return None
    model = copy.deepcopy(job.model)
    task = replace(job.task, decoder=model.decoder) if isinstance(job.task, LinkTask) else job.task  # type: ignore[arg-type]
    train = job.train.model_copy(update={"lr": config.correction_lr or job.train.lr})
    return make_strategy(local_config(config, model.num_layers), replace(job, model=model, task=task, train=train))
