"""Divide a rate among those who want it: weighted max-min fairness by water filling.

Who has a guarantee gets at least that of what it wants, and no more because of it: the guarantee is
a floor of the share, not on top of it. Who wants less than its share leaves the rest to the others.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Claim:
    """What one of them may have; rates in any unit, that of the rate which is divided.

    `weight` is above 0, `most` what it takes if it can: what it wants, or may have.
    """

    weight: float = 1.0
    guaranteed: float = 0.0
    most: float = math.inf

    @property
    def floor(self) -> float:
        """What it takes of its guarantee."""
        return min(self.guaranteed, self.most)

    def at(self, level: float) -> float:
        """Return its share where a weight of 1 gets `level`."""
        return min(self.most, max(self.guaranteed, self.weight * level))


def divide_fairly(rate: float, claims: Sequence[Claim]) -> list[float]:
    """Return the share of each claim, in their order; see `shares_by_claim`."""
    shares = shares_by_claim(rate, Counter(claims))
    return [shares[claim] for claim in claims]


def shares_by_claim(rate: float, claims: Mapping[Claim, int]) -> dict[Claim, float]:
    """Return the share of each of those with a claim, given with how many they are.

    All shares add up to the rate, or to all that is wanted if that is less. Guarantees that add up
    to more than the rate are cut in proportion. Takes time O(n log n), of n different claims.
    """
    floors = math.fsum(number * claim.floor for claim, number in claims.items())
    if floors >= rate:
        return {claim: rate * claim.floor / floors if floors else 0.0 for claim in claims}
    level = _level(rate - floors, claims)
    return {claim: claim.at(level) for claim in claims}


def _level(spare: float, claims: Mapping[Claim, int]) -> float:
    """Return the level at which shares take `spare` beyond the floors; infinite if it is enough.

    Between two levels at which a claim leaves its floor or reaches its most, shares grow by the
    weights of those in between.
    """
    turns: list[tuple[float, float]] = []
    for claim, number in claims.items():
        if claim.floor < claim.most:
            turns.append((claim.floor / claim.weight, number * claim.weight))
            turns.append((claim.most / claim.weight, -number * claim.weight))
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


def apportion_by_weight(count: int, weights: Mapping[Part, int]) -> dict[Part, int]:
    """Divide a whole number by weights of 0 or more, not all 0, by largest remainders (Hamilton).

    Of equal remainders the first one gets one more.
    """
    total = sum(weights.values())
    parts = {part: count * weight // total for part, weight in weights.items()}
    left = count - sum(parts.values())
    for part in sorted(weights, key=lambda each: -(count * weights[each] % total))[:left]:
        parts[part] += 1
    return parts
