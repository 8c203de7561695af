"""The spec of a run, as its launcher hands it to all processes. Nothing heavy is imported here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnfleet.config.schema import RunConfig
    from gnnfleet.graph.graph import Graph


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One run; ``partition`` is the path of the parts below the store."""

    store: str
    digest: str  # of the store: every rank must read the same
    partition: str
    run_dir: str
    config: dict[str, Any]
    quiet: bool = True
    threads: int | None = None  # of every worker; None leaves it to the environment
    parent: int | None = None  # the process that workers do not outlive
    question: dict[str, Any] | None = None  # to a trained run; None trains
    trials: list[dict[str, Any]] | None = None  # of a plan; None trains
    output: dict[str, Any] | None = None  # with a question on nodes: the schema of predictions
    module_fd: int | None = None  # inherited memory with a live module; only the worker's own parent sets it
    answer: str | None = None  # the file that the first rank writes its answer to

    @classmethod
    def of(
        cls, graph: Graph, config: RunConfig, run_dir: Path, placement: Path | None = None, **fields: Any
    ) -> RunSpec:
        """The spec of a run on a stored graph, with the path of its partition, clusters or chunk layouts."""
        assert graph.store is not None
        return cls(
            store=str(graph.store.path.resolve()),
            digest=graph.store.digest,
            partition="" if placement is None else str(placement.relative_to(graph.store.path)),
            run_dir=str(run_dir),
            config=config.model_dump(mode="json"),
            **fields,
        )

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RunSpec:
        return cls(**json.loads(text))

    @classmethod
    def read(cls, path: Path) -> RunSpec:
        return cls.from_json(path.read_bytes())
