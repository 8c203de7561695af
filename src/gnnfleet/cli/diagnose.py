"""``gnnfleet diagnose``: compare schemes that assign nodes to the independent trainers of tma, before training."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli import options
from gnnfleet.cli.output import print_result, table
from gnnfleet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gnnfleet.analysis.partition_diagnosis import DiagnosisRow

DIAGNOSE_EXAMPLES = """\
gnnfleet diagnose shop/ --workers 4 --split 0.6/0.2/0.2

gnnfleet diagnose shop/ --scheme super --clusters 50 --clusters 500 --clusters 5000  # how many clusters?
"""
WORKERS = 3
SchemeChoice = StrEnum("SchemeChoice", ["random", "super", "mincut"])


def diagnose(
    store: options.StoreArgument,
    workers: Annotated[
        int | None, typer.Option("--workers", "-w", metavar="N", help="Number of trainers. Default 3.")
    ] = None,
    schemes: Annotated[
        list[SchemeChoice] | None, typer.Option("--scheme", help="Assignment scheme. Repeatable. Default: all three.")
    ] = None,
    clusters: Annotated[
        list[int] | None,
        typer.Option(
            "--clusters",
            metavar="C",
            min=1,
            help="super: number of clusters; one row for each. Repeatable. Default nodes / 10.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="K", min=0, help="Training steps before the second measurement.")] = 20,
    batches: Annotated[
        int, typer.Option(metavar="B", min=1, help="Batches used to measure losses and gradients.")
    ] = 100,
    model: Annotated[str | None, options.ModelOption] = None,
    task: Annotated[str | None, options.TaskOption] = None,
    split: Annotated[str | None, options.SplitOption] = None,
    settings: Annotated[list[str] | None, options.SettingsOption] = None,
    config: Annotated[Path | None, options.ConfigOption] = None,
    seed: Annotated[int | None, options.SeedOption] = None,
    as_json: options.JsonFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Compare schemes that assign nodes to the independent trainers of strategy tma, before training.

    Each trainer has the subgraph of its own nodes. Good parts keep many edges and resemble each other, so that
    gradients agree.

    kept      share of the edges with both ends in one part
    balance   nodes of the largest part / mean
    labels    distance between the label distributions of a part and of the graph, 0 to 1
    features  distance between the feature means of a part and of the graph, in standard deviations
    loss ±    spread of the losses of trainers with equal weights, relative to the mean
    cosine    mean cosine between the gradients of two trainers with equal weights
    aim       cosine between the mean gradient of the trainers and the gradient of the whole graph

    The last three are measured with the initial weights and after --steps on the whole graph.
    """
    from gnnfleet.analysis.partition_diagnosis import SCHEMES, recommend
    from gnnfleet.analysis.partition_diagnosis import diagnose as measure
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.validate import open_validated_store
    from gnnfleet.nn.custom_model import annotate_model_errors
    from gnnfleet.report.progress import make_progress

    names = [str(scheme) for scheme in schemes or SCHEMES]
    if clusters and "super" not in names:
        raise ConfigError("--clusters applies to --scheme super: add it, or leave out --clusters")
    run_options = {"workers": workers, "model": model, "task": task, "seed": seed, "split": split}
    tree = options.read_settings(config, settings, strategy={"name": "tma"}, **run_options)
    resolved = resolve({"workers": WORKERS, **tree})
    if resolved.spec.placement != "clusters":
        raise ConfigError("strategy.scheme=ggs assigns no nodes to trainers: leave it out")
    graph = open_validated_store(store)
    with annotate_model_errors(resolved.model.file), make_progress(quiet or as_json) as progress:
        rows = measure(graph, resolved, names, clusters or (), steps, batches=batches, progress=progress)
    best = recommend(rows)
    result: dict[str, Any] = {
        "workers": resolved.workers,
        "seed": resolved.seed,
        "steps": steps,
        "rows": [asdict(row) for row in rows],
        "recommended": None if best is None else {"scheme": best.scheme, "clusters": best.clusters},
    }
    title = f"{resolved.model.name} on {store.resolve().name}, {resolved.workers} trainers"
    advice = [] if best is None else [_recommendation(best, rows)]
    print_result(result, as_json=as_json, human=[_table(title, rows, steps), *advice])


def _table(title: str, rows: Sequence[DiagnosisRow], steps: int) -> Any:
    later = f"after {steps}"
    # Short enough for 120 characters: a table that is too wide breaks headings within words.
    columns = ["scheme", "clusters", "kept", "balance", "labels", "features"]
    columns += ["loss ±", later, "cosine", later, "aim", later]
    cells = []
    for row in rows:
        first, trained = row.first, row.trained
        parts = [row.scheme, row.clusters, row.kept, row.balance, row.labels, row.features]
        gradients = [first.discrepancy, trained.discrepancy, first.cosine, trained.cosine, first.aim, trained.aim]
        cells.append([*parts, *gradients])
    return table(title, columns, cells)


def _recommendation(best: DiagnosisRow, rows: Sequence[DiagnosisRow]) -> str:
    from gnnfleet.analysis.partition_diagnosis import COSINE_MARGIN

    settings = {"random": "strategy.scheme=random", "mincut": "strategy.scheme=psgd-pa"}
    setting = settings.get(best.scheme, f"strategy.clusters={best.clusters}")
    highest = max(row.trained.aim for row in rows if row.trained.aim is not None)
    return (
        f"recommended: {setting}. It has the highest cosine ({best.trained.cosine:.3f}) of the schemes whose aim is at "
        f"least {COSINE_MARGIN:.0%} of the best ({best.trained.aim:.3f} of {highest:.3f})."
    )
