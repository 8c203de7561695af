"""The coordinator: a round is a step; evaluation is exact, on the whole graph, while trainers go on.

The desk closes rounds in a thread of its own; here they are taken up one by one, evaluated, and kept as checkpoints by
the loop. Without a post, as when a trained run is asked something, this is ``local``.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError, RunError
from gnnfleet.graph.sampling.batches import count_batches
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.ops.draws import Draws, Purpose
from gnnfleet.report.phase_timer import PHASES, WAIT
from gnnfleet.strategies.job import PRECISIONS, Job
from gnnfleet.strategies.protocol import Prediction, State, StepRecord, Strategy
from gnnfleet.strategies.tma.averaging import FlatLayout, OuterOptimizer
from gnnfleet.strategies.tma.config import TmaConfig
from gnnfleet.strategies.tma.coordinator import Coordinator, EmbeddingTable, RoundResult
from gnnfleet.tasks.base import RowLookup
from gnnfleet.tasks.link import LinkTask

VELOCITY, MOMENTS, CORRECTION = "outer/velocity", "average/moments", "correction/"
"""Names, or their beginnings, of what a checkpoint has beside weights."""


class TmaStrategy:
    """``whole`` evaluates the model on the whole graph; ``correcting`` makes a strategy that trains a copy of it."""

    def __init__(self, config: TmaConfig, job: Job, whole: Strategy, correcting: Strategy | None) -> None:
        self.model = job.model
        self._config, self._job, self._evaluator, self._make_correction = config, job, whole, correcting
        self._tables = _tables(job)
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        dtype = PRECISIONS[job.precision]
        self._layout = FlatLayout.of(self.model.state_dict(), dtype, without=tuple(self._tables), parameters=names)
        self._velocity: Tensor | None = None
        self._correction_memory: dict[str, Tensor] = {}
        self._moments: Tensor | None = None
        self._coordinator: Coordinator | None = None
        self._corrects: _Correction | None = None
        self._closed: RoundResult | None = None
        begun: dict[str, float] = dict.fromkeys(("bytes_sent", "rounds", *PHASES), 0)
        self._told = [dict(begun) for _ in range(job.workers)]
        if config.remote_negatives and config.full:
            raise ConfigError("strategy.remote_negatives needs sampled blocks: leave out strategy.full")
        if config.repartition_every and job.assignment is not None and not job.assignment.can_reassign(job.workers):
            raise ConfigError(
                "strategy.repartition_every would deal the same parts again: use strategy.scheme=super or random"
            )
        if config.remote_negatives and not isinstance(job.task, LinkTask):
            raise ConfigError(
                "strategy.remote_negatives gives more negatives for links: leave it out, or use --task link"
            )

    def train_epoch(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        if self._coordinator is None:
            self._coordinator = self._open(epoch)
        with self._job.world.clock.phase(WAIT, "round"):
            closed = self._coordinator.wait_round()
        assert closed.round == epoch, "rounds come one after the other"
        self._closed, self._velocity = closed, closed.velocity
        self._correction_memory, self._moments = dict(closed.correction), closed.optimizer
        self._record_round(closed)
        self._load(closed.weights, closed.rows)
        yield StepRecord(epoch, 0, closed.loss, closed.count, closed.seconds, steps=closed.steps)

    def artifacts(self) -> dict[str, str]:
        return {}

    def epoch_metrics(self) -> dict[str, float]:
        closed = self._closed
        if closed is None:
            return {}
        return {
            "trainers": len(closed.trainers),
            "steps": closed.steps,
            "round_seconds": closed.seconds,
            "kept_edges": closed.bytes_kept / max(self._job.graph.num_edges, 1),
            "megabytes_up": closed.up / 1e6,
            "megabytes_down": closed.down * len(closed.trainers) / 1e6,
            "megabytes_beside": closed.external_workers / 1e6,
        }

    def _record_round(self, closed: RoundResult) -> None:
        """Count what travelled: down from here, up from each trainer."""
        for i in closed.trainers:
            self._job.world.traffic.add_bytes(closed.down, to=i + 1)
        self._job.world.traffic.add_round()
        for i, gave in closed.contributors.items():
            told = self._told[i]
            told |= {**gave, **{word: told[word] + gave.get(word, 0) for word in ("bytes_sent", *PHASES)}}
            told["rounds"] += 1

    @property
    def external_workers(self) -> list[dict[str, float]]:
        return self._told

    @property
    def has_newer_weights(self) -> bool:
        return bool(
            self._coordinator
            and self._closed
            and not self._config.steps
            and self._coordinator.newest > self._closed.round
        )

    def evaluate(self, split: str) -> dict[str, float]:
        return self._evaluator.evaluate(split)

    def validate(self) -> dict[str, float]:
        return self.evaluate("val")

    def predict(self, *, embeddings: bool = False) -> Prediction:
        return self._evaluator.predict(embeddings=embeddings)

    def predict_nodes(self, ids: Tensor, *, embeddings: bool = False) -> Prediction:
        return self._evaluator.predict_nodes(ids, embeddings=embeddings)

    def exact_lookup(self) -> RowLookup:
        return self._evaluator.exact_lookup()

    def state_dict(self) -> State:
        return {
            "model": self._evaluator.state_dict()["model"],
            "optimizer": {
                **({} if self._velocity is None else {VELOCITY: self._velocity}),
                **({} if self._moments is None else {MOMENTS: self._moments}),
                **{CORRECTION + name: tensor for name, tensor in self._correction_memory.items()},
            },
        }

    def load_state_dict(self, state: State) -> None:
        self._evaluator.load_state_dict({"model": state["model"]})
        if "optimizer" in state:
            kept = state["optimizer"]
            self._velocity, self._moments = kept.get(VELOCITY), kept.get(MOMENTS)
            self._correction_memory = {
                name.removeprefix(CORRECTION): tensor for name, tensor in kept.items() if name.startswith(CORRECTION)
            }

    def close(self) -> None:
        idle = self._coordinator is None or self._coordinator.close()
        self._evaluator.close()
        if self._corrects is not None and idle:
            self._corrects.close()
        if self._make_correction is not None and idle:
            self._make_correction.close()

    def _open(self, first: int) -> Coordinator:
        job, config = self._job, self._config
        if job.message_store is None or job.assignment is None:
            raise ConfigError("tma trains with a coordinator and trainers, found none: use gnnfleet train or gf.train")
        state = self.model.state_dict()
        self._corrects = None if self._make_correction is None else self._correction(self._make_correction, first)
        return Coordinator(
            config=config,
            trainers=job.workers,
            store=job.message_store.reconnect(connect_timeout=config.give_up),
            layout=self._layout,
            weights=self._layout.pack(state),
            first=first,
            last=job.train.epochs,
            assignment=job.assignment,
            outer=OuterOptimizer(config.momentum, self._velocity),
            optimizer=self._moments,
            tables={name: EmbeddingTable(kind, state[name].detach().clone()) for name, kind in self._tables.items()},
            correction=self._corrects,
            remote_rows=self._remote if config.remote_negatives else None,
            log_user=job.log_user,
        )

    def _load(self, weights: Tensor, rows: Any) -> None:
        self._evaluator.load_state_dict({"model": {**self.model.state_dict(), **self._layout.unpack(weights), **rows}})

    def _correction(self, strategy: Strategy, rounds: int) -> _Correction:
        """That goes on after so many rounds."""
        steps = self._config.correction_steps
        epoch, first = 0, rounds * steps
        while first >= (count := self._batches(epoch)):
            epoch, first = epoch + 1, first - count
        if self._correction_memory:
            strategy.load_state_dict({**strategy.state_dict(), "optimizer": self._correction_memory})
        return _Correction(strategy, self._layout, steps, (epoch, first))

    def _batches(self, epoch: int) -> int:
        """Steps of an epoch on the whole graph."""
        items = self._job.task.train_items(self._job.seed, epoch)
        return max(1, count_batches(len(items), self._config.batch))

    def _remote(self, number: int, tables: Mapping[str, EmbeddingTable]) -> Tensor:
        """[G, ·] features and learnt rows of some nodes of the target's type, others in every round."""
        job, kind = self._job, self._job.task.target
        count = job.graph.nodes[kind].count
        ids = (Draws(job.seed, Purpose.REMOTE, epoch=number).uniforms(self._config.remote_negatives) * count).long()
        x = job.graph.nodes[kind].x
        parts = [] if x is None else [x[ids].to(self._layout.dtype)]
        parts += [table.rows[ids] for table in tables.values() if table.kind == kind]
        return torch.cat(parts, 1) if parts else torch.empty(len(ids), 0)


