"""pipe: one chunk for every way equals local; with several, what is not exact is exactly what the rule says."""

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
from gnnfleet.sharded.pipeline.chunk_view import ChunkView
from gnnfleet.sharded.pipeline.chunked_partition import ChunkedPartition, slot_of_position
from gnnfleet.sharded.pipeline.history import GradientRule, HistoryStore, PipelineSlot
from gnnfleet.sharded.pipeline.stage_halo import StageHalo
from gnnfleet.strategies.pipe.schedule import chunk_order
from gnnfleet.strategies.pipe.strategy import PipeStrategy
from gnnfleet.training.build import RankContext, build
from tests.equivalence.spread import NODES, plain_graph, related_graph
from tests.equivalence.test_sar import MODELS, close, link_words, linked, trained, words
from tests.ranks import Crew
from tests.session.test_custom_model import TWICE

GRAPHS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "plain": (plain_graph, MODELS),
    "related": (related_graph, [{"name": "rgcn", "bases": 1}, {"name": "rgcn"}]),
}
KEY = DrawKey(1, 2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores")
    for name, (make, _) in GRAPHS.items():
        save_store(make(), path / name)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [trained(open_store(folder / name), words(model, name="local", order="store")) for model in models]
        for name, (_, models) in GRAPHS.items()
    }


def chunked(graph: Graph, world: World, ways: int, chunks: int, method: str = "mincut") -> RankContext:
    return RankContext(world, layouts=[build_chunk_layout(graph, ways, chunks, method=method)])


def models_of(name: str, size: int) -> list[dict[str, Any]]:
    """All of them on few ranks; on more, every other one."""
    return GRAPHS[name][1] if size < 3 else GRAPHS[name][1][size % 2 :: 2]


def every_model(world: World, store: str, name: str, ways: int, method: str) -> list[dict[str, Any]]:
    graph = open_store(store)
    found = []
    for model in models_of(name, world.size):
        tree = words(model, name="pipe", graph_parallel=ways, chunks=ways) | {"workers": world.size}
        found.append(trained(graph, tree, chunked(graph, world, ways, ways, method)))
    return found


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(
    ("size", "ways", "method"),
    [(1, 1, "mincut"), (2, 1, "mincut"), (2, 2, "random"), (3, 3, "mincut"), (4, 2, "random")],
)
def test_one_chunk_for_every_way_equals_local(
    crew: Crew, folder: Path, expected: dict[str, Any], name: str, size: int, ways: int, method: str
) -> None:
    found = crew.run(size, every_model, str(folder / name), name, ways, method)
    for place, model in enumerate(models_of(name, size)):
        wanted = expected[name][GRAPHS[name][1].index(model)]
        for rank in range(size):
            for word in ("losses", "metrics", "test", "weights"):
                close(found[rank][place][word], wanted[word], f"{model} rank {rank} {word}")
        for word in ("logits", "embeddings"):
            close(found[0][place][word], wanted[word], f"{model} {word}")


def every_link(world: World, store: str) -> list[dict[str, Any]]:
    graph = open_store(store)
    return [
        trained(
            graph,
            link_words(case, name="pipe", graph_parallel=1, chunks=1) | {"workers": world.size},
            chunked(graph, world, 1, 1),
        )
        for case in ("dot", "mlp")
    ]


def test_links_of_one_chunk_equal_local(crew: Crew, folder: Path) -> None:
    graph = save_store(linked(plain_graph), folder / "linked")
    found = crew.run(2, every_link, str(folder / "linked"))
    for place, case in enumerate(("dot", "mlp")):
        wanted = trained(graph, link_words(case, name="local", order="store"))
        for word in ("losses", "metrics", "test", "weights"):
            close(found[0][place][word], wanted[word], f"{case} {word}")


