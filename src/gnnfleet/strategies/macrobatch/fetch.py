"""The relay of a macrobatch: blocks of several batches, then every row of other parts that any of them reads, once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gnnfleet.graph.sampling.loader import prepare_backward
from gnnfleet.graph.views.local import LocalView
from gnnfleet.ops.buffers import empty
from gnnfleet.ops.gather import gather
from gnnfleet.sharded.sampling.dist_sampler import PartSampler, Sampled
from gnnfleet.sharded.sampling.feature_store import Tables
from gnnfleet.strategies.macrobatch.feature_parallel import Columns
from gnnfleet.strategies.macrobatch.host_cache import HostRows, Wants
from gnnfleet.tasks.base import Batch, Task


@dataclass
class Tally:
    """What relays did."""

    relays: int = 0
    read: int = 0  # rows of other parts that batches read, each batch by itself
    wanted: int = 0  # the same, once per relay
    hits: int = 0  # of these, rows that were kept from before
    fetched_bytes: int = 0
    waited: float = 0.0  # seconds in which steps waited for a relay


@dataclass(frozen=True, eq=False)
class Plan:
    """A macrobatch whose blocks are known: what it needs of other parts, ascending store ids by node type."""

    batches: Sequence[Batch]
    sampled: Sequence[Sampled]
    wanted: Mapping[str, Tensor]
    here: Mapping[str, Wants]  # what all workers of this machine want, where they keep rows together
    first: Sequence[
        Sequence[LocalView]
    ] = ()  # by batch and rank, the first blocks of all ranks, where columns are split


def items_of(task: Task, items: Tensor, rank: int, owner: Callable[[str, Tensor], Tensor]) -> Tensor:
    """[n] bool: training items that a rank works on; ``owner`` gives the ranks of nodes by type and store id."""
    found = torch.zeros(len(items), dtype=torch.bool)
    for kind, which, ids in task.homes(items):
        found[which] = owner(kind, ids) == rank
    return found


def far_ids(one: Sampled, kind: str) -> Tensor:
    """Store ids of the nodes of other parts that a batch reads."""
    return one.ids[kind][torch.cat(one.reached[kind].far)]


@dataclass(frozen=True, eq=False)
class Fetched:
    """A macrobatch ready to be trained on: its plan and rows of other parts, one for each of ``plan.wanted``."""

    plan: Plan
    rows: Mapping[str, Mapping[str, Tensor]]
    places: Mapping[str, Tensor]  # by node type, the place in ``rows`` of each that is wanted
    own: Mapping[str, tuple[Tensor, Mapping[str, Tensor]]]  # (rows of this part, ascending; what paged tables have)


@dataclass(eq=False)
class Relay:
    """All ranks make and call it together; serves one thread at a time."""

    sampler: PartSampler
    tables: Tables
    task: Task
    given: bool  # whether the first layer's aggregate is a table, so that the last hop is not drawn
    kept: HostRows | None = None
    columns: Columns | None = None  # where features are split by column: nothing is fetched then
    tally: Tally = field(default_factory=Tally)

    def sample(self, batches: Sequence[Batch]) -> Plan:
        """Draw the blocks of some batches, as many on all ranks."""
        sampled = self.sampler.blocks([(batch.seeds, batch.key) for batch in batches], given=self.given)
        for one, batch in zip(sampled, batches, strict=True):
            one.views = [self.task.hide(view, batch) for view in one.views]
            prepare_backward(one.views)
        self.tally.relays += 1
        if self.columns is not None:
            return Plan(batches, sampled, {}, {}, self.columns.exchange(self.sampler.world, sampled))
        wanted = {kind: torch.unique(torch.cat([far_ids(one, kind) for one in sampled])) for kind in sampled[0].ids}
        plan = Plan(batches, sampled, wanted, {} if self.kept is None else self.kept.tell(wanted))
        for kind, ids in plan.wanted.items():
            self.tally.read += sum(len(far_ids(one, kind)) for one in sampled)
            self.tally.wanted += len(ids)
        return plan

    def fetch(self, plan: Plan, future: Sequence[Plan] = ()) -> Fetched:
        """Get the rows; ``future`` are the plans that follow, as far as they are known."""
        if self.columns is not None:
            return Fetched(plan, {}, {}, {})
        if self.kept is None:
            found, order = self.tables.fetch(plan.wanted)
            places = {kind: _turned(rows) for kind, rows in order.items()}
            fetched = {kind: len(ids) for kind, ids in plan.wanted.items()}
        else:
            before = self.kept.hits
            found, fetched = self.kept.fetch(plan.wanted, plan.here, [later.here for later in future])
            places = {kind: torch.arange(len(ids)) for kind, ids in plan.wanted.items()}
            self.tally.hits += self.kept.hits - before
        self.tally.fetched_bytes += sum(count * self.tables.row_bytes(kind) for kind, count in fetched.items())
        return Fetched(plan, found, places, self._read_own(plan))

    def _read_own(self, plan: Plan) -> dict[str, tuple[Tensor, Mapping[str, Tensor]]]:
        """Rows of this part from tables that are too large for memory, each once."""
        found: dict[str, tuple[Tensor, Mapping[str, Tensor]]] = {}
        for kind in dict.fromkeys(kind for kind, _ in sorted(self.tables.paged)):
            own = self.tables.own[kind].rows
            rows = torch.unique(torch.cat([own[one.reached[kind].places] for one in plan.sampled]))
            found[kind] = rows, self.tables.read_own(kind, rows)
        self.tables.let_go()
        return found

    def fetch_ahead(self, plans: Iterator[Plan], window: int) -> Generator[Fetched]:
        """Plans as they are fetched, each knowing up to ``window`` that follow."""
        known: list[Plan] = []
        for plan in plans:
            known.append(plan)
            if len(known) > window:
                yield self.fetch(known.pop(0), known)
        while known:
            yield self.fetch(known.pop(0), known)


class Reader:
    """The rows that one batch of a macrobatch reads, put together from this part's and from fetched ones."""

    def __init__(self, relay: Relay, fetched: Fetched, place: int) -> None:
        self.batch, self.sampled = fetched.plan.batches[place], fetched.plan.sampled[place]
        self.first = fetched.plan.first[place] if fetched.plan.first else ()
        if relay.columns is not None:
            for kind, ids in self.sampled.ids.items():
                self.sampled.degrees[kind] = relay.columns.degrees_of(ids)
            return
        tables = relay.tables
        self._tables, self._rows, self._own = tables, fetched.rows, fetched.own
        self._where: dict[str, _Where] = {}
        for kind, ids in self.sampled.ids.items():
            reached = self.sampled.reached[kind]
            far = torch.cat(reached.far)
            there = fetched.places[kind][torch.searchsorted(fetched.plan.wanted[kind], ids[far])]
            self._where[kind] = _Where(tables.own[kind].rows[reached.places], reached.rows, there, far)
            self.sampled.degrees[kind] = self._degrees(kind)

    def read(self, kind: str, name: str, *, out: Tensor | None = None) -> Tensor:
        """[S, F] rows of a table, half precision as float32, in the order of the blocks; perhaps into some columns."""
        own, far = self._tables.rows[kind][name], self._rows[kind][name]
        where = self._where[kind]
        if (kind, name) in self._tables.paged:
            known, tables = self._own[kind]
            own, where = tables[name], replace(where, own=torch.searchsorted(known, where.own))
        return where.read(own, far, out=out)

    def _degrees(self, kind: str) -> Callable[[bool], Tensor]:
        """Knows nothing but where degrees lie: views keep it, and rows must not outlive their batch."""
        names = [name for name in (DEGREE, WEIGHTED) if name in self._tables.rows[kind]]
        tables = {name: (self._tables.rows[kind][name], self._rows[kind][name]) for name in names}
        where, known = self._where[kind], dict[str, Tensor]()

        def degree(weighted: bool) -> Tensor:
            name = WEIGHTED if weighted and WEIGHTED in tables else DEGREE
            if name not in known:
                known[name] = where.read(*tables[name])[:, 0]
            return known[name]

        return degree


@dataclass(frozen=True, eq=False)
class _Where:
    """Where a batch finds the rows of one node type."""

    own: Tensor  # rows of this part
    at: Tensor  # where they go
    far: Tensor  # rows that were fetched
    far_at: Tensor

    def read(self, own: Tensor, far: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Rows of a table, half precision as float32."""
        dtype = torch.float32 if own.dtype in (torch.float16, torch.bfloat16) else own.dtype
        if out is None:
            out = empty((len(self.at) + len(self.far_at), own.shape[1]), dtype)
        gather(own, self.own, dtype, out=out, at=self.at)
        gather(far, self.far, dtype, out=out, at=self.far_at)
        return out


def _turned(order: Tensor) -> Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


X, DEGREE, WEIGHTED = "x", "degree", "weighted degree"
"""Names of tables; those of aggregates are the edge types'."""
