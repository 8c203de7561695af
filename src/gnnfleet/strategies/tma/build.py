"""Construction of the coordinator's strategy: it evaluates, and corrects, with one-process strategies of its own."""

from __future__ import annotations

import copy
from dataclasses import replace

from gnnfleet.strategies.job import Job
from gnnfleet.strategies.protocol import NodePredictor, Strategy
from gnnfleet.strategies.registry import build_strategy, make_config
from gnnfleet.strategies.tma.config import TmaConfig
from gnnfleet.strategies.tma.strategy import TmaStrategy
from gnnfleet.tasks.link import LinkTask


def build(config: TmaConfig, job: Job) -> TmaStrategy:
    evaluator = build_strategy(make_config({"name": "local", "cache_inputs": False, "order": "store"}), job)
    assert isinstance(evaluator, NodePredictor)
    return TmaStrategy(config, job, evaluator, _correction_strategy(config, job))


def _correction_strategy(config: TmaConfig, job: Job) -> Strategy | None:
    """The strategy that trains a copy of the model on the whole graph between rounds."""
    if not config.correction_steps or job.context.message_store is None:
        return None
    model = copy.deepcopy(job.model)
    task = replace(job.task, decoder=model.decoder) if isinstance(job.task, LinkTask) else job.task  # type: ignore[arg-type]
    train = job.train.model_copy(update={"lr": config.correction_lr or job.train.lr})
    local = make_config(config.local_settings(model.num_layers))
    return build_strategy(local, replace(job, model=model, task=task, train=train))
