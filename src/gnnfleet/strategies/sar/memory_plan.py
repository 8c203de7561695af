"""Choose prefetch, cached rows and group size within a memory limit per worker.

A worker's peak is the memory after the build, the tensors of a step, the rows sent and received by one exchange at a
time, and the rows cached for backward. The choice starts with the smallest peak and adds what fits, in this order:
prefetch hides waiting, cached rows save a third of the traffic where backward would fetch again, larger groups save
rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gnnfleet.comm.halo_exchange import ExchangePlan
from gnnfleet.errors import ConfigError
from gnnfleet.sharded.step_tracer import RouteKey, StepTrace, TracedExchange
from gnnfleet.strategies.estimates import MEMORY_SLACK
from gnnfleet.strategies.sar.config import SarConfig
from gnnfleet.units import format_size


@dataclass(frozen=True)
class MemoryChoice:
    group: int
    prefetch: int
    cached_layers: tuple[int, ...] = ()  # layers whose fetched rows are cached for backward

    def __str__(self) -> str:
        layers = ", ".join(str(layer + 1) for layer in self.cached_layers)
        return f"group {self.group}, prefetch {self.prefetch}" + (f", rows of layers {layers} cached" if layers else "")


@dataclass(frozen=True)
class MemoryNeeds:
    resident: float  # bytes in use before the step
    peak_bytes: float  # of a step, without remote rows
    trace: StepTrace
    plans: Callable[[RouteKey], ExchangePlan]

    @property
    def cacheable_layers(self) -> list[int]:
        return sorted({exchange.layer for exchange in self.trace.exchanges if exchange.is_cacheable})

    def bytes(self, choice: MemoryChoice) -> float:
        """The peak of a step."""
        exchanges = self.trace.exchanges
        exchanged = max((self._exchange_bytes(exchange, choice) for exchange in exchanges), default=0.0)
        cached = sum(
            float(sum(self.plans(route).recv_counts)) * row_bytes
            for exchange in exchanges
            if exchange.is_cacheable and exchange.layer in choice.cached_layers
            for route, row_bytes in exchange.sent_bytes
        )
        return self.resident + MEMORY_SLACK * (self.peak_bytes + exchanged + cached)

    def _exchange_bytes(self, exchange: TracedExchange, choice: MemoryChoice) -> float:
        """Rows sent and received by the largest rounds that are in memory at once."""
        routes = exchange.returned_bytes
        if not (exchange.is_refetch and exchange.layer in choice.cached_layers):
            routes = (*exchange.sent_bytes, *routes)
        plans = [(self.plans(route), row_bytes) for route, row_bytes in routes]
        ranks = len(plans[0][0].recv_counts) if plans else 0
        by_rank = [
            sum((plan.recv_counts[q] + len(plan.send_rows[q])) * row_bytes for plan, row_bytes in plans)
            for q in range(ranks)
        ]
        ranks_at_once = min((1 + choice.prefetch) * choice.group, max(ranks - 1, 0))
        return float(sum(sorted(by_rank, reverse=True)[:ranks_at_once]))


def least_choice(needs: MemoryNeeds, config: SarConfig) -> MemoryChoice:
    """The settings of least memory."""
    cached_layers = tuple(needs.cacheable_layers) if config.cache_for_backward is True else ()
    return MemoryChoice(value_or(config.group, 1), value_or(config.prefetch, 0), cached_layers)


MaxOverRanks = Callable[[float], float]
"""Collective. The largest value of all ranks."""


def choose_memory_plan(
    needs: MemoryNeeds, limit: int, ranks: int, config: SarConfig, max_over_ranks: MaxOverRanks
) -> tuple[MemoryChoice, str]:
    """Collective. (settings within ``limit`` bytes per worker, a remark); raises ConfigError if nothing fits.

    Options that are not ``auto`` keep their value.
    """
    choice, layers = least_choice(needs, config), needs.cacheable_layers
    total = max_over_ranks(needs.bytes(choice))
    if total > limit:
        raise ConfigError(
            f"a worker needs at least {format_size(total)} ({choice}), found --memory {format_size(limit)}: "
            "use more workers, more memory or a smaller model"
        )
    rejected = ""
    for option, value in _upgrades(ranks, layers, config):
        candidate = _upgraded(choice, option, value)
        peak = max_over_ranks(needs.bytes(candidate))
        if peak <= limit:
            choice, total = candidate, peak
        elif not rejected:
            rejected = f"; {candidate} would take {format_size(peak)}"
    return choice, f"{choice}: {format_size(total)} of {format_size(limit)} per worker{rejected}"


def _upgrades(ranks: int, layers: Sequence[int], config: SarConfig) -> list[tuple[str, int]]:
    """(option, value), in the order in which they are tried."""
    upgrades = [("prefetch", 1)] if config.prefetch == "auto" else []
    upgrades += [("cache", layer) for layer in layers] if config.cache_for_backward == "auto" else []
    sizes = [2**power for power in range(1, ranks.bit_length()) if 2**power < ranks]
    return upgrades + ([("group", size) for size in (*sizes, ranks)] if config.group == "auto" else [])


def value_or(option: int | str, default: int) -> int:
    """The value of an option; ``default`` for auto."""
    return default if option == "auto" else int(option)


def _upgraded(choice: MemoryChoice, option: str, value: int) -> MemoryChoice:
    if option == "cache":
        return replace(choice, cached_layers=tuple(sorted({*choice.cached_layers, value})))
    return replace(choice, prefetch=value) if option == "prefetch" else replace(choice, group=value)
