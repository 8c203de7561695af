"""``gnnfleet diagnose``: how alike independent trainers would be, for several ways to deal the nodes to them."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli.options import (
    ConfigOption,
    JsonFlag,
    ModelOption,
    QuietFlag,
    SeedOption,
    SettingsOption,
    SplitOption,
    StoreArgument,
    TaskOption,
    parse_settings,
)
from gnnfleet.cli.output import print_result, table
from gnnfleet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gnnfleet.analysis.partition_diagnosis import DiagnosisRow
    from gnnfleet.config.schema import RunConfig

DIAGNOSE_EXAMPLES = """\
gnnfleet diagnose shop/ --workers 4 --split 0.6/0.2/0.2

gnnfleet diagnose shop/ --scheme super --clusters 50 --clusters 500 --clusters 5000     how many super-nodes?
"""
WORKERS = 3


class SchemeChoice(StrEnum):
    random = "random"
    super = "super"
    mincut = "mincut"


def diagnose(
    store: StoreArgument,
    workers: Annotated[
        int | None, typer.Option("--workers", "-w", metavar="N", help="Trainers that share the nodes. Default 3.")
    ] = None,
    schemes: Annotated[
        list[SchemeChoice] | None, typer.Option("--scheme", help="How nodes are dealt; repeatable. Default all three.")
    ] = None,
    clusters: Annotated[
        list[int] | None,
        typer.Option(
            "--clusters",
            metavar="C",
            min=1,
            help="super: number of super-nodes, a row for each; repeatable. Default a tenth of the nodes.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="K", min=0, help="Steps on the whole graph before the second look.")
    ] = 20,
    batches: Annotated[
        int, typer.Option(metavar="B", min=1, help="Batches of an epoch that losses and gradients are taken over.")
    ] = 100,
    model: Annotated[str | None, ModelOption] = None,
    task: Annotated[str | None, TaskOption] = None,
    split: Annotated[str | None, SplitOption] = None,
    settings: Annotated[list[str] | None, SettingsOption] = None,
    config: Annotated[Path | None, ConfigOption] = None,
    seed: Annotated[int | None, SeedOption] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure ways to deal nodes to independent trainers (strategy tma), before training.

    Each trainer has the subgraph of its own nodes. Parts that keep more edges lose less; parts that are more alike
    pull the weights the same way.

    kept      edges with both ends in one part, of all
    balance   nodes of the largest part over the mean
    labels    how far the labels of a part are from those of the graph, 0 to 1
    features  how far the mean of a part is from that of the graph, in standard deviations
    loss ±    how much losses differ between trainers at equal weights, of the mean
    cosine    between their gradients at equal weights, mean over pairs
    aim       cosine of the average of their gradients with the gradient on the whole graph

    The last three are given at the first weights and after --steps on the whole graph.
    """
    from gnnfleet.analysis.partition_diagnosis import SCHEMES, recommend
    from gnnfleet.analysis.partition_diagnosis import diagnose as measure
    from gnnfleet.graph.validate import open_validated_store
    from gnnfleet.nn.custom_model import annotate_model_errors
    from gnnfleet.report.progress import make_progress

    chosen = [str(scheme) for scheme in schemes or SCHEMES]
    if clusters and "super" not in chosen:
        raise ConfigError("--clusters is the number of super-nodes: leave it out, or add --scheme super")
    options = {
        "workers": workers,
        "model": None if model is None else {"name": model},
        "task": task,
        "seed": seed,
        "split": split,
    }
    resolved = _resolve(config, settings, {key: value for key, value in options.items() if value is not None})
    graph = open_validated_store(store)
    with annotate_model_errors(resolved.model.file), make_progress(quiet or as_json) as progress:
        rows = measure(graph, resolved, chosen, clusters or (), steps, batches=batches, progress=progress)
    best = recommend(rows)
    result: dict[str, Any] = {
        "workers": resolved.workers,
        "seed": resolved.seed,
        "steps": steps,
        "rows": [asdict(row) for row in rows],
        "recommended": None if best is None else {"scheme": best.scheme, "clusters": best.clusters},
    }
    name = f"{resolved.model.name} on {store.resolve().name}, {resolved.workers} trainers"
    print_result(
        result, as_json=as_json, human=[_shown(name, rows, steps), *([] if best is None else [_sentence(best, rows)])]
    )


def _resolve(file: Path | None, settings: Sequence[str] | None, options: dict[str, Any]) -> RunConfig:
    from gnnfleet.config.resolve import merge_settings, parse_value, read_toml, resolve

    given = {key: parse_value(value) for key, value in parse_settings(settings).items()}
    words = merge_settings({} if file is None else read_toml(file), given, {**options, "strategy": {"name": "tma"}})
    resolved = resolve({"workers": WORKERS, **words})
    if resolved.spec.placement != "clusters":
        raise ConfigError("strategy.scheme=ggs deals no nodes: leave it out")
    return resolved


def _shown(name: str, rows: Sequence[DiagnosisRow], steps: int) -> Any:
    later = f"after {steps}"
    # Short enough for 120 characters: a table that is too wide breaks headings within words.
    columns = ["scheme", "clusters", "kept", "balance", "labels", "features"]
    columns += ["loss ±", later, "cosine", later, "aim", later]
    cells = [
        (
            row.scheme,
            row.clusters,
            row.kept,
            row.balance,
            row.labels,
            row.features,
            row.first.discrepancy,
            row.trained.discrepancy,
            row.first.cosine,
            row.trained.cosine,
            row.first.aim,
            row.trained.aim,
        )
        for row in rows
    ]
    return table(name, columns, cells)


def _sentence(best: DiagnosisRow, rows: Sequence[DiagnosisRow]) -> str:
    from gnnfleet.analysis.partition_diagnosis import COSINE_MARGIN

    words = {"random": "strategy.scheme=random", "mincut": "strategy.scheme=psgd-pa"}
    setting = words.get(best.scheme, f"strategy.clusters={best.clusters}")
    highest = max(row.trained.aim for row in rows if row.trained.aim is not None)
    return (
        f"recommended: {setting}. Its trainers agree most (cosine {best.trained.cosine:.3f}) of those whose aim is at "
        f"least {COSINE_MARGIN:.0%} of the best ({best.trained.aim:.3f} of {highest:.3f})."
    )
