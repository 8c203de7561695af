"""A real graph from the package lists of a Debian machine: packages depend on, recommend and suggest packages.

Features are hashed words of the description, the class is the section, ids are package names. An edge goes from a
package to one that it names. All alternatives become edges, virtual packages are ignored. Packages of one source have
similar descriptions, so they belong to the same split.
"""

from __future__ import annotations

import gzip
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.graph.datasets.base import DatasetConfig, FeatureDtype, split_by_rank
from gnnfleet.graph.graph import Edges, EdgeType, Graph, Nodes
from gnnfleet.graph.ids import Ids
from gnnfleet.io.bundle import DTYPES
from gnnfleet.ops import csr
from gnnfleet.report.progress import NoProgress, Progress

PACKAGE = "package"
RELATIONS = {"depends": ("Depends", "Pre-Depends"), "recommends": ("Recommends",), "suggests": ("Suggests",)}

_SPLIT = 0
_LISTS = re.compile(r".*_Packages(\.lz4|\.xz|\.gz)?")
_WORD = re.compile(r"[a-z][a-z0-9+]+")
_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+")
_FIELDS = {"Package", "Source", "Section", "Description"}.union(*RELATIONS.values())


class DebianConfig(DatasetConfig):
    train: float = Field(0.6, ge=0, le=1, description="share of source packages to train on")
    val: float = Field(
        0.2, ge=0, le=1, description="share of source packages to validate on; the others are for the test"
    )
    lists: Path = Field(
        Path("/var/lib/apt/lists"), description="directory with files *_Packages, plain, .lz4, .xz or .gz"
    )
    status: Path = Field(Path("/var/lib/dpkg/status"), description="list of installed packages, read if it exists")
    features: int = Field(512, ge=1, le=2**20, description="width of the node features: buckets of hashed words")
    dtype: FeatureDtype = Field("float32", description="float32, float16 or bfloat16 features")
    reverse: bool = Field(False, description="add the reverse of the three relations")


class _Package(NamedTuple):
    source: str
    section: str
    description: str
    targets: dict[str, set[str]]  # relation → names of packages


def make_debian(config: DebianConfig, progress: Progress = NoProgress()) -> Graph:
    """Generate one node type and three edge types; raises InputError if there are no package lists."""
    packages = _read_packages(config, progress)
    advance = progress.stage("generate", 2)
    names = sorted(packages)
    rows = {name: row for row, name in enumerate(names)}
    edges: dict[EdgeType, Edges] = {}
    for relation in RELATIONS:
        pairs = [
            (rows[name], rows[target])
            for name in names
            for target in packages[name].targets[relation]
            if target in rows and target != name
        ]
        src, dst = torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2).T
        edges[EdgeType(PACKAGE, relation, PACKAGE)] = _edges(src, dst, len(names))
        if config.reverse:
            edges[EdgeType(PACKAGE, f"{relation}_back", PACKAGE)] = _edges(dst, src, len(names))
    advance(1)
    table = [packages[name] for name in names]
    sections = sorted({package.section for package in table})
    nodes = Nodes(
        count=len(names),
        x=_features([package.description for package in table], config),
        y=torch.tensor([sections.index(package.section) for package in table]),
        classes=tuple(sections),
        split=_split([package.source for package in table], config),
        ids=Ids.from_values(names),
    )
    advance(1)
    return Graph.of({PACKAGE: nodes}, edges, name="debian")


def _read_packages(config: DebianConfig, progress: Progress) -> dict[str, _Package]:
    """Read all packages by name; the first of several with the same name counts."""
    files = sorted(path for path in config.lists.glob("*_Packages*") if _LISTS.fullmatch(path.name))
    if not files:
        raise InputError(
            f"no package lists (*_Packages) in {config.lists}: this dataset needs the lists of a Debian machine. "
            "Run apt-get update on one, or name a directory of lists: --set lists=DIR"
        )
    advance = progress.stage("read package lists", len(files))
    packages: dict[str, _Package] = {}
    for path in [*files, *([config.status] if config.status.is_file() else [])]:
        for fields in _paragraphs(path):
            if "Package" in fields:
                packages.setdefault(fields["Package"], _package(fields))
        advance(1)
    if not packages:
        raise InputError(f"the package lists in {config.lists} have no package: run apt-get update")
    return packages


def _paragraphs(path: Path) -> Iterator[dict[str, str]]:
    """Yield the ``_FIELDS`` of each paragraph, with continuation lines joined."""
    for paragraph in re.split(r"\n\s*\n", _text(path)):
        fields: dict[str, str] = {}
        key = ""
        for line in paragraph.splitlines():
            if line[:1] in (" ", "\t"):
                if key in fields:
                    fields[key] += line
                continue
            key, _, value = line.partition(":")
            if key in _FIELDS:
                fields[key] = value.strip()
        yield fields


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        if path.suffix == ".lz4":
            raw = pa.input_stream(pa.BufferReader(raw), compression="lz4").read()
        elif path.suffix == ".xz":
            raw = lzma.decompress(raw)
        elif path.suffix == ".gz":
            raw = gzip.decompress(raw)
    except (OSError, EOFError, lzma.LZMAError, zlib.error, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read: {error}. Run apt-get update to fetch it again") from error
    return raw.decode("utf-8", errors="replace")


def _package(fields: dict[str, str]) -> _Package:
    return _Package(
        source=fields.get("Source", fields["Package"]).split(" ")[0],
        section=fields.get("Section", "unknown").rpartition("/")[2],
        description=fields.get("Description", ""),
        targets={
            relation: {name for key in keys for name in _targets(fields.get(key, ""))}
            for relation, keys in RELATIONS.items()
        },
    )


def _targets(relation: str) -> list[str]:
    """Parse names: ``a (>= 1), b:any | c`` gives a, b and c."""
    matches = [_NAME.match(term.strip()) for term in re.split(r"[,|]", relation)]
    return [match.group() for match in matches if match]


def _edges(src: Tensor, dst: Tensor, count: int) -> Edges:
    indptr, sources, _ = csr.distinct_edges(src.contiguous(), dst.contiguous(), num_src=count, num_dst=count)
    return Edges(indptr=indptr, src=sources)


def _features(descriptions: list[str], config: DebianConfig) -> Tensor:
    """[N, F]: 1 in the bucket of each word, rows scaled to length 1. CRC-32 is the same on every machine."""
    x = torch.zeros(len(descriptions), config.features)
    for row, text in enumerate(descriptions):
        buckets = {zlib.crc32(word.encode()) % config.features for word in _WORD.findall(text.lower())}
        x[row, list(buckets)] = 1
    return torch.nn.functional.normalize(x).to(DTYPES[config.dtype][0])


def _split(sources: list[str], config: DebianConfig) -> Tensor:
    order = {source: i for i, source in enumerate(sorted(set(sources)))}
    rank = config.draws.at(_SPLIT).permutation(len(order))
    ranks = rank[torch.tensor([order[source] for source in sources], dtype=torch.int64)]
    return split_by_rank(ranks, len(order), train=config.train, val=config.val)