def with_a_layer_twice(world: World, store: str, model: dict[str, Any]) -> dict[str, Any]:
    graph = open_store(store)
    tree = words(model, name="pipe", graph_parallel=1, chunks=1) | {"workers": world.size}
    return trained(graph, tree, chunked(graph, world, 1, 1))


@pytest.mark.parametrize("size", [2, 4])
def test_layers_that_share_weights_equal_local(crew: Crew, folder: Path, tmp_path: Path, size: int) -> None:
    """Four stages have a layer each: the second and the third the same one, the first nothing of it."""
    (tmp_path / "twice.py").write_text(TWICE)
    model = {"name": f"{tmp_path / 'twice.py'}:make", "layers": 4, "settings": {"norm": "LayerNorm"}}
    wanted = trained(open_store(folder / "plain"), words(model, name="local", order="store"))
    for rank, found in enumerate(crew.run(size, with_a_layer_twice, str(folder / "plain"), model)):
        for word in ("losses", "metrics", "test", "weights"):
            close(found[word], wanted[word], f"rank {rank} {word}")


def with_small_ways(world: World, store: str, tree: dict[str, Any], starts: list[int]) -> dict[str, Any]:
    graph = open_store(store)
    layout = ChunkLayout(torch.arange(NODES), torch.tensor(starts), world.size)
    return trained(graph, tree | {"workers": world.size}, RankContext(world, layouts=[layout]))


@pytest.mark.parametrize("starts", [[0, 1, NODES], [0, NODES - 1, NODES], [0, 0, NODES], [0, NODES, NODES]])
def test_batch_norm_on_a_way_of_next_to_nothing(crew: Crew, folder: Path, starts: list[int]) -> None:
    """Statistics are of all ways; only where layers are tried by themselves one row would be too few."""
    model = {"name": "sage", "norm": "batch"}
    wanted = trained(open_store(folder / "plain"), words(model, name="local", order="store"))
    tree = words(model, name="pipe", graph_parallel=2, chunks=2)
    for rank, found in enumerate(crew.run(2, with_small_ways, str(folder / "plain"), tree, starts)):
        for word in ("losses", "metrics", "test", "weights"):
            close(found[word], wanted[word], f"rank {rank} {word}")


# -- what is not exact --


class Walk:
    """A model on the chunks of one way, in this process or with other ways beside it; history is exact and of the same
    weights."""

    def __init__(
        self, graph: Graph, model: GNN, layout: ChunkLayout, gradient: GradientRule, world: World | None = None
    ) -> None:
        self.graph, self.model, self.layout = graph, model, layout
        self.world = world or World()
        way = ChunkedPartition(graph, layout, self.world.rank)
        self.stream = HistoryStore(way, StageHalo(self.world, way), gradient)
        self.views = [ChunkView.open(chunk, self.stream).with_step(key=KEY) for chunk in way.chunks]
        (nodes,) = graph.nodes.values()
        assert nodes.x is not None
        self.x = nodes.x.double()
        self.stream.begin(torch.zeros(graph.num_nodes, dtype=torch.int64), adopts=True)
        whole = PipelineSlot(0, ((-1 if layout.chunks_per_partition > 1 else 0),) * self.world.size)
        with torch.no_grad():
            self.forward(ChunkView.open(way.as_one_chunk, self.stream).with_step(key=KEY).in_slot(whole))
        self.stream.finish()

    def forward(self, view: ChunkView) -> Tensor:
        rows: Any = self.x[view.node_ids]
        carry = None
        for index in range(self.model.num_layers):
            rows, carry = self.model.layer(index, view, rows, carry)
        out: Tensor = rows
        return out

    def gradients(self, pattern: Tensor, *orders: tuple[int, ...]) -> dict[str, Tensor]:
        """Of the sum of output × pattern of this way's rows, with the chunks of every way in an order."""
        self.model.zero_grad()
        self.stream.begin(slot_of_position(orders, self.layout))
        turns = [PipelineSlot(slot, chunks) for slot, chunks in enumerate(zip(*orders, strict=True))]
        own = orders[self.world.rank]
        views = [self.views[chunk].in_slot(turn) for chunk, turn in zip(own, turns, strict=True)]
        outs = [self.forward(view) for view in views]
        for view, out in zip(views[::-1], outs[::-1], strict=True):
            torch.autograd.backward(out, pattern[view.node_ids])
            self.stream.restore(view.slot.slot)
        self.stream.finish()
        return grads(self.model)


