"""How the nodes that feed one stage share what it processes.

By max-min fairness, weighted with their normal rates: nobody may send a larger part of its normal
rate than the level at which all together send as much as the stage processes, and who sends less
than that is left alone. In proportion to what they send now, a node that another stage holds
already would be held twice.
"""

import math
from collections.abc import Collection, Sequence

from .nodes import Controller

SAME_LEVEL = 1e-6
"""Parts of the normal rate that differ by less than this share are the same."""

ROOM_SHARE = 0.01
"""Share of its rate by which what a held stage is sent must be less before it asks for more."""


Upstream = Sequence[tuple[Controller, float]]
"""Nodes that feed a stage, each with how many records the stage is sent for one of the node."""


def fair_rates(upstream: Upstream, capacity: float) -> dict[str, float]:
    """Return to which rates nodes are to slow down so that the stage gets `capacity`.

    When all together send less already, those at the highest level are asked for what they send.
    """
    # Who sends nothing to the stage is to blame only when nobody is known to send anything.
    sending = [(node, records) for node, records in upstream if records > 0]
    if not sending:
        return {node.name: capacity for node, _ in upstream}
    sending.sort(key=lambda each: each[0].level)
    weight = sum(node.normal_rate * records for node, records in sending)
    left = capacity
    for index, (node, records) in enumerate(sending):
        level = left / weight
        if node.level > level * (1 - SAME_LEVEL):
            return {each.name: each.normal_rate * level for each, _ in sending[index:]}
        left -= node.rate * records
        weight -= node.normal_rate * records
    highest = sending[-1][0].level * (1 - SAME_LEVEL)
    return {node.name: node.rate for node, _ in sending if node.level >= highest}


def raised_rates(upstream: Upstream, capacity: float, held: Collection[str]) -> dict[str, float]:
    """Return up to which rates the held nodes may speed up; `capacity` may be infinite."""
    sent = sum(node.rate * records for node, records in upstream)
    if sent >= capacity * (1 - ROOM_SHARE):
        return {}
    more = capacity / sent if sent else math.inf
    return {node.name: node.rate * more for node, _ in upstream if node.name in held}
