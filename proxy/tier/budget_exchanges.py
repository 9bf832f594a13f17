"""Lease parts of each budget to the members that serve its clients, and use what is leased here."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from structlog import get_logger

from metrics.clock import clock_ms
from proxy.quota.budget_claims import BudgetClaim, claim_of, rate_since
from proxy.quota.budget_leases import (
    ASK_EVERY_MS,
    RATE_LEASE_MS,
    BudgetOwner,
    Demand,
    LeaseUser,
    RateLease,
)
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import Meter, sensor_name
from proxy.quota.rules import Budget, Rule
from proxy.tasks import end_tasks
from proxy.tier.peers import PeerError, Peers
from proxy.tier.slot_map import slot_of

LOOK_EVERY_S = 0.1
"""Between two looks for leases that are over, and budgets that are new here."""

FAILING_AFTER_MS = 5_000.0
"""Of demands without an answer: then it is logged."""

Rows = Sequence[Sequence[Any]]

_log = get_logger(__name__)


def slot_of_budget(name: str) -> int:
    """Return the slot whose owner leases a budget."""
    return slot_of(f"budget:{name}")


@dataclass(slots=True)
class _Use:
    """What this member uses of a budget."""

    user: LeaseUser
    moved: float = 0.0
    """What was charged to its sensor until `asked_ms`."""
    asked_ms: float = -math.inf
    answered_ms: float = field(default_factory=clock_ms)
    is_urgent: bool = True
    """Whether to ask at once."""


@dataclass(slots=True)
class _Owned:
    """A budget that this member leases."""

    owner: BudgetOwner
    claims: dict[str, BudgetClaim] = field(default_factory=dict)
    """The latest of each member."""

    def lease(self, demand: Demand, claim: BudgetClaim, now_ms: float) -> RateLease | None:
        """Answer a demand, as BudgetOwner does."""
        self.claims[demand.member] = claim
        inner_weights: defaultdict[str, float] = defaultdict(float)
        for each in self.claims.values():
            for name, inner in each.inner.items():
                inner_weights[name] += inner.inner_weight
        return self.owner.answer(demand._replace(claim=claim.among(inner_weights)), now_ms)


class BudgetExchanges:
    """Those of this member: `owner_of` says which member owns a slot, None while nobody does."""

    def __init__(
        self, name: str, quotas: QuotaManager, peers: Peers, owner_of: Callable[[int], str | None]
    ) -> None:
        self._name, self._quotas, self._peers, self._owner_of = name, quotas, peers, owner_of
        self._process = f"{name}#{uuid4().hex}"
        """Names this process: one that is started anew knows of no lease."""
        self._uses: dict[str, _Use] = {}
        """By the names of budgets' sensors, as all here."""
        self._owned: dict[str, _Owned] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        """By the owners that are asked: one at a time each."""
        self._looked_ms = clock_ms()
        self._known: dict[str, Budget] = {}
        self._generation = -1
        """The update of the rules that `_known` is of."""
        self._wanted = asyncio.Event()
        quotas.leases_budgets = True
        quotas.on_budget = self._wanted.set

    async def run(self) -> None:
        """Ask for leases, and use them, until cancelled."""
        try:
            while True:
                self._wanted.clear()
                self._look(clock_ms())
                try:
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._wanted.wait()
                except TimeoutError:
                    continue
        finally:
            await end_tasks(self._asking.values())

    def lease(self, rows: Rows) -> list[list[Any]]:
        """Answer the demands of a member for budgets that are owned here, as rows.

        Raises ValueError or TypeError for rows that are no demands.
        """
        leases: list[list[Any]] = []
        now_ms = clock_ms()
        self._forget_owned(now_ms)
        for name, member, number, uses, claim_row in rows:
            claim = BudgetClaim.of(claim_row)
            demand = Demand(*(str(member), int(number), _lease_of(uses)), claim.among({}))
            owned = self._owned_of(str(name), now_ms)
            lease = None if owned is None else owned.lease(demand, claim, now_ms)
            if lease is not None:
                leases.append([name, *lease])
        return leases

    def _look(self, now_ms: float) -> None:
        """Use what is leased at this time; ask for what is due."""
        self._forget_owned(now_ms)
        meters = self._quotas.budgets
        for name in self._uses.keys() - meters.keys():
            del self._uses[name]
        due: defaultdict[str, list[Meter]] = defaultdict(list)
        for name, meter in meters.items():
            use = self._uses.setdefault(name, _Use(LeaseUser(self._process)))
            meter.lease_rate(use.user.rate(now_ms), now_ms)
            budget = self._budgets.get(name)
            owner = budget and self._owner_of(slot_of_budget(budget.name))
            if owner and (use.is_urgent or now_ms - use.asked_ms >= ASK_EVERY_MS):
                due[owner].append(meter)
        for owner, asked in due.items():
            if owner not in self._asking:
                rows = [self._demand(meter, now_ms) for meter in asked]
                task = self._asking[owner] = asyncio.create_task(self._ask(owner, rows))
                task.add_done_callback(partial(self._asked, owner))

    def _demand(self, meter: Meter, now_ms: float) -> list[Any]:
        use = self._uses[meter.name]
        lately = rate_since(meter.moved, use.moved, now_ms - use.asked_ms)
        claim = claim_of(meter, lately, now_ms)
        demand = use.user.ask(claim.among({}), now_ms)
        use.moved, use.asked_ms, use.is_urgent = meter.moved, now_ms, False
        return [meter.name, demand.member, demand.number, list(demand.uses), claim.row()]

    async def _ask(self, owner: str, rows: Rows) -> None:
        try:
            answer = self.lease(rows) if owner == self._name else await self._leases(owner, rows)
        except PeerError as error:
            self._failed(owner, rows, str(error))
            return
        now_ms = clock_ms()
        for name, number, rate, guaranteed in answer:
            use, meter = self._uses.get(name), self._quotas.budgets.get(name)
            if use is not None and meter is not None:
                use.answered_ms = now_ms
                use.is_urgent = use.user.take(RateLease(number, rate, guaranteed), now_ms)
                meter.lease_rate(use.user.rate(now_ms), now_ms)
                if use.is_urgent:
                    self._wanted.set()

    async def _leases(self, owner: str, rows: Rows) -> Rows:
        answer = await self._peers.demand(owner, rows)
        try:
            return [(str(name), *_lease_of(lease)) for name, *lease in answer]
        except (TypeError, ValueError) as error:
            raise PeerError(f"{owner}: its leases are not understood: {error}") from None

    def _failed(self, owner: str, rows: Rows, problem: str) -> None:
        now_ms = clock_ms()
        uses = [use for name, *_ in rows if (use := self._uses.get(name)) is not None]
        if any(now_ms - use.answered_ms >= FAILING_AFTER_MS for use in uses):
            _log.warning("budgets are not leased to this member", owner=owner, error=problem)
            for use in uses:
                use.answered_ms = now_ms

    def _asked(self, owner: str, task: asyncio.Task[None]) -> None:
        del self._asking[owner]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("unexpected error about budgets", owner=owner, exc_info=error)

    def _forget_owned(self, now_ms: float) -> None:
        """Forget what was leased, after this process stood still, or where others lease now."""
        stood_still = now_ms - self._looked_ms >= RATE_LEASE_MS
        self._looked_ms = now_ms
        for name in tuple(self._owned):
            budget = self._budgets.get(name)
            is_owned = budget and self._owner_of(slot_of_budget(budget.name)) == self._name
            if stood_still or not is_owned:
                del self._owned[name]

    def _owned_of(self, name: str, now_ms: float) -> _Owned | None:
        """Return a budget that this member leases; None where another one does, or nobody."""
        budget = self._budgets.get(name)
        if budget is None or self._owner_of(slot_of_budget(budget.name)) != self._name:
            return None
        kind = next(
            kind for kind in budget.bounds if sensor_name(kind, budget.shared_entity) == name
        )
        owned = self._owned.get(name)
        if owned is None:
            guaranteed = _guaranteed_in(budget, self._quotas.table.rules)
            owned = _Owned(BudgetOwner(budget.bounds[kind], guaranteed, now_ms))
            self._owned[name] = owned
        owned.owner.rate = budget.bounds[kind]
        return owned

    @property
    def _budgets(self) -> dict[str, Budget]:
        """The budgets of the rules in force by the names of their sensors."""
        if self._generation != self._quotas.generation:
            self._generation = self._quotas.generation
            self._known = {
                sensor_name(kind, budget.shared_entity): budget
                for rule in self._quotas.table.rules
                for budget in budgets_around(rule)
                for kind in budget.bounds
            }
        return self._known


def budgets_around(rule: Rule) -> Iterator[Budget]:
    """Yield the budgets that the clients of a rule are in, the innermost first."""
    while rule.share is not None:
        rule = rule.share.budget
        yield rule


def _guaranteed_in(budget: Budget, rules: Iterable[Rule]) -> float:
    """Return what the clients of a budget are guaranteed in all."""
    shares = (rule.share for rule in rules if budget in budgets_around(rule))
    return math.fsum(share.guaranteed for share in shares if share is not None)


def _lease_of(row: Any) -> RateLease:
    """Read a lease. Raises ValueError or TypeError for anything else."""
    number, rate, guaranteed = row
    lease = RateLease(int(number), float(rate), float(guaranteed))
    if not 0 <= lease.guaranteed <= lease.rate < math.inf:
        raise ValueError(f"{row!r:.200} is no lease")
    return lease
