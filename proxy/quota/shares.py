"""Divide a rate among those who want it: weighted max-min fairness by water filling.

Who has a guarantee gets at least that of what it wants, and no more because of it: the guarantee is
a floor of the share, not on top of it. Who wants less than its share leaves the rest to the others.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Claim:
    """What one of them may have; rates in any unit, that of the rate which is divided.

    `weight` is above 0, `guaranteed` at most `ceiling`.
    """

    weight: float = 1.0
    guaranteed: float = 0.0
    ceiling: float = math.inf
    demand: float = math.inf

    @property
    def most(self) -> float:
        """What it takes if it can."""
        return min(self.demand, self.ceiling)

    @property
    def floor(self) -> float:
        """What it takes of its guarantee."""
        return min(self.guaranteed, self.most)

    def at(self, level: float) -> float:
        """Return its share where a weight of 1 gets `level`."""
        return min(self.most, max(self.guaranteed, self.weight * level))


def divide(rate: float, claims: Sequence[Claim]) -> list[float]:
    """Return the share of each claim, in their order, in time O(n log n).

    They add up to the rate, or to all that is wanted if that is less. Guarantees that add up to
    more than the rate are cut in proportion.
    """
    floors = math.fsum(claim.floor for claim in claims)
    if floors >= rate:
        return [rate * claim.floor / floors if floors else 0.0 for claim in claims]
    level = _level(rate - floors, claims)
    return [claim.at(level) for claim in claims]


def _level(spare: float, claims: Iterable[Claim]) -> float:
    """Return the level at which shares take `spare` beyond the floors; infinite if it is enough.

    Between two levels at which a claim leaves its floor or reaches its most, shares grow by the
    weights of those in between.
    """
    turns: list[tuple[float, float]] = []
    for claim in claims:
        if claim.floor < claim.most:
            turns.append((claim.floor / claim.weight, claim.weight))
            turns.append((claim.most / claim.weight, -claim.weight))
    turns.sort()
    level, growth = 0.0, 0.0
    for at, change in turns:
        taken = growth * (at - level) if growth else 0.0
        if taken >= spare:
            break
        spare -= taken
        level = at
        growth += change
    else:
        return math.inf
    return level + spare / growth


def apportioned(count: int, weights: Mapping[Part, int]) -> dict[Part, int]:
    """Divide a whole number by weights of 0 or more, not all 0, by largest remainders (Hamilton).

    Of equal remainders the first one gets one more.
    """
    total = sum(weights.values())
    parts = {part: count * weight // total for part, weight in weights.items()}
    left = count - sum(parts.values())
    for part in sorted(weights, key=lambda each: -(count * weights[each] % total))[:left]:
        parts[part] += 1
    return parts
