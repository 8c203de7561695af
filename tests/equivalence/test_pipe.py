"""pipe equals local if every partition is one chunk; with several chunks it deviates as the gradient rule says."""

from __future__ import annotations

from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.chunk_layout import ChunkLayout, build_chunk_layout
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.config import make_config
from gnnfleet.nn.model import GNN, build_model
from gnnfleet.ops.draws import DrawKey
from gnnfleet.sharded.pipeline.chunked_partition import ChunkedPartition, slot_of_position
from gnnfleet.sharded.pipeline.history import ChunkView, GradientRule, HistoryStore, PipelineSlot
from gnnfleet.sharded.pipeline.stage_halo import StageHalo
from gnnfleet.sharded.pipeline.typed_chunks import join_node_types, open_chunk_view
from gnnfleet.strategies.pipe.pipeline_rank import run_layer
from gnnfleet.strategies.pipe.schedule import chunk_order
from gnnfleet.strategies.pipe.strategy import PipeStrategy
from gnnfleet.training.build import RankContext, build
from tests.equivalence.spread import NODES, bare_graph, plain_graph, related_graph, typed_graph
from tests.equivalence.test_sar import (
    MODELS,
    TYPED,
    check_close,
    fit,
    graph_with_held_out_edges,
    link_settings,
    run_settings,
)
from tests.ranks import RankPool
from tests.session.test_custom_model import SHARED_LAYER_MODEL

GRAPHS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "plain": (plain_graph, MODELS),
    "related": (related_graph, [{"name": "rgcn", "bases": 1}, {"name": "rgcn"}]),
    "typed": (typed_graph, TYPED),
    "bare": (bare_graph, [{"name": "hgt", "heads": 2}, {"name": "rgcn"}]),
}
KEY = DrawKey(1, 2, 3)
Grads = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores")
    for name, (make, _) in GRAPHS.items():
        save_store(make(), path / name)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {name: [fit_local(folder / name, model) for model in models] for name, (_, models) in GRAPHS.items()}


def fit_local(store: Path, model: dict[str, Any]) -> dict[str, Any]:
    return fit(open_store(store), run_settings(model, name="local", order="store"))


def pipe_settings(model: dict[str, Any], world: World, partitions: int, chunks: int, **strategy: Any) -> dict[str, Any]:
    settings = run_settings(model, name="pipe", graph_parallel=partitions, chunks=chunks, **strategy)
    return settings | {"workers": world.size}


def chunked(graph: Graph, world: World, partitions: int, chunks: int, method: str = "mincut") -> RankContext:
    return RankContext(world, layouts=[build_chunk_layout(graph, partitions, chunks, method=method)])


def check_metrics(fitted: dict[str, Any], reference: dict[str, Any], name: str) -> None:
    for key in ("losses", "metrics", "test", "weights"):
        check_close(fitted[key], reference[key], f"{name} {key}")


def models_of(name: str, size: int) -> list[dict[str, Any]]:
    """All models on few ranks, every other one on more."""
    return GRAPHS[name][1] if size < 3 else GRAPHS[name][1][size % 2 :: 2]


def fit_all_models(world: World, store: str, name: str, partitions: int, method: str) -> list[dict[str, Any]]:
    graph = open_store(store)
    context = chunked(graph, world, partitions, partitions, method)
    return [
        fit(graph, pipe_settings(model, world, partitions, partitions), context)
        for model in models_of(name, world.size)
    ]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(
    ("size", "partitions", "method"),
    [(1, 1, "mincut"), (2, 1, "mincut"), (2, 2, "random"), (3, 3, "mincut"), (4, 2, "random")],
)
def test_partitions_of_one_chunk_equal_local(
    pool: RankPool, folder: Path, expected: dict[str, Any], name: str, size: int, partitions: int, method: str
) -> None:
    ranks = pool.run(size, fit_all_models, str(folder / name), name, partitions, method)
    for index, model in enumerate(models_of(name, size)):
        reference = expected[name][GRAPHS[name][1].index(model)]
        for number, rank in enumerate(ranks):
            check_metrics(rank[index], reference, f"{model} rank {number}")
        for key in ("logits", "embeddings"):
            check_close(ranks[0][index][key], reference[key], f"{model} {key}")


