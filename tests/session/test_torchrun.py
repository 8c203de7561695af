"""Ranks under torchrun: strategies and options that they do not support are refused with the command that does."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from gnnfleet.api import train
from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.errors import ConfigError
from gnnfleet.graph.store import save_store
from gnnfleet.session.prepare import RunLocation
from gnnfleet.session.torchrun import _prepare
from tests.graphs import communities
from tests.shell import fails


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torchrun") / "store"
    save_store(communities(120), path)
    return path


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of one of two ranks."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")  # what the command sets itself is restored afterwards


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "tma"}, "tma does not run under torchrun.*strategy.listen=HOST:PORT.*gnnfleet join"),
        ({"strategy": "local"}, "runs in one process, found workers=2"),
        ({"strategy": "sar", "workers": 3}, "torchrun started 2 workers, found --workers 3: leave it out"),
    ],
)
def test_runs_unfit_for_torchrun_are_refused(store: Path, settings: dict[str, object], message: str) -> None:
    before = sorted(store.rglob("*"))
    with ExitStack() as stack, pytest.raises(ConfigError, match=message):
        _prepare(stack, LaunchEnv(rank=0, size=2), store, settings, RunLocation(), True)
    assert sorted(store.rglob("*")) == before


@pytest.mark.usefixtures("as_rank")
def test_restarts_are_an_option_of_torchrun(store: Path) -> None:
    message = fails("train", store, "--strategy", "sar", "--max-restarts", "2", code=2)
    assert "put --max-restarts before -m gnnfleet" in message


@pytest.mark.usefixtures("as_rank")
def test_gf_train_is_refused_on_several_ranks(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"gf\.train starts its own workers .*run the script without torchrun"):
        train(store)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert train(store, model={"hidden": 4, "layers": 2}, epochs=1).summary.epochs == 1
