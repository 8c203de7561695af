"""TensorBoard gets the numbers of the metrics file; a full disk gives one message."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from gnnfleet.api import train
from gnnfleet.errors import ConfigError, RunError
from gnnfleet.report import metrics
from gnnfleet.report.metrics import MetricsFile, TensorBoard, check_tensorboard, read_metrics
from tests.graphs import communities

needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="TensorBoard is not installed")


@needs_tensorboard
def test_tensorboard_has_every_number_of_the_metrics_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"report.tensorboard": True, "eval_every": 2, "model": {"hidden": 8, "layers": 2}}
    train(communities(), run_dir=tmp_path / "run", epochs=4, **settings)
    train(communities(), run_dir=tmp_path / "run", epochs=6, resume=True)  # a second file in the same folder
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert events.Tags()["scalars"] and {"train_loss", "val", "val_loss", "seconds"} <= set(events.Tags()["scalars"])
    for name in ("train_loss", "val", "val_loss"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == pytest.approx({row["epoch"]: row[name] for row in rows if name in row})


@needs_tensorboard
def test_tensorboard_gets_numbers_only(tmp_path: Path) -> None:
    writer = TensorBoard(tmp_path)
    writer.write({"epoch": 1, "train_loss": 0.5, "note": "text"})
    writer.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_run_that_needs_a_missing_tensorboard_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'gnnfleet\[tensorboard\]'"):
        check_tensorboard()
    with pytest.raises(ConfigError, match="needs TensorBoard"):
        train(communities(), run_dir=tmp_path / "run", **{"report.tensorboard": True})
    assert not list(tmp_path.iterdir())


def test_a_full_disk_gives_one_message() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    file = MetricsFile.__new__(MetricsFile)
    file.path, file._file = Path("metrics.jsonl"), Path("/dev/full").open("a")  # noqa: SIM115
    with pytest.raises(RunError, match=r"cannot write metrics.jsonl: No space left on device.*--resume"):
        file.write({"epoch": 1})
    with pytest.raises(RunError, match="cannot write"):
        file.close()


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    """In files of earlier versions too. A line that is not an object ends the reading."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 1, "val": NaN}\n{"epoch": 2, "val": -Infinity}\n')
    file = MetricsFile(path, epochs=1)
    file.write({"epoch": 2, "val": float("nan"), "parts": [float("inf"), 0.5]})
    file.close()
    assert path.read_text() == '{"epoch": 1, "val": null}\n{"epoch": 2, "val": null, "parts": [null, 0.5]}\n'
    assert [row["val"] for row in read_metrics(path)] == [None, None]
    for depth in (900, 100_000):
        path.write_text('{"epoch": 1}\n' + '{"a": ' * depth + "1" + "}" * depth + "\n")
        assert read_metrics(path)[0] == {"epoch": 1}
