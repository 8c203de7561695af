"""Data sets and schemes of benchmarks/tma.py: graphs, settings of a run, stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TRAINERS, INTERVAL = 3, 0.75
"""A round is 1/120 of a run of 90 s, as in RandomTMA (2 minutes of 4 hours)."""
EVAL_SECONDS = {"shop": 9.0}
"""Seconds of training between two evaluations on val; 3 for other sets."""
SCHEMES: dict[str, dict[str, Any]] = {
    "random": {"scheme": "random"},
    "super": {"scheme": "super"},
    "psgd-pa": {"scheme": "psgd-pa"},
    "llcg": {"scheme": "llcg"},
    "ggs": {"scheme": "ggs"},
    "ggs-small": {"scheme": "ggs"},
    "ggs-1gbit": {"scheme": "ggs"},
    "ggs-long": {"scheme": "ggs"},
    "super-remote": {"scheme": "super", "remote_negatives": 1000},
    "psgd-pa-remote": {"scheme": "psgd-pa", "remote_negatives": 1000},
}
"""Settings of the strategy by scheme. ``-remote`` has negatives from all
parts. A step of ggs has one batch per worker, a step of ``ggs-small`` one batch in total. ``ggs-long`` runs longer, to
find when it reaches the others."""
MAIN = ("random", "super", "psgd-pa", "llcg", "ggs", "ggs-small", "ggs-1gbit")
BASELINES = ("psgd-pa", "llcg", "ggs", "ggs-small", "ggs-long")
LONGER = {"ggs-long": 2.5}
"""Factor of the running time of a scheme; its metric is not used as a target."""
RATES = {"ggs-1gbit": "1gbit"}

SETS: dict[str, dict[str, Any]] = {
    "ddi": {
        "model": {"name": "sage", "hidden": 64, "embedding": 64, "layers": 2, "dropout": 0.2},
        "link": {"decoder": "mlp", "negative_mode": "pair"},
        "strategy": {"fanouts": [10, 5], "batch": 8192},
        "train": {"lr": 0.02, "clip": 1.0, "metric": "hits@20"},
    },
    "debian": {
        "model": {"name": "rgcn", "hidden": 64, "layers": 2, "dropout": 0.2},
        "link": {"decoder": "distmult", "ranking": "sampled"},
        "strategy": {"fanouts": [5, 5], "batch": 512},
        "train": {"lr": 0.01, "clip": 1.0},
    },
    "communities": {
        "model": {"name": "sage", "hidden": 64, "layers": 2, "dropout": 0.2},
        "link": {"decoder": "mlp", "ranking": "sampled"},
        "strategy": {"fanouts": [10, 5], "batch": 2048},
        "train": {"lr": 0.01, "clip": 1.0},
        "split": "0.99/0.005/0.005",
    },
    "shop": {
        "model": {"name": "rgcn", "hidden": 32, "layers": 2, "dropout": 0.2},
        "link": {"decoder": "distmult", "ranking": "sampled"},
        "strategy": {"fanouts": [5, 3], "batch": 2048, "clusters": 1500, "deadline": 600.0},
        "train": {"lr": 0.003, "clip": 1.0},
        "split": "0.998/0.001/0.001",
    },
}


def config_of(name: str, scheme: str, seed: int, rounds: int = 1) -> dict[str, Any]:
    """Settings of a run for ``gf.train``."""
    base = SETS[name]
    strategy = {"name": "tma", "interval": INTERVAL, **base["strategy"], **SCHEMES[scheme]}
    if scheme == "ggs-small":
        strategy["batch"] //= TRAINERS
    train = {**base["train"], "epochs": rounds}
    return {**base, "task": "link", "strategy": strategy, "train": train, "workers": TRAINERS, "seed": seed}


def seconds_of(scheme: str, seconds: float) -> float:
    return seconds * LONGER.get(scheme, 1.0)


def eval_seconds_of(name: str) -> float:
    return EVAL_SECONDS.get(name, 3.0)


def make_store(name: str, data: Path, folder: Path) -> Path:
    """Save the graph of a set in a store, unless the store exists."""
    import gnnfleet as gf
    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.ingest.clean import clean_edges

    store = folder / name
    if not store.exists():
        if name == "communities":
            graph = make_dataset("communities", nodes=50_000, edges=1_000_000, features=64, seed=1)
        elif name == "shop":
            # Reverse edges would reveal the held-out ones; the run adds those of its training edges.
            size = {"users": 500_000, "products": 100_000, "buys": 4_600_000, "views": 7_000_000, "categories": 500}
            graph = make_dataset("shop", **size, reverse=False, seed=1)
        else:
            graph = gf.read_npz(data / f"{'ogbl_ddi' if name == 'ddi' else 'debian_temporal_lp'}.npz")
            if name == "ddi":
                graph, _ = clean_edges(graph, undirected=True, duplicates="drop")
        gf.save(graph, store)
    return store
