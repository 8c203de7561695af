"""Device mesh: the ranks of a World along named axes (way × stage; offset × lane × copy).

Ranks are in row-major order: the last axis varies fastest, so its neighbours are close together.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gnnfleet.comm.world import World


def coordinates_of_rank(rank: int, axes: Mapping[str, int]) -> dict[str, int]:
    """The position of a rank on every axis."""
    coordinates = {}
    for axis, length in reversed(list(axes.items())):
        rank, coordinates[axis] = divmod(rank, length)
    return {axis: coordinates[axis] for axis in axes}


def rank_of_coordinates(coordinates: Mapping[str, int], axes: Mapping[str, int]) -> int:
    """The inverse of ``coordinates_of_rank``."""
    rank = 0
    for axis, length in axes.items():
        assert 0 <= coordinates[axis] < length, (coordinates, axes)
        rank = rank * length + coordinates[axis]
    return rank


def ranks_along(rank: int, axis: str, axes: Mapping[str, int]) -> list[int]:
    """The ranks that differ from this one on one axis only, itself included, in order."""
    own = coordinates_of_rank(rank, axes)
    return [rank_of_coordinates({**own, axis: position}, axes) for position in range(axes[axis])]


class Mesh:
    """The ranks of a World on named axes. Subgroups are created in the constructor, in the same order on all ranks."""

    def __init__(self, world: World, axes: Mapping[str, int]) -> None:
        assert prod(axes.values()) == world.size, f"{dict(axes)} does not have {world.size} positions"
        self.world = world
        self.axes = dict(axes)
        self.coordinates = coordinates_of_rank(world.rank, self.axes)
        self._subgroups = {
            axis: world.subgroup(f"grid/{axis}", ranks_along(world.rank, axis, self.axes)) for axis in self.axes
        }

    def subgroup(self, axis: str) -> World:
        """The World of the ranks along an axis; ranks in it are positions on the axis."""
        return self._subgroups[axis]

    def rank_at(self, **position: int) -> int:
        """The rank at a position; axes that are left out keep this rank's coordinate."""
        assert position.keys() <= self.axes.keys(), (position, self.axes)
        return rank_of_coordinates({**self.coordinates, **position}, self.axes)
