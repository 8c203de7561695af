"""Grid: names for the directions in which the ranks of a World are arranged (way × stage; offset × lane × copy).

Ranks lie in row-major order: the last axis runs fastest, so its neighbours are close together.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gnnfleet.comm.world import World


def coordinates_of_rank(rank: int, axes: Mapping[str, int]) -> dict[str, int]:
    """Where a rank stands, by axis."""
    found = {}
    for axis, length in reversed(list(axes.items())):
        rank, found[axis] = divmod(rank, length)
    return {axis: found[axis] for axis in axes}


def rank_of_coordinates(coordinates: Mapping[str, int], axes: Mapping[str, int]) -> int:
    """The reverse of ``coordinates_of_rank``."""
    rank = 0
    for axis, length in axes.items():
        assert 0 <= coordinates[axis] < length, (coordinates, axes)
        rank = rank * length + coordinates[axis]
    return rank


def ranks_along(rank: int, axis: str, axes: Mapping[str, int]) -> list[int]:
    """The ranks that differ from this one along an axis only, itself included, in order."""
    here = coordinates_of_rank(rank, axes)
    return [rank_of_coordinates({**here, axis: place}, axes) for place in range(axes[axis])]


class Mesh:
    """The ranks of a World by named axes. Sub-Worlds are made here, once, so that all ranks make them alike."""

    def __init__(self, world: World, axes: Mapping[str, int]) -> None:
        assert prod(axes.values()) == world.size, f"{dict(axes)} has not {world.size} places"
        self.world = world
        self.axes = dict(axes)
        self.coordinates = coordinates_of_rank(world.rank, self.axes)
        self._lines = {
            axis: world.subgroup(f"grid/{axis}", ranks_along(world.rank, axis, self.axes)) for axis in self.axes
        }

    def subgroup(self, axis: str) -> World:
        """The World of the ranks along an axis; its ranks are the places on it."""
        return self._lines[axis]

    def rank_at(self, **places: int) -> int:
        """The rank at some places; axes that are not named are this rank's own."""
        assert places.keys() <= self.axes.keys(), (places, self.axes)
        return rank_of_coordinates({**self.coordinates, **places}, self.axes)
