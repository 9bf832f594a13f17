"""Lease parts of a budget's rate to the members that serve its clients, never more than the whole.

Each member tells the budget's owner what its clients want, and gets a lease: a rate for a while, of
which the guaranteed part lasts longer. Leases are divided by water filling. The owner raises one
only by what it has back for sure: a lower lease that its member has confirmed, or one that is over.
So at no moment do the rates that may still be in use add up to more than the budget, whatever is
lost, late, doubled or frozen (leases: Gray and Cheriton, 1989; division: BwE, SIGCOMM 2015).

No clocks are compared: a member counts from when it asked, its owner from when it answered, which
is later.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from .shares import Claim, divide

RATE_LEASE_MS, GUARANTEE_MS = 2_000.0, 10_000.0
"""How long a member may use a lease, and the guaranteed part of it, from when it asked."""

SKEW_MS = 500.0
"""By so much clocks may drift apart within a lease."""

ASK_EVERY_MS = 500.0
"""Between two demands of a member."""

HYSTERESIS = 0.1
"""A lease stays as it is while its member's share differs by no more of it."""

KEPT_DEMANDS = 16
"""Of a member's demands without an answer, so many may still be answered."""


class RateLease(NamedTuple):
    """What a member may use; rates in any unit, that of the budget."""

    number: int
    """Of the demand that it answers; of two leases the one with the higher number counts."""
    rate: float
    guaranteed: float
    """The part of `rate` that lasts longer."""


NO_LEASE = RateLease(0, 0.0, 0.0)
_NOTHING = Claim(demand=0.0)


class Demand(NamedTuple):
    """What a member says to the owner. Its numbers rise, and it confirms what it uses."""

    member: str
    """Names a process: one that is started anew is another member."""
    number: int
    uses: RateLease
    """The lease in use now; the member will never again use one with a lower number."""
    claim: Claim
    """Of all its clients together."""


@dataclass(slots=True)
class LeaseUser:
    """A member's side: what it may use at a time by its own clock."""

    member: str
    lease: RateLease = NO_LEASE
    _since_ms: float = -math.inf
    """When the lease was asked for."""
    _asked_ms: dict[int, float] = field(default_factory=dict)
    _number: int = 0

    def ask(self, claim: Claim, now_ms: float) -> Demand:
        """Return what to say to the owner; send it once, at once."""
        self._number += 1
        self._asked_ms[self._number] = now_ms
        if len(self._asked_ms) > KEPT_DEMANDS:
            del self._asked_ms[next(iter(self._asked_ms))]
        rate, guaranteed = self.rate(now_ms), min(self.guaranteed(now_ms), self.lease.rate)
        return Demand(
            self.member, self._number, RateLease(self.lease.number, rate, guaranteed), claim
        )

    def take(self, lease: RateLease, now_ms: float) -> bool:
        """Use a lease from now on, unless a later one was there before or it was not asked for.

        Return whether to `ask` at once: it is a lower one, and others wait until that is confirmed.
        """
        asked_ms = self._asked_ms.get(lease.number)
        if asked_ms is None or lease.number <= self.lease.number:
            return False
        before = self.rate(now_ms)
        self.lease, self._since_ms = lease, asked_ms
        for number in [each for each in self._asked_ms if each <= lease.number]:
            del self._asked_ms[number]
        return self.rate(now_ms) < before

    def rate(self, now_ms: float) -> float:
        """Return the rate that may be used now."""
        is_over = now_ms >= self._since_ms + RATE_LEASE_MS
        return self.guaranteed(now_ms) if is_over else self.lease.rate

    def guaranteed(self, now_ms: float) -> float:
        """Return the part of it that lasts longer."""
        return self.lease.guaranteed if now_ms < self._since_ms + GUARANTEE_MS else 0.0


@dataclass(slots=True)
class _Outstanding:
    """A lease that may be in use."""

    lease: RateLease
    until_ms: float
    guaranteed_until_ms: float

    def rate(self, now_ms: float) -> float:
        if now_ms < self.until_ms:
            return self.lease.rate
        return self.lease.guaranteed if now_ms < self.guaranteed_until_ms else 0.0


