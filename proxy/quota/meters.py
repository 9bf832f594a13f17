"""The sensors of all clients under the rules in force. Sans-I/O, one thread."""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from metrics.exposition import MetricRows, MetricTable

from .entities import ClientIdentity, QuotaKind
from .meter import AdaptedBound, ByteLease, Meter, sensor_name
from .rules import QuotaManagerSettings, Rule, RuleMatch, RuleTable
from .turns import NEWCOMER_MS

OF_SENSORS = MetricTable(
    ("quota_entity", "quota"),
    {
        "rate_bytes": (
            "Measured rate of a quota's entity: bytes per second, or percent.",
            lambda meter, now_ms: meter.rate.measure(now_ms),
        ),
        "bound_bytes": (
            "Bound that the quota sets for the measured value, in the same unit.",
            lambda meter, _: meter.bound,
        ),
        "violations_total": (
            "Measurements that exceeded a quota.",
            lambda meter, _: meter.violations or None,
        ),
        "throttled_responses_total": (
            "Responses held back, and requests kept waiting, to keep a quota.",
            lambda meter, _: meter.throttled or None,
        ),
        "expected_throttling": (
            "1 where the rule says that being held to the quota is expected.",
            lambda meter, _: meter.rule.expected or None,
        ),
        "guaranteed_bytes": (
            "Bytes per second that a quota's entity is guaranteed of its budget.",
            lambda meter, _: meter.guaranteed or None,
        ),
        "would_throttle_total": (
            "Measurements that exceeded a quota which is not enforced.",
            lambda meter, _: meter.would_throttle or None,
        ),
        "would_throttle_seconds_total": (
            "Seconds in which a measurement exceeded a quota which is not enforced.",
            lambda meter, _: meter.would_throttle_s or None,
        ),
    },
)

Clock = Callable[[], float]
"""Gives the monotonic time in milliseconds."""

QUIET_MS = 30_000.0
"""A client that is not held for this long, more than most holds take, is throttled no more."""

MAX_EXAMINED = 500
"""How many sensors are looked at for an idle one when a new client finds no room: some 5 ms."""

ADDRESS_PARTS = 2
"""Clients of one address have at most this part of the places: who makes up client ids leaves the
other addresses theirs."""


@dataclass(frozen=True, slots=True)
class ThrottleDecision:
    """A response that must be held."""

    due_ms: float
    delay_ms: int
    """For how long it is held; above 0."""
    meter: Meter
    """The sensor whose bound it is held for."""


def longest_throttle(charges: Iterable[ThrottleDecision | None]) -> ThrottleDecision | None:
    """Return the charge with the latest due time: quotas never add up. None if none holds."""
    holding = (charge for charge in charges if charge is not None)
    return max(holding, key=lambda charge: charge.due_ms, default=None)


