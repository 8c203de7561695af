"""Test accuracy on public graphs: mean and standard deviation over ten seeds, beside what is published.

A cell is a data set, a model and a side: gnnfleet, or torch_geometric (a plain loop over PyG's layers with the same
settings), or published: where a published figure is that of one split, the published model in plain torch with its own
settings on the splits of our seeds. Settings are those of examples/accuracy/DATASET_MODEL.toml; on sets with ten splits
the split is the seed.
Each cell runs in a process of its own with one thread. All cells get three seeds first; finished seeds are not run
again unless the settings changed, so what --minutes leaves is done by the next call.

usage: python benchmarks/accuracy.py [--data DIR] [--only cora citeseer/gat …] [--seeds 10] [--at-once 2] [--minutes 30]
DIR holds cora.npz and the others (layout: docs/formats.md); default ../shared/data/static or $GNNFLEET_DATA/static.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "examples" / "accuracy"
DATA = Path(os.environ.get("GNNFLEET_DATA", HERE.parents[1] / "shared" / "data")) / "static"
CELLS = HERE / "results" / "cells" / "accuracy"
UNDIRECTED = ("debian_bookworm",)  # given in one direction; as gnnfleet import --undirected
QUICK = 3  # seeds of every cell that come before further seeds of any
OURS, PEER, PUBLISHED = "gnnfleet", "torch_geometric", "published"
MODELS: dict[str, dict[str, dict[str, Any]]] = {  # published models that are trained here too
    "amazon_photo/sage": {  # github.com/LUOyk1999/tunedGNN
        "model": {"hidden": 64, "layers": 6, "dropout": 0.2, "input_norm": "sum"},
        "train": {"epochs": 1000, "lr": 0.001, "eval_every": 1},
    }
}


@dataclass(frozen=True)
class Wanted:
    """A line of the table: what is published, in points, and how far from it (or from the peer) is still fine."""

    name: str  # DATASET/MODEL
    published: float | None = None
    within: float = 0.7
    peer: bool = False  # torch_geometric is trained too
    above: bool = False  # better than ``published`` is fine too
    least: int = 0  # seeds, where the spread is so wide that ten say too little

    def seeds(self, asked: int) -> int:
        return asked if asked < 10 else max(asked, self.least)

    @property
    def cells(self) -> list[str]:
        sides = [OURS, *[PEER] * self.peer, *[PUBLISHED] * (self.name in MODELS)]
        return [f"{self.name}/{side}" for side in sides]


TABLE = [
    Wanted("cora/gcn", 81.5),
    Wanted("cora/gat", 83.0, peer=True),
    Wanted("cora/sage", peer=True),
    Wanted("citeseer/gcn", 70.3),
    Wanted("citeseer/gat", peer=True, least=24),
    Wanted("citeseer/sage", peer=True),
    Wanted("pubmed/gcn", 79.0),
    Wanted("pubmed/gat", peer=True),
    Wanted("pubmed/sage", peer=True),
    Wanted("minesweeper/gcn", 89.75, within=1.25, above=True),
    Wanted("minesweeper/sage", 93.51, within=1.25, above=True),
    Wanted("minesweeper/gat", 92.01, within=1.25, above=True),
    Wanted("amazon_photo/gcn", 96.1),
    Wanted("amazon_photo/sage", 96.8, peer=True),
    Wanted("debian_bookworm/rgcn", 78.5, within=0, above=True),
]


# -- one cell, in a process of its own --


def run_cell(cell: str, data: Path, seeds: int, until: float) -> None:
    """Run the seeds that are missing, each kept as soon as it is done."""
    import torch

    import gnnfleet as gf
    from gnnfleet.config.resolve import read_toml, resolve
    from gnnfleet.graph.ingest.clean import clean_edges

    torch.set_num_threads(1)
    dataset, model, side = cell.split("/")
    words = read_toml(CONFIGS / f"{dataset}_{model}.toml")
    if side == PUBLISHED:
        chosen = MODELS[f"{dataset}/{model}"]
        words = {**words, **{group: {**words[group], **each} for group, each in chosen.items()}}
    settings = resolve(words).model_dump(mode="json")
    path = CELLS / f"{cell.replace('/', '.')}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    runs = found.get("runs", []) if found.get("settings") == settings else []
    graph = gf.read_npz(data / f"{dataset}.npz")
    if dataset in UNDIRECTED:
        graph, _ = clean_edges(graph, undirected=True, duplicates="drop")
    splits = graph.nodes[graph.labelled_type].split
    ten = splits is not None and len(splits) > 1
    for seed in range(len(runs), seeds):
        if time.time() > until:
            return
        started = time.process_time()  # other work on the machine does not count
        own = {**words, "seed": seed, **({"split": seed % len(splits)} if ten else {})}
        got = ours(graph, own) if side == OURS else plain(graph, own, peer_network if side == PEER else tuned_network)
        runs.append({"seed": seed, **got, "cpu_seconds": round(time.process_time() - started, 2)})
        path.write_text(json.dumps({"cell": cell, "settings": settings, "runs": runs}, indent=1))
        print(f"{cell:34} seed {seed}: val {got['val']:.4f}, {runs[-1]['cpu_seconds']:.1f} s of CPU", flush=True)


def ours(graph: Any, words: dict[str, Any]) -> dict[str, Any]:
    import gnnfleet as gf

    metrics = gf.train(graph, config=words).metrics
    return {key: metrics[key] for key in ("val", "test", "best_epoch")}


def plain(graph: Any, words: dict[str, Any], network_of: Callable[..., Any]) -> dict[str, Any]:
    """A plain loop of torch: accuracy of the epoch with the best val accuracy, then val loss."""
    import torch
    from torch.nn.functional import cross_entropy

    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.split import parse_rule, split_nodes

    config = resolve(words)
    assert config.train.optimizer == "adam" and not config.train.clip
    torch.manual_seed(config.seed)
    nodes = graph.single_nodes
    if config.split != 0:
        drawn = split_nodes(nodes, parse_rule(str(config.split)), seed=config.seed)
        nodes = replace(nodes, split=drawn)
    x, y, edge_index = nodes.x.float(), nodes.y.long(), graph.single_edges.edge_index()
    if config.model.input_norm == "sum":
        x = x / x.sum(1, keepdim=True).clamp(min=1e-12)
    rows = {split: nodes.mask(split) for split in ("train", "val", "test")}
    network = network_of(config.model, x.shape[1], nodes.num_classes)
    optimizer = torch.optim.Adam(network.parameters(), lr=config.train.lr, weight_decay=config.train.weight_decay)
    best: tuple[float, float] | None = None
    result: dict[str, Any] = {}
    for epoch in range(1, config.train.epochs + 1):
        network.train()
        optimizer.zero_grad()
        cross_entropy(network(x, edge_index)[rows["train"]], y[rows["train"]]).backward()
        optimizer.step()
        if epoch % config.train.eval_every and epoch < config.train.epochs:
            continue
        network.eval()
        with torch.no_grad():
            out = network(x, edge_index)
        right = {split: float((out.argmax(1) == y)[mask].double().mean()) for split, mask in rows.items()}
        score = (right["val"], -float(cross_entropy(out[rows["val"]], y[rows["val"]])))
        if best is None or score > best:
            best, result = score, {"val": right["val"], "test": right["test"], "best_epoch": epoch}
        if config.train.patience and epoch - result["best_epoch"] >= config.train.patience:
            break
    return result


def drop_input(x: Any, p: float) -> Any:
    """Dropout on features that are mostly 0, drawn for the others only: torch takes 15 ns for each draw."""
    from torch.nn.functional import dropout

    places = x.nonzero(as_tuple=True)
    dropped = x.clone()
    dropped[places] = dropout(x[places], p)
    return dropped


def peer_network(model: Any, width: int, classes: int) -> Any:
    """Layers of torch_geometric.nn as a ModelConfig asks: conv, norm, activation, dropout; the last conv alone."""
    import torch
    from torch.nn.functional import dropout, elu, relu
    from torch_geometric.nn import GATConv, GCNConv, LayerNorm, SAGEConv

    assert model.norm in ("none", "layer") and not model.residual and model.aggr == "mean" and not model.embedding
    attention = model.dropout if model.attention_dropout is None else model.attention_dropout

    def conv(index: int) -> torch.nn.Module:
        last = index == model.layers - 1
        wide, narrow = model.hidden if index else width, classes if last else model.hidden
        if model.name != "gat":
            return {"gcn": GCNConv, "sage": SAGEConv}[model.name](wide, narrow)
        heads = (model.out_heads or model.heads) if last else model.heads
        return GATConv(wide, narrow if last else narrow // heads, heads=heads, concat=not last, dropout=attention)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = torch.nn.ModuleList(conv(index) for index in range(model.layers))
            norm = torch.nn.Identity if model.norm == "none" else partial(LayerNorm, model.hidden, mode="node")
            self.norms = torch.nn.ModuleList(norm() for _ in range(model.layers - 1))

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            if self.training and model.input_dropout:
                x = drop_input(x, model.input_dropout)
            for layer, norm in zip(self.convs[:-1], self.norms, strict=True):
                x = (relu if model.act == "relu" else elu)(norm(layer(x, edge_index)))
                x = dropout(x, model.dropout, self.training)
            return self.convs[-1](x, edge_index)

    return Network()


def tuned_network(model: Any, width: int, classes: int) -> Any:
    """SAGE as Luo and others (2024) publish it: a node among its own neighbours, a linear map of its row beside every
    layer, layer norm, a linear map after the last."""
    import torch
    from torch.nn import LayerNorm, Linear, ModuleList
    from torch.nn.functional import dropout, relu

    widths = [width, *[model.hidden] * model.layers]
    pairs = list(pairwise(widths))

    class Mean(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, there: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
            ctx.back = back
            return there @ x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            return ctx.back @ grad, None, None

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near = ModuleList(Linear(*pair) for pair in pairs)
            self.own = ModuleList(Linear(*pair, bias=False) for pair in pairs)
            self.beside = ModuleList(Linear(*pair) for pair in pairs)
            self.norms = ModuleList(LayerNorm(narrow) for _, narrow in pairs)
            self.last = Linear(model.hidden, classes)
            self.first: Any = None

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            if self.first is None:  # features rest, and so do their means
                self.there, self.back = mean_matrices(edge_index, len(x))
                self.first = self.there @ x
            for index, layer in enumerate(self.near):
                near = Mean.apply(x, self.there, self.back) if index else self.first
                x = layer(near) + self.own[index](x) + self.beside[index](x)
                x = dropout(relu(self.norms[index](x)), model.dropout, self.training)
            return self.last(x)

    return Network()


def mean_matrices(edge_index: Any, nodes: int) -> tuple[Any, Any]:
    """Sparse matrices: means over neighbours and the node itself, and their transpose."""
    import torch

    own = torch.arange(nodes)
    edges = edge_index[:, edge_index[0] != edge_index[1]]
    source, target = torch.cat([edges, torch.stack([own, own])], 1)
    share = 1.0 / torch.bincount(target, minlength=nodes)[target]
    places = [torch.stack([target, source]), torch.stack([source, target])]
    there, back = (torch.sparse_coo_tensor(each, share, (nodes, nodes)).to_sparse_csr() for each in places)
    return there, back


# -- the table --


def summary(cell: str, seeds: int) -> dict[str, Any] | None:
    """Mean and standard deviation of a cell, in points; None before its first seed is done."""
    path = CELLS / f"{cell.replace('/', '.')}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    runs = found["runs"][:seeds]
    if not runs:
        return None
    made: dict[str, Any] = {"cell": cell, "seeds": len(runs), "metric": found["settings"]["train"]["metric"]}
    for split in ("val", "test"):
        values = [100 * run[split] for run in runs]
        made[split] = statistics.mean(values)
        made[f"{split}_std"] = statistics.stdev(values) if len(values) > 1 else None
    return {**made, "cpu_seconds": sum(run["cpu_seconds"] for run in runs), "runs": runs, "settings": found["settings"]}


def line(wanted: Wanted, seeds: int) -> tuple[str, list[dict[str, Any]]]:
    """One line of the table and the cells it is made of."""
    cells = [summary(cell, wanted.seeds(seeds)) for cell in wanted.cells]
    by = dict(zip((cell.rsplit("/", 1)[1] for cell in wanted.cells), cells, strict=True))
    texts = [_points(by[side]) if side in by else "" for side in (OURS, PEER)]
    first = by[OURS]
    verdict = []
    if first is not None and wanted.published is not None:
        off = first["test"] - wanted.published
        fine = off >= -wanted.within and (wanted.above or off <= wanted.within)
        verdict.append(f"{off:+.2f} to {wanted.published:g}{'' if fine else ' (out of range)'}")
    for side, name in ((PEER, "PyG"), (PUBLISHED, "the published model here")):
        other = by.get(side)
        if first is not None and other is not None:
            off = first["test"] - other["test"]
            verdict.append(f"{off:+.2f} to {name}{'' if abs(off) <= wanted.within else ' (out of range)'}")
    text = f"{wanted.name:22} {texts[0]:>14} {texts[1]:>14}   {', '.join(verdict)}"
    return text, [cell for cell in cells if cell is not None]


def _points(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    return f"{cell['test']:.2f}" + ("" if cell["test_std"] is None else f" ± {cell['test_std']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--only", nargs="+", default=[""], metavar="CELL", help="cells whose name begins like this")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=2, help="cells at a time, one thread each")
    parser.add_argument("--minutes", type=float, default=30, help="no seed is begun after this")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        run_cell(args.cell, args.data, args.seeds, args.until)
        return
    from record import write_results

    CELLS.mkdir(parents=True, exist_ok=True)
    until = time.time() + 60 * args.minutes
    chosen = [(cell, wanted) for wanted in TABLE for cell in wanted.cells if cell.startswith(tuple(args.only))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}

    def run(cell: str, seeds: int) -> int:
        words = ["--cell", cell, "--data", str(args.data), "--seeds", str(seeds), "--until", str(until)]
        return subprocess.run([sys.executable, __file__, *words], env=environment).returncode

    with ThreadPoolExecutor(args.at_once) as pool:
        for seeds in sorted({min(QUICK, args.seeds), args.seeds}):
            if any(pool.map(run, [cell for cell, _ in chosen], [wanted.seeds(seeds) for _, wanted in chosen])):
                sys.exit(1)
    lines = [line(wanted, args.seeds) for wanted in TABLE]
    print(f"{'test, mean of seeds':22} {OURS:>14} {PEER:>14}")
    print("\n".join(text for text, _ in lines))
    print(write_results("accuracy", [cell for _, cells in lines for cell in cells], keep=True))


if __name__ == "__main__":
    main()
