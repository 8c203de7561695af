"""Preparation of a run, once for all ranks: resolve the config, validate it, partition the graph, open the directory.

Mistakes of the user are reported before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gnnfleet.analysis.partition_diagnosis import drop_auto_settings
from gnnfleet.config.resolve import check_resumable, overlay, resolve
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.partitioned_graph import KIND
from gnnfleet.graph.validate import validate_graph
from gnnfleet.io.bundle import Bundle
from gnnfleet.launch.spec import RunSpec
from gnnfleet.nn.custom_model import annotate_model_errors
from gnnfleet.nn.unused_data import describe_unused
from gnnfleet.report.metrics import check_tensorboard
from gnnfleet.report.remarks import print_note
from gnnfleet.training.auto_defaults import with_auto_defaults
from gnnfleet.training.build import validate, validate_events
from gnnfleet.training.module_execution import settle_execution
from gnnfleet.training.output_schema import OutputSchema
from gnnfleet.training.partition_cache import empty_parts_warning, prepare_placement
from gnnfleet.training.run_dir import RunDirectory, choose_directory
from gnnfleet.training.run_session import read_resume_point


@dataclass(frozen=True)
class RunLocation:
    """The directory of a run. Without ``run_dir`` nothing is saved, or with ``keep`` in a new directory below runs/."""

    run_dir: Path | None = None
    keep: bool = False
    resume: bool = False


def resolve_run(
    graph: Graph, settings: Mapping[str, Any], location: RunLocation, *, quiet: bool
) -> tuple[RunConfig, RunDirectory | None]:
    """The config of a run, and the directory that it resumes. Writes no file of the run."""
    directory = choose_run_dir(location, graph, model="") if location.resume else None
    if directory is None or not directory.is_initialized:
        settings = with_auto_defaults(graph, settings, quiet=quiet)
    config = resolve(settings) if directory is None else _resumed_config(directory, graph, settings)
    _check_memory(config)
    if config.report.tensorboard:
        check_tensorboard()
    validate_graph(graph)
    config, remark = settle_execution(graph, config)
    if remark:
        print_note(remark, quiet=quiet)
    return config, directory


def _check_memory(config: RunConfig) -> None:
    """Raise ConfigError for a memory budget that the strategy does not keep within."""
    if config.memory is None or "memory" in config.spec.memory_settings:
        return
    settings = " or ".join(f"--set {setting}=SIZE" for setting in config.spec.memory_settings)
    advice = f"use {settings}" if settings else "leave it out; gnnfleet plan estimates what a worker needs"
    raise ConfigError(
        f"--memory is the budget of a worker of sar, and of plans; for strategy {config.spec.name} {advice}"
    )


def choose_run_dir(location: RunLocation, graph: Graph, *, model: str) -> RunDirectory:
    name = graph.name if graph.store is None else graph.store.path.resolve().name
    return choose_directory(location.run_dir, resume=location.resume, store=name, model=model)


def _resumed_config(directory: RunDirectory, graph: Graph, settings: Mapping[str, Any]) -> RunConfig:
    """The saved config with changed settings. A run that was killed before it was saved starts anew."""
    if not directory.is_initialized:
        return resolve(settings)
    directory.check_graph(graph)
    directory.check_model_file()
    config = resolve(overlay(directory.settings(), drop_auto_settings(settings)))
    check_resumable(directory.config(), config)
    return config


@contextmanager
def prepare_run(
    graph: Graph,
    config: RunConfig,
    directory: RunDirectory | None,
    *,
    location: RunLocation,
    quiet: bool,
    original: Graph | None = None,
    in_subprocess: bool = False,
) -> Iterator[tuple[RunSpec, RunDirectory]]:
    """A run ready for its ranks; its directory is locked until the end.

    ``graph`` has a store; ``original`` is the user's graph if that one is in memory. ``in_subprocess`` partitions in
    another process, for a caller that must keep sending heartbeats.
    """
    with annotate_model_errors(config.model.file):
        trained, output, remarks = _validate(graph, config)
    warning = empty_parts_warning(graph, config.workers) if config.spec.placement in ("partition", "clusters") else None
    for text in (*remarks, *([] if warning is None else [warning])):
        print_note(text, quiet=quiet)
    placement = prepare_placement(graph, config, trained=trained, quiet=quiet, in_subprocess=in_subprocess)
    directory = directory or choose_run_dir(location, original or graph, model=config.model.label)
    directory.seed = config.seed
    directory.lock()
    try:
        read_resume_point(directory)  # reports a damaged checkpoint now
        directory.initialize(config, original or graph, output)
        if config.spec.placement == "partition" and placement is not None:
            partition = Bundle.open(placement, KIND)
            directory.write_partition_info(partition.meta["method"], partition.meta["quality"])
        yield RunSpec.of(graph, config, directory.path, placement, quiet=quiet), directory
    finally:
        directory.close()


def _validate(graph: Graph, config: RunConfig) -> tuple[Graph, OutputSchema | None, tuple[str, ...]]:
    """(graph to train on, output schema of a node task, remarks for the user); raises the errors of ``validate``."""
    if config.spec.input == "events":
        validate_events(graph, config)
        return graph, None, describe_unused(config.model, graph)
    # Each rank initializes the learnable rows it owns; none are needed here.
    validated = validate(graph, config, {kind: torch.empty(0, dtype=torch.int64) for kind in graph.nodes})
    config.strategy.check_task(validated.task)
    config.strategy.check_model(validated.model)
    return validated.graph, validated.output, validated.remarks