def fit_links(world: World, store: str) -> list[dict[str, Any]]:
    graph = open_store(store)
    settings = [link_settings(case, name="pipe", graph_parallel=1, chunks=1) for case in ("dot", "mlp")]
    return [fit(graph, case | {"workers": world.size}, chunked(graph, world, 1, 1)) for case in settings]


def test_link_prediction_with_one_chunk_equals_local(pool: RankPool, folder: Path) -> None:
    graph = save_store(graph_with_held_out_edges(plain_graph), folder / "linked")
    ranks = pool.run(2, fit_links, str(folder / "linked"))
    for index, case in enumerate(("dot", "mlp")):
        check_metrics(ranks[0][index], fit(graph, link_settings(case, name="local", order="store")), case)


def fit_one_chunk(world: World, store: str, model: dict[str, Any]) -> dict[str, Any]:
    graph = open_store(store)
    return fit(graph, pipe_settings(model, world, 1, 1), chunked(graph, world, 1, 1))


@pytest.mark.parametrize("size", [2, 4])
def test_layers_that_share_weights_equal_local(pool: RankPool, folder: Path, tmp_path: Path, size: int) -> None:
    """Each of four stages has one layer; the second and the third layer share their weights."""
    (tmp_path / "twice.py").write_text(SHARED_LAYER_MODEL)
    model = {"name": f"{tmp_path / 'twice.py'}:make", "layers": 4, "settings": {"norm": "LayerNorm"}}
    reference = fit_local(folder / "plain", model)
    for number, fitted in enumerate(pool.run(size, fit_one_chunk, str(folder / "plain"), model)):
        check_metrics(fitted, reference, f"rank {number}")


def fit_two_partitions(world: World, store: str, model: dict[str, Any], starts: list[int]) -> dict[str, Any]:
    layout = ChunkLayout(torch.arange(NODES), torch.tensor(starts), 2)
    return fit(open_store(store), pipe_settings(model, world, 2, 2), RankContext(world, layouts=[layout]))


@pytest.mark.parametrize("starts", [[0, 1, NODES], [0, NODES - 1, NODES], [0, 0, NODES], [0, NODES, NODES]])
def test_batch_norm_on_a_partition_of_at_most_one_node(pool: RankPool, folder: Path, starts: list[int]) -> None:
    """Statistics are those of all partitions; the profile of single layers must not fail on one row."""
    model = {"name": "sage", "norm": "batch"}
    reference = fit_local(folder / "plain", model)
    for number, fitted in enumerate(pool.run(2, fit_two_partitions, str(folder / "plain"), model, starts)):
        check_metrics(fitted, reference, f"rank {number}")


# -- gradients with history --


class ChunkedModel:
    """A model on the chunks of one partition, beside ranks with the others; history is exact, of the same weights."""

    def __init__(
        self, graph: Graph, model: GNN, layout: ChunkLayout, rule: GradientRule, world: World | None = None
    ) -> None:
        self.model, self.layout, self.world = model, layout, world or World()
        partition = ChunkedPartition(join_node_types(graph), layout, self.world.rank)
        self.history = HistoryStore(partition, StageHalo(self.world, partition), rule)
        self.views = [open_chunk_view(graph, chunk, self.history).with_step(key=KEY) for chunk in partition.chunks]
        self.x = features(graph)
        self.history.begin(torch.zeros(graph.num_nodes, dtype=torch.int64), updates_history=True)
        slot = PipelineSlot(0, ((-1 if layout.chunks_per_partition > 1 else 0),) * self.world.size)
        with torch.no_grad():
            self.forward(open_chunk_view(graph, partition.as_one_chunk, self.history).with_step(key=KEY).in_slot(slot))
        self.history.finish()

    def forward(self, view: ChunkView) -> Tensor:
        by_type = {kind: self.x[kind][nodes.node_ids] for kind, nodes in view.nodes.items()}
        rows: Any = by_type if len(by_type) > 1 else next(iter(by_type.values()))
        carry = None
        for index in range(self.model.num_layers):
            rows, carry = run_layer(self.model, index, view, rows, carry, None)
        out: Tensor = rows
        return out

    def gradients(self, pattern: Tensor, *orders: tuple[int, ...]) -> Grads:
        """Gradients of the sum of output × pattern over this partition, given the order of every partition's chunks."""
        self.model.zero_grad()
        self.history.begin(slot_of_position(orders, self.layout))
        views = [
            self.views[chunks[self.world.rank]].in_slot(PipelineSlot(slot, chunks))
            for slot, chunks in enumerate(zip(*orders, strict=True))
        ]
        outs = [self.forward(view) for view in views]
        for view, out in zip(views[::-1], outs[::-1], strict=True):
            torch.autograd.backward(out, pattern[view.chunk.partition.store_ids[view.chunk.span]])
            self.history.restore(view.slot.slot)
        self.history.finish()
        return copy_grads(self.model)

    def mean_gradients(self, pattern: Tensor, orders: list[tuple[tuple[int, ...], ...]]) -> Grads:
        """Means over orders, each with the gradients of another pattern as those of the previous pass."""
        self.gradients(random_pattern(9), *orders[0])
        state = {key: tensor.clone() for key, tensor in self.history.state_dict().items()}
        total: Grads = {}
        for order in orders:
            self.history.load_state_dict(state)
            for name, grad in self.gradients(pattern, *order).items():
                total[name] = total.get(name, torch.zeros_like(grad)) + grad / len(orders)
        return total


