"""One sensor with all that keeps its bound."""

import math
from array import array
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from metrics import MetricConfig, Quota, QuotaViolation, Rate, Sensor, WindowedSum
from metrics.clock import MS_PER_SECOND

from .entities import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE, ClientIdentity, QuotaKind
from .gate import BUDGET_GRANT_MS, Gate
from .pacer import MAX_CARRY_MS, Pacer, throttle_time_ms
from .rules import CLIENT_ID_KEYS, DEFAULT_BURST_MS, Budget, QuotaManagerSettings, Rule
from .turns import TurnNode, TurnPath, newcomer_path
from .values import MAX_SIZE_BYTES

LAST_MINUTE = MetricConfig(samples=12, window_ms=5000.0)
"""Sums reach back a minute, and up to one window further."""

LEASE_MS = 50.0
"""Lent for so long at most; they are charged when they are taken back."""

NS_PER_MS, NS_PER_SECOND = 1_000_000, 1_000_000_000

LEAST_LEASE = 1e-6
"""Of the bound, in the place of no lease at all: one answer at a time passes."""

LONGEST_AHEAD_MS = 1000.0
"""Of the bound: what a client may owe when a request is sent on whose response can be held. A
longer window does not make holds longer."""

UNLEASED_HOLD_MS = 1_000.0
"""What is held without a lease, which mostly comes in a moment, leaves after so long at the latest.
What it owes it owes all the same, so that nothing else is asked for."""

LEND_ABOVE, LEND_PART = 0.5, 0.125
"""With more than the first part of what its schedules may save up a sensor lends the second of what
they have: others of its budget lend, too."""

SAVED_INTERVALS = 2
"""How many batches an adaptive query may read at once: it reads each as fast as it can, and then
nothing until the next one."""

LONGEST_HOLD = 0.25
"""Batch intervals that a response is held at most because of an adapted bound."""

ACTIVE_MS = 2_000.0
"""A client that moved nothing for so long, and waits for nothing, has no share of its budget."""


class GateHop(NamedTuple):
    """A gate that a client's requests pass: of its own sensor, or of a budget that it is in."""

    meter: "Meter"
    path: TurnPath = ()
    """To the client's sensor, of those that wait there."""
    tells_clients: bool = True
    """Whether several clients may take turns at the end of the path."""

    def path_of(self, client: TurnPath) -> TurnPath:
        """Return the path to a client."""
        return (*self.path, *client) if self.tells_clients or not self.path else self.path


class AdaptedBound(NamedTuple):
    """What a query or a pipeline makes of a rule's bound at the moment."""

    bound: float | None
    """Bytes per second, in force when it is below the rule's own; None: the rule's own is."""
    reason: str
    """For people: the figures behind it."""


class ByteLease:
    """Bytes that a sensor lends: they may pass for a while without being charged one by one."""

    __slots__ = ("cells",)

    def __init__(self) -> None:
        self.cells = array("q", (0, 0, 0))
        """Those that are left, those that were taken, and until when in ns of the monotonic clock;
        who takes writes the first two."""

    def lend(self, amount: float, until_ms: float) -> None:
        """Lend so much, if a cell can hold it."""
        self.cells[0] = int(min(amount, MAX_SIZE_BYTES))
        self.cells[2] = int(until_ms * NS_PER_MS)

    def is_over(self, now_ms: float) -> bool:
        """Return whether its time has come."""
        return self.cells[2] <= now_ms * NS_PER_MS

    def has_half(self, now_ms: float) -> bool:
        """Return whether it goes on, and more of it is left than was taken."""
        return self.cells[0] > self.cells[1] and not self.is_over(now_ms)

    def end(self) -> None:
        """Lend nothing any more; what was taken is to be taken back."""
        self.cells[0] = self.cells[2] = 0

    def take_back(self) -> int:
        """End it; return how much was taken since the last time."""
        self.end()
        taken, self.cells[1] = self.cells[1], 0
        return taken


