"""Modules that a run must not load: each costs every process of it time and memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUN = """
import sys
import torch
import gnnfleet as gf

graph = gf.Graph(edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), x=torch.eye(4), y=torch.tensor([0, 1, 0, 1]))
for optimizer in ("adam", "sgd"):
    gf.train(graph, split="0.5/0.25/0.25", epochs=2, optimizer=optimizer, run_dir=f"{sys.argv[1]}/{optimizer}")
assert "torch._dynamo" not in sys.modules
"""


def test_a_run_does_not_load_the_compiler_of_torch(tmp_path: Path) -> None:
    """An optimizer of torch would import torch._dynamo in its first step, as long as torch itself takes."""
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