@dataclass(slots=True)
class _Holder:
    """A member as the owner knows it."""

    number: int = 0
    claim: Claim = _NOTHING
    heard_ms: float = -math.inf
    leases: list[_Outstanding] = field(default_factory=list)

    def in_use(self, now_ms: float) -> float:
        """Return the largest rate that the member may use now."""
        self.leases = [each for each in self.leases if now_ms < each.guaranteed_until_ms]
        return max((each.rate(now_ms) for each in self.leases), default=0.0)

    def add(self, lease: RateLease, now_ms: float) -> None:
        until_ms, guaranteed_until_ms = now_ms + RATE_LEASE_MS, now_ms + GUARANTEE_MS
        self.leases.append(_Outstanding(lease, until_ms + SKEW_MS, guaranteed_until_ms + SKEW_MS))


class BudgetOwner:
    """The owner's side, of one budget. It begins with what an owner before it may have leased.

    `guaranteed` is what guarantees of all the budget's clients add up to. `is_first`: there was no
    owner before whose leases may be in use.
    """

    def __init__(
        self, rate: float, guaranteed: float, now_ms: float, *, is_first: bool = False
    ) -> None:
        self.rate = rate
        self._guaranteed = min(guaranteed, rate)
        begun_ms = -math.inf if is_first else now_ms
        self._free_ms = begun_ms + RATE_LEASE_MS + SKEW_MS
        """Until then earlier leases may be in use, of which only their members tell."""
        self._all_free_ms = begun_ms + GUARANTEE_MS + SKEW_MS
        """Until then their guaranteed parts may be."""
        self._holders: dict[str, _Holder] = {}

    def answer(self, demand: Demand, now_ms: float) -> RateLease | None:
        """Return the lease for a member; None for a demand that is no later than one before."""
        holder = self._holders.get(demand.member)
        if holder is None:
            holder = self._holders[demand.member] = _Holder()
            if now_ms < self._all_free_ms and demand.uses.rate:
                holder.add(demand.uses, now_ms)
        if demand.number <= holder.number:
            return None
        holder.number, holder.claim, holder.heard_ms = demand.number, demand.claim, now_ms
        holder.leases = [each for each in holder.leases if each.lease.number >= demand.uses.number]
        rate = min(self._share(demand, now_ms), self._free(demand, now_ms))
        lease = RateLease(demand.number, rate, min(demand.claim.floor, rate))
        holder.add(lease, now_ms)
        return lease

    def in_use(self, now_ms: float) -> float:
        """Return what all leases that may be in use add up to, as far as it is known."""
        return math.fsum(each.in_use(now_ms) for each in self._holders.values())

    def _share(self, demand: Demand, now_ms: float) -> float:
        """Return a member's share of the budget, or what it has if that is about the same."""
        for name, each in tuple(self._holders.items()):
            if now_ms - each.heard_ms >= RATE_LEASE_MS:
                each.claim = _NOTHING  # what it may still use counts all the same
                if not each.in_use(now_ms) and name != demand.member:
                    del self._holders[name]
        claims = {name: each.claim for name, each in self._holders.items()}
        shares = dict(zip(claims, divide(self.rate, list(claims.values())), strict=True))
        share, has = shares[demand.member], demand.uses.rate
        return has if abs(share - has) <= HYSTERESIS * has else share

    def _free(self, demand: Demand, now_ms: float) -> float:
        """Return what a member may have at the most: the rest is, or may be, in use by others."""
        others = (each for name, each in self._holders.items() if name != demand.member)
        free = self.rate - math.fsum(each.in_use(now_ms) for each in others)
        if now_ms < self._free_ms:
            free = min(free, demand.uses.rate)
        elif now_ms < self._all_free_ms:
            known = math.fsum(each.claim.floor for each in self._holders.values())
            free -= max(self._guaranteed - known, 0.0)
        return max(free, 0.0)
