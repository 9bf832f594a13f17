"""Lease parts of each budget to the members that serve its clients, and use what is leased here."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from structlog import get_logger

from metrics.clock import clock_ms
from proxy.admin.peers.peer_client import PeerError
from proxy.quota.budget_claims import BudgetClaim, claim_of, rate_since
from proxy.quota.budget_leases import (
    ASK_EVERY_MS,
    RATE_LEASE_MS,
    SKEW_MS,
    BudgetOwner,
    Demand,
    LeaseUser,
    RateLease,
)
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import sensor_name
from proxy.quota.rules import Budget
from proxy.tasks import end_tasks
from proxy.tier.peers import Peers
from proxy.tier.slot_map import slot_of

LEASE_LOOK_S = 0.1
"""Between two looks for leases that are over, and budgets that are new here."""

FAILING_AFTER_MS = 5_000.0
"""Of demands without an answer: then it is logged."""

PROCESS_MARK = "#"
"""Between a member's name and what tells apart who asks for it: a new one knows of no lease."""

NO_CLAIM = BudgetClaim(0.0, 0.0, 0.0)
"""Of a member that has no clients of a budget; it votes all the same."""

Rows = Sequence[Sequence[Any]]

_log = get_logger(__name__)


def slot_of_budget(name: str) -> int:
    """Return the slot whose owner leases a budget."""
    return slot_of(f"budget:{name}")


@dataclass(slots=True)
class _Use:
    """What this member uses of a budget."""

    user: LeaseUser
    answered_ms: float
    moved: float = 0.0
    """What was charged to its sensor until `asked_ms`."""
    asked_ms: float = -math.inf
    is_urgent: bool = True
    """Whether to ask at once."""


@dataclass(slots=True)
class _Owned:
    """A budget that this member may lease, if others take it for the owner."""

    owner: BudgetOwner
    claims: dict[str, BudgetClaim] = field(default_factory=dict)
    """The latest of each member."""

    def use(self, members: frozenset[str], now_ms: float) -> None:
        """Have these members vote; what others wanted counts no longer."""
        self.owner.use(members, now_ms)
        for gone in self.claims.keys() - members:
            del self.claims[gone]

    def lease(
        self, member: str, number: int, uses: RateLease, claim: BudgetClaim, now_ms: float
    ) -> RateLease | None:
        """Answer a demand, as BudgetOwner does."""
        voter, _, _ = member.rpartition(PROCESS_MARK)
        self.claims[voter] = claim
        inner_weights: defaultdict[str, float] = defaultdict(float)
        for each in self.claims.values():
            for name, inner in each.inner.items():
                inner_weights[name] += inner.inner_weight
        demand = Demand(member, number, uses, claim.among(inner_weights))
        return self.owner.answer(demand, voter, now_ms)


