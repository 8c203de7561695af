"""A run stopped in the middle of an epoch is resumed to the same weights and losses. Early stopping."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.comm.collectives import broadcast_json
from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.strategies.protocol import State, StepRecord
from gnnfleet.training.build import RankContext, build
from gnnfleet.training.checkpoint import TrainState
from gnnfleet.training.loop import LoopConfig, fit
from tests.equivalence.spread import cut_graph, plain_graph
from tests.ranks import RankPool

SETTINGS: dict[str, Any] = {
    "model": {"name": "sage", "hidden": 8, "layers": 2, "dropout": 0.4, "embedding": 3},
    "train": {"lr": 0.02, "epochs": 3, "checkpoint_seconds": 1e-9},
    "seed": 5,
}


class Stop(Exception):
    pass


class Keeper:
    """A sink that keeps copies, and stops the run after a number of them."""

    def __init__(self, saves: int | None = None) -> None:
        self.remaining = saves
        self.saved: dict[str, tuple[State, TrainState]] = {}
        self.within: list[int] = []

    def save(self, name: str, state: State, position: TrainState) -> None:
        copied = {part: {key: t.detach().clone() for key, t in tensors.items()} for part, tensors in state.items()}
        self.saved[name] = copied, position
        if name == "last":
            self.within.append(position.within)
            if self.remaining is not None:
                self.remaining -= 1
                if not self.remaining:
                    raise Stop


def run(
    store: str, strategy: dict[str, Any], keeper: Keeper, context: RankContext, before: Keeper | None = None
) -> Any:
    config = resolve({**SETTINGS, "strategy": strategy})
    built = build(open_store(store), config, context=context)
    start, best = None, None
    if before is not None:
        state, start = before.saved["last"]
        best = before.saved["best"][0] if "best" in before.saved else None
        built.strategy.load_state_dict(state)
    world = context.world.uncounted()
    loop = LoopConfig(
        config.train,
        built.task.metric,
        True,
        save=keeper.save,
        broadcast=lambda message: broadcast_json(world, message),
    )
    position, rows = fit(built.strategy, loop, start=start, best=best)
    state = {key: t.clone() for tensors in built.strategy.state_dict().values() for key, t in tensors.items()}
    return state, [row["train_loss"] for row in rows], position


def resume_after_stops(world: World, store: str, parts: str | None, strategy: dict[str, Any]) -> list[int]:
    context = RankContext(world, None if parts is None else Partition.open(parts).shard(world.rank))
    uninterrupted = Keeper()
    state, losses, position = run(store, strategy, uninterrupted, context)
    for saves in (1, 3, 5):
        first = Keeper(saves)
        with pytest.raises(Stop):
            run(store, strategy, first, context)
        resumed, later_losses, end = run(store, strategy, Keeper(), context, first)
        assert resumed.keys() == state.keys() and all(torch.equal(resumed[key], state[key]) for key in state)
        assert later_losses == losses[-len(later_losses) :] and end.step == position.step and end.within == 0
    return uninterrupted.within


@pytest.mark.parametrize("size", [1, 2])
def test_a_stopped_epoch_is_resumed_bit_for_bit(pool: RankPool, tmp_path: Path, size: int) -> None:
    save_store(plain_graph(), tmp_path / "store")
    sampled = {"fanouts": [3, 2], "batch": 5}
    if size == 1:
        within = resume_after_stops(World(), str(tmp_path / "store"), None, {"name": "local", **sampled})
        assert len(set(within)) > 2, "checkpoints in the middle of epochs"
        one_step = Keeper()
        run(str(tmp_path / "store"), {"name": "local"}, one_step, RankContext())
        assert one_step.within == [0, 0, 0], "an epoch of one step has no middle"
    parts = str(cut_graph(open_store(tmp_path / "store"), size, "random", tmp_path / "parts"))
    strategy = {"name": "macrobatch", "batches_per_fetch": 2, "prefetch": 1, **sampled}
    by_rank = pool.run(size, resume_after_stops, str(tmp_path / "store"), parts, strategy)
    assert all(within == by_rank[0] and len(set(within)) > 2 for within in by_rank)


class ScriptedStrategy:
    """A strategy with given metrics that has newer weights than those of the evaluation in some epochs."""

    def __init__(self, values: list[float], behind: set[int]) -> None:
        self._values, self._behind, self._epoch = values, behind, 0

    def train_epoch(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        self._epoch = epoch + 1
        yield StepRecord(epoch, 0, 1.0, 1, 0.0)

    @property
    def has_newer_weights(self) -> bool:
        return self._epoch in self._behind

    def validate(self) -> dict[str, float]:
        return {"accuracy": self._values[self._epoch - 1], "loss": 1.0}

    def epoch_metrics(self) -> dict[str, float]:
        return {}

    steps_per_epoch = 1

    def set_learning_rate(self, lr: float) -> None:
        self.lr = lr

    def state_dict(self) -> State:
        return {"model": {}}

    def load_state_dict(self, state: State) -> None:
        return None


@pytest.mark.parametrize(("sixth", "end"), [(0.4, 6), (0.9, 8)])
def test_epochs_without_an_evaluation_do_not_use_up_patience(sixth: float, end: int) -> None:
    """With patience 2, epochs 2 to 5 are not evaluated, so the sixth decides."""
    strategy: Any = ScriptedStrategy([0.5, 0.4, 0.4, 0.4, 0.4, sixth, 0.4, 0.4, 0.4], {2, 3, 4, 5})
    loop = LoopConfig(resolve({"train": {"epochs": 9, "patience": 2}}).train, "accuracy", True)
    position, _ = fit(strategy, loop)
    assert position.epoch == end


@pytest.mark.parametrize(("patience", "values", "end"), [
    (5, {20: 0.4}, 20),
    (15, {20: 0.4, 30: 0.4}, 30),
    (5, {20: 0.6, 30: 0.4}, 30),
    (5, {20: 0.6, 30: 0.7, 35: 0.4}, 35),
])  # fmt: skip
def test_only_an_evaluation_ends_a_run(patience: int, values: dict[int, float], end: int) -> None:
    """With eval_every=10 the first evaluation is in epoch 10. A run resumed from any epoch has the same end."""
    train = resolve({"train": {"epochs": 35, "patience": patience, "eval_every": 10, "checkpoint_seconds": 0}}).train
    metric = [values.get(epoch, 0.5) for epoch in range(1, 36)]

    def ends(keeper: Keeper, start: TrainState | None = None) -> TrainState:
        strategy: Any = ScriptedStrategy(metric, set())
        loop = LoopConfig(train, "accuracy", True, save=keeper.save)
        return fit(strategy, loop, start=start, best={"model": {}})[0]

    uninterrupted = ends(Keeper())
    assert uninterrupted.epoch == end
    for saves in range(1, end + 1):
        keeper = Keeper(saves)
        with pytest.raises(Stop):
            ends(keeper)
        assert ends(Keeper(), keeper.saved["last"][1]) == uninterrupted
