"""Checks of gradients that were computed with historical rows, and fallbacks to exact training.

In some epochs both gradients are computed; the step follows the exact one, and its rows become the history. While both
agree, the interval to the next check doubles. A check fails if the gradients disagree, or if the exact loss has risen:
steps along old rows may overshoot although each has the right direction. The first failure keeps checks at short
intervals, and only they update the history. The second one makes all further epochs exact, on an exact grid if there is
one, else with each partition as one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

MAX_CHECK_INTERVAL = 80
"""Largest number of epochs between two checks, unless ``check_every`` is larger."""

MAX_LOSS_GAP = 0.1
"""Largest rise of the loss, relative to its fall between checks."""

MIN_LOSS_GAP = 0.05
"""A smaller rise, relative to the loss, is noise of draws and steps."""

Fallback = Literal["planned", "fresh", "exact"]
FALLBACKS: tuple[Fallback, ...] = ("planned", "fresh", "exact")


_NO_EXACT_GRID = "each partition is one chunk, which is slow. Set strategy.graph_parallel=WORKERS to train in parallel"


@dataclass(frozen=True)
class ExactnessMonitor:
    """State of the checks; the same on all ranks."""

    check_every: int  # epochs until the first check; 0 disables checks
    tolerance: float
    next_epoch: int = 0  # of the next check
    check_interval: int = 0  # epochs between the last check and the next one
    level: Fallback = "planned"
    first: float = -inf  # exact loss at the first check
    least: float = inf  # least exact loss since the last fallback

    @classmethod
    def begin(cls, every: int, tolerance: float) -> ExactnessMonitor:
        return cls(every, tolerance, next_epoch=every, check_interval=every)

    def is_due(self, epoch: int) -> bool:
        return bool(self.check_every) and self.level != "exact" and epoch >= self.next_epoch

    def update(
        self, epoch: int, cosine: float, loss: float, exact_loss: float, exact_grid: str = ""
    ) -> tuple[ExactnessMonitor, str]:
        """(the next state, a message if the check fails); ``exact_grid`` describes the grid of exact epochs."""
        failure = self._failure(cosine, loss, exact_loss)
        level = FALLBACKS[FALLBACKS.index(self.level) + 1] if failure else self.level
        interval = self.check_every
        if level == "planned":
            interval = min(2 * self.check_interval, max(MAX_CHECK_INTERVAL, self.check_every))
        monitor = replace(
            self,
            next_epoch=epoch + interval,
            check_interval=interval,
            level=level,
            first=self.first if self.first > -inf else exact_loss,
            # A rise that caused a fallback does not cause the next one.
            least=exact_loss if failure else min(self.least, exact_loss),
        )
        fallback = f"All further epochs are exact: {exact_grid or _NO_EXACT_GRID}"
        if level == "fresh":
            fallback = f"An exact pass every {interval} epochs now updates the history"
        return monitor, f"Epoch {epoch + 1}: {failure}. {fallback}." if failure else ""

    def _failure(self, cosine: float, loss: float, exact_loss: float) -> str:
        """The reason why a check fails, if it does."""
        if not cosine >= self.tolerance:
            return (
                f"gradients have a cosine of {cosine:.2f} with exact ones, expected at least {self.tolerance:g} "
                f"(loss {loss:.4g}, exact loss {exact_loss:.4g})"
            )
        # After a fallback ``least`` may exceed ``first``.
        allowed = max(MAX_LOSS_GAP * (self.first - self.least), MIN_LOSS_GAP * abs(self.least))
        if self.least < inf and not exact_loss - self.least <= allowed:
            return f"the exact loss rose from {self.least:.4g} to {exact_loss:.4g}"
        return ""

    def state(self) -> list[float]:
        return [self.next_epoch, self.check_interval, FALLBACKS.index(self.level), self.first, self.least]

    def resumed(self, state: list[float], *, restart: bool = False) -> ExactnessMonitor:
        """The monitor in a saved state; ``restart`` keeps this one's schedule of checks."""
        next_epoch, interval, level, first, least = state
        monitor = replace(self, level=FALLBACKS[int(level)], first=first, least=least)
        return monitor if restart else replace(monitor, next_epoch=int(next_epoch), check_interval=int(interval))
