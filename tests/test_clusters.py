"""The recipes of examples/clusters: every word of them is one that gnnfleet and torchrun know, and they run here.

torchrun.sh is run on two hosts by tests/faults/test_two_hosts.py; a Ray cluster by tests/launch/test_tma_supervisor.py.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser

from gnnfleet.cli.main import app
from gnnfleet.config.resolve import parse_value, resolve, unflatten
from gnnfleet.graph.store import save_store
from gnnfleet.report.metrics import read_metrics
from tests.faults.driving import environment
from tests.graphs import communities
from tests.shell import free_port

FOLDER = Path(__file__).parents[1] / "examples" / "clusters"


def check_gnnfleet(words: list[str]) -> None:
    """``gnnfleet WORDS`` would be understood: options by the command line's own parser, settings by the config's."""
    command: Any = typer.main.get_command(app)
    name, *rest = words
    context = command.commands[name].make_context(name, list(rest))
    settings = dict(word.split("=", 1) for word in context.params["settings"] or ())
    strategy = {"strategy.name": context.params["strategy"]}
    resolve(unflatten({**strategy, **{key: parse_value(value) for key, value in settings.items()}}))


def check_torchrun(words: list[str]) -> None:
    """``python -m torch.distributed.run WORDS``, which ends in a command of gnnfleet's."""
    parsed = get_args_parser().parse_args(words)
    assert parsed.module and parsed.training_script == "gnnfleet" and parsed.rdzv_backend == "static"
    check_gnnfleet(parsed.training_script_args)


def stubbed(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment in which some commands are these scripts."""
    folder.mkdir()
    for name, body in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    env = environment()
    return {**env, "PATH": f"{folder}{os.pathsep}{env['PATH']}"}


TELL = 'printf "%s\\n" "$@"'


def told(script: str, env: dict[str, str], *words: str) -> list[str]:
    done = subprocess.run([FOLDER / script, *words], env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_scripts_say_what_their_commands_know(tmp_path: Path) -> None:
    env = stubbed(tmp_path / "bin", python=TELL, gnnfleet=TELL, srun=TELL, scontrol="echo node1; echo node2")
    env |= {"STORE": "/data/shop", "RUN": str(tmp_path / "run"), "FIRST": "node1", "NODE": "1"}
    more = ("--strategy", "sar", "--set", "train.epochs=3")
    words = told("torchrun.sh", env, *more)
    assert words[:2] == ["-m", "torch.distributed.run"]
    check_torchrun(words[2:])
    env.pop("RAY_ADDRESS", None)
    for cluster, listen in (({}, "127.0.0.1:0"), ({"RAY_ADDRESS": "head:6379"}, "0.0.0.0:29500")):
        words = told("ray.sh", {**env, **cluster}, "--set", "strategy.interval=10")
        check_gnnfleet(words)
        assert f"strategy.listen={listen}" in words
    assert "strategy.listen=10.0.0.1:7" in told("ray.sh", {**env, "RAY_ADDRESS": "head:6379", "LISTEN": "10.0.0.1:7"})
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    words = told("slurm.sbatch", {**env, **job, "SLURM_CPUS_PER_TASK": "8"}, *more)
    assert words[:3] == ["--kill-on-bad-exit=1", "bash", "-c"] and words[4] == "torchrun" and "node1" in words
    check_torchrun(words[5:])
    for path in (FOLDER / "torchrun.sh", FOLDER / "ray.sh"):
        missing = {key: value for key, value in env.items() if key != "STORE"}
        done = subprocess.run([path], env=missing, capture_output=True, text=True, check=False)
        assert done.returncode and "STORE: the store" in done.stderr


def test_a_slurm_job_trains_and_goes_on_when_it_is_submitted_again(tmp_path: Path) -> None:
    """srun starts its command here, on the one node that there is."""
    store = save_store(communities(120), tmp_path / "shop").store
    assert store is not None
    env = stubbed(tmp_path / "bin", srun='shift; exec "$@"', scontrol="echo 127.0.0.1")
    env |= {
        "SLURM_JOB_NODELIST": "here",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_ID": "7",
        "EACH": "2",
        "PORT": str(free_port()),
        "SLURM_NODEID": "0",
    }
    env |= {"STORE": str(store.path), "RUN": str(tmp_path / "run")}
    for epochs in (2, 3):
        words = ["--strategy", "sar", "--set", "model.hidden=4", "--set", f"train.epochs={epochs}", "--quiet"]
        done = subprocess.run([FOLDER / "slurm.sbatch", *words], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == epochs


def containers(name: str) -> list[dict[str, Any]]:
    """What pods of a Kubernetes file run."""
    (found,) = yaml.safe_load_all((FOLDER / name).read_text())
    if found["kind"] == "PyTorchJob":
        assert found["apiVersion"] == "kubeflow.org/v1"
        kinds = found["spec"]["pytorchReplicaSpecs"]
        assert kinds["Master"]["replicas"] == 1 and kinds["Worker"]["replicas"] >= 1
        pods = [kind["template"]["spec"] for kind in kinds.values()]
        assert all(pod["containers"][0]["name"] == "pytorch" for pod in pods)
    else:
        assert (found["kind"], found["apiVersion"]) == ("JobSet", "jobset.x-k8s.io/v1alpha2")
        (job,) = found["spec"]["replicatedJobs"]
        spec = job["template"]["spec"]
        assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]
        pods = [spec["template"]["spec"]]
    for pod in pods:
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    return [pod["containers"][0] for pod in pods]


def test_pods_of_a_pytorchjob_start_gnnfleet() -> None:
    for container in containers("pytorchjob.yaml"):
        program, *words = [*container["command"], *container["args"]]
        assert program == "gnnfleet"
        check_gnnfleet(words)


@pytest.mark.parametrize("index", ["0", "2"])
def test_pods_of_a_jobset_start_torchrun(tmp_path: Path, index: str) -> None:
    (container,) = containers("jobset.yaml")
    env = {**stubbed(tmp_path / "bin", python=TELL), "JOB_COMPLETION_INDEX": index}
    line = [*container["command"], *container["args"]]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[:2] == ["-m", "torch.distributed.run"] and words[words.index("--node-rank") + 1] == index
    check_torchrun(words[2:])


def test_the_page_shows_no_other_words_than_the_recipes() -> None:
    """Commands on docs/clusters.md that start with gnnfleet are understood too."""
    text = (FOLDER.parents[1] / "docs" / "clusters.md").read_text()
    commands = [line.strip() for line in text.splitlines() if re.match(r"    gnnfleet (train|evaluate|predict) ", line)]
    assert commands
    for line in commands:
        words = shlex.split(line, comments=True)[1:]
        if words[0] == "train":
            check_gnnfleet(words)
