"""Questions to a trained run: a metric on a split, predictions, scores of pairs.

Exact rows do not depend on how a run was trained: one process answers as ``local`` evaluates, several as ``sar`` does,
each with a part of the graph.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from gnnfleet.comm.collectives import broadcast_json
from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.process_lifetime import die_with_parent
from gnnfleet.comm.rendezvous import Rendezvous
from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError, RunError, StoreError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.inference.predict import OutputColumns, check_output, write_predictions, write_scores
from gnnfleet.inference.predict_events import write_event_scores
from gnnfleet.launch.local_launcher import launch
from gnnfleet.launch.rank_main import open_own_part, run_rank
from gnnfleet.launch.spec import RunSpec
from gnnfleet.launch.torchrun import broadcast_spec
from gnnfleet.nn.custom_model import annotate_model_errors
from gnnfleet.nn.embedding import embedding_ids
from gnnfleet.report.progress import make_progress
from gnnfleet.strategies.protocol import State
from gnnfleet.strategies.registry import inference_config
from gnnfleet.tasks.event import EventTask
from gnnfleet.training.build import BuiltRun, RankContext, build, rebuild, rebuild_links
from gnnfleet.training.checkpoint import TrainState
from gnnfleet.training.output_schema import OutputSchema, column_order
from gnnfleet.training.partition_cache import ensure_partition, ensure_placement_in_subprocess, trained_graph
from gnnfleet.training.resume import broadcast_state
from gnnfleet.training.run_dir import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Query:
    """What is asked of which weights; in plain words, so that workers can read it from a file.

    Either ``split`` is measured, or ``output`` is written: every node, or the ``pairs`` or ``events`` of a file.
    """

    run: str
    checkpoint: str = "best"
    memory: str | int | None = None  # in place of the run's own
    split: str | None = None
    output: str | None = None
    logits: bool = False
    embeddings: bool = False
    pairs: str | None = None
    events: str | None = None
    relation: str = ""


def run_query(question: Query, graph: Graph, *, workers: int | None = None, quiet: bool = True) -> dict[str, Any]:
    """The answer as plain words; by default on as many workers as the run was trained on."""
    config = _config(question, workers)
    _check_output(question)
    if config.task != "node":
        _check_columns(RunDirectory(Path(question.run)), config, graph)
    if config.workers == 1:
        built, position, name = open_trained_run(
            Path(question.run), graph, checkpoint=question.checkpoint, split=question.split, memory=question.memory,
            quiet=quiet,
        )  # fmt: skip
        return {**_query_info(question, name, position), **_answer(built, question)}
    if config.task == "node":
        # Workers read features from parts, so what is in another order is stored anew, in theirs.
        graph = _output(RunDirectory(Path(question.run)), config).adapt(graph)
    with tempfile.TemporaryDirectory(prefix="gnnfleet-") as scratch:
        stored = graph if graph.store is not None else save_store(graph, Path(scratch) / "store")
        spec = _spec(question, config, stored, quiet=quiet)
        return launch(
            spec,
            folder=Path(scratch) / "launch",
            workers=config.workers,
            advice="try again",
            module="gnnfleet.inference.query_worker",
        )


def run_query_as_rank(
    seat: LaunchEnv, question: Query, store: Callable[[], Graph], *, quiet: bool, show: Callable[[dict[str, Any]], None]
) -> NoReturn:
    """Answer as one of the ranks that torchrun started and end the process; the first opens the store and calls
    ``show``. The others find store and run at the same paths."""
    if seat.agent:
        die_with_parent()

    def work(world: World, meeting: Rendezvous) -> None:
        def prepare() -> RunSpec:
            config = _config(question, seat.size)
            _check_output(question)
            if config.spec.input == "events":
                raise ConfigError("a run on events is asked by one process: leave torchrun out")
            graph = store()
            if config.task != "node":
                _check_columns(RunDirectory(Path(question.run)), config, graph)
            return _spec(question, config, graph, quiet=quiet, apart=True)

        spec = broadcast_spec(world, meeting, prepare, lambda: _model_files(question))
        found = run_query_spec(spec, world)
        if world.is_first:
            show(found)

    run_rank(seat, work, print_errors=True)


def run_query_spec(spec: RunSpec, world: World) -> dict[str, Any]:
    """One rank's share of an answer, which the first has whole."""
    assert spec.question is not None
    question, config = Query(**spec.question), resolve(spec.config)
    directory = RunDirectory(Path(question.run), seed=config.seed)
    quiet = spec.quiet or not world.is_first
    with annotate_model_errors(config.model.file):
        with make_progress(quiet) as progress:
            graph, shard = open_own_part(spec, world)
            output = OutputSchema.from_json(spec.output) if spec.output is not None else None
            built = _build(graph, config, output, split=question.split, context=RankContext(world, shard, progress))
        aside = world.uncounted()
        state, position, name = _weights(directory, question.checkpoint) if world.is_first else ({}, TrainState(), "")
        word = broadcast_json(aside, {"position": asdict(position), "name": name})
        # Ranks hear the weights from the first, and read the rows they own themselves.
        state = broadcast_state(aside, {"model": state["model"]} if world.is_first else None)
        state |= directory.load_sharded(word["name"], world.rank, embedding_ids(built.strategy.model))
        _load_state(built, state, question.run, word["name"])
        found = _answer(built, question)
        built.strategy.close()
    return {**_query_info(question, word["name"], TrainState(**word["position"])), **found}


