"""Training runs that two versions of gnnfleet are compared on, in the option names of version 0.1.0.

Nothing in a case may depend on a clock or on free memory: grids, batches per fetch and steps per round are fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Options = Mapping[str, object]

STORES: dict[str, tuple[str, Options]] = {
    "nodes": ("communities", {"nodes": 400, "features": 16, "classes": 5, "mean_degree": 8, "seed": 1}),
    "shop": ("shop", {"users": 150, "products": 120, "brands": 10, "buys": 600, "views": 900, "features": 12}),
    "events": ("events", {"users": 60, "items": 40, "events": 1500, "features": 4}),
}
"""Name of a store: (generator, its parameters)."""

COMMON: Options = {"seed": 3, "train.epochs": 3, "model.hidden": 16, "model.layers": 2}


@dataclass(frozen=True)
class Case:
    """Describe one training run, and the predictions that are made with it."""

    name: str
    store: str
    strategy: str
    workers: int = 1
    options: Options = field(default_factory=dict)
    predict: tuple[str, ...] | None = None  # further arguments of ``gnnfleet predict``; None leaves predictions out
    pairs: tuple[str, ...] = ()  # lines of a CSV file that is scored with --pairs
    environment: tuple[str, ...] = ()  # further variables, NAME=VALUE

    @property
    def content(self) -> list[object]:
        """Everything that decides the result; names its directory."""
        environment = [self.environment] if self.environment else []
        return [self.store, STORES[self.store], self.settings, self.predict, self.pairs, *environment]

    @property
    def settings(self) -> dict[str, object]:
        """All options of the run in the names of 0.1.0."""
        required = {"strategy.name": self.strategy, "workers": self.workers}
        return {**COMMON, **required, **self.options}


def _local(name: str, model: str, **options: object) -> Case:
    return Case(f"local-{name}", "nodes", "local", options=_dotted(model, options))


def _sar(name: str, model: str, workers: int, **options: object) -> Case:
    return Case(f"sar{workers}-{name}", "nodes", "sar", workers, _dotted(model, options))


def _pipe(name: str, workers: int, **options: object) -> Case:
    return Case(f"pipe{workers}-{name}", "nodes", "pipe", workers, _dotted("gcn", {"model__layers": 3, **options}))


def _macrobatch(name: str, model: str = "sage", **options: object) -> Case:
    fixed = {"fanouts": "[5,3]", "batch": 10, "together": 2, "prefetch": 0, "resident": "true", "cache_inputs": "false"}
    return Case(f"macrobatch-{name}", "nodes", "macrobatch", 2, _dotted(model, {**fixed, **options}))


def _without_shared_memory(name: str, model: str = "sage", **options: object) -> Case:
    """Workers without shared memory, as on several machines: remote rows are sent, and may be cached."""
    return replace(_macrobatch(name, model, **options), environment=("GNNFLEET_SHARED_MEMORY=0",))


def _tma(name: str, **options: object) -> Case:
    # Limits are far away: a busy machine must not lose a trainer.
    fixed = {"steps": 3, "batch": 8, "fanouts": "[5,3]", "deadline": 600, "silence": 300, "quorum": 2}
    return Case(f"tma-{name}", "nodes", "tma", 2, _dotted("sage", {**fixed, **options}))


def _temporal(name: str, model: str, workers: int = 1, grid: str = "", **more: object) -> Case:
    sizes = {name: workers if name == grid else 1 for name in ("share", "lanes", "copies")}
    fixed = {"batch": 200, "static": "false", "prefetch": 0, "eval_negatives": 9, "model__layers": 1}
    options = {**fixed, **sizes, "train__epochs": 2, **more}
    return Case(f"temporal{workers}-{name}", "events", "temporal", workers, _dotted(model, options))


def _dotted(model: str, options: Mapping[str, object]) -> dict[str, object]:
    """Full option names: ``model__layers`` is model.layers, ``top__task`` is task, a bare name one of the strategy."""
    full: dict[str, object] = {"model.name": model}
    for key, value in options.items():
        group, _, name = key.rpartition("__")
        full[name if group == "top" else f"{group or 'strategy'}.{name}"] = value
    return full


LINKS: dict[str, object] = {"top__task": "link", "top__split": "0.8/0.1/0.1"}
SHOP: dict[str, object] = {"train.epochs": 3, "model.name": "rgcn"}

CASES: tuple[Case, ...] = (
    # local: full batch
    Case("local-sage", "nodes", "local", options={"model.name": "sage"}, predict=("--logits", "--embeddings")),
    _local("gcn-cluster", "gcn", order="cluster", model__residual="true"),
    _local("gatv2", "gatv2", cache_inputs="false"),
    _local("gin-bf16", "gin", top__precision="bf16", model__norm="batch"),
    _local("gcn2", "gcn2", model__norm="layer", train__optimizer="adamw", train__clip=1),
    _local("res", "res+", model__embedding=4, model__norm="layer", train__optimizer="sgd"),
    # local: sampled
    _local("sampled", "sage", fanouts="[5,3]", batch=10, prefetch=0, cache_inputs="false"),
    _local("sampled-cached", "gcn", fanouts="[5,3]", batch=10, prefetch=2, cache_inputs="true", replace="true"),
    Case(
        "local-link",
        "nodes",
        "local",
        options=_dotted("sage", {**LINKS, "fanouts": "[5,3]", "batch": 400, "link__decoder": "mlp", "prefetch": 0}),
        predict=(),
        pairs=("0,1", "5,17", "210,399"),
    ),
    Case("local-rgcn", "shop", "local", options={**SHOP, "model.bases": 2}, predict=("--logits",)),
    # sar
    _sar("sage", "sage", 1),
    _sar("sage", "sage", 2, top__partition="random"),
    _sar("sage-pool", "sage", 3, model__aggr="pool"),
    _sar("gat", "gat", 2, group=1, prefetch=1),
    _sar("gatv2", "gatv2", 3, keep="true", group=2),
    _sar("gcn", "gcn", 2, model__dropout=0.6, model__residual="true", top__partition="super"),
    _sar("gcn", "gcn", 3, flow="false", cache_inputs="false", prefetch=0),
    _sar("int8", "gat", 2, wire="int8"),
    _sar("link", "gcn", 2, **LINKS, link__exclude="none", model__embedding=4),
    Case("sar2-rgcn", "shop", "sar", 2, SHOP, predict=("--logits",)),
    # pipe: always a fixed grid
    _pipe("one-chunk", 2, ways=1, chunks=1),
    _pipe("exact", 2, ways=2, chunks=2),
    _pipe("history", 2, ways=1, chunks=4, guard=2),
    _pipe("stale", 2, ways=1, chunks=4, gradient="stale", warm="false", wire="bf16", refresh=2, shuffle="false"),
    _pipe("alone", 1, ways=1, chunks=4, gradient="stale", guard=0, train__epochs=4),
    # macrobatch
    _macrobatch("plain"),
    _without_shared_memory("apart"),
    _without_shared_memory("belady", "gcn", cache=4000, window=2, together=1),
    _without_shared_memory("score", cache=4000, policy="score", resident="false"),
    _without_shared_memory("score-gat", "gat", cache=4000, policy="score", prefetch=1),
    _macrobatch("columns", "sage", split="columns"),
    _macrobatch("link", "sage", **LINKS, batch=400),
    Case(
        "macrobatch-rgcn",
        "shop",
        "macrobatch",
        2,
        {**SHOP, "strategy.batch": 8, "strategy.together": 3, "strategy.prefetch": 0, "strategy.resident": "true"},
    ),
    # tma: rounds by steps instead of the clock
    _tma("random", scheme="random"),
    _tma("super", scheme="super", clusters=20),
    _tma("psgd-pa", scheme="psgd-pa", weighting="edges"),
    _tma("llcg", scheme="llcg", full="true", correction=2, optimizer="reset"),
    _tma("ggs", scheme="ggs"),
    _tma("link", scheme="random", **LINKS, remote=20),
    # temporal
    _temporal("tgn", "tgn", static="true", static_epochs=2, average=0.9),
    _temporal("tgat", "tgat", events="drawn", queries="batch", model__layers=2),
    _temporal("tgn-id", "tgn-id"),
    _temporal("share", "tgn", 2, "share"),
    _temporal("lanes", "tgn", 2, "lanes", lr_scale="linear"),
    _temporal("copies", "tgn", 2, "copies", prefetch=1),
)
