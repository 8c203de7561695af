"""The sets and schemes of benchmarks/tma.py: graphs, words of a run, stores that are made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TRAINERS, INTERVAL = 3, 0.75
"""Rounds are a 120th of a run of 90 s, as those of RandomTMA were of its runs (2 minutes of 4 hours)."""
LOOKS = {"shop": 9.0}
"""Seconds of training between two values of val; 3 elsewhere."""
SCHEMES: dict[str, dict[str, Any]] = {
    "random": {"scheme": "random"},
    "super": {"scheme": "super"},
    "psgd-pa": {"scheme": "psgd-pa"},
    "llcg": {"scheme": "llcg"},
    "ggs": {"scheme": "ggs"},
    "ggs-small": {"scheme": "ggs"},
    "ggs-1gbit": {"scheme": "ggs"},
    "ggs-long": {"scheme": "ggs"},
    "random-redeal": {"scheme": "random", "repartition_every": 3},
    "super-redeal": {"scheme": "super", "repartition_every": 3},
    "super-remote": {"scheme": "super", "remote_negatives": 1000},
    "psgd-pa-remote": {"scheme": "psgd-pa", "remote_negatives": 1000},
}
"""What each sets of the strategy. ``-redeal`` deals anew every third round, ``-remote`` has negatives of all parts;
ggs makes steps of a batch for each worker, ``ggs-small`` of one that they share; ``ggs-long`` is ggs for longer, to see
when it gets to what others have."""
MAIN = ("random", "super", "psgd-pa", "llcg", "ggs", "ggs-small", "ggs-1gbit")
BASELINES = ("psgd-pa", "llcg", "ggs", "ggs-small", "ggs-long")
LONGER = {"ggs-long": 2.5}
"""How many times as long as the others a scheme runs; it sets no mark."""
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


def words_of(name: str, scheme: str, seed: int, rounds: int = 1) -> dict[str, Any]:
    """Of a run as ``gf.train`` takes them."""
    base = SETS[name]
    strategy = {"name": "tma", "interval": INTERVAL, **base["strategy"], **SCHEMES[scheme]}
    if scheme == "ggs-small":
        strategy["batch"] //= TRAINERS
    train = {**base["train"], "epochs": rounds}
    return {**base, "task": "link", "strategy": strategy, "train": train, "workers": TRAINERS, "seed": seed}


def seconds_of(scheme: str, seconds: float) -> float:
    return seconds * LONGER.get(scheme, 1.0)


def look_of(name: str) -> float:
    return LOOKS.get(name, 3.0)


def make_store(name: str, data: Path, place: Path) -> Path:
    """The graph of a set in a store; one that is there is taken."""
    import gnnfleet as gf
    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.ingest.clean import clean_edges

    store = place / name
    if not store.exists():
        if name == "communities":
            graph = make_dataset("communities", nodes=50_000, edges=1_000_000, features=64, seed=1)
        elif name == "shop":
            # Reverse edges would show the held-out ones; the run adds those of the edges it trains on.
            size = {"users": 500_000, "products": 100_000, "buys": 4_600_000, "views": 7_000_000, "categories": 500}
            graph = make_dataset("shop", **size, reverse=False, seed=1)
        else:
            graph = gf.read_npz(data / f"{'ogbl_ddi' if name == 'ddi' else 'debian_temporal_lp'}.npz")
            if name == "ddi":
                graph, _ = clean_edges(graph, undirected=True, duplicates="drop")
        gf.save(graph, store)
    return store
