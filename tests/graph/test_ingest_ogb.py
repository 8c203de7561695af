"""Small directories in OGB's formats: text and binary, one node type and several, node splits and held-out links."""

import gzip
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnfleet.errors import InputError
from gnnfleet.graph.graph import EDGE, EdgeType, Graph
from gnnfleet.graph.ingest.ogb import read_ogb

PAIRS = np.array([[0, 1, 2, 2], [1, 2, 0, 3]])
X = np.array([[0.5, 1], [2, 3], [4, 5], [6, 7.25]], dtype=np.float32)


def put(path: Path, rows: Any, header: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [] if header is None else [header]
    lines += [",".join(map(str, np.atleast_1d(row).tolist())) for row in rows]
    with gzip.open(path, "wt") as file:
        file.write("".join(line + "\n" for line in lines))


def text_set(folder: Path) -> Path:
    raw = folder / "raw"
    put(raw / "edge.csv.gz", PAIRS.T)
    put(raw / "num-node-list.csv.gz", [4])
    put(raw / "num-edge-list.csv.gz", [4])
    put(raw / "node-feat.csv.gz", X)
    put(raw / "node-label.csv.gz", [1, 0, "nan", 2])
    put(raw / "node_year.csv.gz", [2000, 2001, 2002, 2003])
    split(folder)
    return folder


def split(folder: Path, *below: str) -> None:
    for word, rows in (("train", [2, 0]), ("valid", [1]), ("test", [3])):
        put(folder.joinpath("split", "time", *below, f"{word}.csv.gz"), rows)


def binary_set(folder: Path) -> Path:
    raw = folder / "raw"
    raw.mkdir(parents=True)
    sizes = {"num_nodes_list": np.array([4]), "num_edges_list": np.array([4])}
    np.savez(raw / "data.npz", edge_index=PAIRS, node_feat=X, node_year=np.zeros((4, 1)), **sizes)
    np.savez(raw / "node-label.npz", node_label=np.array([[1.0], [0.0], [np.nan], [2.0]]))
    split(folder)
    return folder


def hetero_text(folder: Path) -> Path:
    raw = folder / "raw"
    put(raw / "triplet-type-list.csv.gz", [], header="author,writes,paper\npaper,cites,paper")
    put(raw / "num-node-dict.csv.gz", ["2,4"], header="author,paper")
    put(raw / "nodetype-has-label.csv.gz", ["False,True"], header="author,paper")
    put(raw / "relations/author___writes___paper/edge.csv.gz", [(0, 3), (1, 0)])
    put(raw / "relations/author___writes___paper/num-edge-list.csv.gz", [2])
    put(raw / "relations/author___writes___paper/edge_reltype.csv.gz", [0, 0])
    put(raw / "relations/paper___cites___paper/edge.csv.gz", PAIRS.T)
    put(raw / "relations/paper___cites___paper/edge_reltype.csv.gz", [1] * 4)
    put(raw / "node-feat/paper/node-feat.csv.gz", X)
    put(raw / "node-label/paper/node-label.csv.gz", [1, 0, 0, 2])
    split(folder, "paper")
    put(folder / "mapping/author_entidx2name.csv.gz", [(1, 77), (0, 55)], header="ent idx,ent name")
    return folder


def hetero_binary(folder: Path) -> Path:
    raw = folder / "raw"
    raw.mkdir(parents=True)
    np.savez(raw / "num_nodes_dict.npz", author=np.array([2]), paper=np.array([4]))
    pairs = {"author___writes___paper": np.array([[0, 1], [3, 0]]), "paper___cites___paper": PAIRS}
    np.savez(raw / "edge_index_dict.npz", **pairs)
    np.savez(raw / "num_edges_dict.npz", **{kind: np.array([value.shape[1]]) for kind, value in pairs.items()})
    np.savez(raw / "node_feat_dict.npz", paper=X)
    np.savez(raw / "node-label.npz", paper=np.array([[1], [0], [0], [2]]))
    split(folder, "paper")
    return folder


def pairs_of(graph: Graph, kind: EdgeType = EDGE) -> list[tuple[int, ...]]:
    return sorted(map(tuple, graph.edges[kind].edge_index().T.tolist()))


@pytest.mark.parametrize("make", [text_set, binary_set])
def test_datasets_of_one_node_type_are_read(tmp_path: Path, make: Any) -> None:
    graph = read_ogb(make(tmp_path / "ogbn_arxiv"))
    nodes = graph.single_nodes
    assert graph.name == "ogbn_arxiv" and pairs_of(graph) == sorted(map(tuple, PAIRS.T.tolist()))
    assert nodes.x is not None and nodes.x.dtype == torch.float32 and torch.equal(nodes.x, torch.from_numpy(X))
    assert nodes.y is not None and nodes.y.tolist() == [1, 0, -1, 2]
    assert nodes.split is not None and nodes.split.tolist() == [[0, 1, 0, 2]]
    assert nodes.ids.are_rows


@pytest.mark.parametrize("make", [hetero_text, hetero_binary])
def test_heterogeneous_datasets_are_read(tmp_path: Path, make: Any) -> None:
    graph = read_ogb(make(tmp_path / "ogbn_mag"))
    assert {kind: table.count for kind, table in graph.nodes.items()} == {"author": 2, "paper": 4}
    assert pairs_of(graph, EdgeType("author", "writes", "paper")) == [(0, 3), (1, 0)]
    assert pairs_of(graph, EdgeType("paper", "cites", "paper")) == sorted(map(tuple, PAIRS.T.tolist()))
    author, paper = graph.nodes["author"], graph.nodes["paper"]
    assert author.x is None and author.y is None and author.split is None
    assert paper.y is not None and paper.y.tolist() == [1, 0, 0, 2]
    assert paper.split is not None and paper.split.tolist() == [[0, 1, 0, 2]]
    if make is hetero_text:
        assert author.ids.values().to_pylist() == [55, 77]


def test_undirected_datasets_get_both_directions(tmp_path: Path) -> None:
    expected = sorted([*map(tuple, PAIRS.T.tolist()), *map(tuple, PAIRS[::-1].T.tolist())])
    products = read_ogb(text_set(tmp_path / "ogbn_products"))
    assert products.undirected and pairs_of(products) == expected
    assert not read_ogb(tmp_path / "ogbn_products", undirected=False).undirected
    assert pairs_of(read_ogb(text_set(tmp_path / "mine"), undirected=True)) == expected


@pytest.mark.parametrize(
    ("names", "ids"), [("dcba", list("dcba")), ("aabb", [0, 1, 2, 3]), ([9, 8, 7, 6], [9, 8, 7, 6])]
)
def test_original_ids_are_used_if_they_are_unique(tmp_path: Path, names: Any, ids: list[Any]) -> None:
    folder = text_set(tmp_path / "ogbn_x")
    put(
        folder / "mapping/nodeidx2paperid.csv.gz",
        [f"{i},{name}" for i, name in enumerate(names)],
        header="node idx,paper id",
    )
    put(folder / "mapping/labelidx2word.csv.gz", ["0,zero"], header="label idx,word")
    assert read_ogb(folder).single_nodes.ids.values().to_pylist() == ids


def test_edge_data_is_read(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "ogbl_y")
    put(folder / "raw/edge_weight.csv.gz", [1, 2, 0.5, 4])
    put(folder / "raw/edge_year.csv.gz", [1999, 1998, 2001, 2000])
    put(folder / "raw/edge-feat.csv.gz", PAIRS.T)
    edges = read_ogb(folder).single_edges
    assert edges.weight is not None and edges.weight.tolist() == [0.5, 1.0, 2.0, 4.0]
    assert (
        edges.time is not None
        and edges.order is not None
        and edges.time[edges.order].tolist() == [1998, 1999, 2000, 2001]
    )
    assert edges.attr is not None and torch.equal(edges.attr.long().T, edges.edge_index())


def save_links(folder: Path, values: dict[str, Any], **options: Any) -> None:
    scheme = folder / "split" / "target"
    scheme.mkdir(parents=True)
    for word in ("train", "valid", "test"):
        torch.save(values, scheme / f"{word}.pt", **options)


def links_set(folder: Path, values: dict[str, Any], **options: Any) -> Path:
    text_set(folder)
    for path in (folder / "split" / "time").iterdir():
        path.unlink()
    (folder / "split" / "time").rmdir()
    save_links(folder, values, **options)
    return folder


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("zipped", [True, False])
def test_links_and_their_negatives_are_read(tmp_path: Path, convert: Any, zipped: bool) -> None:
    held = {"edge": convert(np.array([[0, 3], [1, 3]])), "edge_neg": convert(np.array([[3, 0]]))}
    folder = links_set(tmp_path / "ogbl_z", held, _use_new_zipfile_serialization=zipped)
    links = read_ogb(folder).single_edges.links
    assert {name: pairs.tolist() for name, pairs in links.items()} == {
        "val": [[0, 1], [3, 3]],
        "val_neg": [[3], [0]],
        "test": [[0, 1], [3, 3]],
        "test_neg": [[3], [0]],
    }


def test_links_saved_with_an_older_numpy_are_read(tmp_path: Path) -> None:
    folder = links_set(tmp_path / "ogbl_z", {"edge": np.array([[0, 3], [1, 3]])})
    for path in (folder / "split" / "target").iterdir():
        with zipfile.ZipFile(path) as old:
            parts = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
            for name, content in parts.items():
                new.writestr(name, content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    assert read_ogb(folder).single_edges.links["val"].tolist() == [[0, 1], [3, 3]]


def test_several_negatives_per_link_become_consecutive_pairs(tmp_path: Path) -> None:
    held = {
        "source_node": np.array([0, 1]),
        "target_node": np.array([3, 2]),
        "target_node_neg": np.array([[1, 2], [0, 3]]),
    }
    links = read_ogb(links_set(tmp_path / "ogbl_citation2", held)).single_edges.links
    assert links["val"].tolist() == [[0, 1], [3, 2]]
    assert links["test_neg"].tolist() == [[0, 0, 1, 1], [1, 2, 0, 3]]


def test_links_of_a_knowledge_graph_are_grouped_by_relation(tmp_path: Path) -> None:
    held = {
        "head": np.array([0, 1, 2]),
        "relation": np.array([2, 0, 2]),
        "tail": np.array([3, 2, 1]),
        "head_neg": np.ones((3, 2)),
    }
    folder = links_set(tmp_path / "ogbl_wikikg2", held)
    put(folder / "raw/edge_reltype.csv.gz", [2, 0, 2, 0])
    graph = read_ogb(folder)
    assert [kind.relation for kind in graph.edges] == ["r0", "r1", "r2"]
    assert pairs_of(graph, EdgeType("node", "r2", "node")) == [(0, 1), (2, 0)]
    assert graph.edges[EdgeType("node", "r2", "node")].links["val"].tolist() == [[0, 2], [3, 1]]
    assert graph.edges[EdgeType("node", "r0", "node")].links["test"].tolist() == [[1], [2]]


def test_links_of_several_node_types_are_read(tmp_path: Path) -> None:
    folder = hetero_text(tmp_path / "ogbl_biokg")
    held = {
        "head": np.array([1, 2]),
        "relation": np.array([0, 1]),
        "tail": np.array([3, 3]),
        "head_type": ["author", "paper"],
    }
    save_links(folder, held)
    graph = read_ogb(folder, split="target")
    assert graph.edges[EdgeType("author", "writes", "paper")].links["val"].tolist() == [[1], [3]]
    assert graph.edges[EdgeType("paper", "cites", "paper")].links["val"].tolist() == [[2], [3]]


def test_messages_name_the_missing_or_bad_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not an OGB dataset"):
        read_ogb(tmp_path)
    folder = text_set(tmp_path / "set")
    (tmp_path / "set/split/other").mkdir()
    with pytest.raises(InputError, match=r"several schemes \(other, time\)"):
        read_ogb(folder)
    with pytest.raises(InputError, match="no 'nope'"):
        read_ogb(folder, split="nope")
    put(folder / "split/time/test.csv.gz", [9])
    with pytest.raises(InputError, match=r"test\.csv\.gz names node 9"):
        read_ogb(folder, split="time")
    put(folder / "raw/edge.csv.gz", [(0, "x")])
    with pytest.raises(InputError, match=r"edge\.csv\.gz cannot be read"):
        read_ogb(folder, split="other")
    put(folder / "raw/edge.csv.gz", [(0, 4)])
    with pytest.raises(InputError, match="edge_index names destination 4"):
        read_ogb(folder, split="other")
    put(folder / "raw/num-node-list.csv.gz", [2, 2])
    with pytest.raises(InputError, match="holds 2 graphs"):
        read_ogb(folder, split="other")
    (folder / "raw/num-node-list.csv.gz").unlink()
    with pytest.raises(InputError, match=r"num-node-list\.csv\.gz is missing"):
        read_ogb(folder, split="other")


def test_links_to_missing_nodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="held-out links val name nodes"):
        read_ogb(links_set(tmp_path / "ogbl_z", {"edge": np.array([[0, 4]])}))
    with pytest.raises(InputError, match="found hello"):
        read_ogb(links_set(tmp_path / "ogbl_a", {"hello": np.array([[0, 4]])}))


def test_pickles_with_code_are_refused(tmp_path: Path) -> None:
    folder = links_set(tmp_path / "ogbl_z", {"edge": Path("needs/code")})
    with pytest.raises(InputError, match="runs no code"):
        read_ogb(folder)
