"""What is done once before ranks train: words resolved, everything checked, the graph cut, the run's directory made.

Everything a user can get wrong is found before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gnnfleet.analysis.cluster_count import drop_auto_settings
from gnnfleet.config.resolve import check_resumable, overlay, resolve
from gnnfleet.config.schema import RunConfig
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.partitioned_graph import KIND
from gnnfleet.graph.validate import validate_graph
from gnnfleet.io.bundle import Bundle
from gnnfleet.launch.spec import RunSpec
from gnnfleet.nn.custom_model import annotate_model_errors
from gnnfleet.report.metrics import check_tensorboard
from gnnfleet.report.progress import make_progress
from gnnfleet.report.remarks import print_note
from gnnfleet.training.build import validate, validate_events
from gnnfleet.training.output_schema import OutputSchema
from gnnfleet.training.partition_cache import empty_parts_warning, ensure_placement, ensure_placement_in_subprocess
from gnnfleet.training.resume import read_resume_point
from gnnfleet.training.run_dir import RunDirectory, choose_directory


@dataclass(frozen=True)
class RunLocation:
    """Where a run is kept. Without ``run_dir`` nowhere, or with ``keep`` in a new directory below runs/."""

    run_dir: Path | None = None
    keep: bool = False
    resume: bool = False


def resolve_run(graph: Graph, words: Mapping[str, Any], place: RunLocation) -> tuple[RunConfig, RunDirectory | None]:
    """The config of a run, and its directory where it goes on with one. Writes nothing."""
    directory = choose_run_dir(place, graph, model="") if place.resume else None
    config = resolve(words) if directory is None else _resumed_config(directory, graph, words)
    if config.report.tensorboard:
        check_tensorboard()
    validate_graph(graph)
    return config, directory


def choose_run_dir(place: RunLocation, graph: Graph, *, model: str) -> RunDirectory:
    name = graph.name if graph.store is None else graph.store.path.resolve().name
    return choose_directory(place.run_dir, resume=place.resume, store=name, model=model)


def _resumed_config(directory: RunDirectory, graph: Graph, words: Mapping[str, Any]) -> RunConfig:
    """The saved config with what is said anew; a run that was killed before it was saved begins."""
    if not directory.is_initialized:
        return resolve(words)
    directory.check_graph(graph)
    directory.check_model_file()
    config = resolve(overlay(directory.info()["config"], drop_auto_settings(words)))
    check_resumable(directory.config(), config)
    return config


@contextmanager
def prepare_run(
    graph: Graph,
    config: RunConfig,
    directory: RunDirectory | None,
    *,
    place: RunLocation,
    quiet: bool,
    known_as: Graph | None = None,
    apart: bool = False,
) -> Iterator[tuple[RunSpec, RunDirectory]]:
    """A run on workers, ready for its ranks; its directory is locked until the end.

    The graph lies in a store; ``known_as`` is the user's own where that was in memory. ``apart`` cuts it in another
    process, for a caller that must go on answering.
    """
    assert graph.store is not None
    with annotate_model_errors(config.model.file):
        trained, output, remarks = _checked(graph, config)
    empty = empty_parts_warning(graph, config.workers) if config.spec.placement in ("partition", "clusters") else None
    for text in (*remarks, *([] if empty is None else [empty])):
        print_note(text, quiet=quiet)
    path: Path | None
    if apart:
        path = ensure_placement_in_subprocess(graph, config, quiet=quiet)
    else:
        with make_progress(quiet) as progress:
            path = ensure_placement(graph, trained, config, progress=progress, quiet=quiet)
    directory = directory or choose_run_dir(place, known_as or graph, model=config.model.label)
    directory.seed = config.seed
    directory.lock()
    try:
        read_resume_point(directory)  # a damaged checkpoint is found now
        directory.initialize(config, known_as or graph, output)
        if config.spec.placement == "partition" and path is not None:
            cut = Bundle.open(path, KIND)
            directory.write_partition_info(cut.meta["method"], cut.meta["quality"])
        yield (
            RunSpec(
                store=str(graph.store.path.resolve()),
                digest=graph.store.digest,
                partition="" if path is None else str(path.relative_to(graph.store.path)),
                run_dir=str(directory.path),
                config=config.model_dump(mode="json"),
                quiet=quiet,
            ),
            directory,
        )
    finally:
        directory.close()


def _checked(graph: Graph, config: RunConfig) -> tuple[Graph, OutputSchema | None, tuple[str, ...]]:
    """(what is trained on, what nodes are classified as, what the user should know); raises what ``validate`` does."""
    if config.spec.input == "events":
        validate_events(graph, config)
        return graph, None, ()
    # Learnable rows are the ranks' own: none are drawn here.
    checked = validate(graph, config, {kind: torch.empty(0, dtype=torch.int64) for kind in graph.nodes})
    config.strategy.check_task(checked.task)
    return checked.graph, checked.output, checked.remarks