class BudgetExchanges:
    """Those of this member: `owners` gives the member that owns each slot, and all members."""

    def __init__(
        self,
        name: str,
        quotas: QuotaManager,
        peers: Peers,
        owners: Callable[[], tuple[Sequence[str | None], frozenset[str]]],
    ) -> None:
        self._name, self._quotas, self._peers, self._owners = name, quotas, peers, owners
        self._budgets: dict[str, Budget] = {}
        """Of the rules in force by the names of their sensors, as all here."""
        self._uses: dict[str, _Use] = {}
        self._owned: dict[str, _Owned] = {}
        self._generation = -1
        """The update of the rules that these are of."""
        self._asking: dict[str, asyncio.Task[None]] = {}
        """By the owners that are asked: one at a time each."""
        self._looked_ms = clock_ms()
        self._wanted = asyncio.Event()
        quotas.leases_budgets = True
        quotas.on_budget = self._want_all

    async def run(self) -> None:
        """Ask for leases, and use them, until cancelled."""
        try:
            while True:
                self._wanted.clear()
                self._look(clock_ms())
                with suppress(TimeoutError):
                    async with asyncio.timeout(LEASE_LOOK_S):
                        await self._wanted.wait()
        finally:
            await end_tasks(self._asking.values())

    def lease(self, rows: Rows) -> list[list[Any]]:
        """Answer the demands of a member, which takes this one for the owner, as rows.

        Raises ValueError, TypeError or AttributeError for rows that are no demands.
        """
        leases: list[list[Any]] = []
        now_ms = clock_ms()
        if self._stood_still(now_ms):
            return leases  # they may be old
        for name, member, number, uses, claim_row in rows:
            demand = str(member), int(number), _lease_of(uses), BudgetClaim.of(claim_row)
            owned = self._owned.get(name)
            lease = None if owned is None else owned.lease(*demand, now_ms)
            if lease is not None:
                leases.append([name, *lease])
        return leases

    def _look(self, now_ms: float) -> None:
        """Use what is leased at this time; ask for what is due."""
        self._stood_still(now_ms)
        if self._generation != self._quotas.generation:
            self._follow_rules()
        if not self._budgets:
            return
        owners, members = self._owners()
        due: defaultdict[str, list[str]] = defaultdict(list)
        for name, budget in self._budgets.items():
            use, meter = self._uses[name], self._quotas.budgets.get(name)
            if meter is not None:
                meter.lease_rate(use.user.rate(now_ms), now_ms)
            self._owned[name].use(members, now_ms)
            owner = owners[slot_of_budget(budget.name)]
            if owner and (use.is_urgent or now_ms - use.asked_ms >= ASK_EVERY_MS):
                due[owner].append(name)
        for owner, names in due.items():
            if owner not in self._asking:
                demands = (self._demand(name, owner, now_ms) for name in names)
                rows = [row for row in demands if row is not None]
                task = self._asking[owner] = asyncio.create_task(self._ask(owner, rows))
                task.add_done_callback(partial(self._asked, owner))

    def _follow_rules(self) -> None:
        """Keep what is known of budgets for those of the rules in force."""
        self._generation = self._quotas.generation
        rates = {
            sensor_name(kind, budget.shared_entity): (budget, rate, guaranteed)
            for budget, guaranteed in self._quotas.table.budgets
            for kind, rate in budget.bounds.items()
        }
        self._budgets = {name: budget for name, (budget, _, _) in rates.items()}
        for known in (self._uses, self._owned):
            for name in known.keys() - self._budgets.keys():
                del known[name]
        for name, (_, rate, guaranteed) in rates.items():
            if name not in self._uses:
                now_ms = clock_ms()
                # Another one each time: who asked for the budget before may have voted until now.
                user = LeaseUser(f"{self._name}{PROCESS_MARK}{uuid4().hex}", now_ms)
                self._uses[name] = _Use(user, now_ms)
                self._owned[name] = _Owned(BudgetOwner(rate, guaranteed))
            owner = self._owned[name].owner
            owner.rate, owner.guaranteed = rate, guaranteed

    def _demand(self, name: str, owner: str, now_ms: float) -> list[Any] | None:
        use, meter = self._uses[name], self._quotas.budgets.get(name)
        claim = NO_CLAIM
        if meter is not None:
            lately = rate_since(meter.moved, use.moved, now_ms - use.asked_ms)
            claim = claim_of(meter, lately, now_ms)
        demand = use.user.ask(owner, claim.among({}), now_ms)
        if demand is None:
            return None
        use.moved, use.asked_ms, use.is_urgent = meter.moved if meter else 0.0, now_ms, False
        return [name, demand.member, demand.number, list(demand.uses), claim.row()]

    def _want_all(self) -> None:
        """Ask at once: there are clients of a budget that had none here."""
        for use in self._uses.values():
            use.is_urgent = True
        self._wanted.set()

    def _stood_still(self, now_ms: float) -> bool:
        """Return whether this process stood still, and so knows of no votes."""
        stood_still = now_ms - self._looked_ms >= SKEW_MS
        self._looked_ms = now_ms
        for owned in self._owned.values() if stood_still else ():
            owned.owner.forget_votes()
        return stood_still

    async def _ask(self, owner: str, rows: Rows) -> None:
        try:
            answer = self.lease(rows) if owner == self._name else await self._leases(owner, rows)
        except PeerError as error:
            self._failed(owner, rows, str(error))
            return
        finally:
            for name, *_ in rows:
                if (use := self._uses.get(name)) is not None:
                    use.user.ended(clock_ms())
        now_ms = clock_ms()
        for name, *lease in answer:
            use, meter = self._uses.get(name), self._quotas.budgets.get(name)
            if use is None:
                continue
            use.answered_ms = now_ms
            use.is_urgent = use.user.take(RateLease(*lease), now_ms)
            if meter is not None:
                meter.lease_rate(use.user.rate(now_ms), now_ms)
                if use.is_urgent:
                    self._wanted.set()

    async def _leases(self, owner: str, rows: Rows) -> Rows:
        answer = await self._peers.demand(owner, rows)
        try:
            return [(str(name), *_lease_of(lease)) for name, *lease in answer]
        except (TypeError, ValueError) as error:
            raise PeerError(owner, f"its leases are not understood: {error}") from None

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


def _lease_of(row: Any) -> RateLease:
    """Read a lease. Raises ValueError or TypeError for anything else."""
    number, *figures = row
    lease = RateLease(int(number), *map(float, figures))
    if not (0 <= lease.guaranteed <= lease.rate < math.inf and lease.lasts_ms <= RATE_LEASE_MS):
        raise ValueError(f"{row!r:.200} is no lease")
    return lease
