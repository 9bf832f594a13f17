"""How the nodes that feed one stage share what it processes.

By max-min fairness, weighted with their normal rates: nobody may send a larger part of its normal
rate than the level at which all together send as much as the stage processes, and who sends less
than that is left alone. In proportion to what they send now, a node that another stage holds
already would be held twice.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

SAME_LEVEL = 1e-6
"""Parts of the normal rate that differ by less than this share are the same."""

ROOM_SHARE = 0.01
"""Share of its rate by which what a held stage is sent must be less before it asks for more."""


@dataclass(frozen=True, slots=True)
class UpstreamRate:
    """What one node sends to one stage."""

    node: str
    rate: float
    """The rate of the node in force, above 0."""
    normal_rate: float
    records: float
    """How many records the stage is sent for one of the node, 0 or more."""

    @property
    def level(self) -> float:
        """Which part of its normal rate the node has."""
        return self.rate / self.normal_rate


def fair_rates(upstream: Sequence[UpstreamRate], capacity: float) -> dict[str, float]:
    """Return to which rates nodes are to slow down so that the stage gets `capacity`.

    When all together send less already, those at the highest level are asked for what they send.
    """
    # Who sends nothing to the stage is to blame only when nobody is known to send anything.
    sending = [each for each in upstream if each.records > 0]
    if not sending:
        return {each.node: capacity for each in upstream}
    sending.sort(key=lambda each: each.level)
    weight = sum(each.normal_rate * each.records for each in sending)
    left = capacity
    for index, each in enumerate(sending):
        level = left / weight
        if each.level > level * (1 - SAME_LEVEL):
            return {item.node: item.normal_rate * level for item in sending[index:]}
        left -= each.rate * each.records
        weight -= each.normal_rate * each.records
    highest = sending[-1].level * (1 - SAME_LEVEL)
    return {each.node: each.rate for each in sending if each.level >= highest}


def raised_rates(
    upstream: Sequence[UpstreamRate], capacity: float, held: Collection[str]
) -> dict[str, float]:
    """Return up to which rates the held nodes may speed up; `capacity` may be infinite."""
    sent = sum(each.rate * each.records for each in upstream)
    if sent >= capacity * (1 - ROOM_SHARE):
        return {}
    more = capacity / sent if sent else math.inf
    return {each.node: each.rate * more for each in upstream if each.node in held}
