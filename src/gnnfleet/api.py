"""``gf.train`` and ``gf.load_run``: train with keyword arguments, and use finished runs.

>>> record = gf.train(graph, model=gf.nn.SAGE(hidden=256, layers=3), epochs=100, lr=0.01, seed=0)
>>> record.metrics["test"], record.model, record.predict(["alice", "bob"])
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.config.keyword_syntax import keyword_syntax
from gnnfleet.config.resolve import named_group, overlay, read_toml, unflatten
from gnnfleet.config.schema import RunConfig, SettingsTree
from gnnfleet.config.suggest import suggest_setting
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.ingest.pyg import from_pyg
from gnnfleet.graph.store import open_store
from gnnfleet.inference.predict import END_COLUMNS, class_names, score_events
from gnnfleet.inference.query import open_trained_run, rebuild_on
from gnnfleet.nn.config import LIVE, ModelConfig
from gnnfleet.nn.custom_model import live_modules
from gnnfleet.nn.interop import save_model
from gnnfleet.nn.pyg.module import PygModule
from gnnfleet.report.remarks import rewrite
from gnnfleet.report.run_record import RunRecord
from gnnfleet.session.prepare import RunLocation
from gnnfleet.session.training import TrainingResult, run_training
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.registry import AUTO, find_spec, strategy_options
from gnnfleet.tasks.event import EventTask
from gnnfleet.tasks.link import LinkTask
from gnnfleet.tasks.node import NodeTask
from gnnfleet.tasks.train_options import TrainConfig
from gnnfleet.training.build import BuiltRun
from gnnfleet.training.build_link import score_pairs
from gnnfleet.training.run_dir import RunDirectory

NodeSelection = Sequence[int] | Sequence[str] | Tensor | np.ndarray[Any, Any] | Any
"""Original ids, a mask of all nodes, None for all; or all nodes of another graph: a gf.Graph, a store, a Data."""


class Record:
    """A finished run: its metrics, its model with the best weights, predictions by original id."""

    def __init__(self, result: TrainingResult, graph: Graph, module: torch.nn.Module | None = None) -> None:
        self.graph = graph
        self.summary: RunRecord = result.record
        self.config: RunConfig = result.config
        self.stopped_early: bool = result.record.epochs < result.config.train.epochs
        self._reopen = result.reopen
        self._module = module  # keeps a live module registered

    def __repr__(self) -> str:
        s = self.summary
        return f"Record({s.strategy}, {s.model}, epochs={s.epochs}, {s.metrics['name']} test={s.metrics['test']})"

    @cached_property
    def _built(self) -> BuiltRun:
        return self._reopen()

    @property
    def metrics(self) -> Mapping[str, Any]:
        """train_loss, val, test, name, best_epoch."""
        return self.summary.metrics

    @property
    def model(self) -> torch.nn.Module:
        """The model with the best weights, in evaluation mode; also called as ``model(x, edge_index)``."""
        return self._built.strategy.model.eval()

    def save_model(self, path: str | Path) -> None:
        """Write the model to a safetensors file, for ``gf.nn.load_model``."""
        with keyword_syntax():
            save_model(self.model, path)

    @property
    def run_dir(self) -> str | None:
        return self.summary.run_dir

    def predict(self, nodes: NodeSelection = None) -> list[Any]:
        """The class of each node (by default of all): its name, or its number if classes have no names.

        For multi-label data a list of classes per node. Raises InputError for an unknown id.
        """
        task = self._built.task
        if isinstance(task, EventTask):
            raise ConfigError("this run predicts events: use record.score(events)")
        if not isinstance(task, NodeTask):
            raise ConfigError("this run predicts links: use record.score(pairs) or record.embeddings(ids)")
        return class_names(task.head, self._built.nodes, self.logits(nodes))

    def score(self, pairs: Sequence[tuple[Any, ...]], relation: str = "") -> Tensor:
        """[n] probability of a link for each pair of ids (source, destination), from a run with ``task="link"``.

        An event run scores (source, destination, time, features …) in the order of time, as [n], or [n, C] for classes.
        It adds them to its stream, so events of the next call must be later.
        """
        task = self._built.task
        if isinstance(task, EventTask):
            if not pairs:
                return torch.empty(0)
            names = [*END_COLUMNS, "time", *(f"f{index}" for index in range(len(pairs[0]) - 3))]
            columns = map(list, zip(*pairs, strict=True))
            return score_events(self._built, pa.table(dict(zip(names, columns, strict=True))))
        if not isinstance(task, LinkTask):
            raise ConfigError("this run classifies nodes: pairs are scored by a run with task='link'")
        return score_pairs(self._built.node_predictor, task, pairs, relation)

    def logits(self, nodes: NodeSelection = None) -> Tensor:
        """[n, C]."""
        return self._predict_rows(nodes, embeddings=False)

    def embeddings(self, nodes: NodeSelection = None) -> Tensor:
        """[n, hidden] input of the last layer, or for a link run of its decoder."""
        return self._predict_rows(nodes, embeddings=not isinstance(self._built.task, LinkTask))

    def _predict_rows(self, nodes: NodeSelection, *, embeddings: bool) -> Tensor:
        built = self._built
        if isinstance(nodes, str | Path) or _is_graph(nodes):
            built, nodes = rebuild_on(_as_graph(nodes), self.config, built), None
        prediction = built.node_predictor.predict(embeddings=embeddings)
        rows = prediction.embeddings if embeddings else prediction.logits
        assert rows is not None
        return rows if nodes is None else rows[built.nodes.ids.rows(nodes)]


@keyword_syntax()
def train(
    graph: Any,
    *,
    strategy: str | Mapping[str, Any] | StrategyConfig | None = None,
    model: str | Mapping[str, Any] | ModelConfig | torch.nn.Module | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    max_restarts: int = 0,
    **settings: Any,
) -> Record:
    """Train a model and return its record.

    ``graph`` is a gf.Graph, the path of a store, or a torch_geometric Data or HeteroData. ``model`` is a name, settings
    such as gf.nn.SAGE(hidden=64), or a module: any of torch_geometric, or a gf.nn.Model. A copy of the module is
    trained, from its present weights; ``record.model`` has the result. Runs of modules cannot be resumed.

    ``settings`` are options of the run (``seed``, ``split``, ``precision``, ``workers``), of the group train
    (``epochs``, ``lr``, ``patience``, …) or of the strategy, in this order of precedence. Any other goes by its full
    name, as in ``**{"report.memory": True}`` or ``**{"strategy.optimizer": "reset"}``. They override ``config``.

    ``strategy`` is local by default. ``strategy="auto"`` plans first and trains with the fastest that fits ``memory``.
    Files are written only if ``run_dir`` is given. ``workers`` processes are started on this machine, and restarted up
    to ``max_restarts`` times after a failure. ``quiet`` hides progress and notes; notes are records of the logger
    gnnfleet, and printed if the program has not configured logging.
    """
    env = LaunchEnv.from_environment()
    if env is not None and env.size > 1:
        raise ConfigError(
            "gf.train starts its own workers (workers=N): run the script without torchrun, or torchrun … -m gnnfleet "
            "train STORE for ranks of several machines"
        )
    if resume and run_dir is None:
        raise ConfigError("resume needs run_dir, the directory of the run to resume")
    module = model.module if isinstance(model, PygModule) else model if isinstance(model, torch.nn.Module) else None
    if module is not None:
        if resume:
            raise ConfigError("runs do not save modules, so this one cannot be resumed: use model='file.py:factory'")
        model = f"{LIVE}{type(module).__name__}:{id(module)}"
        live_modules[model] = module
    graph = _as_graph(graph)
    base = {} if config is None else config if isinstance(config, Mapping) else read_toml(Path(config))
    groups: SettingsTree = {} if strategy is None else {"strategy": _as_settings(strategy)}
    if model is not None:
        groups["model"] = {"name": model} if isinstance(model, str) else _as_settings(model)
    tree = overlay(base, groups)
    tree = overlay(tree, group_settings(settings, tree.get("strategy", {})))
    location = RunLocation(None if run_dir is None else Path(run_dir), resume=resume)
    result = run_training(graph, tree, location=location, quiet=quiet, restarts=max_restarts)
    for reason in result.record.lost:
        warnings.warn(f"the run continued without a trainer: {reason}", RuntimeWarning, stacklevel=3)
    if result.record.failure:
        warnings.warn(rewrite.get()(result.record.failure), RuntimeWarning, stacklevel=3)
    return Record(result, graph, module)


@keyword_syntax()
def load_run(run_dir: str | Path = "runs/last", store: Any = None) -> Record:
    """Open a finished run, with its best weights, on the store it was trained on, or on another store or graph.

    Raises RunError for a run that has not finished, is of version 0.1.0, trained a module, or lost its store.
    """
    directory = RunDirectory(Path(run_dir))
    config, record = directory.config(), directory.record()
    graph = directory.open_graph() if store is None else _as_graph(store)
    built = open_trained_run(directory.path, graph)[0]
    return Record(TrainingResult(record, config, lambda: built), graph)


def group_settings(settings: Mapping[str, Any], strategy: Any) -> SettingsTree:
    """Sort keyword arguments into their groups; raises ConfigError with the nearest name for an unknown one."""
    name = str(named_group("strategy", strategy).get("name", "local"))
    options = strategy_options(name)
    by_full_name = {}
    for key, value in settings.items():
        if "." in key or key in RunConfig.model_fields:
            by_full_name[key] = _as_settings(value)
        elif key in TrainConfig.model_fields:
            by_full_name[f"train.{key}"] = value
        elif key in options:
            by_full_name[f"strategy.{key}"] = value
        else:
            raise ConfigError(
                f"no setting {key!r}: {suggest_setting(key, find_spec('local' if name == AUTO else name))}"
            )
    return unflatten(by_full_name)


def _is_graph(value: Any) -> bool:
    return isinstance(value, Graph) or hasattr(value, "edge_index") or hasattr(value, "edge_types")


def _as_graph(graph: Any) -> Graph:
    if isinstance(graph, Graph):
        return graph
    if isinstance(graph, str | Path):
        return open_store(graph)
    if _is_graph(graph):
        return from_pyg(graph)
    raise ConfigError(
        f"gf.train takes a gf.Graph, the path of a store, or a torch_geometric Data or HeteroData, found "
        f"{type(graph).__name__}"
    )


def _as_settings(value: Any) -> Any:
    return value.model_dump() if isinstance(value, (ModelConfig, StrategyConfig)) else value
