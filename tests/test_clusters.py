"""The recipes of examples/clusters: gnnfleet and torchrun accept every option in them, and they run here.

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


def check_gnnfleet(arguments: list[str]) -> None:
    """Parse ``gnnfleet ARGUMENTS``: options with the command line's own parser, settings with the config's."""
    command: Any = typer.main.get_command(app)
    name, *options = arguments
    context = command.commands[name].make_context(name, list(options))
    settings = dict(setting.split("=", 1) for setting in context.params["settings"] or ())
    strategy = {"strategy.name": context.params["strategy"]}
    resolve(unflatten({**strategy, **{key: parse_value(value) for key, value in settings.items()}}))


def check_torchrun(arguments: list[str]) -> None:
    """Parse ``python -m torch.distributed.run ARGUMENTS``, which ends in a gnnfleet command."""
    parsed = get_args_parser().parse_args(arguments)
    assert parsed.module and parsed.training_script == "gnnfleet" and parsed.rdzv_backend == "static"
    check_gnnfleet(parsed.training_script_args)


def environment_with_stubs(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment in which the named commands are these scripts."""
    folder.mkdir()
    for name, body in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    env = environment()
    return {**env, "PATH": f"{folder}{os.pathsep}{env['PATH']}"}


PRINT_ARGUMENTS = 'printf "%s\\n" "$@"'


def run_script(script: str, env: dict[str, str], *arguments: str) -> list[str]:
    done = subprocess.run([FOLDER / script, *arguments], env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_scripts_pass_valid_options(tmp_path: Path) -> None:
    env = environment_with_stubs(
        tmp_path / "bin",
        python=PRINT_ARGUMENTS,
        gnnfleet=PRINT_ARGUMENTS,
        srun=PRINT_ARGUMENTS,
        scontrol="echo node1; echo node2",
    )
    env |= {"STORE": "/data/shop", "RUN": str(tmp_path / "run"), "FIRST": "node1", "NODE": "1"}
    options = ("--strategy", "sar", "--set", "train.epochs=3")
    arguments = run_script("torchrun.sh", env, *options)
    assert arguments[:2] == ["-m", "torch.distributed.run"]
    check_torchrun(arguments[2:])
    env.pop("RAY_ADDRESS", None)
    for cluster, listen in (({}, "127.0.0.1:0"), ({"RAY_ADDRESS": "head:6379"}, "0.0.0.0:29500")):
        arguments = run_script("ray.sh", {**env, **cluster}, "--set", "strategy.interval=10")
        check_gnnfleet(arguments)
        assert f"strategy.listen={listen}" in arguments
    assert "strategy.listen=10.0.0.1:7" in run_script(
        "ray.sh", {**env, "RAY_ADDRESS": "head:6379", "LISTEN": "10.0.0.1:7"}
    )
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    arguments = run_script("slurm.sbatch", {**env, **job, "SLURM_CPUS_PER_TASK": "8"}, *options)
    assert (
        arguments[:3] == ["--kill-on-bad-exit=1", "bash", "-c"] and arguments[4] == "torchrun" and "node1" in arguments
    )
    check_torchrun(arguments[5:])
    for path in (FOLDER / "torchrun.sh", FOLDER / "ray.sh"):
        without_store = {key: value for key, value in env.items() if key != "STORE"}
        done = subprocess.run([path], env=without_store, capture_output=True, text=True, check=False)
        assert done.returncode and "STORE: the store" in done.stderr


def test_a_slurm_job_trains_and_resumes_when_submitted_again(tmp_path: Path) -> None:
    """srun starts its command on the local machine, the only node."""
    store = save_store(communities(120), tmp_path / "shop").store
    assert store is not None
    env = environment_with_stubs(tmp_path / "bin", srun='shift; exec "$@"', scontrol="echo 127.0.0.1")
    env |= {
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_ID": "7",
        "EACH": "2",
        "PORT": str(free_port()),
        "SLURM_NODEID": "0",
    }
    env |= {"STORE": str(store.path), "RUN": str(tmp_path / "run")}
    for epochs in (2, 3):
        options = ["--strategy", "sar", "--set", "model.hidden=4", "--set", f"train.epochs={epochs}", "--quiet"]
        done = subprocess.run([FOLDER / "slurm.sbatch", *options], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == epochs


def containers(name: str) -> list[dict[str, Any]]:
    """Containers of the pods in a Kubernetes file."""
    (manifest,) = yaml.safe_load_all((FOLDER / name).read_text())
    if manifest["kind"] == "PyTorchJob":
        assert manifest["apiVersion"] == "kubeflow.org/v1"
        kinds = manifest["spec"]["pytorchReplicaSpecs"]
        assert kinds["Master"]["replicas"] == 1 and kinds["Worker"]["replicas"] >= 1
        pods = [kind["template"]["spec"] for kind in kinds.values()]
        assert all(pod["containers"][0]["name"] == "pytorch" for pod in pods)
    else:
        assert (manifest["kind"], manifest["apiVersion"]) == ("JobSet", "jobset.x-k8s.io/v1alpha2")
        (job,) = manifest["spec"]["replicatedJobs"]
        spec = job["template"]["spec"]
        assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]
        pods = [spec["template"]["spec"]]
    for pod in pods:
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    return [pod["containers"][0] for pod in pods]


def test_pods_of_a_pytorchjob_start_gnnfleet() -> None:
    for container in containers("pytorchjob.yaml"):
        program, *arguments = [*container["command"], *container["args"]]
        assert program == "gnnfleet"
        check_gnnfleet(arguments)


@pytest.mark.parametrize("index", ["0", "2"])
def test_pods_of_a_jobset_start_torchrun(tmp_path: Path, index: str) -> None:
    (container,) = containers("jobset.yaml")
    env = {**environment_with_stubs(tmp_path / "bin", python=PRINT_ARGUMENTS), "JOB_COMPLETION_INDEX": index}
    command = [*container["command"], *container["args"]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    arguments = done.stdout.splitlines()
    assert arguments[:2] == ["-m", "torch.distributed.run"] and arguments[arguments.index("--node-rank") + 1] == index
    check_torchrun(arguments[2:])


def test_commands_on_the_clusters_page_are_valid() -> None:
    """Commands on docs/clusters.md that start with gnnfleet."""
    text = (FOLDER.parents[1] / "docs" / "clusters.md").read_text()
    commands = [
        command.strip() for command in text.splitlines() if re.match(r"    gnnfleet (train|evaluate|predict) ", command)
    ]
    assert commands
    for command in commands:
        arguments = shlex.split(command, comments=True)[1:]
        if arguments[0] == "train":
            check_gnnfleet(arguments)
