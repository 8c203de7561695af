"""Links: what is a target, what is held out, and that both directions of a pair never part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.edge_keys import EdgeKeys, EdgeMask, contains
from gnnfleet.graph.graph import EDGE, EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.ingest.clean import add_inverse_edges, clean_edges
from gnnfleet.graph.ingest.npz import read_npz
from gnnfleet.graph.links import Links, has_held_out_links, link_data, split_links
from gnnfleet.graph.sampling.negatives import LinkNegativeSampler
from gnnfleet.graph.split import SplitShares
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.graph.views.block import full_block
from gnnfleet.graph.views.local import LocalView
from gnnfleet.ops import draws
from gnnfleet.ops.draws import DrawKey, Draws, Purpose

RULE = SplitShares(0.8, 0.1, 0.1)


def random_graph(nodes: int = 60, edges: int = 300, *, undirected: bool, seed: int = 0) -> Graph:
    random = torch.Generator().manual_seed(seed)
    graph = Graph(torch.randint(0, nodes, (2, edges), generator=random), num_nodes=nodes)
    return clean_edges(graph, undirected=undirected, duplicates="drop", self_loops="drop")[0]


def pairs(links: Tensor) -> set[tuple[int, int]]:
    return {(int(a), int(b)) for a, b in links.t()}


@pytest.mark.parametrize("undirected", [True, False])
def test_a_split_loses_no_edge_and_keeps_both_directions_together(undirected: bool) -> None:
    graph = random_graph(undirected=undirected)
    parted = split_links(graph, RULE, seed=3)
    before, after = pairs(graph.single_edges.edge_index()), pairs(parted.single_edges.edge_index())
    held = {name: pairs(parted.single_edges.links[name]) for name in ("val", "test")}
    turned = {name: {(b, a) for a, b in found} for name, found in held.items()}
    both = set().union(*held.values(), *turned.values())
    assert after <= before and (after | both) & before == before
    assert not after & both and not held["val"] & (held["test"] | turned["test"])
    if undirected:
        assert {(b, a) for a, b in after} == after and all(a <= b for a, b in held["val"] | held["test"])
        assert link_data(parted).symmetric.all()
    total = len(before) // 2 if undirected else len({frozenset(pair) for pair in before})
    assert abs(len({frozenset(pair) for pair in held["test"]}) - 0.1 * total) <= 1


def test_a_split_depends_on_ids_not_on_rows() -> None:
    graph = random_graph(undirected=False)
    names = [f"n{i}" for i in range(60)]
    place = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    shuffled = Graph(place[graph.single_edges.edge_index()], ids=[names[int(i)] for i in torch.argsort(place)])
    one = split_links(Graph(graph.single_edges.edge_index(), ids=names), RULE, seed=1)
    two = split_links(shuffled, RULE, seed=1)
    assert pairs(place[one.single_edges.links["test"]]) == pairs(two.single_edges.links["test"])
    other = split_links(Graph(graph.single_edges.edge_index(), ids=names), RULE, seed=2)
    assert pairs(one.single_edges.links["test"]) != pairs(other.single_edges.links["test"])


def test_inverse_edge_types_are_split_with_their_edges() -> None:
    graph = add_inverse_edges(random_graph(undirected=False))
    forward, backward = graph.edges
    parted = split_links(graph, RULE, seed=0)
    assert pairs(parted.edges[forward].edge_index()) == {(b, a) for a, b in pairs(parted.edges[backward].edge_index())}
    assert not parted.edges[backward].links
    data = link_data(parted)
    assert set(data.splits["train"].relation.tolist()) == {0}
    assert len(data.splits["train"]) == parted.edges[forward].count


def test_wrong_shares_are_refused(tmp_path: Path) -> None:
    graph = random_graph(undirected=False)
    with pytest.raises(ConfigError, match="must sum to 1"):
        split_links(graph, SplitShares(0.5, 0.1, 0.1), seed=0)
    parted = split_links(graph, RULE, seed=0)
    with pytest.raises(ConfigError, match="already has held-out links"):
        split_links(parted, RULE, seed=0)
    with pytest.raises(ConfigError, match="no edge type a:b:c"):
        link_data(parted, [EdgeType("a", "b", "c")])
    opened = open_store(save_store(parted, tmp_path / "store").store.path)  # type: ignore[union-attr]
    assert has_held_out_links(opened)
    for name, links in link_data(parted).splits.items():
        again = link_data(opened).splits[name]
        assert torch.equal(links.src, again.src) and torch.equal(links.dst, again.dst)


def test_datasets_with_held_out_links_are_read(shared_data: Path) -> None:
    kg = link_data(add_inverse_edges(read_npz(shared_data / "static" / "kg_fb15k237.npz")))
    assert len(kg.edge_types) == 474
    assert [len(kg.splits[s]) for s in ("train", "val", "test")] == [272115, 17535, 20466]
    debian = link_data(read_npz(shared_data / "static" / "debian_temporal_lp.npz"))
    assert len(torch.unique(debian.splits["train"].relation)) == 1 and len(debian.splits["test"]) == 8150


@given(st.integers(0, 2**40), st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_uniforms_at_ids_equal_uniforms(first: int, columns: int) -> None:
    family = Draws(7, Purpose.NEGATIVE, layer=1)
    ids = first + torch.tensor([3, 0, 2])
    assert torch.equal(family.uniforms_at(ids, columns)[:, 0], family.uniforms(4, first=first)[[3, 0, 2]])


def test_uniforms_of_many_ids_do_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, family = torch.arange(50) * 7, Draws(7, Purpose.NEGATIVE)
    whole = family.uniforms_at(ids, 3)
    monkeypatch.setattr(draws, "_AT_ONCE", 16)
    assert torch.equal(family.uniforms_at(ids, 3), whole)


@pytest.mark.parametrize("ends", ["dst", "src", "either", "pair"])
def test_negatives_are_keyed_by_the_positive(ends: str) -> None:
    data = link_data(split_links(random_graph(undirected=True), RULE, seed=0))
    source, links, key = LinkNegativeSampler.of(data.graph), data.splits["train"], DrawKey(1, 2, 3)
    made = source.corrupt(links, key, count=3, ends=ends)  # type: ignore[arg-type]
    some = torch.tensor([17, 3, 40])
    again = source.corrupt(links.select(some), key, count=3, ends=ends)  # type: ignore[arg-type]
    rows = (some[:, None] * 3 + torch.arange(3)).flatten()
    assert torch.equal(made.src[rows], again.src) and torch.equal(made.dst[rows], again.dst)
    kept_src = made.src == links.src.repeat_interleave(3)
    kept_dst = made.dst == links.dst.repeat_interleave(3)
    if ends == "dst":
        assert kept_src.all()
    if ends == "src":
        assert kept_dst.all()
    if ends == "either":
        assert (kept_src | kept_dst).all() and not kept_src.all() and not kept_dst.all()
    edges = pairs(data.graph.single_edges.edge_index())
    # A tenth of all pairs are edges; four tries leave one in ten thousand.
    assert sum((int(a), int(b)) in edges for a, b in zip(made.src, made.dst, strict=True)) <= 1


def test_negatives_have_the_node_types_of_their_edge_type() -> None:
    nodes = {"a": validated_nodes(5), "b": validated_nodes(1000)}
    kind = EdgeType("a", "likes", "b")
    made = torch.Generator().manual_seed(0)
    index = torch.stack([torch.randint(0, 5, (200,), generator=made), torch.randint(0, 1000, (200,), generator=made)])
    graph = Graph.of(nodes, {kind: validated_edges(index, num_src=5, num_dst=1000)})
    links = link_data(split_links(graph, RULE, seed=0)).splits["train"]
    made_links = LinkNegativeSampler.of(graph, avoid=False).corrupt(links, DrawKey(), count=8, ends="pair")
    assert int(made_links.src.max()) == 4 and 900 < int(made_links.dst.max()) < 1000
    assert abs(float(made_links.dst.double().mean()) - 499.5) < 40


@pytest.mark.parametrize("inverse", [True, False])
def test_masked_edges_and_their_reverses_are_removed(inverse: bool) -> None:
    graph = random_graph(undirected=not inverse)
    graph = add_inverse_edges(graph) if inverse else graph
    links = link_data(graph).splits["train"].select(torch.tensor([5, 9, 30]))
    keys, view = EdgeKeys.of(graph), LocalView.of_graph(graph)
    cut = EdgeMask.of(keys, links).apply(view)
    gone = {(int(a), int(b)) for a, b in zip(links.src, links.dst, strict=True)}
    lost = torch.zeros(60)
    for number, (kind, edges) in enumerate(graph.edges.items()):
        turn = inverse and number == 1
        hidden = {(b, a) for a, b in gone} if turn else gone if inverse else gone | {(b, a) for a, b in gone}
        relation = cut.relations[kind]
        left = torch.stack([relation.structure.col, relation.structure.row])
        assert pairs(left) == pairs(edges.edge_index()) - hidden
        assert torch.equal(left.long(), edges.edge_index()[:, relation.edge_ids])
        for _, dst in hidden:
            lost[dst] += 1
    before, after = (v.nodes["node"].degree(False) for v in (view, cut))
    assert torch.equal(before - after, lost)


def test_contains_finds_keys_in_ascending_keys() -> None:
    assert contains(torch.tensor([1, 4]), torch.tensor([0, 1, 4, 9])).tolist() == [False, True, True, False]
    assert not contains(torch.empty(0, dtype=torch.int64), torch.tensor([3])).any()
    empty = Links.concat([])
    assert len(empty) == 0


def test_evaluation_negatives_avoid_held_out_links() -> None:
    data = link_data(split_links(random_graph(nodes=12, edges=60, undirected=True), RULE, seed=0))
    held = Links.concat([data.splits["val"], data.splits["test"]])
    source = LinkNegativeSampler.of(data.graph, avoid=False)
    plain = source.corrupt(held, DrawKey(), count=50, ends="dst")
    aware = source.avoiding(held).corrupt(held, DrawKey(), count=50, ends="dst")
    true = {frozenset(pair) for pair in zip(held.src.tolist(), held.dst.tolist(), strict=True)}

    def wrong(links: Links) -> int:
        return sum(frozenset(pair) in true for pair in zip(links.src.tolist(), links.dst.tolist(), strict=True))

    assert wrong(plain) > 10 > 2 >= wrong(aware)


def test_masked_edges_are_removed_from_blocks() -> None:
    graph = random_graph(undirected=True)
    links = link_data(graph).splits["train"].select(torch.arange(0, 100, 7))
    hidden = EdgeMask.of(EdgeKeys.of(graph), links)
    whole = hidden.apply(LocalView.of_graph(graph)).relations[EDGE].edge_ids
    block = full_block(LocalView.of_graph(graph), {"node": (10, 25)}).view
    before, after = (view.relations[EDGE] for view in (block, hidden.apply(block)))
    kept = before.edge_ids[torch.isin(before.edge_ids, whole)]
    assert torch.equal(after.edge_ids, kept) and 0 < len(kept) < len(before.edge_ids)
    ids = block.nodes["node"].node_ids
    ends = torch.stack([ids[after.structure.col.long()], ids[after.structure.row.long()]])
    assert torch.equal(ends, graph.single_edges.edge_index()[:, after.edge_ids])
