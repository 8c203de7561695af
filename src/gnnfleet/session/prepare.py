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

from gnnfleet.analysis.cluster_count import without_auto
from gnnfleet.config.resolve import check_continues, overlay, resolve
from gnnfleet.config.schema import RunConfig
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.partitioned_graph import KIND
from gnnfleet.graph.validate import check_graph
from gnnfleet.io.bundle import Bundle
from gnnfleet.launch.spec import Spec
from gnnfleet.nn.custom_model import naming_line
from gnnfleet.report.metrics import check_tensorboard
from gnnfleet.report.progress import show
from gnnfleet.report.remarks import remark
from gnnfleet.strategies.temporal.config import TemporalConfig
from gnnfleet.training.build import check, check_events
from gnnfleet.training.output_schema import Output
from gnnfleet.training.partition_cache import empty_parts, ensure_apart, ensure_cut
from gnnfleet.training.resume import read_start
from gnnfleet.training.run_dir import RunDirectory, choose_directory


@dataclass(frozen=True)
class Place:
    """Where a run is kept. Without ``run_dir`` nowhere, or with ``keep`` in a new directory below runs/."""

    run_dir: Path | None = None
    keep: bool = False
    resume: bool = False


def settle(graph: Graph, words: Mapping[str, Any], place: Place) -> tuple[RunConfig, RunDirectory | None]:
    """The config of a run, and its directory where it goes on with one. Writes nothing."""
    directory = choose(place, graph, model="") if place.resume else None
    config = resolve(words) if directory is None else _continued(directory, graph, words)
    if config.report.tensorboard:
        check_tensorboard()
    check_graph(graph)
    return config, directory


def choose(place: Place, graph: Graph, *, model: str) -> RunDirectory:
    name = graph.name if graph.store is None else graph.store.path.resolve().name
    return choose_directory(place.run_dir, resume=place.resume, store=name, model=model)


def _continued(directory: RunDirectory, graph: Graph, words: Mapping[str, Any]) -> RunConfig:
    """The saved config with what is said anew; a run that was killed before it was saved begins."""
    if not directory.is_begun:
        return resolve(words)
    directory.check_graph(graph)
    directory.check_model_file()
    config = resolve(overlay(directory.about()["config"], without_auto(words)))
    check_continues(directory.config(), config)
    return config


@contextmanager
def prepared(
    graph: Graph,
    config: RunConfig,
    directory: RunDirectory | None,
    *,
    place: Place,
    quiet: bool,
    known_as: Graph | None = None,
    apart: bool = False,
) -> Iterator[tuple[Spec, RunDirectory]]:
    """A run on workers, ready for its ranks; its directory is locked until the end.

    The graph lies in a store; ``known_as`` is the user's own where that was in memory. ``apart`` cuts it in another
    process, for a caller that must go on answering.
    """
    assert graph.store is not None
    with naming_line(config.model.file):
        trained, output, remarks = _checked(graph, config)
    empty = empty_parts(graph, config.workers) if config.strategy.cut in ("parts", "clusters") else None
    for text in (*remarks, *([] if empty is None else [empty])):
        remark(text, quiet=quiet)
    path: Path | None
    if apart:
        path = ensure_apart(graph, config, quiet=quiet)
    else:
        with show(quiet) as progress:
            path = ensure_cut(graph, trained, config, progress=progress, quiet=quiet)
    directory = directory or choose(place, known_as or graph, model=config.model.label)
    directory.seed = config.seed
    directory.lock()
    try:
        read_start(directory)  # a damaged checkpoint is found now
        directory.begin(config, known_as or graph, output)
        if config.strategy.cut == "parts" and path is not None:
            cut = Bundle.open(path, KIND)
            directory.note_parts(cut.meta["method"], cut.meta["quality"])
        yield (
            Spec(
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


def _checked(graph: Graph, config: RunConfig) -> tuple[Graph, Output | None, tuple[str, ...]]:
    """(what is trained on, what nodes are classified as, what the user should know); raises what ``check`` does."""
    if isinstance(config.strategy, TemporalConfig):
        check_events(graph, config)
        return graph, None, ()
    # Learnable rows are the ranks' own: none are drawn here.
    checked = check(graph, config, {kind: torch.empty(0, dtype=torch.int64) for kind in graph.nodes})
    config.strategy.check(checked.task)
    return checked.graph, checked.output, checked.remarks
