"""What clients want at this member of what they share, as its owner hears it. Sans-I/O."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from metrics.clock import MS_PER_SECOND

from .meter import Meter
from .rules import Budget
from .shares import Claim

IDLE_MS = 10_000.0
"""After so long without traffic no part is asked for any more."""

DEMAND_GROWTH = 1.5
"""Of what clients moved lately, who did not wait for more: so much they may want next."""

DEMAND_HEADROOM = 0.02
"""Of the budget: what a member may have for clients that begin, before it asks anew."""


class InnerClaim(NamedTuple):
    """What a sharer has of which clients may be at several members, and how much of it is at one.

    That is a budget in the budget, or clients that one rule adds up.
    """

    weight: float
    """Of all of it."""
    inner_weight: float
    """Of its clients at the member, added up."""
    guaranteed: float
    """To all of it; of a budget each client has its own."""


@dataclass(frozen=True, slots=True)
class BudgetClaim:
    """What all clients of a budget at one member may have of it."""

    weight: float
    """Of its clients, added up, without those in `inner`."""
    guaranteed: float
    """As `weight`, but with those of budgets in it."""
    demand: float
    """Bytes per second; infinite while somebody waits."""
    inner: Mapping[str, InnerClaim] = field(default_factory=dict)

    def among(self, inner_weights: Mapping[str, float]) -> Claim:
        """Return the claim beside those of other members; `inner_weights` are those of all.

        What is in `inner` has its weight and its guarantee once, wherever its clients are.
        """
        weight, guaranteed = self.weight, self.guaranteed
        for name, each in self.inner.items():
            of_all = max(inner_weights.get(name, 0.0), each.inner_weight)
            part = each.inner_weight / of_all if of_all else 1.0
            weight += each.weight * part
            guaranteed += each.guaranteed * part
        return Claim(weight or 1.0, guaranteed, demand=self.demand)

    @property
    def lasting(self) -> float:
        """What is guaranteed here and at no other member."""
        return min(self.guaranteed, self.demand)

    def row(self) -> list[Any]:
        """Return it as JSON has it; `of` reads that."""
        demand = None if math.isinf(self.demand) else self.demand
        inner = {name: list(each) for name, each in self.inner.items()}
        return [self.weight, self.guaranteed, demand, inner]

    @classmethod
    def of(cls, row: Any) -> Self:
        """Read a `row`. Raises ValueError, TypeError or AttributeError for anything else."""
        weight, guaranteed, demand, inner = row
        demand = math.inf if demand is None else float(demand)
        figures = {str(name): InnerClaim(*map(float, each)) for name, each in inner.items()}
        least = (weight, guaranteed, demand, *(of for each in figures.values() for of in each))
        if not all(each >= 0 for each in least):
            raise ValueError(f"{row!r:.200} is no claim")
        return cls(float(weight), float(guaranteed), demand, figures)


def claim_of(of: Meter, moved_per_s: float, now_ms: float) -> BudgetClaim:
    """Return what clients want here of a sensor, who moved so much per second lately."""
    if not isinstance(of.rule, Budget):
        return _claim(of, float(of.gate.turns.clients), 0.0, {}, moved_per_s, now_ms)
    weight, guaranteed, inner = 0.0, 0.0, dict[str, InnerClaim]()
    for sharer in _active(of, now_ms):
        share = sharer.rule.share
        assert share is not None
        if isinstance(sharer.rule, Budget):
            inner[sharer.entity] = InnerClaim(share.weight, _inner_weight(sharer, now_ms), 0.0)
            guaranteed += math.fsum(_guarantees(sharer, now_ms))
        elif sharer.is_divided:
            inner[sharer.entity] = InnerClaim(share.weight, 1.0, share.guaranteed)
        else:
            weight += share.weight
            guaranteed += share.guaranteed
    return _claim(of, weight, guaranteed, inner, moved_per_s, now_ms)


def _claim(
    of: Meter,
    weight: float,
    guaranteed: float,
    inner: Mapping[str, InnerClaim],
    moved_per_s: float,
    now_ms: float,
) -> BudgetClaim:
    bound = of.rule.ceilings[of.kind]
    demand = DEMAND_GROWTH * moved_per_s + DEMAND_HEADROOM * bound
    if of.gate.waiting or of.hold_until_ms(now_ms) is not None:
        demand = math.inf
    return BudgetClaim(weight, min(guaranteed, bound), demand, inner)


def is_idle(of: Meter, now_ms: float) -> bool:
    """Return whether nobody has wanted anything of a rule's sensor for a while."""
    is_moving = now_ms - of.last_record_ms < IDLE_MS
    return not (isinstance(of.rule, Budget) or is_moving or of.gate.waiting)


def _active(budget: Meter, now_ms: float) -> Iterator[Meter]:
    """Yield the sensors of clients, and of budgets in it, that have a share of a budget now."""
    return (each for each in budget.sharers.values() if each.is_active(now_ms))


def _inner_weight(budget: Meter, now_ms: float) -> float:
    shares = (each.rule.share for each in _active(budget, now_ms))
    return math.fsum(each.weight for each in shares if each is not None)


def _guarantees(budget: Meter, now_ms: float) -> Iterator[float]:
    """Yield the guarantees of all clients in a budget that are active, and here alone."""
    for sharer in _active(budget, now_ms):
        if isinstance(sharer.rule, Budget):
            yield from _guarantees(sharer, now_ms)
        elif sharer.rule.share is not None and not sharer.is_divided:
            yield sharer.rule.share.guaranteed


def rate_since(moved: float, before: float, passed_ms: float) -> float:
    """Return bytes per second."""
    return (moved - before) / passed_ms * MS_PER_SECOND if passed_ms > 0 else 0.0
