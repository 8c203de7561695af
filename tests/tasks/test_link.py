"""Link prediction equals a plain loop, hides the edges it should, and measures reproducibly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import EDGE, EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.ingest.clean import add_inverse_edges
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.conv import RGCNConv
from gnnfleet.nn.link import DistMult, ProductMLP, make_decoder
from gnnfleet.nn.link_config import LinkConfig
from gnnfleet.ops.draws import DrawKey
from gnnfleet.tasks.link import LinkBatch, LinkTask
from gnnfleet.training.build import BuiltRun, build


@pytest.fixture(scope="module")
def graph() -> Graph:
    graph = make_dataset("communities", nodes=200, mean_degree=8, seed=3)
    return Graph(graph.single_edges.edge_index(), x=graph.single_nodes.x)


def relational(nodes: int = 40, relations: int = 6, edges: int = 60, *, links: bool = True) -> Graph:
    random = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randint(0, nodes, (2, count), generator=random)

    tables = {
        EdgeType("node", f"r{i}", "node"): validated_edges(
            draw(edges), num_src=nodes, num_dst=nodes, links={"val": draw(5), "test": draw(5)} if links else None
        )
        for i in range(relations)
    }
    return Graph.of({"node": validated_nodes(nodes)}, tables)


def build_task(graph: Graph, **settings: Any) -> tuple[BuiltRun, LinkTask]:
    base = {"task": "link", "precision": "float64", "split": "0.8/0.1/0.1", "seed": 5}
    model = {"hidden": 16, "layers": 2, "dropout": 0.0, **settings.pop("model", {})}
    built = build(graph, resolve({**base, "model": model, **settings}))
    assert isinstance(built.task, LinkTask)
    return built, built.task


@pytest.mark.parametrize("name", ["dot", "mlp", "distmult"])
def test_decoders_equal_their_formulas(name: str) -> None:
    config = LinkConfig.model_validate({"decoder": name, "layers": 3})
    decoder = make_decoder(config, width=8, relations=5, several=True).double()
    random = torch.Generator().manual_seed(0)
    src, dst = torch.randn(2, 9, 8, generator=random, dtype=torch.float64)
    relation = torch.randint(0, 5, (9,), generator=random)
    logits = decoder(src, dst, relation)
    if isinstance(decoder, DistMult):
        expected = torch.stack([(s * decoder.weight[r] * d).sum() for s, d, r in zip(src, dst, relation, strict=True)])
    elif isinstance(decoder, ProductMLP):
        assert len(decoder.lins) == 3
        hidden = functional.relu(decoder.lins[1](functional.relu(decoder.lins[0](src * dst))))
        expected = decoder.lins[2](hidden)[:, 0]
    else:
        expected = torch.einsum("ij,ij->i", src, dst)
    torch.testing.assert_close(logits, expected)
    all_logits = decoder.score_all(src, relation, dst)
    torch.testing.assert_close(all_logits.diagonal(), logits)
    repeated = decoder(src[2:3].expand(9, -1), dst, relation[2:3].expand(9))
    torch.testing.assert_close(all_logits[2], repeated)


@pytest.mark.parametrize("link", [{}, {"eval_negatives": 7}])
def test_tied_val_metric_is_the_metric_of_constant_scores(graph: Graph, link: dict[str, Any]) -> None:
    built, task = build_task(graph, link=link)
    rows = torch.ones(graph.num_nodes, 16, dtype=torch.float64)
    assert task.tied_val_metric == pytest.approx(task.measure(lambda kind, ids: rows[ids], "val")["mrr"], rel=1e-12)
    assert task.tied_val_metric < task.measure(built.strategy.exact_lookup(), "val")["mrr"]
    assert build_task(graph, link={"ranking": "filtered"})[1].tied_val_metric is None
    assert build_task(graph, train={"metric": "hits@10"})[1].tied_val_metric is None


@pytest.mark.parametrize("loss", ["bce", "softmax"])
@pytest.mark.parametrize("mode", ["either", "shared"])
def test_a_step_equals_a_plain_loop(graph: Graph, mode: str, loss: str) -> None:
    link = {"negatives": 3, "negative_mode": mode, "loss": loss, "l2": 0.1}
    built, _ = build_task(graph, link=link, train={"lr": 0.1, "optimizer": "sgd", "momentum": 0.0})
    other, plain = build_task(graph, link=link)
    record = next(iter(built.strategy.train_epoch(0)))
    batch = plain.batch(plain.items("train"), DrawKey(5, 0, 0))
    assert isinstance(batch, LinkBatch)
    model = other.strategy.model
    h = model(LocalView.of_graph(other.graph), other.graph.single_nodes.x.double())  # type: ignore[union-attr]
    links = batch.links
    positive = (h[links.src] * h[links.dst]).sum(1)
    if mode == "shared":
        assert batch.shared is not None
        sides = [h[links.src] @ h[batch.shared].t(), h[links.dst] @ h[batch.shared].t()]
    else:
        assert batch.negatives is not None
        sides = [(h[batch.negatives.src] * h[batch.negatives.dst]).sum(1).view(-1, 3)]
    total = 0.1 * len(links) * torch.cat([h[links.src], h[links.dst]]).square().mean()
    for negative in sides:
        if loss == "bce":
            logits = torch.cat([positive, negative.flatten()])
            labels = torch.cat([torch.ones_like(positive), torch.zeros(negative.numel(), dtype=torch.float64)])
            total = total + functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        else:
            candidates = torch.cat([positive[:, None], negative], 1)
            classes = torch.zeros(len(candidates), dtype=torch.int64)
            total = total + functional.cross_entropy(candidates, classes, reduction="sum")
    mean = total / len(links)
    assert record.loss == pytest.approx(mean.item(), rel=1e-12) and record.count == len(links)
    mean.backward()  # type: ignore[no-untyped-call]
    for (name, mine), theirs in zip(model.named_parameters(), built.strategy.model.parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(theirs, mine - 0.1 * mine.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
@pytest.mark.parametrize("exclude", ["batch", "disjoint:0.4"])
def test_a_masked_edge_has_no_effect(graph: Graph, name: str, exclude: str) -> None:
    built, task = build_task(graph, model={"name": name}, link={"exclude": exclude}, strategy={"batch": 50})
    items = task.train_items(5, 1)[:50]
    batch, view = task.batch(items, DrawKey(5, 1, 0)), LocalView.of_graph(built.graph)
    seen = task.mask_edges(view, batch)
    gone = task.data.splits["train"].select(items if exclude == "batch" else task.train_items(5, 1))
    ends = {
        *zip(gone.src.tolist(), gone.dst.tolist(), strict=True),
        *zip(gone.dst.tolist(), gone.src.tolist(), strict=True),
    }
    index = built.graph.single_edges.edge_index()
    keep = torch.tensor([pair not in ends for pair in zip(*index.tolist(), strict=True)])
    x = built.graph.single_nodes.x
    assert x is not None and 0 < int(keep.sum()) < len(keep)
    without = LocalView.of_graph(Graph(index[:, keep], x=x))
    model = built.strategy.model
    rows = [model(some.with_step(training=False), x.double()) for some in (seen, without, view)]
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(rows[0], rows[2])


def test_a_masked_target_does_not_reveal_its_answer() -> None:
    """The graph is pairs of nodes with one edge each: rows depend on the partner only if the edge is visible."""
    a = torch.arange(0, 200, 2)
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    index = torch.cat([torch.stack([a, a + 1]), torch.stack([a + 1, a])], 1)
    losses = {}
    for exclude in ("none", "batch"):
        link = {"exclude": exclude, "avoid_edges": False}
        built, task = build_task(Graph(index, x=x), link=link, strategy={"batch": 20}, model={"layers": 1})
        batch = task.batch(task.items("train")[:20], DrawKey(5, 0, 0))
        assert isinstance(batch, LinkBatch)
        view = task.mask_edges(LocalView.of_graph(built.graph), batch)
        rows = built.strategy.model(view, x.double())
        other = x.double().clone()
        other[batch.links.dst] += 1  # rows that depend on their partner change
        moved = built.strategy.model(view, other)
        losses[exclude] = (moved - rows)[batch.links.src].abs().max().item()
    assert losses["none"] > 0.01 and losses["batch"] == 0


def test_disjoint_targets_change_with_the_epoch(graph: Graph) -> None:
    _, task = build_task(graph, link={"exclude": "disjoint:0.3"})
    first, second = task.train_items(5, 0), task.train_items(5, 1)
    total = len(task.items("train"))
    assert 0.2 * total < len(first) < 0.4 * total and first.tolist() != second.tolist()
    assert task.train_items(5, 0).tolist() == first.tolist()


@pytest.mark.parametrize("settings", [{}, {"model": {"name": "rgcn", "bases": 2}, "split": 0, "ranking": "filtered"}])
def test_evaluation_is_reproducible(graph: Graph, settings: dict[str, Any]) -> None:
    used = relational() if settings else graph
    settings = {"model": {"embedding": 8}, **settings}
    settings["model"] = {**settings["model"], "embedding": 8}
    ranking = settings.pop("ranking", "sampled")
    first, task = build_task(used, **settings)
    second, _ = build_task(used, **settings)
    assert task.ranking == ranking and task.metric == "mrr"
    metrics = first.strategy.evaluate("test")
    assert metrics == second.strategy.evaluate("test") == first.strategy.evaluate("test")
    assert 0 < metrics["mrr"] <= 1 and metrics["count"] == len(task.items("test"))


def test_filtered_mrr_of_a_run_equals_explicit_ranks() -> None:
    built, task = build_task(relational(), model={"name": "rgcn", "bases": 2, "embedding": 8}, split=0)
    with torch.no_grad():
        lookup = built.strategy.exact_lookup()
        h = lookup("node", torch.arange(40))
        weight = task.decoder.weight  # type: ignore[union-attr]
        triples = {
            (int(r), int(s), int(d))
            for links in task.data.splits.values()
            for r, s, d in zip(links.relation, links.src, links.dst, strict=True)
        }
        ranks: list[float] = []
        test = task.data.splits["test"]
        for r, s, d in zip(test.relation.tolist(), test.src.tolist(), test.dst.tolist(), strict=True):
            for query, truth, side in ((s, d, 2), (d, s, 1)):
                score = (h[query] * weight[r]) @ h.t()
                candidates = [(r, s, c) if side == 2 else (r, c, d) for c in range(40)]
                rivals = [c for c in range(40) if c != truth and candidates[c] not in triples]
                above = sum(bool(score[c] > score[truth]) for c in rivals)
                ranks.append(1 + above + sum(bool(score[c] == score[truth]) for c in rivals) / 2)
    expected = sum(1 / rank for rank in ranks) / len(ranks)
    assert built.strategy.evaluate("test")["mrr"] == pytest.approx(expected)


def test_given_negatives_define_hits_at_20() -> None:
    random = torch.Generator().manual_seed(0)
    draw = {n: torch.randint(0, 50, (2, k), generator=random) for n, k in (("val", 9), ("test", 7), ("test_neg", 30))}
    edges = validated_edges(torch.randint(0, 50, (2, 200), generator=random), num_src=50, num_dst=50, links=draw)
    graph = Graph.of({"node": validated_nodes(50, x=torch.randn(50, 4, generator=random))}, {EDGE: edges})
    built, task = build_task(graph, split=0)
    assert task.metric == "hits@20"
    with torch.no_grad():
        h = built.strategy.exact_lookup()("node", torch.arange(50))
    positive, negative = ((h[draw[n][0]] * h[draw[n][1]]).sum(1) for n in ("test", "test_neg"))
    expected = float((positive > negative.sort(descending=True).values[19]).double().mean())
    assert built.strategy.evaluate("test")["hits@20"] == pytest.approx(expected)


@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_sums_per_basis_equal_sums_per_relation(aggr: str) -> None:
    graph = add_inverse_edges(relational(links=False))
    view = LocalView.of_graph(graph)
    conv = RGCNConv(5, 4, 12, num_bases=3, aggr=aggr, relations=tuple(graph.edges)).double()
    x = torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    out = conv(view, x)
    expected = conv(view, {"node": x})["node"]
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    push = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    leaves = [x, *conv.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad(out, leaves, push), torch.autograd.grad(expected, leaves, push), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_links_between_several_node_types_are_trained() -> None:
    graph = make_dataset("shop", seed=1, users=100, products=60, brands=5, buys=500, views=600)
    kind = next(kind for kind in graph.edges if kind.relation == "buys")
    built, task = build_task(graph, model={"name": "rgcn", "embedding": 4}, link={"relation": str(kind)})
    before = built.strategy.evaluate("test")["mrr"]
    for epoch in range(3):
        record = next(iter(built.strategy.train_epoch(epoch)))
        assert record.count == len(task.items("train"))
    assert built.strategy.evaluate("test")["mrr"] != before
    built, task = build_task(graph, model={"name": "rgcn", "embedding": 4})  # all relations, ends of several types
    next(iter(built.strategy.train_epoch(0)))
    assert task.ranking == "filtered" and 0 < built.strategy.evaluate("val")["mrr"] <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"link": {"exclude": "batch"}}, "in a full batch would leave no edges"),
        ({"split": 0}, "no held-out links"),
        ({"split": "20-per-class"}, "split by shares"),
        ({"train": {"metric": "accuracy"}}, "mrr or hits@K"),
        ({"link": {"ranking": "given"}}, "needs negatives with the data"),
        ({"link": {"relation": "a:b:c"}}, "no edge type a:b:c"),
    ],
)
def test_wrong_settings_are_refused(graph: Graph, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_task(graph, **settings)


@pytest.mark.parametrize("exclude", ["none", "batch", "disjoint:0.4"])
@pytest.mark.parametrize("mode", ["either", "shared"])
def test_sampling_all_neighbours_equals_the_whole_graph(graph: Graph, exclude: str, mode: str) -> None:
    link = {"exclude": exclude, "negatives": 3, "negative_mode": mode}
    whole, _ = build_task(graph, link=link, strategy={"batch": 50}, model={"name": "sage", "dropout": 0.3})
    blocks, _ = build_task(
        graph, link=link, strategy={"batch": 50, "fanouts": [-1, -1]}, model={"name": "sage", "dropout": 0.3}
    )
    for full, sampled in zip(whole.strategy.train_epoch(1), blocks.strategy.train_epoch(1), strict=True):
        assert full.loss == pytest.approx(sampled.loss, rel=1e-9) and full.count == sampled.count
    for mine, theirs in zip(whole.strategy.model.parameters(), blocks.strategy.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


def test_cached_inputs_are_refused_with_masked_edges(graph: Graph) -> None:
    with pytest.raises(ConfigError, match="would show hidden edges"):
        build_task(graph, link={"exclude": "disjoint:0.4"}, strategy={"cache_inputs": True})


def test_targets_are_masked_by_default_in_sampled_training(graph: Graph) -> None:
    built, task = build_task(graph, strategy={"batch": 50, "fanouts": [5, 5]})
    assert task.masks_edges and not built.remarks
    for strategy in ({}, {"batch": 50}):
        built, task = build_task(graph, strategy=strategy)
        assert not task.masks_edges and "link.exclude=none" in built.remarks[0]
