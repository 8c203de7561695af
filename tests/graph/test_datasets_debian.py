"""The package graph, built from a small directory of lists."""

from __future__ import annotations

import gzip
import lzma

import pyarrow as pa
import pytest
import torch

from gnnfleet.errors import InputError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.store import save_store

MAIN = """\
Package: alpha
Source: greek (1.0)
Section: libs
Depends: beta (>= 1.2), gamma:any | delta, libvirtual,
 epsilon
Recommends: alpha, beta
Description: Letters of the old alphabet
 with a second line
Description-md5: 0123

Package: beta
Source: greek
Section: non-free/doc
Pre-Depends: alpha
Suggests: gamma, gamma (>> 2) | delta
Description: letters, again
"""
MORE = """\
Package: gamma
Section: doc
Description: a page

Package: alpha
Section: games
Description: a later alpha that does not count

Package: delta
"""
STATUS = """\
Package: epsilon
Status: install ok installed
Section: libs
Description: installed only
"""


@pytest.fixture
def lists(tmp_path):
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "a_main_Packages").write_text(MAIN)
    (tmp_path / "lists" / "b_more_Packages.xz").write_bytes(lzma.compress(MORE.encode()))
    (tmp_path / "lists" / "a_InRelease").write_text("Package: nothing")
    (tmp_path / "status").write_text(STATUS)
    return {"lists": tmp_path / "lists", "status": tmp_path / "status", "features": 64}


def edges_of(graph, relation):
    names = graph.single_nodes.ids.values().to_pylist()
    src, dst = graph.edges[EdgeType("package", relation, "package")].edge_index().tolist()
    return {(names[s], names[d]) for s, d in zip(src, dst, strict=True)}


def test_packages_sections_and_relations_are_read(lists, tmp_path):
    graph = make_dataset("debian", **lists)
    assert graph.single_nodes.ids.values().to_pylist() == ["alpha", "beta", "delta", "epsilon", "gamma"]
    depends = {("alpha", "beta"), ("alpha", "gamma"), ("alpha", "delta"), ("alpha", "epsilon"), ("beta", "alpha")}
    assert edges_of(graph, "depends") == depends
    assert edges_of(graph, "recommends") == {("alpha", "beta")}
    assert edges_of(graph, "suggests") == {("beta", "gamma"), ("beta", "delta")}
    nodes = graph.single_nodes
    assert nodes.classes == ("doc", "libs", "unknown") and nodes.y.tolist() == [1, 0, 2, 1, 0]
    both = make_dataset("debian", **lists, reverse=True)
    assert edges_of(both, "depends_back") == {(b, a) for a, b in depends}
    assert save_store(graph, tmp_path / "store").single_nodes.ids.select([0]).to_pylist() == ["alpha"]


def test_features_are_buckets_of_words(lists):
    x = make_dataset("debian", **lists, dtype="float32").single_nodes.x
    assert torch.allclose(x.norm(dim=1), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]))
    # alpha: letters of the old alphabet with second line (single letters are no words); beta: letters again
    assert [int((row > 0).sum()) for row in x] == [8, 2, 0, 2, 1]
    assert float(x[0] @ x[1]) > 0 and float(x[1] @ x[4]) == 0


def test_packages_of_one_source_share_a_split(lists):
    splits = set()
    for seed in range(12):
        split = make_dataset("debian", **lists, seed=seed, train=0.5, val=0.25).single_nodes.split[0].tolist()
        assert split[0] == split[1]
        splits.add(tuple(split))
    assert len(splits) > 3


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".lz4", None), ("", bytes)])
def test_compressed_lists_are_read(lists, suffix, compress):
    plain = make_dataset("debian", **lists)
    (lists["lists"] / "a_main_Packages").unlink()
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "lz4") as stream:
        stream.write(MAIN.encode())
    compressed = compress(MAIN.encode()) if compress else sink.getvalue().to_pybytes()
    (lists["lists"] / f"a_main_Packages{suffix}").write_bytes(compressed)
    again = make_dataset("debian", **lists)
    assert torch.equal(plain.single_nodes.x, again.single_nodes.x) and plain.num_edges == again.num_edges


def test_missing_and_damaged_lists_are_reported(tmp_path, lists):
    with pytest.raises(InputError, match=r"no package lists .* Debian machine"):
        make_dataset("debian", lists=tmp_path / "absent")
    (lists["lists"] / "a_main_Packages.xz").write_bytes(b"not packed")
    with pytest.raises(InputError, match="cannot be read"):
        make_dataset("debian", **lists)


def test_empty_lists_are_reported(tmp_path):
    (tmp_path / "x_Packages").write_text("\n")
    with pytest.raises(InputError, match="have no package"):
        make_dataset("debian", lists=tmp_path, status=tmp_path / "none")