@dataclass(slots=True, eq=False)
class Meter(Sensor):
    """The sensor of an entity with its rule, its schedule, its gate and its holds."""

    kind: QuotaKind
    entity: str
    rule: Rule
    adapted: AdaptedBound | None = None
    """Of a query's reading it counts only under an adaptive rule."""
    brake: Pacer | None = None
    """Keeps a query's adapted bound, beside the schedule that keeps the rule's own. Each wait makes
    a batch longer: what goes over the bound passes, and what follows waits, no response for long.
    """
    retired: bool = False
    """Whether it is kept no more: who holds it must ask for a new one."""
    is_overflow: bool = False
    """Whether clients share it that have no place of their own."""
    generation: int = -1
    """The update of the manager's rules that it follows; -1 while it is new."""
    longest_hold_ms: float = 0.0
    span_ms: float = 0.0
    """How far its rate looks back."""
    ahead_ms: float = 0.0
    """How much its clients may owe when a request is sent on whose response can be held."""
    violations: int = 0
    """How often a charge found it above its bound, enforced or not."""
    throttled: int = 0
    """How many responses were held, or requests kept waiting."""
    holds: WindowedSum | None = None
    """The holds with their milliseconds; None until a response is held: most clients never are."""
    held_until_ms: float = -math.inf
    """When the latest hold ends; it may lie in the past."""
    is_throttled: bool = False
    """From the first hold until `QUIET_MS` after the end of the last one."""
    is_enforced: bool = True
    above: WindowedSum | None = None
    """Values above a bound that is not enforced, and in how many seconds; None before the first."""
    would_throttle: int = 0
    """All of them."""
    would_throttle_s: int = 0
    """In how many seconds they were."""
    above_second: int = -1
    """Of the latest one."""
    lease: ByteLease | None = None
    """What it lends; None until it does."""
    lease_size: int = 0
    """Of what is saved up: what it was lent and is not taken back."""
    used_by: ClientIdentity | None = None
    """The last client that began to use it."""
    charged: tuple["Meter", ...] = ()
    """Itself, and the sensors of the budgets that it is in, the outermost last."""
    levels: tuple[GateHop, ...] = ()
    """The gates that a request passes, one after the other."""
    is_measured_only: bool = False
    """Whether it has no bound but that of its budget, whose sensor holds its clients."""
    budget: "Meter | None" = None
    """The sensor of the budget that it has a share of."""
    sharers: dict[str, "Meter"] = field(default_factory=dict)
    """A budget's: the sensors that have a share of it, by their names."""
    new_from: str | None = None
    """From which address its client came, while that takes turns in its budgets with others that
    are new."""
    moved: float = 0.0
    """How much was charged to it in all."""
    leased: float | None = None
    """What this member may have of its bound, per second; None: all of it."""
    is_divided: bool = False
    """Whether other members may have sensors of the same entity, with parts of what it has."""
    lent: float = 0.0
    """What it, or what is charged to it, has lent of what its schedule has saved up."""
    rate: Rate = field(init=False)
    pacer: Pacer = field(init=False)
    gate: Gate = field(init=False)

    def __post_init__(self) -> None:
        self.rate = Rate(MetricConfig())
        Sensor.__init__(self, sensor_name(self.kind, self.entity), self.rate)
        self.pacer = Pacer(self.rule.ceilings[self.kind], 0.0)
        self.gate = Gate(self.pacer, self._allowance_ms)

    def follow(
        self,
        rule: Rule,
        settings: QuotaManagerSettings,
        generation: int,
        now_ms: float,
        *,
        enforced: bool = True,
        budget: "Meter | None" = None,
        is_divided: bool = False,
    ) -> None:
        """Set bound and windows; the history stays, but nothing is owed when `enforced` changes.

        `budget` is the sensor of the budget that it has a share of, if that is to be charged. Of a
        bound that `is_divided` among members it has what is leased to it, nothing at first.
        """
        self.rule = rule
        self.generation = generation
        self.longest_hold_ms = settings.longest_hold_ms(self.kind)
        most_ahead_ms = min(settings.window_ms, LONGEST_AHEAD_MS)
        self.ahead_ms = most_ahead_ms if self.is_of_one_client else 0.0
        if isinstance(rule, Budget):
            self.gate.grant_ms = BUDGET_GRANT_MS
        self.span_ms = settings.span_ms
        self.pacer.burst_ms = DEFAULT_BURST_MS if settings.burst_ms is None else settings.burst_ms
        # Time as Kafka, which holds for as long as the rate shows a spike.
        self.pacer.carry_ms = self.span_ms if self.kind.is_time else MAX_CARRY_MS
        begins = enforced and not self.is_enforced
        if enforced != self.is_enforced:
            self.is_enforced, self.brake = enforced, None
            self.pacer.end()
            self.held_until_ms = min(self.held_until_ms, now_ms)
        self.is_divided = is_divided
        self._join(budget)
        is_leased = is_divided and enforced and self.kind in rule.bounds
        if not is_leased or self.is_measured_only:
            self.leased = None
        elif self.leased is None:
            self.leased = 0.0
        if self.leased is not None:
            self.pacer.carry_ms = math.inf  # with the least lease an answer may be owed for weeks
        self.rate.config = MetricConfig(samples=settings.samples, window_ms=settings.window_ms)
        self._keep(now_ms)
        if begins:
            self.pacer.begin(self.rate.measure(now_ms), now_ms)
        is_budgeted = budget is not None or isinstance(rule, Budget)
        if self.leased is None and settings.burst_ms is None and not is_budgeted:
            self.pacer.strict_until_ms = min(self.pacer.strict_until_ms, now_ms + self.span_ms)
        elif enforced and (self.leased is not None or not self.kind.is_time):
            self.pacer.pace_immediately(math.inf, now_ms)

    def _join(self, budget: "Meter | None") -> None:
        """Have a share of a budget, which is charged for what is charged here, or of none."""
        rule, kind = self.rule, self.kind
        self.is_measured_only = budget is not None and (
            kind not in rule.bounds
            or (budget.rule.enforce and budget.rule.ceilings[kind] <= rule.bounds[kind])
        )
        self.charged = (self,)
        own = GateHop(self, tells_clients=not self.is_of_one_client)
        self.levels = (own,) if self.is_enforced and not self.is_measured_only else ()
        if self.budget is not None:
            self.budget.sharers.pop(self.name, None)
        self.budget = budget
        if budget is None or rule.share is None:
            return
        budget.sharers[self.name] = self
        is_group = isinstance(rule, Budget)
        weight, guaranteed = rule.share.weight, rule.share.guaranteed / MS_PER_SECOND
        step = TurnNode(self.entity, weight, guaranteed, is_group)
        end = newcomer_path(step, self.new_from)
        self.charged += tuple(
            each for each in budget.charged if self.is_enforced or not each.is_enforced
        )
        self.levels += tuple(
            GateHop(level.meter, (*level.path, *end), own.tells_clients)
            for level in budget.levels
            if self.is_enforced and level.meter.is_enforced
        )

    def settle(self) -> None:
        """Have its client, which is new no more, take turns in its budgets by itself."""
        if self.new_from is not None:
            self.new_from = None
            self._join(self.budget)

    def adapt(self, adapted: AdaptedBound | None, now_ms: float) -> None:
        """Put another adapted bound in force, or with None the rule's own; the history stays."""
        self.adapted = adapted
        self._keep(now_ms)

    def lease_rate(self, rate: float, now_ms: float) -> None:
        """Have no more of the bound than this from now on, per second; 0 or more."""
        if rate != self.leased:
            self.leased = rate
            self._keep(now_ms)

    def is_above(self, value: float, now_ms: float) -> bool:
        """Record a value that nothing is held for; return whether the bound is exceeded."""
        try:
            self.record(value, now_ms)
        except QuotaViolation:
            return True
        return False

    def hold_ms(self, value: float, now_ms: float) -> float:
        """Record a value; return for how many milliseconds to hold what it stands for."""
        throttle_ms = 0
        self.moved += value
        if self.is_measured_only or not self.is_enforced:
            self.is_above(value, now_ms)
            return 0.0
        try:
            self.record(value, now_ms)
        except QuotaViolation as violation:
            self.violations += 1
            window_ms = self.rate.window_size_ms(now_ms)
            throttle_ms = throttle_time_ms(violation.value, self.pacer.bound, window_ms)
        had_turn = self.pacer.is_pacing and not self.is_of_one_client
        hold_ms = self.pacer.charge(value, throttle_ms, now_ms)
        if hold_ms and had_turn:
            # Its own bytes had their turn: who has one connection asks for more meanwhile.
            hold_ms = max(hold_ms - value / self.pacer.bound * MS_PER_SECOND, 0.0)
            hold_ms = min(hold_ms, UNLEASED_HOLD_MS) if self.leased == 0 else hold_ms
        if self.brake is not None:
            hold_ms = max(hold_ms, self._braked_ms(now_ms))
            self.brake.charge(value, 0.0, now_ms)
        if not self.pacer.is_pacing and now_ms < self.pacer.strict_until_ms:
            self.room = None  # type: ignore[misc]  # it knows of the formula alone; a slot of Sensor
        self.gate.poke(now_ms)
        return min(hold_ms, self.longest_hold_ms) if hold_ms else 0.0

    def lends(self, now_ms: float) -> bool:
        """Lend what can be recorded for certain; return whether that is anything.

        Nothing at the bound, where each request counts as it comes.
        """
        is_free = not (self.gate.waiting or self.pacer.is_pacing) and self.brake is None
        if is_free and self.lease is not None and self.lease.has_half(now_ms):
            return True  # another connection has asked just before
        self.take_back(now_ms)
        if len(self.charged) > 1 or self.pacer.strict_until_ms == math.inf:
            return self.is_enforced and self._lends_saved(now_ms)
        room = self.room
        if room is not None and room.is_over(now_ms):
            room = self.room = self.rate.room(now_ms)  # type: ignore[misc]  # as in hold_ms
        is_kept = self.is_enforced and not is_free
        if is_kept or room is None or room.is_over(now_ms) or room.free < 1:
            return False
        self.lease = self.lease or ByteLease()
        self.lease.lend(room.free, now_ms + LEASE_MS)
        return True

    def _lends_saved(self, now_ms: float) -> bool:
        """Lend of what the schedules of it and its budgets have saved up, while that is much."""
        held = [each for each in self.charged if not each.is_measured_only and each.is_enforced]
        if self.brake is not None or any(each.gate.waiting for each in held):
            return False
        free = min((each.saved(now_ms) for each in held), default=0.0)
        if any(each.saved(now_ms) < LEND_ABOVE * each.most_saved for each in held) or free < 1:
            return False
        self.lease = self.lease or ByteLease()
        self.lease_size = int(free * LEND_PART)
        for each in held:
            each.lent += self.lease_size
        self.lease.lend(self.lease_size, now_ms + LEASE_MS)
        return True

    def saved(self, now_ms: float) -> float:
        """Return how many bytes the schedule lets pass at once, without those that are lent."""
        pacer = self.pacer
        saved_ms = min(now_ms - pacer.next_ms, pacer.burst_ms)
        return saved_ms * pacer.bound / MS_PER_SECOND - self.gate.expected_size - self.lent

    @property
    def most_saved(self) -> float:
        """The most that `saved` may be."""
        return self.pacer.burst_ms * self.pacer.bound / MS_PER_SECOND

    def take_back(self, now_ms: float) -> None:
        """Charge what was taken of the lease, and end it: to be called before anything else."""
        if self.lease_size:
            for each in self.charged:
                each.lent = max(each.lent - self.lease_size, 0.0)
            self.lease_size = 0
        if (lease := self.lease) and any(lease.cells) and (taken := lease.take_back()):
            for each in self.charged:
                each.hold_ms(taken, now_ms)

    def held(self, hold_ms: float, due_ms: float, now_ms: float) -> None:
        """Record a hold."""
        self.holds = self.holds or WindowedSum(LAST_MINUTE)
        self.holds.record(hold_ms, now_ms)
        self.throttled += 1
        self.held_until_ms = max(self.held_until_ms, due_ms)

    def is_first_above(self, now_ms: float) -> bool:
        """Count a value above a bound that is not enforced; return if it is a second's first."""
        self.above = self.above or WindowedSum(LAST_MINUTE)
        before, self.above_second = self.above_second, int(now_ms // MS_PER_SECOND)
        is_first = self.above_second != before
        self.above.record(float(is_first), now_ms)
        self.violations += 1
        self.would_throttle += 1
        self.would_throttle_s += is_first
        return is_first

    def is_expired(self, now_ms: float) -> bool:
        """Return it; the sensor of a budget stays, as those that have a share of it know it."""
        return not isinstance(self.rule, Budget) and Sensor.is_expired(self, now_ms)

    def is_active(self, now_ms: float) -> bool:
        """Return whether its clients moved something lately, wait, or are held."""
        is_moving = now_ms - self.last_record_ms < ACTIVE_MS
        return is_moving or self.waiting > 0 or self.held_until_ms > now_ms

    @property
    def guaranteed(self) -> float:
        """What it is guaranteed of its budget, per second; 0 without one."""
        share = self.rule.share
        return 0.0 if self.budget is None or share is None else share.guaranteed

    def budget_waits(self) -> dict["Meter", int]:
        """Return how many connections wait at the gates of its budgets, where any do."""
        around = (level for level in self.levels if level.path and level.meter.gate.waiting)
        counts = ((level.meter, level.meter.gate.turns.count(level.path)) for level in around)
        return {budget: count for budget, count in counts if count}

    @property
    def waiting(self) -> int:
        """How many connections wait at its gate, and at those of its budgets."""
        return self.gate.waiting + sum(self.budget_waits().values())

    def has_history(self, now_ms: float) -> bool:
        """Return whether anything measured or owed still counts."""
        owed_ms = max(self.owed_ms(now_ms), self.pacer.due_ms - now_ms)
        return owed_ms > 0 or self.gate.waiting > 0 or self.rate.measure(now_ms) > 0

    def is_in_use(self, now_ms: float) -> bool:
        """Return whether forgetting it could give its clients anything.

        Whose schedule decides is held sooner than a new client, however long ago that began, but
        where new clients are held by schedule, too.
        """
        pacer = self.pacer
        is_as_new = pacer.is_as_new(now_ms) and pacer.due_ms <= now_ms - pacer.burst_ms
        is_as_new &= self.brake is None and not self.gate.under_way
        return not is_as_new or self.has_history(now_ms)

    def owed_ms(self, now_ms: float) -> float:
        """Return for how long a response that came now would be held for what went before it."""
        return max(self.pacer.owed_ms(now_ms), self._braked_ms(now_ms))

    def debt_ms(self, now_ms: float) -> float:
        """Return in how long all that was charged has flowed at the bound: a hold or more."""
        return max(self.pacer.debt_ms(now_ms), self._braked_ms(now_ms))

    def owe(self, owed_ms: float, held_ms: float, now_ms: float) -> None:
        """Owe at least what was charged elsewhere, if the bound is enforced, and all of it here."""
        if self.is_enforced and self.leased is None:
            self.take_back(now_ms)
            self.share(now_ms)
            self.pacer.owe(owed_ms, held_ms, now_ms)
            self.gate.poke(now_ms)

    @property
    def is_of_one_client(self) -> bool:
        """Whether no others have it, as far as its rule tells clients apart."""
        is_shared = self.is_overflow or self.rule.scope == "shared"
        return not is_shared and not CLIENT_ID_KEYS.isdisjoint(self.rule.keys)

    def owed_alone(self, now_ms: float) -> float:
        """Return how much was charged that has not flowed at the bound, if it holds one client."""
        self.take_back(now_ms)
        if self.is_measured_only or not self.is_of_one_client:
            return 0.0
        return max(self.pacer.due_ms - now_ms, 0.0) * self.pacer.bound / MS_PER_SECOND

    def inherit(self, owed: float, held_ms: float, now_ms: float) -> None:
        """Owe at least what its client owed alone elsewhere; not for long where it is not alone."""
        if not self.is_measured_only:
            most_ms = math.inf if self.is_of_one_client else self.span_ms
            self.owe(min(owed / self.pacer.bound * MS_PER_SECOND, most_ms), held_ms, now_ms)

    def share(self, now_ms: float) -> None:
        """Keep the bound, but of time, by schedule while a rate looks back: others measure, too."""
        if self.is_enforced and not self.kind.is_time:
            self.pacer.pace_immediately(now_ms + self.span_ms, now_ms)

    def _braked_ms(self, now_ms: float) -> float:
        """Return for how long a response that came now would be held by the adapted bound."""
        if self.brake is None:
            return 0.0
        longest_ms = self.brake.burst_ms / SAVED_INTERVALS * LONGEST_HOLD
        return min(self.brake.debt_ms(now_ms), longest_ms)

    def _allowance_ms(self, now_ms: float) -> float:
        """Return how much of the bound may pass at once before the formula finds it exceeded."""
        free = 1.0 - self.rate.measure(now_ms) / self.pacer.bound
        window_ms = self.rate.window_size_ms(now_ms)
        return min(free * window_ms, self.pacer.allowance_ms(now_ms))

    @property
    def is_adaptive(self) -> bool:
        """Whether the bound may be adapted: a query's by its rule, a producer's by a pipeline."""
        if self.kind is CONSUMER_BYTE_RATE:
            return self.rule.adaptive is not None
        return self.kind is PRODUCER_BYTE_RATE and self.adapted is not None

    @property
    def bound(self) -> float:
        """The bound in force: what is leased, or adapted, never more than the rule's own."""
        bound = self.rule.ceilings[self.kind]
        if self.leased is not None:
            bound = min(bound, max(self.leased, LEAST_LEASE * bound))
        adapted = self.adapted.bound if self.adapted and self.is_adaptive else None
        return bound if adapted is None else min(bound, adapted)

    @property
    def shown_bound(self) -> float:
        """The bound in force of all members together."""
        return self.bound if self.leased is None else self.rule.ceilings[self.kind]

    def _keep(self, now_ms: float) -> None:
        """Put the bound in force: a query's adapted one with the brake, all else by schedule."""
        bound, adaptive = self.bound, self.rule.adaptive
        self.rate.config = replace(self.rate.config, quota=Quota(bound))
        is_lowered = self.kind is PRODUCER_BYTE_RATE or self.leased is not None
        kept = bound if is_lowered else self.rule.ceilings[self.kind]
        pacer, soon_ms = self.pacer, now_ms + self.span_ms
        if kept > pacer.bound:
            is_strict = self.is_enforced and not self.kind.is_time
            allowance_ms = self._allowance_ms(now_ms)
            pacer.raise_bound(kept, allowance_ms, soon_ms if is_strict else -math.inf, now_ms)
            self.gate.poke(now_ms)
        elif kept < pacer.bound:
            forgives_ms = soon_ms if self.leased is None else math.inf
            pacer.lower_bound(kept, self.rate.measure(now_ms), forgives_ms, now_ms)
            self.gate.poke(now_ms)
        if adaptive is None or adaptive.batch_interval_ms is None or kept == bound:
            self.brake = None
            return
        if self.brake is None:
            self.brake = Pacer(bound, 0.0, is_pacing=True, strict_until_ms=math.inf)
        self.brake.change(bound, SAVED_INTERVALS * adaptive.batch_interval_ms, now_ms)


def sensor_name(kind: QuotaKind, entity: str) -> str:
    """Return the name of an entity's sensor."""
    return f"{kind}:{entity}"
