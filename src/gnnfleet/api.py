"""``gf.train``: the words of the command line as keyword arguments, and a record that answers questions.

>>> record = gf.train(graph, model=gf.nn.SAGE(hidden=256, layers=3), epochs=100, lr=0.01, seed=0)
>>> record.metrics["test"], record.model, record.predict(["alice", "bob"])
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.config.resolve import named_group, overlay, read_toml, unflatten
from gnnfleet.config.schema import RunConfig, SettingsTree
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.store import open_store
from gnnfleet.inference.predict import class_names
from gnnfleet.inference.predict_events import score_events
from gnnfleet.nn.config import ModelConfig
from gnnfleet.report.run_record import RunRecord
from gnnfleet.session.prepare import RunLocation
from gnnfleet.session.training import TrainingResult, run_training
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.registry import strategy_options
from gnnfleet.tasks.event import EventTask
from gnnfleet.tasks.link import LinkTask
from gnnfleet.tasks.node import NodeTask
from gnnfleet.tasks.train_options import TrainConfig
from gnnfleet.training.build import BuiltRun
from gnnfleet.training.build_link import score_pairs

NodeSelection = Sequence[int] | Sequence[str] | Tensor | np.ndarray[Any, Any] | None
"""Original ids, or a mask of all nodes."""


class Record:
    """A finished run: its numbers, its model with the best weights, predictions by original id."""

    def __init__(self, trained: TrainingResult) -> None:
        self.summary: RunRecord = trained.record
        self.config: RunConfig = trained.config
        self.stopped_early: bool = trained.stopped_early
        self._trained = trained

    def __repr__(self) -> str:
        s = self.summary
        return f"Record({s.strategy}, {s.model}, epochs={s.epochs}, {s.metrics['name']} test={s.metrics['test']})"

    @property
    def _built(self) -> BuiltRun:
        return self._trained.built

    @property
    def metrics(self) -> Mapping[str, Any]:
        """train_loss, val, test, name, best_epoch."""
        return self.summary.metrics

    @property
    def model(self) -> torch.nn.Module:
        return self._built.strategy.model

    @property
    def run_dir(self) -> str | None:
        return self.summary.run_dir

    def predict(self, ids: NodeSelection = None) -> list[Any]:
        """The class of each id (all nodes without ``ids``): its name, or its number where classes have no names.

        With several labels per node, a list of classes for each id. A mask of all nodes stands for the ids of those
        it names. Raises InputError for an unknown id.
        """
        if isinstance(self._built.task, EventTask):
            raise ConfigError("this run predicts events: use record.score(events)")
        if not isinstance(self._built.task, NodeTask):
            raise ConfigError("this run predicts links: use record.score(pairs) or record.embeddings(ids)")
        return class_names(self._built.task.head, self._built.nodes, self.logits(ids))

    def score(self, pairs: Sequence[tuple[Any, ...]], relation: str = "") -> Tensor:
        """[n]: for each pair of ids (source, destination) the probability of a link; for runs with ``task="link"``.

        A run on events takes (source, destination, time, features …) in the order of time; the state moves on, so the
        next call is about what comes after. Where it classifies events, [n, C].
        """
        if isinstance(self._built.task, EventTask):
            names = ["src", "dst", "time", *(f"f{place}" for place in range(len(pairs[0]) - 3))] if pairs else []
            columns = dict(zip(names, map(list, zip(*pairs, strict=True)), strict=True))
            return score_events(self._built, pa.table(columns)) if pairs else torch.empty(0)
        if not isinstance(self._built.task, LinkTask):
            raise ConfigError("this run classifies nodes: pairs are scored by a run with task='link'")
        return score_pairs(self._built.node_predictor, self._built.task, pairs, relation)

    def logits(self, ids: NodeSelection = None) -> Tensor:
        """[n, C]."""
        return self._rows(self._built.node_predictor.predict().logits, ids)

    def embeddings(self, ids: NodeSelection = None) -> Tensor:
        """[n, hidden]: what the last layer reads; of a run on links, what its decoder reads."""
        if isinstance(self._built.task, LinkTask):
            return self._rows(self._built.node_predictor.predict().logits, ids)
        found = self._built.node_predictor.predict(embeddings=True).embeddings
        assert found is not None
        return self._rows(found, ids)

    def _rows(self, values: Tensor, ids: NodeSelection) -> Tensor:
        return values if ids is None else values[self._built.nodes.ids.rows(ids)]


def train(
    graph: Graph | str | Path,
    *,
    strategy: str | Mapping[str, Any] | StrategyConfig | None = None,
    model: str | Mapping[str, Any] | ModelConfig | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    quiet: bool = True,
    max_restarts: int = 0,
    **settings: Any,
) -> Record:
    """Train a model on a graph or a store and return its record.

    ``settings`` are the words of the config: ``seed``, ``split``, ``precision``, ``workers``; of its group train
    (``epochs``, ``lr``, ``patience``, …) and of the strategy by their own names; any other by its full name, as in
    ``**{"report.memory": True}``. Without ``strategy`` it is the one of ``config``, or local; ``strategy="auto"`` plans
    first and trains what is fastest within ``memory``. Files are written only where ``run_dir`` is given. With
    ``workers`` processes are started on this machine; ``max_restarts`` is how often they may be started again when one
    is lost. A word that another group has too (``split``, ``optimizer``, ``momentum``) means that one's; the strategy's
    goes by its full name, as in ``**{"strategy.momentum": 0.5}``.
    """
    seat = LaunchEnv.from_environment()
    if seat is not None and seat.size > 1:
        raise ConfigError(
            "gf.train starts its own workers (workers=N): run the script without torchrun, or torchrun … -m gnnfleet "
            "train STORE for ranks of several machines"
        )
    if resume and run_dir is None:
        raise ConfigError("resume needs run_dir: the directory of the run to go on with")
    found = graph if isinstance(graph, Graph) else open_store(graph)
    base = {} if config is None else config if isinstance(config, Mapping) else read_toml(Path(config))
    given: SettingsTree = {} if strategy is None else {"strategy": _plain(strategy)}
    if model is not None:
        given["model"] = {"name": model} if isinstance(model, str) else _plain(model)
    words = overlay(base, given)
    words = overlay(words, group_settings(settings, words.get("strategy", {})))
    place = RunLocation(run_dir=None if run_dir is None else Path(run_dir), resume=resume)
    trained = run_training(found, words, place=place, quiet=quiet, restarts=max_restarts)
    for how in trained.record.lost:
        warnings.warn(f"the run went on without a trainer: {how}", RuntimeWarning, stacklevel=2)
    return Record(trained)


def group_settings(settings: Mapping[str, Any], strategy: Any) -> SettingsTree:
    """Keyword arguments in the groups they belong to; raises ConfigError with the nearest word for an unknown one."""
    own = strategy_options(str(named_group("strategy", strategy).get("name", "local")))
    full = {}
    for key, value in settings.items():
        if "." in key or key in RunConfig.model_fields:
            full[key] = _plain(value)
        elif key in TrainConfig.model_fields:
            full[f"train.{key}"] = value
        elif key in own:
            full[f"strategy.{key}"] = value
        else:
            known = [*RunConfig.model_fields, *TrainConfig.model_fields, *own]
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            raise ConfigError(f"no setting {key!r}" + (f": did you mean {close[0]}?" if close else ""))
    return unflatten(full)


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, (ModelConfig, StrategyConfig)) else value
