from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.errors import StoreError
from gnnfleet.io.atomic import PARTIAL
from gnnfleet.io.bundle import DTYPES, Bundle, BundleWriter


def write(path: Path, **arrays: torch.Tensor) -> Bundle:
    with BundleWriter(path, kind="graph", overwrite=True) as out:
        for name, tensor in arrays.items():
            out.put(f"{name}.npy", tensor)
        out.commit({"note": "test"})
    return Bundle.open(path, "graph")


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (5,), (3, 4), (0, 4), (2, 3, 4)])
def test_arrays_are_read_back_bit_for_bit(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(DTYPES[name][0])
    back = write(tmp_path / "b", a=tensor).tensor("a.npy")
    assert back.dtype == tensor.dtype and torch.equal(back, tensor)
    assert np.load(tmp_path / "b" / "a.npy", allow_pickle=False).shape == shape, "a plain .npy file"


@given(sizes=st.lists(st.integers(0, 5), max_size=6))
@settings(max_examples=20, deadline=None)
def test_an_array_written_in_parts_equals_the_array(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    path = tmp_path_factory.mktemp("grow") / "b"
    parts = [torch.randn(size, 3) for size in sizes]
    with BundleWriter(path, kind="graph") as out:
        writer = out.array("a.npy", torch.float32, (3,))
        for part in parts:
            writer.append(part)
        out.commit({})
    assert torch.equal(Bundle.open(path, "graph").tensor("a.npy"), torch.cat([*parts, torch.empty(0, 3)]))


def test_writing_to_a_tensor_does_not_change_the_file(tmp_path: Path) -> None:
    bundle = write(tmp_path / "b", a=torch.zeros(4))
    bundle.tensor("a.npy")[0] = 1
    assert Bundle.open(tmp_path / "b", "graph").tensor("a.npy")[0] == 0
    bundle.verify()


def test_all_kinds_of_damage_are_detected(tmp_path: Path) -> None:
    write(tmp_path / "b", a=torch.arange(100), c=torch.zeros(3, 3), e=torch.empty(0))
    for path in sorted((tmp_path / "b").iterdir()):
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(StoreError):
            Bundle.open(tmp_path / "b", "graph")
        path.write_bytes(content + b"x")
        with pytest.raises(StoreError):
            Bundle.open(tmp_path / "b", "graph")
        for position in (0, len(content) // 2, len(content) - 1):
            altered = bytearray(content)
            altered[position] ^= 1
            path.write_bytes(altered)
            with pytest.raises(StoreError):
                Bundle.open(tmp_path / "b", "graph").verify()
        path.unlink()
        with pytest.raises(StoreError):
            Bundle.open(tmp_path / "b", "graph")
        path.write_bytes(content)
    Bundle.open(tmp_path / "b", "graph").verify()


def test_a_foreign_version_or_kind_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "b", a=torch.arange(3))
    with pytest.raises(StoreError, match=r"partition\.json is missing"):
        Bundle.open(tmp_path / "b", "partition")
    manifest = json.loads((tmp_path / "b" / "graph.json").read_text())
    (tmp_path / "b" / "graph.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(StoreError, match="version 99"):
        Bundle.open(tmp_path / "b", "graph")


def test_a_failure_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), BundleWriter(tmp_path / "b", kind="graph") as out:
        out.put("a.npy", torch.zeros(3))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with BundleWriter(tmp_path / "b", kind="graph") as out:
        out.put("a.npy", torch.zeros(3))
    assert list(tmp_path.iterdir()) == [], "leaving without commit is a failure too"


def test_existing_output_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    write(tmp_path / "b", a=torch.zeros(3))
    with pytest.raises(StoreError, match="--overwrite"):
        BundleWriter(tmp_path / "b", kind="graph")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("x")
    with pytest.raises(StoreError, match="is not a graph"):
        BundleWriter(tmp_path / "other", kind="graph", overwrite=True)
    assert torch.equal(write(tmp_path / "b", a=torch.ones(3)).tensor("a.npy"), torch.ones(3))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


WRITER = """
import sys, torch
from gnnfleet.io.bundle import BundleWriter
print("ready", flush=True)
while True:
    with BundleWriter(sys.argv[1], kind="graph", overwrite=True) as out:
        for i in range(8):
            out.put(f"{i}.npy", torch.full((1000,), 7))
        out.commit({})
"""


def test_a_killed_writer_never_leaves_a_partial_store(tmp_path: Path) -> None:
    """SIGKILL at many moments: what lies at the target is absent or whole, and what lies beside it never opens."""
    for trial in range(4):
        target = tmp_path / f"t{trial % 3}"
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(target)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.002 + 0.03 * trial)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        process.stdout.close()
        for path in tmp_path.iterdir():
            if PARTIAL in path.name:
                with pytest.raises(StoreError):
                    Bundle.open(path, "graph")
            else:
                bundle = Bundle.open(path, "graph")
                bundle.verify()
                assert all(bool((bundle.tensor(f"{i}.npy") == 7).all()) for i in range(8))
    for trial in range(3):
        write(tmp_path / f"t{trial}", a=torch.zeros(1))
    assert [path.name for path in tmp_path.iterdir() if PARTIAL in path.name] == [], "the next writer cleans up"
