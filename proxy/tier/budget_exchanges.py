"""Lease parts of what clients of several members share, and use what is leased here.

That is each budget, and what a rule adds up whose clients may have several keys. One exchange with
each owner of some, twice a second, has this member's votes and its demands.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple
from uuid import uuid4

from structlog import get_logger

from metrics.clock import clock_ms
from proxy.quota.budget_leases import (
    ASK_EVERY_MS,
    RATE_LEASE_MS,
    SKEW_MS,
    VOTE_MS,
    ActiveLease,
    BudgetClaim,
    BudgetOwner,
    Demand,
    OwnerVote,
    RateLease,
    ReceivedVotes,
    VoterSet,
    claim_of,
    is_sensor_idle,
)
from proxy.quota.entities import TRAFFIC_KINDS
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import Meter, sensor_name
from proxy.quota.rules import Budget, Rule
from proxy.state import Document
from proxy.tasks import wait_at_most
from proxy.tier.peer_client import BUDGETS_PATH, PeerError
from proxy.tier.peers import Peers, PeerTasks
from proxy.tier.quota_keys import QuotaKeys
from proxy.tier.slot_map import slot_of

LEASE_LOOK_S = 0.1
"""Between two looks for leases that are over, and what is new here."""

LEASES_AT_ONCE = 200
"""Of what is leased, between two turns of the event loop."""

MAX_DEMANDS = 200
"""In one message: what was asked for longest ago goes first."""

FAILING_AFTER_MS = 5_000.0
"""Of demands without an answer: then it is logged."""

PROCESS_MARK = "#"
"""Between a member's name and what tells apart its processes: a new one knows of no lease."""

Rows = Sequence[Sequence[Any]]

_log = get_logger(__name__)


def lease_owner_slot(entity: str) -> int:
    """Return the slot whose owner leases what a budget, or a rule, has for all its clients.

    It is not that of a client with the same values.
    """
    return slot_of(entity.replace("=", ":"))


class _Leased(NamedTuple):
    """What rules in force have for clients of several members; of one quota type."""

    slot: int
    rate: float
    """Of a rule: of each entity."""
    guaranteed: float
    since_ms: float
    """When the rule came, if in the place of others."""


@dataclass(slots=True)
class _Use:
    """What this member uses of an entity."""

    rule: str
    """Whose entity it is, as its own sensor is called."""
    lease: ActiveLease
    answered_ms: float
    moved: float = 0.0
    """What was charged to its sensor until `asked_ms`."""
    asked_ms: float = -math.inf
    is_urgent: bool = True
    """Whether to ask at once."""

    def is_due(self, meter: Meter, now_ms: float) -> bool:
        """Return whether to ask for it now."""
        if is_sensor_idle(meter, now_ms):
            return False
        return self.is_urgent or now_ms - self.asked_ms >= ASK_EVERY_MS