def grads(model: GNN) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def made(graph: Graph, name: str, layers: int, **settings: Any) -> GNN:
    torch.manual_seed(0)
    words = {"heads": 2} if name in ("gat", "gatv2") else {}
    return build_model(make_config(name, hidden=8, layers=layers, **words, **settings), graph).double()


def exact(graph: Graph, model: GNN, pattern: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (nodes,) = graph.nodes.values()
    assert nodes.x is not None
    (model(LocalView.of_graph(graph).with_step(key=KEY), nodes.x.double()) * pattern).sum().backward()
    return grads(model)


def some(graph: Graph, seed: int = 0) -> Tensor:
    return torch.randn(graph.num_nodes, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


NAMES = ("sage", "gcn", "gat", "gatv2", "gin", "rgcn", "gcn2", "res+")


@pytest.mark.parametrize("gradient", ["stale", "control_variate"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_settle_on_the_exact_ones(name: str, gradient: GradientRule) -> None:
    """With weights that stay, each pass mends one more hop; dropout is on, and the same in every pass."""
    graph = plain_graph()
    model, pattern = made(graph, name, 3), some(graph)
    wanted = exact(graph, model, pattern)
    walk = Walk(graph, model, build_chunk_layout(graph, 1, 4), gradient)
    first = walk.gradients(pattern, (2, 0, 3, 1))
    assert any(not torch.allclose(first[key], wanted[key]) for key in wanted), "nothing was at stake"
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (1, 3, 2, 0)):
        found = walk.gradients(pattern, order)
    close(found, wanted, name)


@pytest.mark.parametrize("name", ["sage", "gat", "gatv2", "res+"])
def test_edges_inside_chunks_are_exact(name: str) -> None:
    """Without edges between chunks there is nothing to remember."""
    random = torch.Generator().manual_seed(4)
    block = torch.randint(0, 10, (2, 60), generator=random)
    index = torch.cat([block + 10 * i for i in range(4)], 1)
    graph = Graph(index, x=torch.randn(40, 5, generator=random), y=torch.arange(40) % 3, num_nodes=40)
    layout = ChunkLayout(torch.arange(40), torch.arange(0, 41, 10), 1)
    model, pattern = made(graph, name, 3), some(graph)
    walk = Walk(graph, model, layout, "double")
    walk.stream.history.clear()
    close(walk.gradients(pattern, (3, 0, 2, 1)), exact(graph, model, pattern), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gradient", ["double", "control_variate"])
def test_the_mean_over_orders_of_one_hop_is_exact(name: str, gradient: GradientRule) -> None:
    """Features have no gradient; layers that map rows before they gather them cross chunks once in the last layer."""
    graph = plain_graph()
    model, pattern = made(graph, name, 1 if name in ("gat", "gatv2", "gcn2", "res+") else 2), some(graph)
    wanted = exact(graph, model, pattern)
    walk = Walk(graph, model, build_chunk_layout(graph, 1, 3), gradient)
    walk.gradients(some(graph, 9), (0, 1, 2))  # what a control variate remembers: anything will do
    kept = walk.stream.state_dict()
    kept = {key: tensor.clone() for key, tensor in kept.items()}
    total: dict[str, Tensor] = {}
    for order in permutations(range(3)):
        walk.stream.load_state_dict(kept)
        for key, gradient_of in walk.gradients(pattern, order).items():
            total[key] = total.get(key, torch.zeros_like(gradient_of)) + gradient_of / 6
    close(total, wanted, f"{name} {gradient}")


def test_two_crossings_count_two_thirds() -> None:
    """The rule of GNNPipe is not right along paths: of three chunks in a row one order of six carries, weighed by 4."""
    graph = Graph(torch.tensor([[0, 1], [1, 2]]), num_nodes=3)  # 0 → 1 → 2, each in a chunk of its own
    layout = ChunkLayout(torch.arange(3), torch.arange(4), 1)
    way = ChunkedPartition(graph, layout, 0)
    stream = HistoryStore(way, StageHalo(World(), way), "double")
    total = 0.0
    for order in permutations(range(3)):
        stream.begin(slot_of_position([order], layout))
        rows = [torch.ones(1, 1, dtype=torch.float64, requires_grad=True) for _ in order]
        views = [
            ChunkView.open(way.chunks[chunk], stream).in_slot(PipelineSlot(t, (chunk,)))
            for t, chunk in enumerate(order)
        ]
        outs = [
            view.with_step(layer=1).aggregate(view.with_step(layer=0).aggregate(rows[chunk]))
            for chunk, view in zip(order, views, strict=True)
        ]
        for chunk, view, out in list(zip(order, views, outs, strict=True))[::-1]:
            torch.autograd.backward(out, torch.full((1, 1), float(chunk == 2), dtype=torch.float64))
            stream.restore(view.slot.slot)
        stream.finish()
        assert rows[0].grad is not None
        total += float(rows[0].grad) / 6
    assert total == pytest.approx(2 / 3)


CROSSING = (("gcn", 2), ("gat", 1), ("gatv2", 1))
"""Models whose gradients cross chunks at most once."""


def mean_of_ways(world: World, store: str, gradient: GradientRule) -> list[dict[str, Tensor]]:
    """Over all orders of both ways: this way's share of gradients."""
    graph = open_store(store)
    found = []
    for name, layers in CROSSING:
        walk = Walk(graph, made(graph, name, layers), build_chunk_layout(graph, 2, 4), gradient, world)
        orders = list(product(permutations(range(2)), repeat=2))
        walk.gradients(some(graph, 9), *orders[0])
        kept = {key: tensor.clone() for key, tensor in walk.stream.state_dict().items()}
        total: dict[str, Tensor] = {}
        for both in orders:
            walk.stream.load_state_dict(kept)
            for key, each in walk.gradients(some(graph), *both).items():
                total[key] = total.get(key, torch.zeros_like(each)) + each / len(orders)
        found.append(total)
    return found


@pytest.mark.parametrize("gradient", ["double", "control_variate"])
def test_the_mean_over_orders_of_two_ways_is_exact(crew: Crew, folder: Path, gradient: GradientRule) -> None:
    graph = open_store(folder / "plain")
    found = crew.run(2, mean_of_ways, str(folder / "plain"), gradient)
    for place, (name, layers) in enumerate(CROSSING):
        wanted = exact(graph, made(graph, name, layers), some(graph))
        close({key: found[0][place][key] + found[1][place][key] for key in wanted}, wanted, name)


# -- chunks of every awkward kind --

AWKWARD: dict[str, tuple[list[int], int, GradientRule]] = {
    "a node each": ([1] * 60, 1, "control_variate"),
    "empty ones": ([0, 17, 0, 1, 42, 0], 1, "stale"),
    "unequal ways": ([1, 3, 0, 20, 5, 2, 0, 0, 29], 3, "control_variate"),
    "a way without rows": ([10, 20, 0, 0, 17, 13], 3, "stale"),
}
"""Sizes of chunks, the ways that share them, a rule that keeps gradients."""


def awkward(how: str, nodes: int) -> ChunkLayout:
    sizes, ways, _ = AWKWARD[how]
    order = torch.randperm(nodes, generator=torch.Generator().manual_seed(5))
    starts = torch.tensor([0, *sizes]).cumsum(0).clamp(max=nodes)
    starts[-1] = nodes
    return ChunkLayout(order, starts, ways)


def settled(world: World, how: str) -> list[dict[str, Tensor]]:
    """Gradients of this way after some passes in orders of all kinds."""
    found = []
    for graph, name, settings in awkward_models():
        layout = awkward(how, graph.num_nodes)
        walk = Walk(graph, made(graph, name, 2, **settings), layout, AWKWARD[how][2], world)
        for number in range(3):
            orders = [
                chunk_order(number, 0, way, layout.chunks_per_partition, shuffle=True)
                for way in range(layout.partitions)
            ]
            last = walk.gradients(some(graph), *map(tuple, orders))
        found.append(last)
    return found


def awkward_models() -> list[tuple[Graph, str, dict[str, Any]]]:
    plain, related = plain_graph(), related_graph()
    kinds = [("sage", {"aggr": "max"}), ("gcn", {}), ("gat", {}), ("gatv2", {}), ("gcn2", {}), ("res+", {})]
    return [*((plain, name, settings) for name, settings in kinds), (related, "rgcn", {})]


@pytest.mark.parametrize("how", AWKWARD)
def test_awkward_chunks_settle_on_exact_gradients(crew: Crew, how: str) -> None:
    ways = AWKWARD[how][1]
    found = crew.run(ways, settled, how) if ways > 1 else [settled(World(), how)]
    for place, (graph, name, settings) in enumerate(awkward_models()):
        wanted = exact(graph, made(graph, name, 2, **settings), some(graph))
        close({key: sum(one[place][key] for one in found) for key in wanted}, wanted, f"{how} {name}")


# -- bytes --


def bytes_of_a_step(world: World, folder: str, ways: int, chunks: int, wire: str) -> list[tuple[int, int]]:
    found = []
    for kind, name, layers in WEIGHED:
        graph = open_store(f"{folder}/{kind}")
        here = chunked(graph, world, ways, chunks, "random")
        model = {"name": name, "layers": layers, "heads": 2}
        tree = words(
            model, name="pipe", graph_parallel=ways, chunks=chunks, wire_dtype=wire, exactness_check_every=0
        ) | {"workers": world.size}
        strategy = build(graph, resolve(tree), context=here).strategy
        assert isinstance(strategy, PipeStrategy)
        list(strategy.train_epoch(0))
        before = world.traffic.bytes_sent
        list(strategy.train_epoch(1))
        found.append((world.traffic.bytes_sent - before, strategy.grid_estimate.bytes))
    return found


WEIGHED = (
    ("plain", "gcn2", 4),
    ("plain", "sage", 3),
    ("plain", "gat", 3),
    ("plain", "gatv2", 3),
    ("plain", "res+", 3),
    ("plain", "rgcn", 3),
    ("related", "rgcn", 3),
)


@pytest.mark.parametrize(
    ("size", "ways", "chunks", "wire"),
    [(2, 1, 4, "exact"), (3, 1, 3, "bf16"), (4, 2, 4, "exact"), (2, 2, 4, "bf16"), (3, 3, 3, "exact")],
)
def test_bytes_are_the_formulas(crew: Crew, folder: Path, size: int, ways: int, chunks: int, wire: str) -> None:
    """What is counted is what was predicted, on a graph of directed edges; without ways, GNNPipe's formula."""
    found = crew.run(size, bytes_of_a_step, str(folder), ways, chunks, wire)
    for place, (kind, name, _) in enumerate(WEIGHED):
        sent = sum(one[place][0] for one in found)
        assert sent == found[0][place][1], (kind, name)
        if ways == 1:
            carried, number = 2 if name == "gcn2" else 1, 2 if wire == "bf16" else 8
            nodes = {"plain": 60, "related": 40}[kind]
            assert sent == 2 * (size - 1) * nodes * 8 * number * carried, (kind, name)
