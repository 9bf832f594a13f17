"""Lease parts of a budget's rate to the members that serve its clients, never more than the whole.

Each member tells the budget's owner what its clients want, and gets a lease: a rate for a while, of
which the guaranteed part lasts longer. Leases are divided by water filling. The owner raises one
only by what it has back for sure: a lower lease that its member has confirmed, or one that is over.
So at no moment do the rates that may still be in use add up to more than the budget, whatever is
lost, late, doubled or frozen (leases: Gray and Cheriton, 1989; division: BwE, SIGCOMM 2015).

Who the owner is members may judge differently for a while. So they vote for one, and a vote lasts
as long as a lease: only who has those of a majority leases anything, for no longer than these last,
and a member asks another owner only when its vote for the one before is over. Any two majorities
have a member in common; so when one owner begins, all leases of others are over. There is a vote
for each slot; who has a majority there leases all that the slot has, whoever wants any of it.

No clocks are compared: a member counts from when it asked, its owner from when it answered, which
is later.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Self

from metrics.clock import MS_PER_SECOND

from .meter import Meter
from .rules import Budget, Share
from .shares import Claim, shares_by_claim

RATE_LEASE_MS = 2_000.0
"""How long a member may use a lease, from when it asked."""

GUARANTEE_MS = 2_000.0
"""How much longer it may use the guaranteed part of it."""

SKEW_MS = 500.0
"""By so much clocks may drift apart within a lease. An owner that stood still for as long knows of
no votes."""

ASK_EVERY_MS = 500.0
"""Between two demands of a member."""

ASK_LIMIT_MS = 1_000.0
"""A demand that is not answered for so long is given up, and comes to no owner any more."""

VOTE_MS = RATE_LEASE_MS + SKEW_MS
"""How long a vote may count after it is answered, or given up, by the member's clock."""

HYSTERESIS = 0.1
"""A lease stays as it is while its member's share is less by no more of it."""

IDLE_MS = 10_000.0
"""After so long without traffic no part is asked for any more."""

DEMAND_GROWTH = 1.5
"""Of what clients moved lately, who did not wait for more: so much they may want next."""

DEMAND_HEADROOM = 0.02
"""Of the budget: what a member may have for clients that begin, before it asks anew."""


class RateLease(NamedTuple):
    """What a member may use; rates in any unit, that of the budget."""

    number: int
    """Of the demand that it answers; of two leases the one with the higher number counts."""
    rate: float
    guaranteed: float
    """The part of `rate` that lasts longer, by GUARANTEE_MS."""
    lasts_ms: float = RATE_LEASE_MS
    """From when it was asked for."""


NO_LEASE = RateLease(0, 0.0, 0.0)


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

    weight: float = 1.0
    """Of its clients, added up, without those in `inner` and `own`."""
    guaranteed: float = 0.0
    """To the clients of budgets in it."""
    demand: float = math.inf
    """Bytes per second; infinite while somebody waits."""
    inner: Mapping[str, InnerClaim] = field(default_factory=dict)
    own: Mapping[tuple[float, float], int] = field(default_factory=dict)
    """How many clients have a weight and a guarantee, here and at no other member."""

    def among(self, inner_weights: Mapping[str, float]) -> Counter[Claim]:
        """Return the claims beside those of other members; `inner_weights` are those of all.

        What is in `inner` has its weight and its guarantee once, wherever its clients are. Who has
        a guarantee has a claim alone: it leaves nothing of it to the others at its member.
        """
        weight, claims = self.weight, Counter[Claim]()
        for (own_weight, guaranteed), number in self.own.items():
            claims[Claim(own_weight, guaranteed, most=self.demand)] += number
        for name, each in self.inner.items():
            of_all = max(inner_weights.get(name, 0.0), each.inner_weight)
            part = each.inner_weight / of_all if of_all else 1.0
            if each.guaranteed and part:
                claim = Claim(each.weight * part, each.guaranteed * part, most=self.demand)
                claims[claim] += 1
            else:
                weight += each.weight * part
        if weight or not claims:
            claims[Claim(weight or 1.0, self.guaranteed, most=self.demand)] += 1
        return claims

    @property
    def lasting(self) -> float:
        """What is guaranteed here and at no other member."""
        own = math.fsum(guaranteed * number for (_, guaranteed), number in self.own.items())
        return min(self.guaranteed + own, self.demand)

    def row(self) -> list[Any]:
        """Return it as JSON has it; `of` reads that."""
        demand = None if math.isinf(self.demand) else self.demand
        inner = {name: list(each) for name, each in self.inner.items()}
        own = [[*each, number] for each, number in self.own.items()]
        return [self.weight, self.guaranteed, demand, inner, own]

    @classmethod
    def of(cls, row: Any) -> Self:
        """Read a `row`. Raises ValueError, TypeError or AttributeError for anything else."""
        weight, guaranteed, demand, inner, *own = row  # a member of an earlier version has no `own`
        demand = math.inf if demand is None else float(demand)
        figures = {str(name): InnerClaim(*map(float, each)) for name, each in inner.items()}
        numbers = {(float(of_one), float(least)): number for of_one, least, number in chain(*own)}
        least = (weight, guaranteed, demand, *chain(*figures.values(), *numbers, numbers.values()))
        weights = (each[0] for each in (*figures.values(), *numbers))
        if not (all(each >= 0 for each in least) and all(weights)):
            raise ValueError(f"{row!r:.200} is no claim")
        return cls(float(weight), float(guaranteed), demand, figures, numbers)


