"""Writes the fixtures of this directory with version 0.1.0; later versions must never write them again.

    python -m tests.golden.compare --only local-sage        # builds 0.1.0 under build/golden
    build/golden/a56b128f3caa/env/bin/python tests/golden/make_fixtures.py

    store/            60 nodes with string ids, classes, features, split and edge weights; below parts/ what runs on two
                      workers keep in a store: a partition (sar), clusters (tma), chunks (pipe)
    run/              a finished run of sar on two workers; learnable rows, so ranks have checkpoint files of their own
    logits.npy        what its best weights give for all nodes, in store order
    state_keys.json   names and shapes of the tensors of every model

Paths are taken out: config.json calls the store "store", record.json the run "run". A command that opens the store of
the run needs --store.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
SETTINGS: dict[str, Any] = {
    "strategy.name": "sar",
    "workers": 2,
    "seed": 5,
    "train.epochs": 6,
    "train.lr": 0.05,
    "model.name": "gcn",
    "model.hidden": 8,
    "model.layers": 2,
    "model.embedding": 4,
    "model.norm": "batch",
    "model.residual": "true",
}
OTHERS = ({"name": "tma", "scheme": "super", "clusters": 12}, {"name": "pipe", "ways": 1, "chunks": 4})
"""Further strategies whose partitions are saved in the store."""

SIZES = {"hidden": 8, "layers": 3}
MODELS: dict[str, dict[str, Any]] = {
    "sage": {"name": "sage", **SIZES},
    "sage-pool": {"name": "sage", "aggr": "pool", "norm": "layer", **SIZES},
    "gcn": {"name": "gcn", "residual": True, "norm": "batch", "embedding": 4, **SIZES},
    "gat": {"name": "gat", "residual": True, **SIZES},
    "gatv2": {"name": "gatv2", "residual": True, **SIZES},
    "gin": {"name": "gin", "train_eps": True, "norm": "batch", **SIZES},
    "rgcn": {"name": "rgcn", **SIZES},
    "rgcn-bases": {"name": "rgcn", "bases": 2, "norm": "layer", **SIZES},
    "gcn2": {"name": "gcn2", "shared_weights": False, **SIZES},
    "res+": {"name": "res+", "norm": "layer", **SIZES},
    "tgn": {"name": "tgn", "hidden": 8, "layers": 2, "time_width": 6, "pairs": True, "clock": "learnt"},
    "tgn-id": {"name": "tgn-id", "hidden": 8, "layers": 1, "time_width": 6},
    "tgat": {"name": "tgat", "hidden": 8, "layers": 2, "time_width": 6},
}
"""Models whose tensors are listed."""

DECODERS: dict[str, dict[str, Any]] = {"dot": {}, "mlp": {"layers": 2}, "distmult": {}}


def make_store(path: Path) -> None:
    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.graph import Graph, validated_edges, validated_nodes
    from gnnfleet.graph.store import save_store

    graph = make_dataset("communities", nodes=60, features=8, classes=3, mean_degree=5, signal=1, train=0.4, val=0.3)
    nodes, edges = graph.single_nodes, graph.single_edges
    named = validated_nodes(
        60, x=nodes.x, y=nodes.y, split=nodes.split, ids=[f"n{row:02d}" for row in range(60)], classes=["a", "b", "c"]
    )
    index = edges.edge_index()
    weight = (1 + (3 * index[0] + 5 * index[1]) % 7) / 4
    weighted = validated_edges(index, num_src=60, num_dst=60, weight=weight.float())
    kind = next(iter(graph.edges))
    save_store(Graph.of({kind.src: named}, {kind: weighted}, name="golden", undirected=graph.undirected), path)


def make_cuts(path: Path) -> None:
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.store import open_store
    from gnnfleet.training.partition_cache import ensure_placement

    graph = open_store(path)
    for strategy in OTHERS:
        ensure_placement(graph, graph, resolve({"strategy": strategy, "workers": 2}))


def make_run(store: Path, run: Path) -> None:
    options = [option for key, value in SETTINGS.items() for option in ("--set", f"{key}={value}")]
    subprocess.run([sys.executable, "-m", "gnnfleet", "train", store, "--run-dir", run, *options], check=True)


def logits(store: Path, run: Path) -> torch.Tensor:
    from gnnfleet.graph.store import open_store
    from gnnfleet.inference.query import open_trained_run

    return open_trained_run(run, open_store(store))[0].strategy.predict().logits


def without_paths(run: Path) -> None:
    from gnnfleet.io.bundle import manifest_digest

    config, record = (json.loads((run / name).read_text()) for name in ("config.json", "record.json"))
    config["store"]["path"], record["run_dir"] = "store", "run"
    config["digest"] = manifest_digest(config)
    (run / "config.json").write_text(json.dumps(config, indent=1))
    (run / "record.json").write_text(json.dumps(record, indent=1))


def state_keys() -> dict[str, dict[str, list[int]]]:
    """{model: {tensor: shape}}, of link decoders as "decoder-mlp"."""
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.nn.link import make_decoder
    from gnnfleet.nn.link_config import LinkConfig
    from gnnfleet.nn.model import build_model
    from gnnfleet.training.build import build_events

    homogeneous = make_dataset("communities", nodes=20, features=4, classes=3, mean_degree=4)
    heterogeneous = make_dataset("shop", users=10, products=10, brands=3, buys=20, views=20, features=4)
    stream = make_dataset("events", users=10, items=8, events=60, features=4)
    modules: dict[str, torch.nn.Module | None] = {}
    for label, settings in MODELS.items():
        if settings["name"].startswith("tg"):
            config = resolve({"strategy": {"name": "temporal"}, "model": settings})
            modules[label] = build_events(stream, config)[1]
        else:
            graph = heterogeneous if settings["name"] == "rgcn" else homogeneous
            modules[label] = build_model(resolve({"model": settings}).model, graph, out_channels=3)
    for name, settings in DECODERS.items():
        modules[f"decoder-{name}"] = make_decoder(
            LinkConfig(decoder=name, **settings), width=8, relations=2, several=True
        )
    return {
        label: {} if module is None else {key: list(tensor.shape) for key, tensor in module.state_dict().items()}
        for label, module in modules.items()
    }


def main() -> None:
    if version("gnnfleet") != "0.1.0":
        sys.exit(f"fixtures are of version 0.1.0, this is {version('gnnfleet')}: see the top of this file")
    with tempfile.TemporaryDirectory() as scratch:
        store, run = Path(scratch) / "store", Path(scratch) / "run"
        make_store(store)
        make_run(store, run)
        make_cuts(store)
        np.save(HERE / "logits.npy", logits(store, run).numpy())
        without_paths(run)
        for path in (store, run):
            shutil.rmtree(HERE / path.name, ignore_errors=True)
            shutil.copytree(path, HERE / path.name, ignore=shutil.ignore_patterns(".*"))
    (HERE / "state_keys.json").write_text(json.dumps(state_keys(), indent=1) + "\n")


if __name__ == "__main__":
    main()
