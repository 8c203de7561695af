"""The strategies there are. A strategy's code is loaded when it is chosen."""

from __future__ import annotations

from gnnfleet.errors import ConfigError
from gnnfleet.strategies.base import Job, Strategy, StrategyConfig
from gnnfleet.strategies.local.config import LocalConfig
from gnnfleet.strategies.macrobatch.config import MacrobatchConfig
from gnnfleet.strategies.sar.config import SarConfig

CONFIGS: dict[str, type[StrategyConfig]] = {"local": LocalConfig, "sar": SarConfig, "macrobatch": MacrobatchConfig}
PLANNED = ("pipe", "tma", "temporal")


def find_config(name: str) -> type[StrategyConfig]:
    """The config class of a strategy; raises ConfigError listing what exists."""
    if name not in CONFIGS:
        problem = f"strategy {name!r} comes later" if name in PLANNED else f"no strategy {name!r}"
        raise ConfigError(f"{problem}; this version has {', '.join(CONFIGS)}")
    return CONFIGS[name]


def make_strategy(config: StrategyConfig, job: Job) -> Strategy:
    """The strategy a config describes."""
    if isinstance(config, SarConfig):
        from gnnfleet.strategies.sar.strategy import SarStrategy

        return SarStrategy(config, job)
    if isinstance(config, MacrobatchConfig):
        from gnnfleet.strategies.macrobatch.strategy import MacrobatchStrategy

        return MacrobatchStrategy(config, job)
    from gnnfleet.strategies.local.strategy import LocalStrategy

    assert isinstance(config, LocalConfig)
    return LocalStrategy(config, job)