class BudgetLeasing:
    """Those of this member: `owners` gives the member that owns each slot, and all members.

    `keys` gives the keys in force: what is divided among members follows from them.
    """

    def __init__(
        self,
        name: str,
        quotas: QuotaManager,
        peers: Peers,
        owners: Callable[[], tuple[Sequence[str | None], frozenset[str]]],
        keys: Callable[[], QuotaKeys],
    ) -> None:
        self._name, self._quotas, self._peers, self._owners = name, quotas, peers, owners
        self._process = f"{name}{PROCESS_MARK}{uuid4().hex}"
        self._made_ms = self._looked_ms = clock_ms()
        self._numbers = count(1)
        """Of messages."""
        self._leased: dict[str, _Leased] = {}
        """By the names that sensors of all clients of a rule have."""
        self._uses: dict[str, _Use] = {}
        """By the names of sensors here, as all below."""
        self._owned: dict[str, BudgetOwner] = {}
        """What this member may lease, if others take it for the owner."""
        self._given: dict[int, OwnerVote] = {}
        """By slots, as those taken."""
        self._taken: dict[int, ReceivedVotes] = {}
        self._voters = VoterSet()
        self._latest: dict[str, tuple[str, int]] = {}
        """Of each member that asks its process, and the number of its latest message."""
        self._generation = -1
        """The update of the rules that these are of."""
        self._asked_ms: dict[str, float] = {}
        self._asking = PeerTasks("leases")
        self._wanted = asyncio.Event()
        quotas.on_leased = self._wanted.set
        self._keys, self._divided_by = keys, keys()
        self._divide(self._divided_by)

    def _divide(self, keys: QuotaKeys) -> None:
        """Divide among members what clients of several keys share."""
        self._divided_by = keys
        self._quotas.divide(lambda rule: isinstance(rule, Budget) or keys.is_divided(rule))

    async def run(self) -> None:
        """Ask for leases, and use them, until cancelled."""
        try:
            while True:
                self._wanted.clear()
                await self._look()
                await wait_at_most(LEASE_LOOK_S, self._wanted.wait())
        finally:
            await self._asking.end()

    def lease(self, document: Document) -> list[list[Any]]:
        """Answer the demands of a member, which takes this one for the owner, as rows.

        Raises ValueError, KeyError, TypeError or AttributeError for what holds no demands.
        """
        member, number, voted = document["votes"]
        member, number, slots = str(member), int(number), {int(slot) for slot in voted}
        demands = [
            (str(rule), str(sensor), Demand(member, number, _lease_of(uses), BudgetClaim.of(claim)))
            for rule, sensor, uses, claim in document["demands"]
        ]
        now_ms, voter = clock_ms(), member.rpartition(PROCESS_MARK)[0]
        process, latest = self._latest.get(voter, ("", 0))
        if self._stood_still(now_ms) or (process == member and number <= latest):
            return []  # it may be old
        self._latest[voter] = member, number
        for slot in slots & self._taken.keys():
            self._taken[slot].take(voter, now_ms)
        leases: list[list[Any]] = []
        for rule, sensor, demand in demands:
            leased = self._leased.get(rule)
            if leased is None or leased.slot not in slots:
                continue
            owner = self._owned.setdefault(sensor, BudgetOwner(0.0, 0.0))
            owner.rate, owner.guaranteed = leased.rate, leased.guaranteed
            owner.free_ms = leased.since_ms + VOTE_MS
            lease = owner.answer(demand, self._taken[leased.slot], now_ms)
            if lease is not None:
                leases.append([sensor, *lease])
        return leases

    async def _look(self) -> None:
        """Use what is leased at this time; ask for what is due."""
        now_ms = clock_ms()
        self._stood_still(now_ms)
        if (keys := self._keys()) is not self._divided_by:
            self._divide(keys)
        if self._generation != self._quotas.generation:
            self._follow_rules()
        owners, members = self._owners()
        slots: defaultdict[str, list[int]] = defaultdict(list)
        self._voters.use(members, now_ms)
        for slot in self._taken:
            if (owner := owners[slot]) is not None and self._leased:
                slots[owner].append(slot)
        due: defaultdict[str, list[str]] = defaultdict(list)
        for at, (name, meter) in enumerate(tuple(self._quotas.leased.items()), 1):
            use = self._use(name, meter)
            meter.lease_rate(use.lease.rate(now_ms), now_ms)
            leased = self._leased.get(use.rule)
            owner = None if leased is None else owners[leased.slot]
            if owner is not None and use.is_due(meter, now_ms):
                due[owner].append(name)
            if at % LEASES_AT_ONCE == 0:
                await asyncio.sleep(0)
                now_ms = clock_ms()
        # Who does not answer is asked when it does again: each vote for it would last longer.
        for owner in slots.keys() - self._asking.running.keys() - self._peers.failing:
            is_due = now_ms - self._asked_ms.get(owner, -math.inf) >= ASK_EVERY_MS
            if due[owner] or is_due:
                self._asked_ms[owner] = now_ms
                names = sorted(due[owner], key=lambda name: self._uses[name].asked_ms)
                self._asking.start(owner, self._ask(owner, slots[owner], names[:MAX_DEMANDS]))
        await self._forget(now_ms)

    def _use(self, name: str, meter: Meter) -> _Use:
        """Return what is used of a sensor's entity, under another rule the same as before."""
        use, rule = self._uses.get(name), sensor_name(meter.kind, meter.rule.shared_entity)
        if use is None:
            use = self._uses[name] = _Use(rule, ActiveLease(), clock_ms())
        if use.rule != rule:
            use.rule, use.is_urgent = rule, True
        return use

    def _follow_rules(self) -> None:
        """Lease what the rules in force have for clients of several members."""
        self._generation, table, known = self._quotas.generation, self._quotas.table, self._leased
        every: Iterable[tuple[Rule, float]] = (
            *table.budgets,
            *((rule, 0.0) for rule in table.rules if self._quotas.is_divided(rule)),
        )
        named = {
            sensor_name(kind, rule.shared_entity): (rule, rate, guaranteed)
            for rule, guaranteed in every
            for kind, rate in rule.bounds.items()
            if kind in TRAFFIC_KINDS
        }
        # In the place of a rule that went, others may use parts by that.
        since_ms = clock_ms() if known.keys() - named.keys() else self._made_ms
        self._leased = {
            name: _Leased(
                *(lease_owner_slot(rule.shared_entity), rate, guaranteed),
                known[name].since_ms if name in known else since_ms,
            )
            for name, (rule, rate, guaranteed) in named.items()
        }
        for slot in {each.slot for each in self._leased.values()} - self._taken.keys():
            self._given[slot] = OwnerVote(self._made_ms)
            self._taken[slot] = ReceivedVotes(self._voters)

    async def _forget(self, now_ms: float) -> None:
        """Forget what is used no more here, and what nobody uses of what was leased."""
        for name in self._uses.keys() - self._quotas.leased.keys():
            del self._uses[name]
        for at, (name, owner) in enumerate(tuple(self._owned.items()), 1):
            if owner.is_idle(now_ms):
                del self._owned[name]
            if at % LEASES_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _stood_still(self, now_ms: float) -> bool:
        """Return whether this process stood still, and so knows of no votes."""
        stood_still = now_ms - self._looked_ms >= SKEW_MS
        self._looked_ms = now_ms
        if stood_still:
            self._voters = VoterSet()
            self._taken = {slot: ReceivedVotes(self._voters) for slot in self._taken}
        return stood_still

    async def _ask(self, owner: str, slots: Sequence[int], names: Sequence[str]) -> None:
        """Vote for an owner, and use what it leases of some entities."""
        now_ms, number = clock_ms(), next(self._numbers)
        voted = [slot for slot in slots if self._given[slot].give(owner, now_ms)]
        rows = [] if not voted else [self._demand(name, now_ms) for name in names]
        asked = {
            row[1]: row for row in rows if row is not None and self._leased[row[0]].slot in voted
        }
        try:
            if voted:
                message = {"votes": [self._process, number, voted], "demands": [*asked.values()]}
                leases = await self._leases(owner, message)
                answers = [row for row in leases if row[0] in asked and row[1] == number]
                self._take(answers, now_ms)
        except PeerError as error:
            self._failed(owner, asked, str(error))
        finally:
            for slot in voted:
                self._given[slot].ended(clock_ms())

    def _demand(self, name: str, now_ms: float) -> list[Any] | None:
        """Return what this member wants of a sensor's entity; None if it is there no more."""
        use, meter = self._uses.get(name), self._quotas.leased.get(name)
        if use is None or meter is None or use.rule not in self._leased:
            return None
        claim = claim_of(meter, use.moved, now_ms - use.asked_ms, now_ms)
        uses = use.lease.in_use(now_ms)
        use.moved, use.asked_ms, use.is_urgent = meter.moved, now_ms, False
        return [use.rule, name, list(uses), claim.row()]

    def _take(self, leases: Rows, asked_ms: float) -> None:
        now_ms = clock_ms()
        for name, *lease in leases:
            use, meter = self._uses.get(name), self._quotas.leased.get(name)
            if use is None or meter is None:
                continue
            use.answered_ms = now_ms
            use.is_urgent = use.lease.take(RateLease(*lease), asked_ms, now_ms)
            meter.lease_rate(use.lease.rate(now_ms), now_ms)
            if use.is_urgent:
                self._wanted.set()

    async def _leases(self, owner: str, message: Document) -> Rows:
        if owner == self._name:
            return self.lease(message)
        answer = await self._peers.rows(owner, BUDGETS_PATH, message, "leases")
        try:
            return [(str(name), *_lease_of(lease)) for name, *lease in answer]
        except (ArithmeticError, TypeError, ValueError) as error:
            raise PeerError(owner, f"its leases are not understood: {error}") from None

    def _failed(self, owner: str, names: Iterable[str], problem: str) -> None:
        now_ms = clock_ms()
        uses = [use for name in names if (use := self._uses.get(name)) is not None]
        if any(now_ms - use.answered_ms >= FAILING_AFTER_MS for use in uses):
            _log.warning("no part of what clients share is leased here", owner=owner, error=problem)
            for use in uses:
                use.answered_ms = now_ms


def _lease_of(row: Any) -> RateLease:
    """Read a lease. Raises ValueError or TypeError for anything else."""
    number, *figures = row
    lease = RateLease(int(number), *map(float, figures))
    if not (0 <= lease.guaranteed <= lease.rate < math.inf and lease.lasts_ms <= RATE_LEASE_MS):
        raise ValueError(f"{row!r:.200} is no lease")
    return lease
