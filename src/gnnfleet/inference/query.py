"""Queries to a trained run: a metric on a split, predictions, scores of pairs or events.

Exact rows do not depend on how a run was trained: one process evaluates like ``local``, several like ``sar``, each with
a part of the graph.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from gnnfleet.comm.collectives import broadcast_json
from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.rendezvous import Rendezvous
from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError, RunError, StoreError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.inference.predict import check_output, write_event_scores, write_predictions, write_scores
from gnnfleet.launch.local_launcher import launch
from gnnfleet.launch.rank_main import broadcast_spec, open_same_store, run_rank, with_placement
from gnnfleet.launch.spec import RunSpec
from gnnfleet.nn.custom_model import annotate_model_errors
from gnnfleet.nn.embedding import embedding_ids
from gnnfleet.report.progress import make_progress
from gnnfleet.strategies.protocol import State
from gnnfleet.strategies.registry import inference_config
from gnnfleet.tasks.base import PER_CLASS
from gnnfleet.tasks.event import EventTask
from gnnfleet.training.build import BuiltRun, RankContext, build, rebuild, rebuild_links
from gnnfleet.training.checkpoint import TrainState, load_sharded
from gnnfleet.training.output_schema import OutputSchema, column_order
from gnnfleet.training.partition_cache import prepare_placement
from gnnfleet.training.run_dir import RunDirectory
from gnnfleet.training.run_session import broadcast_state, named_report


@dataclass(frozen=True, kw_only=True)
class Query:
    """One query, as JSON values for workers.

    Either ``split`` is evaluated, or ``output`` is written: every node, or the ``pairs`` or ``events`` of a file.
    """

    run: str
    checkpoint: str = "best"
    memory: str | int | None = None  # replaces the memory setting of the run
    split: str | None = None
    output: str | None = None
    logits: bool = False
    embeddings: bool = False
    pairs: str | None = None
    events: str | None = None
    relation: str = ""


def run_query(query: Query, graph: Graph, *, workers: int | None = None, quiet: bool = True) -> dict[str, Any]:
    """The answer as JSON; by default with as many workers as the run was trained with."""
    config = _resolve_query(query, workers)
    directory = RunDirectory(Path(query.run))
    _check_columns(directory, config, graph)
    if config.workers == 1:
        built, position, name = open_trained_run(
            directory.path, graph, checkpoint=query.checkpoint, split=query.split, memory=query.memory, quiet=quiet
        )
        return _answer(built, query, name, position)
    output = _output_schema(directory, config)
    graph = graph if output is None else output.adapt(graph)
    with tempfile.TemporaryDirectory(prefix="gnnfleet-") as scratch:
        # Workers read features from parts, so a graph with columns in another order is saved again.
        stored = graph if graph.store is not None else save_store(graph, Path(scratch) / "store")
        return launch(
            _query_spec(query, config, stored, quiet=quiet),
            folder=Path(scratch) / "launch",
            workers=config.workers,
            advice="try again",
            function=f"{__name__}:run_query_spec",
        )


def run_query_as_rank(
    env: LaunchEnv, query: Query, store: Callable[[], Graph], *, quiet: bool, show: Callable[[dict[str, Any]], None]
) -> NoReturn:
    """Run a query as one of the ranks that torchrun started and end the process.

    The first rank opens the store and calls ``show``. The others find store and run under the same paths.
    """

    def work(world: World, rendezvous: Rendezvous) -> None:
        def prepare() -> RunSpec:
            config = _resolve_query(query, env.size)
            graph = store()
            _check_columns(RunDirectory(Path(query.run)), config, graph)
            return _query_spec(query, config, graph, quiet=quiet, in_subprocess=True)

        def model_files() -> frozenset[Path]:
            file = RunDirectory(Path(query.run)).config().model.file
            return frozenset() if file is None else frozenset({file})

        answer = run_query_spec(broadcast_spec(world, rendezvous, prepare, model_files), world)
        if world.is_first:
            show(answer)

    run_rank(env, work, print_errors=True)


def run_query_spec(spec: RunSpec, world: World) -> dict[str, Any]:
    """Collective. Run a query on the part of this rank; the first rank has the whole answer."""
    assert spec.question is not None
    query, config = Query(**spec.question), resolve(spec.config)
    directory = RunDirectory(Path(query.run), seed=config.seed)
    with annotate_model_errors(config.model.file):
        with make_progress(spec.quiet or not world.is_first) as progress:
            graph, part = open_same_store(spec, world), Path(spec.store) / spec.partition
            output = OutputSchema.from_json(spec.output) if spec.output is not None else None
            context = with_placement(RankContext(world, progress=progress), config, part)
            built = _build(graph, config, output, context, query.split)
        uncounted = world.uncounted()
        state, position, name = _weights(directory, query.checkpoint) if world.is_first else ({}, TrainState(), "")
        message = broadcast_json(uncounted, {"position": asdict(position), "name": name})
        position, name = TrainState(**message["position"]), message["name"]
        # Rank 0 sends the shared weights; each rank reads the rows it owns.
        state = broadcast_state(uncounted, state if world.is_first else None)
        state |= load_sharded(directory.checkpoint(name), rank=world.rank, ids=embedding_ids(built.strategy.model))
        _load_state(built, state, query.run, name)
        answer = _answer(built, query, name, position)
        built.strategy.close()
    return answer


def open_trained_run(
    path: Path,
    graph: Graph,
    *,
    checkpoint: str = "best",
    split: str | None = None,
    memory: str | int | None = None,
    quiet: bool = True,
) -> tuple[BuiltRun, TrainState, str]:
    """(a trained run in this process, its position, the name of its checkpoint); raises RunError.

    ``split`` is the one to evaluate; predictions need none. ``memory`` replaces the setting of the run.
    """
    config = _resolve_query(Query(run=str(path), memory=memory), workers=1)
    directory = RunDirectory(path, seed=config.seed)
    state, position, name = _weights(directory, checkpoint, sharded=True)
    with make_progress(quiet) as progress:
        built = _build(graph, config, _output_schema(directory, config), RankContext(progress=progress), split)
    _load_state(built, state, str(path), name)
    return built, position, name


def read_finished_run(graph: Graph, config: RunConfig, directory: RunDirectory) -> Callable[[], BuiltRun]:
    """Read the best weights of a run that has just finished; the result builds it in this process."""
    output, (state, _, _) = _output_schema(directory, config), _weights(directory, "best", sharded=True)

    def reopen() -> BuiltRun:
        built = _build(graph, _with_workers(config, 1), output, RankContext())
        built.strategy.load_state_dict(state)
        return built

    return reopen


def rebuild_on(graph: Graph, config: RunConfig, trained: BuiltRun) -> BuiltRun:
    """A trained node run with its weights on another graph, whose nodes need neither labels nor a split."""
    if trained.output is None:
        raise ConfigError("runs on links and events predict on their own graph only")
    output = trained.output if _reads_edge_features(config) else replace(trained.output, edge_columns={})
    built = _build(graph, _with_workers(config, 1), output, RankContext())
    built.strategy.load_state_dict({"model": trained.strategy.state_dict()["model"]})
    return built


def _resolve_query(query: Query, workers: int | None) -> RunConfig:
    """The config that a query runs with; raises ConfigError for impossible workers or output."""
    directory = RunDirectory(Path(query.run))
    config = directory.config()
    if query.memory is not None:
        config = resolve({**config.model_dump(mode="json"), "memory": query.memory, "evaluation_memory": query.memory})
    directory.check_model_file()
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers is a number from 1, found {workers}")
    if config.spec.input == "events":
        if workers is not None and workers > 1:
            raise ConfigError(
                f"an event stream is evaluated in order, by one process; found {workers}: use --workers 1, not torchrun"
            )
        workers = 1
    if query.output is not None:
        check_output(Path(query.output))
    return _with_workers(config, workers or config.workers)


def _with_workers(config: RunConfig, workers: int) -> RunConfig:
    strategy, method = inference_config(config.strategy, workers), config.partition if workers > 1 else None
    return config.model_copy(update={"strategy": strategy, "workers": workers, "partition": method})


def _output_schema(directory: RunDirectory, config: RunConfig) -> OutputSchema | None:
    """The output schema of a node run; without names of edge features if the model does not read them."""
    if config.task != "node":
        return None
    output = directory.output()
    return output if _reads_edge_features(config) else replace(output, edge_columns={})


def _reads_edge_features(config: RunConfig) -> bool:
    """True if the model may read edge features; a custom model is assumed to."""
    model = config.model
    return model.uses_edge_features


def _check_columns(directory: RunDirectory, config: RunConfig, graph: Graph) -> None:
    """Refuse feature columns with other names, or in another order, than a run on links or events was trained on.

    Such a run saves no output schema: the names are those of its own store, as long as that exists.
    """
    saved = directory.info()["store"]
    if config.task == "node" or saved is None or (graph.store is not None and graph.store.digest == saved["digest"]):
        return
    try:
        trained = open_store(saved["path"])
    except StoreError:
        return
    assert trained.store is not None
    if trained.store.digest != saved["digest"]:
        return
    columns = {str(kind): nodes.columns for kind, nodes in graph.nodes.items()}
    columns |= {str(kind): edges.columns for kind, edges in graph.edges.items()}
    before = {kind: ("--features", nodes.columns) for kind, nodes in trained.nodes.items()}
    if _reads_edge_features(config):
        before |= {str(kind): ("--edge-features", edges.columns) for kind, edges in trained.edges.items()}
    for kind, (option, trained_columns) in before.items():
        if kind in columns and column_order(trained_columns, columns[kind], f" of {kind}") is not None:
            raise RunError(
                f"feature columns of {kind} are in another order than those of the run: import them again, with "
                f"{option} naming them in the order of {saved['path']}"
            )


def _query_spec(query: Query, config: RunConfig, graph: Graph, *, quiet: bool, in_subprocess: bool = False) -> RunSpec:
    """The spec of a query for ranks. The graph is partitioned if it is not yet, if required in another process."""
    directory = RunDirectory(Path(query.run), seed=config.seed)
    output = _output_schema(directory, config)
    if output is not None and output.adapt(graph) is not graph:
        assert graph.store is not None
        raise RunError(
            f"{graph.store.path} has features or edge types in another order than the run, or no edges yet: leave "
            "torchrun out, or import it with all of them in the order of the run"
        )
    partition = prepare_placement(graph, config, quiet=quiet, in_subprocess=in_subprocess)
    schema = None if output is None else output.as_json()
    return RunSpec.of(graph, config, directory.path, partition, quiet=quiet, question=asdict(query), output=schema)


def _build(
    graph: Graph, config: RunConfig, output: OutputSchema | None, context: RankContext, split: str | None = None
) -> BuiltRun:
    if config.spec.input == "events":
        return build(graph, config, context=context)
    if output is not None:
        return rebuild(graph, config, output, split=split, context=context)
    if split == "all":
        raise ConfigError("links are evaluated on train, val or test, found --split all")
    return rebuild_links(graph, config, context=context)


def _weights(directory: RunDirectory, checkpoint: str, *, sharded: bool = False) -> tuple[State, TrainState, str]:
    """(weights, position, name) of a checkpoint; without a best one, as in runs without val nodes, of the last.

    With ``sharded`` the rows that ranks own are included.
    """
    load = directory.load_weights if sharded else directory.load
    for name in ("best", "last") if checkpoint == "best" else (checkpoint,):
        loaded = load(name)
        if loaded is not None:
            return {"model": loaded[0]["model"]}, loaded[1], name
    raise RunError(f"{directory.path} has no checkpoint {checkpoint}: train it first, or continue with --resume")


def _load_state(built: BuiltRun, state: State, run: str, name: str) -> None:
    try:
        built.strategy.load_state_dict(state)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise RunError(f"checkpoint {name} of {run} does not fit this store: {reason}") from error


def _answer(built: BuiltRun, query: Query, name: str, position: TrainState) -> dict[str, Any]:
    answer = {"run": query.run, "checkpoint": name, "epoch": position.epoch}
    with annotate_model_errors(built.model_file):
        if query.split is not None:
            metrics = built.strategy.evaluate("test" if query.split == "all" else query.split)
            count, loss, metric = int(metrics.pop("count")), metrics.pop("loss"), built.task.metric
            report = {PER_CLASS: named_report(built, metrics.pop(PER_CLASS))} if PER_CLASS in metrics else {}
            answer |= {"split": query.split, "name": metric, "value": metrics[metric], "loss": loss}
            return {**answer, built.unit: count, "metrics": metrics, **report}
        assert query.output is not None
        path = Path(query.output)
        if query.events is not None:
            rows = write_event_scores(built, Path(query.events), path)
        elif isinstance(built.task, EventTask):
            raise ConfigError("this run predicts events: name a table of them with --events")
        elif query.pairs is not None:
            rows = write_scores(built, Path(query.pairs), path, relation=query.relation)
        else:
            rows = write_predictions(built, path, logits=query.logits, embeddings=query.embeddings)
    return {**answer, "output": query.output, "rows": rows}
