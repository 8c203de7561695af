"""The decision how a torch_geometric module runs, layer by layer or as a whole: once per run, before it starts.

It depends on the module, the widths of the graph and the self-check alone, so it is the same for every strategy, and so
are the draws of dropout. The config of a run records it for workers, and for --resume, evaluate and predict.
"""

from __future__ import annotations

import torch

from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.nn.custom_model import annotate_model_errors
from gnnfleet.nn.pyg.module import PygModule
from gnnfleet.sharded.module_check import cached_check, check_layers, check_parts, check_sampled
from gnnfleet.strategies.sampling_options import parse_fanouts
from gnnfleet.training.build import ValidatedRun, validate


def settle_execution(graph: Graph, config: RunConfig, *, for_plan: bool = False) -> tuple[RunConfig, str]:
    """(config with ``model.execution`` decided, a remark for the user); raises ConfigError for a module to refuse.

    A plan decides the execution only: it checks every strategy by itself.
    """
    if not config.model.is_custom or config.spec.input == "events":
        return config, ""
    with annotate_model_errors(config.model.file):
        validated = validate(graph, config, {kind: torch.empty(0, dtype=torch.int64) for kind in graph.nodes})
        model, name = validated.model, config.model.label
        if not isinstance(model, PygModule):
            return config, ""
        if config.check and not model.reads_whole_graph:
            like = validated.graph
            reason = cached_check("layers", model, like, lambda: check_layers(model, like))
            if reason and config.model.execution == "layers":
                raise ConfigError(f"{name} cannot run layer by layer: {reason}. Leave out model.execution=layers")
            if reason:
                model.run_whole(reason)
        if not for_plan:
            check_strategy(config, validated)
    remark = f"{name} runs as a whole: {model.reason_whole}" if model.reason_whole else ""
    execution = "whole" if model.reads_whole_graph else "layers"
    return config.model_copy(update={"model": config.model.model_copy(update={"execution": execution})}), remark


def check_strategy(config: RunConfig, validated: ValidatedRun) -> None:
    """Raise ConfigError if the strategy cannot run the module: the module depends on parts, or on sampling."""
    model, graph = validated.model, validated.graph
    config.strategy.check_model(model)
    if not config.check or not isinstance(model, PygModule):
        return
    if config.spec.placement == "partition" and config.workers > 1:
        cached_check("parts", model, graph, lambda: check_parts(model, graph))
    if config.strategy.is_sampled:
        fanouts = parse_fanouts(getattr(config.strategy, "fanouts", None), model.num_layers)
        cached_check(f"sampled {fanouts}", model, graph, lambda: check_sampled(model, graph, fanouts))
