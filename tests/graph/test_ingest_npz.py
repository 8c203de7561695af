"""Graphs from .npz files: every layout in small, and every real file where there are any."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnfleet.errors import InputError
from gnnfleet.graph.graph import EDGE, EdgeType, Graph
from gnnfleet.graph.ingest.npz import read_npz
from gnnfleet.graph.store import save_store

PAIRS = np.array([[0, 1, 2, 2], [1, 2, 0, 3]], dtype=np.int32)


def save(tmp_path: Path, **arrays: Any) -> Path:
    path = tmp_path / "tiny.npz"
    np.savez(path, **arrays)
    return path


def pairs_of(graph: Graph, kind: EdgeType = EDGE) -> list[tuple[int, ...]]:
    return sorted(map(tuple, graph.edges[kind].edge_index().T.tolist()))


def hetero(**changes: Any) -> dict[str, Any]:
    """Papers 0, 1, 2 and authors 3, 4; papers cite papers, authors write papers."""
    arrays: dict[str, Any] = {
        "edge_index": np.array([[0, 3, 1, 4], [1, 0, 2, 2]]),
        "edge_type": np.array([0, 1, 0, 1], dtype=np.int8),
        "edge_type_names": np.array(["cites", "author-writes-paper"]),
        "node_type": np.array([0, 0, 0, 1, 1], dtype=np.int8),
        "node_type_offset": np.array([0, 3, 5]),
        "node_type_names": np.array(["paper", "author"]),
        "target_type": np.array(0),
        "y": np.array([1, 0, -1, -1, -1]),
        "train_mask": np.array([1, 0, 0, 0, 0], dtype=bool),
        "val_mask": np.array([0, 1, 0, 0, 0], dtype=bool),
        "test_mask": np.array([0, 0, 1, 0, 0], dtype=bool),
        "x__author": np.ones((2, 3), dtype=np.float16),
    }
    arrays.update(changes)
    return {name: array for name, array in arrays.items() if array is not None}


def test_edge_index_alone_is_a_graph(tmp_path: Path) -> None:
    graph = read_npz(save(tmp_path, edge_index=PAIRS))
    assert graph.name == "tiny" and graph.num_nodes == 4 and not graph.undirected
    assert pairs_of(graph) == sorted(zip(*PAIRS.tolist(), strict=True))


def test_symmetric_edges_make_a_graph_undirected(tmp_path: Path) -> None:
    both = np.concatenate([PAIRS, PAIRS[::-1]], axis=1)
    assert read_npz(save(tmp_path, edge_index=both)).undirected
    assert not read_npz(save(tmp_path, edge_index=both, edge_weight=np.arange(8.0))).undirected


def test_num_nodes_may_exceed_the_edges(tmp_path: Path) -> None:
    assert read_npz(save(tmp_path, edge_index=PAIRS, num_nodes=9)).num_nodes == 9


def test_compressed_features_equal_dense_ones(tmp_path: Path) -> None:
    dense = np.array([[0, 2, 0], [0, 0, 0], [1, 0, 3], [0, 0, 4]], dtype=np.float32)
    rows, columns = dense.nonzero()
    parts = {
        "x_data": dense[rows, columns].astype(np.float16),
        "x_indices": columns.astype(np.uint16),
        "x_indptr": np.array([0, 1, 1, 3, 4]),
        "x_shape": np.array([4, 3]),
    }
    x = read_npz(save(tmp_path, edge_index=PAIRS, **parts)).single_nodes.x
    assert x is not None and x.dtype == torch.float32 and torch.equal(x, torch.from_numpy(dense))
    with pytest.raises(InputError, match="x_indices"):
        read_npz(save(tmp_path, edge_index=PAIRS, **{**parts, "x_indices": columns + 1}))
    with pytest.raises(InputError, match="lacks the array x_indptr"):
        read_npz(save(tmp_path, edge_index=PAIRS, **{k: v for k, v in parts.items() if k != "x_indptr"}))


def test_class_numbers_and_multi_labels_are_read(tmp_path: Path) -> None:
    single = read_npz(
        save(tmp_path, edge_index=PAIRS, y=np.array([0, -1, 2, 1]), class_names=np.array(["a", "b", "c"]))
    )
    assert single.single_nodes.classes == ("a", "b", "c") and not single.single_nodes.multilabel
    several = read_npz(save(tmp_path, edge_index=PAIRS, y_multi=np.eye(4, 5, dtype=np.uint8)))
    assert several.single_nodes.multilabel and several.single_nodes.num_classes == 5


def test_splits_are_read_from_masks(tmp_path: Path) -> None:
    eye = np.eye(4, dtype=bool)
    path = save(tmp_path, edge_index=PAIRS, train_mask=eye[0], val_mask=eye[1], test_mask=eye[3])
    nodes = read_npz(path).single_nodes
    assert nodes.split is not None and nodes.split.tolist() == [[0, 1, -1, 2]]
    ten = {
        f"{split}_masks": np.roll(np.tile(eye[0], (10, 1)), i, axis=1)
        for i, split in enumerate(("train", "val", "test"))
    }
    many = read_npz(
        save(tmp_path, edge_index=PAIRS, train_mask=eye[0], val_mask=eye[1], test_mask=eye[2], **ten)
    ).single_nodes
    assert many.split is not None and many.split.tolist() == [[0, 1, 2, -1]] * 10
    more = {"train_mask_20": eye[0], "val_mask_20": eye[1], "train_mask_5": eye[3], "val_mask_5": eye[2]}
    further = read_npz(save(tmp_path, edge_index=PAIRS, train_mask=eye[0], val_mask=eye[1], **more)).single_nodes
    assert further.split is not None and further.split.tolist() == [[0, 1, -1, -1], [-1, -1, 1, 0]]


def test_relations_become_edge_types(tmp_path: Path) -> None:
    graph = read_npz(save(tmp_path, edge_index=PAIRS, edge_type=np.array([1, 0, 1, 3]), num_relations=5))
    assert [kind.relation for kind in graph.edges] == ["r0", "r1", "r3", "r2", "r4"]
    assert pairs_of(graph, EdgeType("node", "r1", "node")) == [(0, 1), (2, 0)]
    assert graph.edges[EdgeType("node", "r4", "node")].count == 0


def test_node_types_are_read_from_offsets(tmp_path: Path) -> None:
    graph = read_npz(save(tmp_path, **hetero()))
    assert set(graph.edges) == {EdgeType("paper", "cites", "paper"), EdgeType("author", "writes", "paper")}
    assert pairs_of(graph, EdgeType("author", "writes", "paper")) == [(0, 0), (1, 2)]
    paper, author = graph.nodes["paper"], graph.nodes["author"]
    assert paper.y is not None and paper.y.tolist() == [1, 0, -1] and author.y is None
    assert paper.split is not None and author.split is None
    assert paper.x is None and author.x is not None and author.x.shape == (2, 3)
    assert author.ids.values().to_pylist() == [3, 4]


def test_node_types_may_be_interleaved(tmp_path: Path) -> None:
    mixed = hetero(node_type=np.array([1, 0, 0, 1, 0]), node_type_offset=None, edge_index=np.array([[1, 0], [2, 4]]),
                   edge_type=np.array([0, 1]), x__author=None)  # fmt: skip
    graph = read_npz(save(tmp_path, **mixed))
    assert graph.nodes["paper"].ids.values().to_pylist() == [1, 2, 4]
    assert pairs_of(graph, EdgeType("author", "writes", "paper")) == [(0, 2)]


def test_links_without_relations_belong_to_the_first_matching_edge_type(tmp_path: Path) -> None:
    links = {
        "valid_edge": np.array([[0, 1], [2, 3]]),
        "test_edge": np.array([[3], [0]]),
        "valid_edge_neg": PAIRS[:, :1],
    }
    links_read = read_npz(save(tmp_path, edge_index=PAIRS, **links)).single_edges.links
    assert {name: pairs.tolist() for name, pairs in links_read.items()} == {
        "val": [[0, 1], [2, 3]],
        "val_neg": [[0], [1]],
        "test": [[3], [0]],
    }


def test_links_with_relations_use_rows_of_their_types(tmp_path: Path) -> None:
    links = {"valid_edge_index": np.array([[4, 0, 3], [1, 2, 0]]), "valid_edge_type": np.array([1, 0, 1])}
    graph = read_npz(save(tmp_path, **hetero(**links)))
    assert graph.edges[EdgeType("author", "writes", "paper")].links["val"].tolist() == [[1, 0], [1, 0]]
    assert graph.edges[EdgeType("paper", "cites", "paper")].links["val"].tolist() == [[0], [2]]


def test_node_names_are_ids_if_they_are_unique(tmp_path: Path) -> None:
    named = read_npz(save(tmp_path, edge_index=PAIRS, node_name=np.array([b"a", b"b", b"c", b"d"])))
    assert named.single_nodes.ids.values().to_pylist() == ["a", "b", "c", "d"]
    assert read_npz(save(tmp_path, edge_index=PAIRS, node_name=np.array([b"a"] * 4))).single_nodes.ids.are_rows


def test_edge_data_follows_its_edge(tmp_path: Path) -> None:
    weight = PAIRS[0] * 10.0 + PAIRS[1]
    edges = read_npz(
        save(tmp_path, edge_index=PAIRS, edge_weight=weight, edge_attr=weight[:, None], edge_time=np.arange(4))
    ).single_edges
    expected = edges.src * 10.0 + edges.dst()
    assert edges.weight is not None and torch.equal(edges.weight, expected.float())
    assert edges.attr is not None and torch.equal(edges.attr[:, 0].float(), expected.float())
    assert edges.order is not None and edges.src[edges.order].tolist() == PAIRS[0].tolist()


def test_ignored_arrays_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        read_npz(save(tmp_path, edge_index=PAIRS, graph_id=np.zeros(4), y=np.zeros(4, dtype=int)))
    assert "ignored arrays: graph_id" in caplog.text and "y" not in caplog.text.split("ignored arrays:")[1]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones((4, 2))}, "edge_index"),
        ({"edge_index": PAIRS[:1]}, "edge_index"),
        ({"edge_index": PAIRS, "num_nodes": 3}, "edge_index names node 3"),
        ({"edge_index": PAIRS, "x": np.ones((4, 2)), "y": np.zeros(5)}, "y covers 5 nodes"),
        ({"edge_index": PAIRS, "edge_type": np.zeros(3, dtype=int)}, "edge_type must be 4"),
        (
            {"edge_index": PAIRS, "edge_type": np.array([0, 1, 0, 2]), "edge_type_names": np.array(["a", "b"])},
            "edge_type",
        ),
        ({"edge_index": PAIRS, "edge_weight": np.ones(3)}, "edge_weight"),
        ({"edge_index": PAIRS, "x": np.full((4, 1), np.nan)}, "x must be finite"),
        ({"edge_index": PAIRS, "test_edge": np.array([[0], [9]])}, "test_edge names node 9"),
        ({"edge_index": PAIRS, "train_mask": np.ones(4, bool), "val_mask": np.ones(4, bool)}, "val mask overlaps"),
        (hetero(node_type_offset=np.array([0, 2, 5])), "node_type contradicts"),
        (hetero(target_type=np.array("venue")), "target_type"),
        (hetero(x__author=np.ones((3, 3))), "author.* x has 3 rows"),
    ],
)
def test_messages_name_the_bad_array(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_npz(save(tmp_path, **arrays))
    assert "tiny.npz" in str(caught.value)


def test_other_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file"):
        read_npz(tmp_path / "absent.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(InputError, match="cannot be read"):
        read_npz(tmp_path / "text.npz")
    np.savez(tmp_path / "pickled.npz", edge_index=np.array([{}], dtype=object))
    with pytest.raises(InputError, match="edge_index cannot be read"):
        read_npz(tmp_path / "pickled.npz")


# nodes, edges, node types, edge types, splits of the labelled type, classes, held-out links
REAL = {
    "amazon_photo": (7650, 238162, 1, 1, 0, 8, 0),
    "attr_flickr": (7575, 479476, 1, 1, 0, 9, 0),
    "blogcatalog_multilabel": (10312, 667966, 1, 1, 0, 39, 0),
    "citeseer": (3327, 9104, 1, 1, 1, 6, 0),
    "coauthor_cs": (18333, 163788, 1, 1, 0, 15, 0),
    "cora": (2708, 10556, 1, 1, 1, 7, 0),
    "debian_bookworm": (63436, 324963, 1, 3, 1, 50, 0),
    "debian_hetero_trixie": (141799, 2436664, 4, 7, 1, 50, 0),
    "debian_temporal_lp": (58653, 296829, 1, 3, 0, 0, 15376 + 8150),
    "hetero_acm": (11246, 34852, 3, 4, 3, 3, 0),
    "hetero_dblp": (26128, 239566, 4, 6, 3, 4, 0),
    "kg_fb15k237": (14541, 272115, 1, 237, 0, 0, 17535 + 20466),
    "mesh_4elt": (15606, 91756, 1, 1, 0, 0, 0),
    "mesh_copter2": (55476, 704476, 1, 1, 0, 0, 0),
    "minesweeper": (10000, 78804, 1, 1, 10, 2, 0),
    "ogbl_ddi": (4267, 1067911, 1, 1, 0, 0, 133489 * 2 + 101882 + 95599),
    "pubmed": (19717, 88648, 1, 1, 1, 3, 0),
    "squirrel_filtered": (2223, 93996, 1, 1, 10, 5, 0),
    "twitch": (36890, 985150, 1, 1, 0, 2, 0),
}


@pytest.mark.parametrize("name", REAL)
def test_real_files_have_the_known_sizes(shared_data: Path, name: str) -> None:
    path = shared_data / "static" / f"{name}.npz"
    graph = read_npz(path)
    labelled = graph.nodes.get(graph.labelled_type or "", next(iter(graph.nodes.values())))
    splits = 0 if labelled.split is None else labelled.split.shape[0]
    links = sum(pairs.shape[1] for edges in graph.edges.values() for pairs in edges.links.values())
    sizes = (graph.num_nodes, graph.num_edges, len(graph.nodes), len(graph.edges), splits, labelled.num_classes, links)
    assert sizes == REAL[name]
    offset = graph.node_offsets
    back = [e.edge_index() + torch.tensor([[offset[k.src]], [offset[k.dst]]]) for k, e in graph.edges.items()]
    keys = np.sort((torch.cat(back, 1)[0] * graph.num_nodes + torch.cat(back, 1)[1]).numpy())
    pairs = np.load(path)["edge_index"].astype(np.int64)
    assert np.array_equal(keys, np.sort(pairs[0] * graph.num_nodes + pairs[1]))


def test_a_real_file_is_equal_after_saving_a_store(shared_data: Path, tmp_path: Path) -> None:
    graph = read_npz(shared_data / "static" / "hetero_acm.npz")
    again = save_store(graph, tmp_path / "acm")
    assert again.nodes.keys() == graph.nodes.keys() and again.edges.keys() == graph.edges.keys()
    assert torch.equal(again.nodes["paper"].split, graph.nodes["paper"].split)  # type: ignore[arg-type]