NO_CLAIM = BudgetClaim(demand=0.0)


class Demand(NamedTuple):
    """What a member says to the owner. Its numbers rise, and it confirms what it uses."""

    member: str
    """Names a process: one that is started anew is another member."""
    number: int
    uses: RateLease
    """The lease in use now; the member will never again use one with a lower number."""
    claim: BudgetClaim
    """Of all its clients together."""


@dataclass(slots=True)
class OwnerVote:
    """A member's side of one slot: whom it takes for the owner."""

    _voted_ms: float
    """When the latest vote was given at the latest. At first when this is made: until then who is
    new may have asked any owner."""
    owner: str = ""
    """That was asked last."""

    def give(self, owner: str, now_ms: float) -> bool:
        """Return whether this owner may be asked now, once, at once: no other one has the vote."""
        if owner != self.owner and now_ms < self._voted_ms + VOTE_MS:
            return False
        self.owner, self._voted_ms = owner, now_ms + ASK_LIMIT_MS
        return True

    def ended(self, now_ms: float) -> None:
        """Record that the owner has answered, or that it is given up."""
        self._voted_ms = now_ms


@dataclass(slots=True)
class ActiveLease:
    """A lease with what may be used of it at a time, by its member's clock, or by the owner's."""

    lease: RateLease = NO_LEASE
    until_ms: float = -math.inf

    def take(self, lease: RateLease, asked_ms: float, now_ms: float) -> bool:
        """Use a lease that was asked for at `asked_ms`, unless a later one was there before.

        Return whether to ask at once: it is a lower one, and others wait until that is confirmed.
        """
        if lease.number <= self.lease.number:
            return False
        before = self.rate(now_ms)
        self.lease, self.until_ms = lease, asked_ms + lease.lasts_ms
        return self.rate(now_ms) < before

    def in_use(self, now_ms: float) -> RateLease:
        """Return what is in use, for a demand whose number is above all before."""
        return RateLease(self.lease.number, self.rate(now_ms), self.guaranteed(now_ms))

    def rate(self, now_ms: float) -> float:
        """Return the rate that may be used."""
        return self.lease.rate if now_ms < self.until_ms else self.guaranteed(now_ms)

    def guaranteed(self, now_ms: float) -> float:
        """Return the part of it that lasts longer."""
        return 0.0 if self.is_over(now_ms) else self.lease.guaranteed

    def is_over(self, now_ms: float) -> bool:
        """Return whether nothing of it may be used any more."""
        return now_ms >= self.until_ms + GUARANTEE_MS


