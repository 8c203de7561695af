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

LONGEST = 80
"""Epochs between two comparisons at most."""

LOST = 0.1
"""Share of what the loss had fallen by between comparisons that it may rise again."""

FLOOR = 0.05
"""Share of the loss itself that it may rise by at least: less is noise of draws and steps."""

Level = Literal["planned", "fresh", "exact"]
LEVELS: tuple[Level, ...] = ("planned", "fresh", "exact")


@dataclass(frozen=True)
class Compared:
    """A pair of passes with the same weights and draws."""

    cosine: float  # between the gradients
    loss: float
    exact_loss: float


@dataclass(frozen=True)
class Guard:
    """Where a run stands; the same on all ranks."""

    every: int  # epochs until the first comparison; 0 never compares
    tolerance: float
    due: int = 0  # the epoch of the next one
    wait: int = 0  # epochs from the last one to that
    level: Level = "planned"
    first: float = -inf  # exact loss at the first comparison
    least: float = inf  # and at the best one

    @classmethod
    def begin(cls, every: int, tolerance: float, epoch: int) -> Guard:
        return cls(every, tolerance, due=epoch + every, wait=every)

    def is_due(self, epoch: int) -> bool:
        return bool(self.every) and self.level != "exact" and epoch >= self.due

    def after(self, epoch: int, found: Compared, exactly: str = "") -> tuple[Guard, str]:
        """(the guard from now on, what to say: nothing while all is well); ``exactly`` is how exact epochs go."""
        loss = found.exact_loss
        first = self.first if self.first > -inf else loss
        seen = self._seen(found)
        if not seen:
            wait = min(2 * self.wait, max(LONGEST, self.every)) if self.level == "planned" else self.every
            return replace(self, due=epoch + wait, wait=wait, first=first, least=min(self.least, loss)), ""
        level = LEVELS[LEVELS.index(self.level) + 1]
        does = {
            "fresh": f"from now on history comes from exact passes, one every {self.every} epochs",
            "exact": f"from now on every epoch is exact, {exactly}",
        }[level]
        # What was lost is lost: the next step down is for losing more.
        then = replace(self, level=level, due=epoch + self.every, wait=self.every, first=first, least=loss)
        return then, f"epoch {epoch + 1}: {seen}: {does}"

    def _seen(self, found: Compared) -> str:
        """What is wrong, if anything."""
        if not found.cosine >= self.tolerance:
            return (
                f"the gradient has a cosine of {found.cosine:.2f} with the exact one "
                f"(at least {self.tolerance:g} is wanted), loss {found.loss:.4g}, exactly {found.exact_loss:.4g}"
            )
        # After a step down ``least`` may be above ``first``: then the floor alone counts.
        allowed = max(LOST * (self.first - self.least), FLOOR * abs(self.least))
        if self.least < inf and not found.exact_loss - self.least <= allowed:
            return f"the exact loss has risen to {found.exact_loss:.4g}, it had been {self.least:.4g}"
        return ""

    def state(self) -> list[float]:
        return [self.due, self.wait, LEVELS.index(self.level), self.first, self.least]

    def resumed(self, state: list[float], *, anew: bool = False) -> Guard:
        """Where ``state`` was taken; with ``anew`` comparisons begin as in this guard, and what they found stays."""
        due, wait, level, first, least = state
        found = replace(self, level=LEVELS[int(level)], first=first, least=least)
        return found if anew else replace(found, due=int(due), wait=int(wait))