def copy_grads(model: GNN) -> Grads:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def make_model(graph: Graph, name: str, layers: int, **settings: Any) -> GNN:
    torch.manual_seed(0)
    heads = {"heads": 2} if name in ("gat", "gatv2", "hetero-gat", "hetero-gatv2", "hgt") else {}
    return build_model(make_config(name, hidden=8, layers=layers, **heads, **settings), graph).double()


def exact_gradients(graph: Graph, model: GNN, pattern: Tensor) -> Grads:
    model.zero_grad()
    x: Any = features(graph)
    out = model(LocalView.of_graph(graph).with_step(key=KEY), x if len(x) > 1 else next(iter(x.values())))
    (out * pattern[: len(out)]).sum().backward()
    return copy_grads(model)


def features(graph: Graph) -> dict[str, Tensor]:
    return {kind: nodes.x.double() for kind, nodes in graph.nodes.items() if nodes.x is not None}


def random_pattern(seed: int = 0, nodes: int = NODES) -> Tensor:
    return torch.randn(nodes, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


NAMES = ("sage", "gcn", "gat", "gatv2", "gin", "rgcn", "gcn2", "res+")
HETERO = ("hetero-sage", "hetero-gat", "hetero-gatv2", "hetero-gin", "hgt")


@pytest.mark.parametrize(
    ("name", "make"), [*((name, plain_graph) for name in NAMES), *((name, typed_graph) for name in ("rgcn", *HETERO))]
)
def test_gradients_converge_to_exact_ones_at_fixed_weights(name: str, make: Any) -> None:
    """Each pass makes one more hop exact; dropout is on, and the same in every pass."""
    graph = make()
    model, pattern = make_model(graph, name, 3), random_pattern()
    reference = exact_gradients(graph, model, pattern)
    chunked_model = ChunkedModel(graph, model, build_chunk_layout(graph, 1, 4), "stale")
    first = chunked_model.gradients(pattern, (2, 0, 3, 1))
    assert any(not torch.allclose(first[key], reference[key]) for key in reference), "the first pass is exact already"
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (1, 3, 2, 0)):
        last = chunked_model.gradients(pattern, order)
    check_close(last, reference, name)


@pytest.mark.parametrize("name", ["sage", "gat", "gatv2", "res+", "hetero-gat", "hgt"])
def test_edges_inside_chunks_are_exact(name: str) -> None:
    """A graph without edges between chunks needs no history."""
    random = torch.Generator().manual_seed(4)
    block = torch.randint(0, 10, (2, 60), generator=random)
    index = torch.cat([block + 10 * i for i in range(4)], 1)
    graph = Graph(index, x=torch.randn(40, 5, generator=random), y=torch.arange(40) % 3, num_nodes=40)
    layout = ChunkLayout(torch.arange(40), torch.arange(0, 41, 10), 1)
    model, pattern = make_model(graph, name, 3), random_pattern(nodes=40)
    chunked_model = ChunkedModel(graph, model, layout, "double")
    chunked_model.history.rows.clear()
    gradients = chunked_model.gradients(pattern, (3, 0, 2, 1))
    check_close(gradients, exact_gradients(graph, model, pattern), name)


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_over_orders_of_one_hop_is_exact(name: str) -> None:
    """Features have no gradient. Layers that map rows before they gather them cross chunks in their only layer."""
    graph, pattern = plain_graph(), random_pattern()
    model = make_model(graph, name, 1 if name in ("gat", "gatv2", "gcn2", "res+") else 2)
    reference = exact_gradients(graph, model, pattern)
    chunked_model = ChunkedModel(graph, model, build_chunk_layout(graph, 1, 3), "double")
    mean = chunked_model.mean_gradients(pattern, [(order,) for order in permutations(range(3))])
    check_close(mean, reference, name)


