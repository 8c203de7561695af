"""Whether gradients that were made with history still point where exact ones do and lead down, and what is done if not.

Now and then an epoch computes both and steps along the exact one; its rows become the history. As long as they agree,
the next comparison is twice as far away. When they do not, or when exact loss has risen since an earlier comparison
(steps along old rows may overshoot although each points the right way), comparisons stay close together and history
comes from them alone; if that does not help, the run goes on exactly: on more ways where such a grid was planned with,
else with all chunks of a way as one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

MAX_CHECK_INTERVAL = 80
"""Epochs between two comparisons at most."""

MAX_LOSS_GAP = 0.1
"""Share of what the loss had fallen by between comparisons that it may rise again."""

MIN_LOSS_GAP = 0.05
"""Share of the loss itself that it may rise by at least: less is noise of draws and steps."""

Fallback = Literal["planned", "fresh", "exact"]
FALLBACKS: tuple[Fallback, ...] = ("planned", "fresh", "exact")


@dataclass(frozen=True)
class GradientComparison:
    """A pair of passes with the same weights and draws."""

    cosine: float  # between the gradients
    loss: float
    exact_loss: float


@dataclass(frozen=True)
class ExactnessMonitor:
    """Where a run stands; the same on all ranks."""

    check_every: int  # epochs until the first comparison; 0 never compares
    tolerance: float
    next_epoch: int = 0  # the epoch of the next one
    check_interval: int = 0  # epochs from the last one to that
    level: Fallback = "planned"
    first: float = -inf  # exact loss at the first comparison
    least: float = inf  # and at the best one

    @classmethod
    def begin(cls, every: int, tolerance: float, epoch: int) -> ExactnessMonitor:
        return cls(every, tolerance, next_epoch=epoch + every, check_interval=every)

    def is_due(self, epoch: int) -> bool:
        return bool(self.check_every) and self.level != "exact" and epoch >= self.next_epoch

    def update(self, epoch: int, found: GradientComparison, exactly: str = "") -> tuple[ExactnessMonitor, str]:
        """(the guard from now on, what to say: nothing while all is well); ``exactly`` is how exact epochs go."""
        loss = found.exact_loss
        first = self.first if self.first > -inf else loss
        seen = self._seen(found)
        if not seen:
            wait = (
                min(2 * self.check_interval, max(MAX_CHECK_INTERVAL, self.check_every))
                if self.level == "planned"
                else self.check_every
            )
            return replace(
                self, next_epoch=epoch + wait, check_interval=wait, first=first, least=min(self.least, loss)
            ), ""
        level = FALLBACKS[FALLBACKS.index(self.level) + 1]
        does = {
            "fresh": f"from now on history comes from exact passes, one every {self.check_every} epochs",
            "exact": f"from now on every epoch is exact, {exactly}",
        }[level]
        # What was lost is lost: the next step down is for losing more.
        then = replace(
            self,
            level=level,
            next_epoch=epoch + self.check_every,
            check_interval=self.check_every,
            first=first,
            least=loss,
        )
        return then, f"epoch {epoch + 1}: {seen}: {does}"

    def _seen(self, found: GradientComparison) -> str:
        """What is wrong, if anything."""
        if not found.cosine >= self.tolerance:
            return (
                f"the gradient has a cosine of {found.cosine:.2f} with the exact one "
                f"(at least {self.tolerance:g} is wanted), loss {found.loss:.4g}, exactly {found.exact_loss:.4g}"
            )
        # After a step down ``least`` may be above ``first``: then the floor alone counts.
        allowed = max(MAX_LOSS_GAP * (self.first - self.least), MIN_LOSS_GAP * abs(self.least))
        if self.least < inf and not found.exact_loss - self.least <= allowed:
            return f"the exact loss has risen to {found.exact_loss:.4g}, it had been {self.least:.4g}"
        return ""

    def state(self) -> list[float]:
        return [self.next_epoch, self.check_interval, FALLBACKS.index(self.level), self.first, self.least]

    def resumed(self, state: list[float], *, anew: bool = False) -> ExactnessMonitor:
        """Where ``state`` was taken; with ``anew`` comparisons begin as in this guard, and what they found stays."""
        due, wait, level, first, least = state
        found = replace(self, level=FALLBACKS[int(level)], first=first, least=least)
        return found if anew else replace(found, next_epoch=int(due), check_interval=int(wait))
