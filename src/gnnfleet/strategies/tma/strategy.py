"""The coordinator's strategy: a round is an epoch of one step; evaluation is exact, while trainers train.

The coordinator closes rounds in a thread; the training loop takes them one by one, evaluates and writes checkpoints.
Without a message store, as for predictions of a trained run, this is strategy ``local``.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.sampling.batches import count_batches
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.ops.draws import Draws, Purpose
from gnnfleet.report.phase_timer import PHASES, WAIT
from gnnfleet.strategies.job import Job
from gnnfleet.strategies.protocol import NodePredictor, NodeStrategy, Prediction, Reporting, State, StepRecord, Strategy
from gnnfleet.strategies.registry import build_strategy, make_config
from gnnfleet.strategies.tma.averaging import FlatLayout
from gnnfleet.strategies.tma.config import TmaConfig
from gnnfleet.strategies.tma.coordinator import Coordinator, Correction, EmbeddingTable, ModelSnapshot, RoundStats
from gnnfleet.strategies.tma.protocol import RunMessages
from gnnfleet.tasks.base import RowLookup, Scores
from gnnfleet.tasks.link import LinkTask

CORRECTION = "correction/"
"""Prefix of tensors in a checkpoint, beside weights."""


class TmaStrategy(Reporting):
    """Evaluation and corrections use strategies ``local`` on the whole graph."""

    def __init__(self, config: TmaConfig, job: Job) -> None:
        self.model = job.model
        self._config, self._job = config, job
        evaluator = build_strategy(make_config({"name": "local", "cache_inputs": False, "order": "store"}), job)
        assert isinstance(evaluator, NodePredictor)
        self._evaluator: NodeStrategy = evaluator
        self._corrector = self._build_corrector()
        self._tables = _embedding_types(job)
        self._layout = FlatLayout.of_model(self.model, job.dtype, without=self._tables)
        self._correction_state: dict[str, Tensor] = {}
        self._coordinator: Coordinator | None = None
        self._correction: Correction | None = None
        self._round: RoundStats | None = None
        zeros: dict[str, float] = dict.fromkeys(("bytes_sent", "rounds", *PHASES), 0)
        self._reports = [dict(zeros) for _ in range(job.workers)]
        if config.remote_negatives and config.full:
            raise ConfigError("strategy.remote_negatives needs sampled blocks: leave out strategy.full")
        if config.remote_negatives and not isinstance(job.task, LinkTask):
            raise ConfigError("strategy.remote_negatives adds negative links: leave it out, or use --task link")

    def _build_corrector(self) -> Strategy | None:
        """The strategy that trains a copy of the model on the whole graph between rounds."""
        config, job = self._config, self._job
        if not config.correction_steps or job.context.message_store is None:
            return None
        model = copy.deepcopy(job.model)
        task = replace(job.task, decoder=model.decoder) if isinstance(job.task, LinkTask) else job.task  # type: ignore[arg-type]
        train = job.train.model_copy(update={"lr": config.correction_lr or job.train.lr})
        local = make_config(config.local_settings(model.num_layers))
        return build_strategy(local, replace(job, model=model, task=task, train=train))

    def set_learning_rate(self, lr: float) -> None:
        """Nothing: trainers know the rate of each round."""

    def train_epoch(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        if self._coordinator is None:
            self._coordinator = self._make_coordinator(epoch).start()
        with self._job.world.clock.phase(WAIT, "round"):
            stats, snapshot = self._coordinator.wait_round()
        assert stats.round == epoch, "rounds arrive in order"
        self._record_round(stats)
        self._load(snapshot)
        yield StepRecord(epoch, 0, stats.loss, stats.count, stats.seconds, steps=stats.steps)

    def epoch_metrics(self) -> dict[str, float]:
        stats = self._round
        if stats is None:
            return {}
        return {
            "trainers": len(stats.trainers),
            "steps": stats.steps,
            "round_seconds": stats.seconds,
            "kept_edges": stats.edges / max(self._job.graph.num_edges, 1),
            "megabytes_up": stats.upload_bytes / 1e6,
            "megabytes_down": stats.download_bytes * len(stats.trainers) / 1e6,
            "megabytes_beside": stats.side_bytes / 1e6,
        }

    def _record_round(self, stats: RoundStats) -> None:
        """Count the messages of a round: weights to each trainer, updates from each trainer."""
        self._round = stats
        for i in stats.trainers:
            self._job.world.traffic.add_bytes(stats.download_bytes, to=i + 1)
        self._job.world.traffic.add_round()
        for i, report in stats.reports.items():
            total = self._reports[i]
            total |= {**report, **{key: total[key] + report.get(key, 0) for key in ("bytes_sent", *PHASES)}}
            total["rounds"] += 1

    @property
    def external_workers(self) -> list[dict[str, float]]:
        return self._reports

    @property
    def has_newer_weights(self) -> bool:
        if self._coordinator is None or self._round is None or self._config.steps:
            return False
        return self._coordinator.newest_round > self._round.round

    def evaluate(self, split: str) -> Scores:
        return self._evaluator.evaluate(split)

    def predict(self, *, embeddings: bool = False) -> Prediction:
        return self._evaluator.predict(embeddings=embeddings)

    def predict_nodes(self, ids: Tensor, *, embeddings: bool = False) -> Prediction:
        return self._evaluator.predict_nodes(ids, embeddings=embeddings)

    def exact_lookup(self) -> RowLookup:
        return self._evaluator.exact_lookup()

    def state_dict(self) -> State:
        return {
            "model": self._evaluator.state_dict()["model"],
            "optimizer": {CORRECTION + name: tensor for name, tensor in self._correction_state.items()},
        }

    def load_state_dict(self, state: State) -> None:
        self._evaluator.load_state_dict({"model": state["model"]})
        if "optimizer" in state:
            saved = state["optimizer"]
            self._correction_state = {
                name.removeprefix(CORRECTION): tensor for name, tensor in saved.items() if name.startswith(CORRECTION)
            }

    def close(self) -> None:
        is_idle = self._coordinator is None or self._coordinator.close()
        self._evaluator.close()
        if self._correction is not None and is_idle:
            self._correction.close()
        if self._corrector is not None and is_idle:
            self._corrector.close()

    def _make_coordinator(self, first: int) -> Coordinator:
        job, config = self._job, self._config
        store, assignment = job.context.message_store, job.context.assignment
        if store is None or assignment is None:
            raise ConfigError("strategy tma trains with a coordinator and trainers: use gnnfleet train or gf.train")
        state = self.model.state_dict()
        self._correction = None if self._corrector is None else self._make_correction(self._corrector, first)
        return Coordinator(
            config=config,
            trainers=job.workers,
            messages=RunMessages(store).reconnect(retry_seconds=config.give_up),
            layout=self._layout,
            weights=self._layout.pack(state),
            first=first,
            last=job.train.epochs,
            assignment=assignment,
            tables={name: EmbeddingTable(kind, state[name].detach().clone()) for name, kind in self._tables.items()},
            correction=self._correction,
            remote_rows=self._remote_rows if config.remote_negatives else None,
            log_user=job.log_user,
        )

    def _load(self, snapshot: ModelSnapshot) -> None:
        self._correction_state = dict(snapshot.correction)
        weights = self._layout.unpack(snapshot.weights)
        self._evaluator.load_state_dict({"model": {**self.model.state_dict(), **weights, **snapshot.rows}})

    def _make_correction(self, strategy: Strategy, rounds: int) -> Correction:
        """Resume the correction after a number of rounds."""
        steps = self._config.correction_steps
        epoch, first = 0, rounds * steps
        while first >= (count := self._batches(epoch)):
            epoch, first = epoch + 1, first - count
        if self._correction_state:
            strategy.load_state_dict({**strategy.state_dict(), "optimizer": self._correction_state})
        return Correction(strategy, self._layout, steps, (epoch, first))

    def _batches(self, epoch: int) -> int:
        """Count the steps of an epoch on the whole graph."""
        items = self._job.task.train_items(self._job.seed, epoch)
        return max(1, count_batches(len(items), self._config.batch))

    def _remote_rows(self, number: int, tables: Mapping[str, EmbeddingTable]) -> Tensor:
        """[G, ·] features and embedding rows of random nodes of the target type, drawn for every round."""
        job, kind = self._job, self._job.task.target
        count = job.graph.nodes[kind].count
        ids = (Draws(job.seed, Purpose.REMOTE, epoch=number).uniforms(self._config.remote_negatives) * count).long()
        x = job.graph.nodes[kind].x
        columns = [] if x is None else [x[ids].to(self._layout.dtype)]
        columns += [table.rows[ids] for table in tables.values() if table.kind == kind]
        return torch.cat(columns, 1) if columns else torch.empty(len(ids), 0)


def _embedding_types(job: Job) -> dict[str, str]:
    """{name of an embedding: type of its nodes}; raises ConfigError for an embedding without a type."""
    types, kinds = {}, list(job.graph.nodes)
    for name, module in job.model.named_modules():
        if not isinstance(module, NodeEmbedding):
            continue
        if module.kind not in kinds and len(kinds) > 1:
            raise ConfigError(
                f"the embedding {name!r} has the node type {module.kind!r}, and strategy tma needs one of "
                f"{', '.join(kinds)}: write NodeEmbedding(…, kind={kinds[0]!r})"
            )
        types[f"{name}.weight"] = module.kind if module.kind in kinds else kinds[0]
    return types