class _Correction:
    """Some steps of a strategy on the whole graph, from given weights on; in the desk's thread, on a model of its own.

    ``start`` is the epoch and the step that come first.
    """

    def __init__(self, strategy: Strategy, layout: FlatLayout, steps: int, start: tuple[int, int]) -> None:
        self._strategy, self._layout, self._steps = strategy, layout, steps
        self._records = self._forever(*start)

    def apply(self, weights: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """What becomes of the weights; learnt rows of nodes are their owners' to change."""
        state = self._strategy.state_dict()
        model = {**state["model"], **self._layout.unpack(weights), **rows}
        self._strategy.load_state_dict({**state, "model": model})
        for record in islice(self._records, self._steps):
            if not math.isfinite(record.loss):
                raise RunError(f"the loss of the correction is {record.loss}: try a smaller strategy.correction_lr")
        return self._layout.pack(self._strategy.state_dict()["model"])

    def close(self) -> None:
        self._records.close()

    def memory(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._strategy.state_dict()["optimizer"].items()}

    def _forever(self, epoch: int, first: int) -> Generator[StepRecord]:
        while True:
            yield from self._strategy.train_epoch(epoch, first)
            epoch, first = epoch + 1, 0


def _tables(job: Job) -> dict[str, str]:
    """{name of a parameter of learnt rows: the type of its nodes}; raises ConfigError where that is not known."""
    found, kinds = {}, list(job.graph.nodes)
    for name, module in job.model.named_modules():
        if not isinstance(module, NodeEmbedding):
            continue
        if module.kind not in kinds and len(kinds) > 1:
            raise ConfigError(
                f"tma deals learnt rows by node type: write NodeEmbedding(…, kind={kinds[0]!r}) for {name!r}, found "
                f"{module.kind!r}; there are {', '.join(kinds)}"
            )
        found[f"{name}.weight"] = module.kind if module.kind in kinds else kinds[0]
    return found