class VoterSet:
    """The members whose votes count, as a process knows them; made anew when it stood still."""

    def __init__(self) -> None:
        self.members: frozenset[str] = frozenset()
        self._changed_ms = math.inf
        """When they changed: a majority of others may know of other ones for as long as a vote
        lasts."""

    def use(self, members: frozenset[str], now_ms: float) -> None:
        """Have these members vote."""
        if members != self.members:
            self.members, self._changed_ms = members, now_ms

    @property
    def sure_ms(self) -> float:
        """From when on no majority of others has another owner."""
        return self._changed_ms + VOTE_MS


class ReceivedVotes:
    """The owner's side of one slot: the votes for this process, made anew with the voters."""

    def __init__(self, voters: VoterSet) -> None:
        self.voters = voters
        self._heard_ms: dict[str, float] = {}
        """When each member voted last."""
        self._begun_ms: float | None = None
        """Since when there is a majority."""

    def take(self, voter: str, now_ms: float) -> None:
        """Count a member's vote from now on."""
        if self.lasts_ms(now_ms) <= 0:  # it had ended, if this vote makes one again
            self._begun_ms = None
        self._heard_ms[voter] = now_ms
        if self._begun_ms is None and self.lasts_ms(now_ms) > 0:
            self._begun_ms = now_ms

    def lasts_ms(self, now_ms: float) -> float:
        """Return how long a lease may last that is given now; 0 or less without a majority."""
        heard = [self._heard_ms.get(each, -math.inf) for each in self.voters.members]
        heard.sort(reverse=True)
        majority_ms = heard[len(heard) // 2] if heard else -math.inf
        return majority_ms + RATE_LEASE_MS - now_ms

    @property
    def free_ms(self) -> float:
        """From when on what nobody says to use is not in use, but for guaranteed parts."""
        assert self._begun_ms is not None
        return max(self._begun_ms, self.voters.sure_ms)


@dataclass(slots=True)
class _Holder:
    """A member as the owner knows it."""

    number: int = 0
    """Of its latest demand."""
    claim: BudgetClaim = NO_CLAIM
    heard_ms: float = -math.inf
    leases: list[ActiveLease] = field(default_factory=list)

    def in_use(self, now_ms: float) -> float:
        """Return the largest rate that the member may use now."""
        self.leases = [each for each in self.leases if not each.is_over(now_ms)]
        return max((each.rate(now_ms) for each in self.leases), default=0.0)

    def add(self, lease: RateLease, now_ms: float) -> None:
        self.leases.append(ActiveLease(lease, now_ms + lease.lasts_ms + SKEW_MS))


class BudgetOwner:
    """The owner's side, of one budget.

    `guaranteed` is what guarantees of all the budget's clients add up to. Until `free_ms` what
    nobody says to use may be in use all the same: by a rule that was changed, of another owner.
    """

    def __init__(self, rate: float, guaranteed: float, free_ms: float = -math.inf) -> None:
        self.rate, self.guaranteed, self.free_ms = rate, guaranteed, free_ms
        self._holders: dict[str, _Holder] = {}

    def answer(self, demand: Demand, votes: ReceivedVotes, now_ms: float) -> RateLease | None:
        """Return the lease for a member, whose own vote is counted.

        None for a demand that is no later than one before, and without a majority.
        """
        holder = self._holders.setdefault(demand.member, _Holder())
        if demand.number <= holder.number:
            return None
        holder.number, holder.claim, holder.heard_ms = demand.number, demand.claim, now_ms
        holder.leases = [each for each in holder.leases if each.lease.number >= demand.uses.number]
        if demand.uses.rate and all(
            each.lease.number != demand.uses.number for each in holder.leases
        ):  # another owner's
            holder.add(demand.uses, now_ms)
        lasts_ms = votes.lasts_ms(now_ms)
        if lasts_ms <= 0:
            return None
        free_ms = max(votes.free_ms, self.free_ms)
        rate = min(self._share(demand, now_ms), self._free(demand, free_ms, now_ms))
        lease = RateLease(demand.number, rate, min(demand.claim.lasting, rate), lasts_ms)
        holder.add(lease, now_ms)
        return lease

    def is_idle(self, now_ms: float) -> bool:
        """Return whether it knows of nothing that may be in use, or wanted."""
        self._forget_silent(now_ms)
        return not self._holders

    def _forget_silent(self, now_ms: float, but: str = "") -> None:
        """Count no more what silent members want, and forget those of them that use nothing."""
        for name, each in tuple(self._holders.items()):
            if now_ms - each.heard_ms >= RATE_LEASE_MS:
                each.claim = NO_CLAIM  # what it may use counts all the same
                if not each.in_use(now_ms) and name != but:
                    del self._holders[name]

    def _share(self, demand: Demand, now_ms: float) -> float:
        """Return a member's share of the budget, or what it has if that is about the same."""
        self._forget_silent(now_ms, demand.member)
        claims = [each.claim for each in self._holders.values()]
        inner_weights: defaultdict[str, float] = defaultdict(float)
        for name, inner in chain.from_iterable(each.inner.items() for each in claims):
            inner_weights[name] += inner.inner_weight
        several = [each.among(inner_weights) for each in claims]
        shares = shares_by_claim(self.rate, sum(several, Counter[Claim]()))
        own, has = demand.claim.among(inner_weights), demand.uses.rate
        share = math.fsum(shares[claim] * number for claim, number in own.items())
        share = min(share, demand.claim.demand)
        return has if 0 <= has - share <= HYSTERESIS * has else share

    def _free(self, demand: Demand, free_ms: float, now_ms: float) -> float:
        """Return what a member may have at the most: the rest is, or may be, in use by others."""
        others = (each for name, each in self._holders.items() if name != demand.member)
        free = self.rate - math.fsum(each.in_use(now_ms) for each in others)
        if now_ms < free_ms:
            free = min(free, demand.uses.rate)
        elif now_ms < free_ms + GUARANTEE_MS + SKEW_MS:
            known = math.fsum(each.claim.lasting for each in self._holders.values())
            free -= max(min(self.guaranteed, self.rate) - known, 0.0)
        return max(free, 0.0)


def claim_of(of: Meter, before: float, passed_ms: float, now_ms: float) -> BudgetClaim:
    """Return what clients want here of a sensor; `before` is what they had moved so long ago."""
    moved_per_s = (of.moved - before) / passed_ms * MS_PER_SECOND if passed_ms > 0 else 0.0
    weight, guaranteed, inner = float(of.gate.turns.clients), 0.0, dict[str, InnerClaim]()
    own = Counter[tuple[float, float]]()
    if isinstance(of.rule, Budget):
        weight = 0.0
        for sharer, share in _active(of, now_ms):
            if isinstance(sharer.rule, Budget):
                inner_weight = math.fsum(each.weight for _, each in _active(sharer, now_ms))
                inner[sharer.entity] = InnerClaim(share.weight, inner_weight, 0.0)
                guaranteed += math.fsum(_guarantees(sharer, now_ms))
            elif sharer.is_divided:
                inner[sharer.entity] = InnerClaim(share.weight, 1.0, share.guaranteed)
            elif share.guaranteed:
                own[share.weight, share.guaranteed] += 1
            else:
                weight += share.weight
    bound = of.rule.ceilings[of.kind]
    demand = DEMAND_GROWTH * moved_per_s + DEMAND_HEADROOM * bound
    if of.gate.waiting or of.held_until_ms > now_ms:
        demand = math.inf
    return BudgetClaim(weight, min(guaranteed, bound), demand, inner, own)


def is_sensor_idle(of: Meter, now_ms: float) -> bool:
    """Return whether nobody has wanted anything of a rule's sensor for a while."""
    is_moving = now_ms - of.last_record_ms < IDLE_MS
    return not (isinstance(of.rule, Budget) or is_moving or of.gate.waiting)


def _active(budget: Meter, now_ms: float) -> Iterator[tuple[Meter, Share]]:
    """Yield the sensors of clients, and of budgets in it, that have a share of a budget now."""
    for each in budget.sharers.values():
        if each.rule.share is not None and each.is_active(now_ms):
            yield each, each.rule.share


def _guarantees(budget: Meter, now_ms: float) -> Iterator[float]:
    """Yield the guarantees of all clients in a budget that are active, and here alone."""
    for sharer, share in _active(budget, now_ms):
        if isinstance(sharer.rule, Budget):
            yield from _guarantees(sharer, now_ms)
        elif not sharer.is_divided:
            yield share.guaranteed