def open_trained_run(
    path: Path,
    graph: Graph,
    *,
    checkpoint: str = "best",
    split: str | None = None,
    memory: str | int | None = None,
    quiet: bool = True,
) -> tuple[BuiltRun, TrainState, str]:
    """A trained run in this process: what was built, where its checkpoint stands, that one's name. Raises RunError.

    ``split`` is what is to be evaluated; predictions need none. ``memory`` takes the place of the run's own.
    """
    config = _config(Query(run=str(path), memory=memory), workers=1)
    directory = RunDirectory(path, seed=config.seed)
    state, position, name = _weights(directory, checkpoint, whole=True)
    output = _output(directory, config) if config.task == "node" else None
    with make_progress(quiet) as progress:
        built = _build(graph, config, output, split=split, context=RankContext(progress=progress))
    _load_state(built, state, str(path), name)
    return built, position, name


def reopen_run(graph: Graph, config: RunConfig, output: OutputSchema | None, state: State) -> BuiltRun:
    """A run that has just ended, in this process alone."""
    built = _build(graph, _query_workers(config, 1), output, context=RankContext())
    built.strategy.load_state_dict(state)
    return built


def best_weights(directory: RunDirectory) -> State:
    """Those a run ended with, whole in this process."""
    return _weights(directory, "best", whole=True)[0]


def _config(question: Query, workers: int | None) -> RunConfig:
    """The config a run is asked under."""
    directory = RunDirectory(Path(question.run))
    config = directory.config()
    if question.memory is not None:
        config = resolve({**config.model_dump(mode="json"), "memory": question.memory})
    directory.check_model_file()
    return _query_workers(config, config.workers if workers is None else workers)


def _model_files(question: Query) -> frozenset[Path]:
    file = RunDirectory(Path(question.run)).config().model.file
    return frozenset() if file is None else frozenset({file})


def _check_output(question: Query) -> None:
    if question.output is not None:
        check_output(Path(question.output))


def _output(directory: RunDirectory, config: RunConfig) -> OutputSchema:
    """What a run predicts and read: how edge features are called is nothing to a model that does not read them."""
    output = directory.output()
    return output if _reads_edges(config) else replace(output, edge_columns={})


def _reads_edges(config: RunConfig) -> bool:
    """What a model of the user's own reads is not known."""
    model = config.model
    could = model.name in ("gat", "gatv2") or config.spec.input == "events"
    return model.file is not None or (could and model.edge_features)


def _check_columns(run: RunDirectory, config: RunConfig, graph: Graph) -> None:
    """Refuse features of other names, or in another order, than a run on links or events read.

    Such a run keeps no output: its own store tells, while it is there.
    """
    known = run.info()["store"]
    if known is None or (graph.store is not None and graph.store.digest == known["digest"]):
        return
    try:
        own = open_store(known["path"])
    except StoreError:
        return
    assert own.store is not None
    if own.store.digest != known["digest"]:
        return
    nodes = [(own.nodes[kind].columns, each.columns, kind) for kind, each in graph.nodes.items() if kind in own.nodes]
    read = own.edges if _reads_edges(config) else {}
    edges = [(read[kind].columns, each.columns, str(kind)) for kind, each in graph.edges.items() if kind in read]
    for mine, found, kind in (*nodes, *edges):
        if column_order(mine, found, f" of {kind}") is not None:
            raise RunError(
                f"feature columns of {kind} are in another order than those of the run: import them again, with "
                f"--{'edge-' * (':' in kind)}features naming them in the order of {known['path']}"
            )


