"""Whether gradients that were made with history still point where exact ones do, and what is done when not.

Now and then an epoch computes both and steps along the exact one; its rows become the history. As long as they agree,
the next comparison is twice as far away. When they do not, comparisons stay close together and history comes from them
alone; if they still do not, the run goes on exactly: on more ways where such a grid was planned with, else with all
chunks of a way as one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

LONGEST = 80
"""Epochs between two comparisons at most."""

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

    @classmethod
    def begin(cls, every: int, tolerance: float, epoch: int) -> Guard:
        return cls(every, tolerance, due=epoch + every, wait=every)

    def is_due(self, epoch: int) -> bool:
        return bool(self.every) and self.level != "exact" and epoch >= self.due

    def after(self, epoch: int, found: Compared, exactly: str = "") -> tuple[Guard, str]:
        """(the guard from now on, what to say: nothing while gradients agree); ``exactly`` is how exact epochs go."""
        if found.cosine >= self.tolerance:
            wait = min(2 * self.wait, max(LONGEST, self.every)) if self.level == "planned" else self.every
            return replace(self, due=epoch + wait, wait=wait), ""
        level = LEVELS[LEVELS.index(self.level) + 1]
        seen = (
            f"epoch {epoch + 1}: the gradient has a cosine of {found.cosine:.2f} with the exact one "
            f"(at least {self.tolerance:g} is wanted), loss {found.loss:.4g}, exactly {found.exact_loss:.4g}"
        )
        does = {
            "fresh": f"from now on history comes from exact passes, one every {self.every} epochs",
            "exact": f"from now on every epoch is exact, {exactly}",
        }[level]
        return replace(self, level=level, due=epoch + self.every, wait=self.every), f"{seen}: {does}"

    def state(self) -> list[int]:
        return [self.due, self.wait, LEVELS.index(self.level)]

    def resumed(self, state: list[int]) -> Guard:
        due, wait, level = state
        return replace(self, due=due, wait=wait, level=LEVELS[level])