def test_two_crossings_count_two_thirds() -> None:
    """GNNPipe's rule is not exact along paths of several hops.

    A path through three chunks has a gradient in one of six orders, with weight 4.
    """
    graph = Graph(torch.tensor([[0, 1], [1, 2]]), num_nodes=3)  # 0 → 1 → 2, each in a chunk of its own
    layout = ChunkLayout(torch.arange(3), torch.arange(4), 1)
    partition = ChunkedPartition(graph, layout, 0)
    history = HistoryStore(partition, StageHalo(World(), partition), "double")
    total = 0.0
    for order in permutations(range(3)):
        history.begin(slot_of_position([order], layout))
        rows = [torch.ones(1, 1, dtype=torch.float64, requires_grad=True) for _ in order]
        views = [
            ChunkView.open(partition.chunks[chunk], history).in_slot(PipelineSlot(slot, (chunk,)))
            for slot, chunk in enumerate(order)
        ]
        outs = [
            view.with_step(layer=1).aggregate(view.with_step(layer=0).aggregate(rows[chunk]))
            for chunk, view in zip(order, views, strict=True)
        ]
        for chunk, view, out in list(zip(order, views, outs, strict=True))[::-1]:
            torch.autograd.backward(out, torch.full((1, 1), float(chunk == 2), dtype=torch.float64))
            history.restore(view.slot.slot)
        history.finish()
        assert rows[0].grad is not None
        total += float(rows[0].grad) / 6
    assert total == pytest.approx(2 / 3)


CROSSING = (("gcn", 2), ("gat", 1), ("gatv2", 1))
"""Models whose gradients cross chunks at most once."""


def mean_gradients_of_a_partition(world: World, store: str) -> list[Grads]:
    """This partition's share of the gradients, averaged over all orders of both partitions."""
    graph = open_store(store)
    layout, orders = build_chunk_layout(graph, 2, 4), list(product(permutations(range(2)), repeat=2))
    return [
        ChunkedModel(graph, make_model(graph, name, layers), layout, "double", world).mean_gradients(
            random_pattern(), orders
        )
        for name, layers in CROSSING
    ]


def test_the_mean_over_orders_of_two_partitions_is_exact(pool: RankPool, folder: Path) -> None:
    graph = open_store(folder / "plain")
    ranks = pool.run(2, mean_gradients_of_a_partition, str(folder / "plain"))
    for index, (name, layers) in enumerate(CROSSING):
        reference = exact_gradients(graph, make_model(graph, name, layers), random_pattern())
        check_close({key: ranks[0][index][key] + ranks[1][index][key] for key in reference}, reference, name)


# -- irregular chunks --

IRREGULAR: dict[str, tuple[list[int], int, GradientRule]] = {
    "single nodes": ([1] * 60, 1, "stale"),
    "empty chunks": ([0, 17, 0, 1, 42, 0], 1, "stale"),
    "unequal partitions": ([1, 3, 0, 20, 5, 2, 0, 0, 29], 3, "stale"),
    "empty partition": ([10, 20, 0, 0, 17, 13], 3, "stale"),
}
"""Sizes of chunks, number of partitions, a rule that stores gradients."""


def irregular_layout(case: str, nodes: int) -> ChunkLayout:
    sizes, partitions, _ = IRREGULAR[case]
    order = torch.randperm(nodes, generator=torch.Generator().manual_seed(5))
    starts = torch.tensor([0, *sizes]).cumsum(0).clamp(max=nodes)
    starts[-1] = nodes
    return ChunkLayout(order, starts, partitions)