class Meters:
    """All sensors, under rules that may change at run time.

    A rule with scope `each` gives every client a sensor until there are `max_client_entities` of
    them for a kind. Then sensors without history make room: their clients gain nothing by it.
    Further clients share one sensor of their rule, named `other`: they are held to one bound
    together, never unmetered. So do those of an address that has more than its part of the places.
    """

    def __init__(self, settings: QuotaManagerSettings) -> None:
        self.by_name: dict[str, Meter] = {}
        """All of them by `sensor_name`; they expire only through `expiring`."""
        self.on_overflow: Callable[[Rule, QuotaKind], None] = lambda *_: None
        """Called for a rule and kind when its clients begin to share the sensor `other`."""
        self.on_state: Callable[[Meter, bool, float], None] = lambda *_: None
        """Called when a sensor's throttling begins (True) and has ended (False), with the time."""
        # Those whose throttling has begun and not ended, in this order.
        self._throttled: dict[Meter, None] = {}
        # By sensor name; kept apart from the sensors, which come and go.
        self._adapted: dict[str, AdaptedBound] = {}
        # The clients' sensors: when each may have no history at the earliest, in this order, and
        # from which address its first client came.
        self._quiet: dict[QuotaKind, OrderedDict[Meter, tuple[float, str | None]]] = {
            kind: OrderedDict() for kind in QuotaKind
        }
        self._of_address: Counter[tuple[QuotaKind, str | None]] = Counter()
        self._lent: dict[Meter, ByteLease] = {}
        self.on_lent: Callable[[], None] = lambda: None
        """Called when there is the first lease to take back."""
        self.on_would_throttle: Callable[[ClientIdentity, QuotaKind], None] = lambda *_: None
        """Called for each second in which a quota is exceeded that is not enforced, and by whom."""
        self.generation = -1
        """Counts the updates, after which handles look up their rules again."""
        self.is_divided: Callable[[Rule], bool] = lambda _: False
        """Whether several members may have sensors of one entity of a rule. Each has then only
        what the entity's owner leases to it."""
        self.leased: dict[str, Meter] = {}
        """The sensors of such entities whose bounds are enforced, by their names."""
        self.on_leased: Callable[[], None] = lambda: None
        """Called when there is one more of these."""
        self.paces_new = False
        """Whether a new sensor paces from its first byte: its clients may have had at another
        member what the formula would let pass here."""
        self.on_new: Callable[[Meter, float], None] = lambda *_: None
        """Called with each new sensor and the time: what is owed already is charged to it."""
        self._first_ms: dict[ClientIdentity, float] = {}
        """When clients came first, those that came last at the end. Bounded: the first make room.
        """
        self._begun_ms = math.inf
        """When the first of all came."""
        self.on_update: Callable[[], None] = lambda: None
        """Called after each update: what waits for a quota may go sooner, or at once."""
        self.update(settings)

    def update(self, settings: QuotaManagerSettings, table: RuleTable | None = None) -> None:
        """Put other rules in force, `table` being theirs if it is made; what was measured stays."""
        for lease in self._lent.values():
            lease.end()
        self.settings = settings
        self.table = table or RuleTable(settings.rules, enforce=settings.enforce)
        self.generation += 1
        for meter in self.iter_meters():
            if meter.gate.has_turns:  # few have, of ten thousand
                meter.gate.open()
        self.on_update()

    def divide(self, is_divided: Callable[[Rule], bool]) -> None:
        """Have other bounds be divided among members, under the rules in force."""
        self.is_divided = is_divided
        self.update(self.settings, self.table)

    def adapt(
        self, kind: QuotaKind, entity: str, adapted: AdaptedBound | None, now_ms: float
    ) -> None:
        """Lower the bound of a query whose rule is adaptive, or of a producer, until the next call.

        In force is the lower one of this and the rule's own, also through updates and for a sensor
        made anew. `entity` is a `Rule.entity`; None: it is forgotten. Raises ValueError for a bound
        that is not a finite number above 0.
        """
        name = sensor_name(kind, entity)
        bound = None if adapted is None else adapted.bound
        if bound is not None and not (math.isfinite(bound) and bound > 0):
            raise ValueError(f"the bound of {entity} must be above 0, not {bound!r}")
        self._adapted.pop(name, None)
        if adapted is not None:
            self._adapted[name] = adapted
        if meter := self.by_name.get(name):
            meter.take_back(now_ms)
            meter.adapt(adapted, now_ms)

    def measured_rates(self, clock_ms: Clock) -> Iterator[tuple[Meter, float]]:
        """Yield each sensor with what it measures, for a fraction of the cost of `rows`."""
        self.take_back(clock_ms(), are_all=True)
        for meter in self.iter_meters():
            yield meter, meter.rate.measure(clock_ms())

    def iter_meters(self) -> Iterator[Meter]:
        """Yield the sensors of this moment, but for those that have gone when it is theirs."""
        return (each for each in tuple(self.by_name.values()) if not each.retired)

    def metric_rows(self) -> MetricRows:
        """Return the sensors with their labels; who has gone when it is its turn is left out."""
        return (((each.entity, str(each.kind)), each) for each in self.iter_meters())

    def lends(self, meter: Meter, now_ms: float) -> bool:
        """Have a sensor lend what it has room for; return whether it does. See `Meter.lends`."""
        if not meter.lends(now_ms) or meter.lease is None:
            return False
        if not self._lent:
            self.on_lent()
        self._lent[meter] = meter.lease
        return True

    def take_back(self, now_ms: float, *, are_all: bool = False) -> bool:
        """Charge what was taken of leases that are over; return whether there are others.

        With `are_all` end all of them: what is measured is of now.
        """
        for meter, lease in tuple(self._lent.items()):
            if are_all or lease.is_over(now_ms):
                del self._lent[meter]
                meter.take_back(now_ms)
        return bool(self._lent)

    def held(self, charge: ThrottleDecision, hold_ms: float, now_ms: float) -> None:
        """Record that a response is really held for a charge, beginning now; once for each.

        A hold that is cut short counts in full, and none where the sensor has gone meanwhile.
        """
        meter = charge.meter
        if meter.retired:
            return
        meter.held(hold_ms, charge.due_ms, now_ms)
        if not meter.is_throttled:
            meter.is_throttled, self._throttled[meter] = True, None
            self.on_state(meter, True, now_ms)

    def sweeping(self, now_ms: float) -> Iterator[bool]:
        """Yield for each throttled entity whether that ends, and report it; run it each second."""
        for meter in tuple(self._throttled):
            ended = meter.is_throttled and now_ms - meter.held_until_ms >= QUIET_MS
            if ended:
                self._end_throttling(meter, now_ms)
            yield ended

    def _end_throttling(self, meter: Meter, now_ms: float) -> None:
        meter.is_throttled = False
        del self._throttled[meter]
        self.on_state(meter, False, now_ms)

    def expiring(self, now_ms: float) -> Iterator[bool]:
        """Drop sensors that are idle for an hour or of no rule, in steps: yield if one goes."""
        for meter in self.iter_meters():
            # A handle in use renews its sensors at the next charge. One that does not has nothing
            # to lose as soon as the history is empty.
            is_outdated = meter.generation != self.generation
            goes = meter.is_expired(now_ms) or (is_outdated and not meter.has_history(now_ms))
            if goes:
                self._drop(meter, now_ms)
            yield goes

    def meter(
        self,
        kind: QuotaKind,
        match: RuleMatch,
        now_ms: float,
        address: str | None = None,
        *,
        paces: bool = False,
    ) -> Meter:
        """Return the sensor for a match: the one in use, a new one, or the rule's overflow.

        `paces`: a new one paces from its first byte, as its client was measured by another one.
        """
        rule = match.rule
        meter = self.by_name.get(sensor_name(kind, match.entity))
        if meter is None and rule.is_open and not self._make_room(kind, address, now_ms):
            meter = self._overflow(kind, match, now_ms)
        elif meter is None:
            meter = self._create(kind, match.entity, rule, now_ms)
            if rule.is_open:
                self._of_address[kind, address] += 1
                self._quiet[kind][meter] = now_ms + self.settings.span_ms, address
                if rule.share is not None and rule.user is None:
                    meter.new_from = address
        if meter.generation != self.generation:
            meter.take_back(now_ms)
            is_new = meter.generation < 0
            meter.follow(
                *(rule, self.settings, self.generation, now_ms),
                enforced=match.enforced,
                budget=self._budget(kind, rule, now_ms),
                is_divided=self.is_divided(rule),
            )
            if meter.leased is None:
                self.leased.pop(meter.name, None)
            elif self.leased.get(meter.name) is not meter:
                self.leased[meter.name] = meter
                self.on_leased()
            if is_new and (paces or self.paces_new):
                meter.share(now_ms)
            if is_new:
                self.on_new(meter, now_ms)
        return meter

    def settles_ms(self, client: ClientIdentity, now_ms: float) -> float:
        """Return until when a client that comes now is new; infinity: it is not.

        As those that came within NEWCOMER_MS of the first of all: a start makes nobody new.
        """
        self._begun_ms = min(self._begun_ms, now_ms)
        first_ms = self._first_ms.pop(client, now_ms)
        if len(self._first_ms) >= self.settings.max_client_entities:
            del self._first_ms[next(iter(self._first_ms))]
        self._first_ms[client] = first_ms
        settles_ms = first_ms + NEWCOMER_MS
        is_new = first_ms > self._begun_ms + NEWCOMER_MS and now_ms < settles_ms
        return settles_ms if is_new else math.inf

    def _budget(self, kind: QuotaKind, rule: Rule, now_ms: float) -> Meter | None:
        """Return the sensor of the budget that a rule's clients share, if it bounds this kind."""
        if rule.share is None or kind not in rule.share.budget.ceilings:
            return None
        budget = rule.share.budget
        enforced = self.settings.enforce and budget.enforce
        return self.meter(kind, RuleMatch(budget, budget.shared_entity, enforced), now_ms)

    def _overflow(self, kind: QuotaKind, match: RuleMatch, now_ms: float) -> Meter:
        """Return the sensor that further clients of a rule share."""
        entity = self.table.overflow_entity(kind, match)
        meter = self.by_name.get(sensor_name(kind, entity))
        if meter is None:
            self.on_overflow(match.rule, kind)
            meter = self._create(kind, entity, match.rule, now_ms)
            meter.is_overflow = True
        return meter

    def _create(self, kind: QuotaKind, entity: str, rule: Rule, now_ms: float) -> Meter:
        meter = Meter(kind, entity, rule, self._adapted.get(sensor_name(kind, entity)))
        meter.last_record_ms = now_ms  # type: ignore[misc]  # a slot of Sensor
        self.by_name[meter.name] = meter
        return meter

    def _make_room(self, kind: QuotaKind, address: str | None, now_ms: float) -> bool:
        """Drop no more idle sensors than it takes; return whether there is room for a client."""
        most = self.settings.max_client_entities
        of_address = most if address is None else max(most // ADDRESS_PARTS, 1)

        def has_room() -> bool:
            return len(self._quiet[kind]) < most and self._of_address[kind, address] < of_address

        return has_room() or any(has_room() for _ in self._dropping_quiet(kind, now_ms))

    def _dropping_quiet(self, kind: QuotaKind, now_ms: float) -> Iterator[None]:
        """Drop sensors without history, of those for whom it is time; yield after each."""
        quiet = self._quiet[kind]
        for _ in range(min(len(quiet), MAX_EXAMINED)):
            meter, (quiet_ms, address) = next(iter(quiet.items()))
            if quiet_ms > now_ms:
                return
            is_in_use = meter.is_in_use(now_ms) or meter.is_throttled
            if is_in_use and not meter.is_expired(now_ms):
                quiet[meter] = now_ms + self.settings.span_ms, address
                quiet.move_to_end(meter)
            else:
                self._drop(meter, now_ms)
                yield

    def _drop(self, meter: Meter, now_ms: float) -> None:
        """Forget a sensor."""
        del self.by_name[meter.name]
        meter.retired = True
        meter.take_back(now_ms)
        self._lent.pop(meter, None)
        self.leased.pop(meter.name, None)
        if meter.budget is not None:
            meter.budget.sharers.pop(meter.name, None)
        meter.gate.open()
        if meter.is_throttled:
            self._end_throttling(meter, now_ms)
        if meter in self._quiet[meter.kind]:
            of_address = meter.kind, self._quiet[meter.kind].pop(meter)[1]
            self._of_address[of_address] -= 1
            if not self._of_address[of_address]:
                del self._of_address[of_address]
