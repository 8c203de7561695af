"""Sampled training on a partitioned graph (BatchGNN): one exchange samples and fetches several mini-batches."""

from __future__ import annotations

from gnnfleet.strategies.macrobatch.config import MacrobatchConfig
from gnnfleet.strategies.sampling_options import DEFAULT_FANOUT
from gnnfleet.strategies.spec import Settings, StrategySpec, lazy


def _reference(config: MacrobatchConfig, layers: int) -> Settings:
    fanouts = config.fanouts or (DEFAULT_FANOUT,) * layers
    return {"name": "local", "fanouts": fanouts, **config.model_dump(include={"replace", "batch", "cache_inputs"})}


SPEC = StrategySpec(
    config=MacrobatchConfig,
    build=lazy("gnnfleet.strategies.macrobatch.strategy:MacrobatchStrategy"),
    placement="partition",
    estimate=lazy("gnnfleet.strategies.macrobatch.estimate:estimate"),
    reference=_reference,
    resumable=("feature_memory",),
    memory_settings=("strategy.feature_memory",),
)