def irregular_models() -> list[tuple[Graph, str, dict[str, Any]]]:
    plain, related = plain_graph(), related_graph()
    models = [("sage", {"aggr": "max"}), ("gcn", {}), ("gat", {}), ("gatv2", {}), ("gcn2", {}), ("res+", {})]
    typed = [(typed_graph(), name, {}) for name in ("rgcn", "hetero-gat", "hgt")]
    return [*((plain, name, settings) for name, settings in models), (related, "rgcn", {}), *typed]


def gradients_of_third_passes(world: World, case: str) -> list[Grads]:
    """This partition's share of the gradients, for every model."""
    gradients = []
    for graph, name, settings in irregular_models():
        layout = irregular_layout(case, graph.num_nodes)
        model = make_model(graph, name, 2, **settings)
        chunked_model = ChunkedModel(graph, model, layout, IRREGULAR[case][2], world)
        for seed in range(3):
            orders = [
                tuple(chunk_order(seed, 0, number, layout.chunks_per_partition, shuffle=True))
                for number in range(layout.partitions)
            ]
            last = chunked_model.gradients(random_pattern(nodes=graph.num_nodes), *orders)
        gradients.append(last)
    return gradients


@pytest.mark.parametrize("case", IRREGULAR)
def test_gradients_of_irregular_chunks_converge_to_exact_ones(pool: RankPool, case: str) -> None:
    ranks = pool.run(IRREGULAR[case][1], gradients_of_third_passes, case)
    for index, (graph, name, settings) in enumerate(irregular_models()):
        pattern = random_pattern(nodes=graph.num_nodes)
        reference = exact_gradients(graph, make_model(graph, name, 2, **settings), pattern)
        check_close({key: sum(rank[index][key] for rank in ranks) for key in reference}, reference, f"{case} {name}")


# -- bytes --

COUNTED = (
    ("plain", "gcn2", 4),
    ("plain", "sage", 3),
    ("plain", "gat", 3),
    ("plain", "gatv2", 3),
    ("plain", "res+", 3),
    ("plain", "rgcn", 3),
    ("related", "rgcn", 3),
    ("typed", "rgcn", 3),
    ("typed", "hetero-sage", 3),
    ("typed", "hgt", 3),
)


def count_bytes(world: World, folder: str, partitions: int, chunks: int, wire: str) -> list[tuple[int, int]]:
    """(bytes sent by this rank in the second epoch, estimate for all ranks) of every model."""
    counts = []
    for graph_name, name, layers in COUNTED:
        graph = open_store(f"{folder}/{graph_name}")
        context = chunked(graph, world, partitions, chunks, "random")
        model = {"name": name, "layers": layers, "heads": 2}
        settings = pipe_settings(model, world, partitions, chunks, wire_dtype=wire, exactness_check_every=0)
        strategy = build(graph, resolve(settings), context=context).strategy
        assert isinstance(strategy, PipeStrategy)
        list(strategy.train_epoch(0))
        before = world.traffic.bytes_sent
        list(strategy.train_epoch(1))
        counts.append((world.traffic.bytes_sent - before, strategy.grid_estimate.bytes))
    return counts


@pytest.mark.parametrize(
    ("size", "partitions", "chunks", "wire"),
    [(2, 1, 4, "exact"), (3, 1, 3, "bf16"), (4, 2, 4, "exact"), (2, 2, 4, "bf16"), (3, 3, 3, "exact")],
)
def test_counted_bytes_equal_the_estimate(
    pool: RankPool, folder: Path, size: int, partitions: int, chunks: int, wire: str
) -> None:
    """On a graph of directed edges; with one partition the bytes are those of GNNPipe's formula."""
    ranks = pool.run(size, count_bytes, str(folder), partitions, chunks, wire)
    for index, (graph_name, name, _) in enumerate(COUNTED):
        sent = sum(rank[index][0] for rank in ranks)
        assert sent == ranks[0][index][1], (graph_name, name)
        if partitions == 1:
            tensors, itemsize = 2 if name == "gcn2" else 1, 2 if wire == "bf16" else 8
            nodes = {"plain": 60, "related": 40, "typed": 56}[graph_name]
            assert sent == 2 * (size - 1) * nodes * 8 * itemsize * tensors, (graph_name, name)