def _query_workers(config: RunConfig, workers: int) -> RunConfig:
    if workers < 1:
        raise ConfigError(f"--workers is a number from 1, found {workers}")
    if config.spec.input == "events":
        workers = 1
    strategy, method = inference_config(config.strategy, workers), config.partition if workers > 1 else None
    return config.model_copy(update={"strategy": strategy, "workers": workers, "partition": method})


def _spec(question: Query, config: RunConfig, graph: Graph, *, quiet: bool, apart: bool = False) -> RunSpec:
    """What ranks need to answer; the graph is cut where it is not yet, ``apart`` in another process."""
    directory = RunDirectory(Path(question.run), seed=config.seed)
    assert graph.store is not None
    output = _output(directory, config) if config.task == "node" else None
    if output is not None and output.adapt(graph) is not graph:
        raise RunError(
            f"{graph.store.path} has features or edge types in another order than the run, or no edges yet: leave "
            "torchrun out, or import it with all of them in the order of the run"
        )
    path: Path | None
    if apart:
        path = ensure_placement_in_subprocess(graph, config, quiet=quiet)
    else:
        with make_progress(quiet) as progress:
            path = ensure_partition(graph, trained_graph(graph, config), config, progress=progress, quiet=quiet)
    return RunSpec(
        store=str(graph.store.path.resolve()),
        digest=graph.store.digest,
        partition="" if path is None else str(path.relative_to(graph.store.path)),
        run_dir=str(directory.path),
        config=config.model_dump(mode="json"),
        quiet=quiet,
        question=asdict(question),
        output=None if output is None else output.as_json(),
    )


def _build(
    graph: Graph, config: RunConfig, output: OutputSchema | None, *, split: str | None = None, context: RankContext
) -> BuiltRun:
    if config.spec.input == "events":
        return build(graph, config, context=context)
    if output is not None:
        return rebuild(graph, config, output, split=split, context=context)
    if split == "all":
        raise ConfigError("links are evaluated on train, val or test, found --split all")
    return rebuild_links(graph, config, context=context)


def _weights(directory: RunDirectory, checkpoint: str, *, whole: bool = False) -> tuple[State, TrainState, str]:
    """Weights, where they stand, the checkpoint's name; a run without val nodes keeps no best, its last stands in.

    ``whole`` has the rows that ranks own as well.
    """
    load = directory.load_weights if whole else directory.load
    found, name = load(checkpoint), checkpoint
    if found is None and checkpoint == "best":
        found, name = load("last"), "last"
    if found is None:
        raise RunError(f"{directory.path} has no checkpoint {checkpoint}: train it first, or go on with --resume")
    return {"model": found[0]["model"]}, found[1], name


def _load_state(built: BuiltRun, state: State, run: str, name: str) -> None:
    try:
        built.strategy.load_state_dict(state)
    except RuntimeError as error:
        raise RunError(
            f"checkpoint {name} of {run} does not fit this store: {str(error).splitlines()[-1].strip()}"
        ) from error


def _query_info(question: Query, name: str, position: TrainState) -> dict[str, Any]:
    return {"run": question.run, "checkpoint": name, "epoch": position.epoch}


def _answer(built: BuiltRun, question: Query) -> dict[str, Any]:
    with annotate_model_errors(built.model_file):
        if question.split is not None:
            found = built.strategy.evaluate("test" if question.split == "all" else question.split)
            count, loss, name = int(found.pop("count")), found.pop("loss"), built.task.metric
            value = {"name": name, "value": found[name], "loss": loss, built.unit: count, "metrics": found}
            return {"split": question.split, **value}
        assert question.output is not None
        path = Path(question.output)
        if isinstance(built.task, EventTask) and question.events is None:
            raise ConfigError("this run predicts events: name a table of them with --events")
        if question.events is not None:
            rows = write_event_scores(built, Path(question.events), path)
        elif question.pairs is not None:
            rows = write_scores(built, Path(question.pairs), path, relation=question.relation)
        else:
            rows = write_predictions(built, path, OutputColumns(logits=question.logits, embeddings=question.embeddings))
        return {"output": question.output, "rows": rows}
