"""Charge each client's traffic to the sensors that its rules give it, and say when to hold it.

Sans-I/O: the time is an argument and nothing here waits. One thread.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import prometheus_client

from metrics import (
    Instruments,
    Metric,
    MetricConfig,
    MetricName,
    Quota,
    QuotaViolation,
    Rate,
    Registry,
    Sensor,
)

from .control import Pacer, throttle_time_ms
from .entities import ClientIdentity, QuotaKind
from .rules import Match, Rule, RuleTable

RATE_METRIC = "rate_bytes"
RATE_HELP = "Measured rate of a quota's entity: bytes per second, or percent."

BUSY_MS_PER_PERCENT = 10.0
"""Busy milliseconds in a second that are one percent of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaSettings:
    """The rules and how they are measured. Raises ValueError for a value out of range."""

    rules: tuple[Rule, ...] = ()
    window_ms: float = 1000.0
    """Length of one sample; at least 1."""
    samples: int = 11
    """How many windows a rate looks back on; at least 2."""
    max_delay_ms: float = 20_000.0
    """The longest single hold; above 0. Clients give up after 30 s."""
    max_client_entities: int = 10_000
    """For how many clients each kind of quota keeps a sensor of their own; at least 1."""

    def __post_init__(self) -> None:
        if self.samples < 2:  # noqa: PLR2004 - one sample has no window to look back on
            raise ValueError(f"samples must be at least 2, not {self.samples}")
        if not self.max_delay_ms > 0:
            raise ValueError(f"max_delay_ms must be above 0, not {self.max_delay_ms}")
        if self.max_client_entities < 1:
            raise ValueError(f"max_client_entities must be above 0, not {self.max_client_entities}")
        MetricConfig(samples=self.samples, window_ms=self.window_ms)

    @property
    def memory_ms(self) -> float:
        """The time that a rate certainly looks back on."""
        return (self.samples - 1) * self.window_ms

    @property
    def max_sensors(self) -> int:
        """How many sensors these settings can need; the bound to give to the registry."""
        # A rule has at most two that do not count as a client's: its own, and its overflow.
        return len(QuotaKind) * (self.max_client_entities + 2 * len(self.rules))


@dataclass(frozen=True, slots=True)
class Charge:
    """A response that must be held."""

    due_ms: float
    """When it may leave."""
    delay_ms: int
    """For how long it is held; whole milliseconds, above 0."""
    kind: QuotaKind
    entity: str


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """One sensor as the status page shows it."""

    entity: str
    kind: QuotaKind
    rule: Rule
    rate: float
    """Measured now: bytes per second, or percent."""
    bound: float
    window_ms: float
    """The time over which the rate is measured."""
    owed_ms: float
    """How long a response that came now would be held for what went before it; 0 or more."""


def largest(charges: Iterable[Charge | None]) -> Charge | None:
    """Return the charge with the latest due time: quotas never add up. None if none holds."""
    return max(
        (charge for charge in charges if charge is not None),
        key=lambda charge: charge.due_ms,
        default=None,
    )


class _Meter:
    """One sensor with its rule and its schedule."""

    __slots__ = (
        *("entity", "generation", "is_clients", "kind", "max_delay_ms"),
        *("metric", "pacer", "rate", "rule", "sensor", "violations"),
    )

    def __init__(self, kind: QuotaKind, entity: str, sensor: Sensor, rule: Rule) -> None:
        self.kind = kind
        self.entity = entity
        self.rule = rule
        self.is_clients = False
        self.generation = -1
        self.max_delay_ms = 0.0
        self.violations: prometheus_client.Counter | None = None
        self.sensor = sensor
        self.rate = Rate()
        labels = (("quota_entity", entity), ("quota", str(kind)))
        self.metric: Metric = sensor.add(
            MetricName(RATE_METRIC, RATE_HELP, labels), self.rate, MetricConfig()
        )
        self.pacer = Pacer(rule.bounds[kind], 0.0)

    def follow(self, rule: Rule, settings: QuotaSettings, generation: int, now_ms: float) -> None:
        """Take over the bound and the windows of these settings; the history stays."""
        bound = rule.bounds[self.kind]
        self.rule = rule
        self.generation = generation
        self.max_delay_ms = settings.max_delay_ms
        self.pacer.memory_ms = settings.memory_ms
        self.metric.config = MetricConfig(
            samples=settings.samples, window_ms=settings.window_ms, quota=Quota.upper(bound)
        )
        if bound != self.pacer.bound:
            self.pacer.change_bound(bound, self.metric.measure(now_ms), now_ms)

    def hold_ms(self, value: float, now_ms: float) -> int:
        """Record a value; return for how many milliseconds to hold what it stands for."""
        throttle_ms = 0
        try:
            self.sensor.record(value, now_ms)
        except QuotaViolation as violation:
            window_ms = self.rate.window_size_ms(self.metric.config, now_ms)
            throttle_ms = throttle_time_ms(violation.value, violation.bound, window_ms)
        return self.pacer.hold_ms(value, throttle_ms, now_ms, self.max_delay_ms)

    def row(self, now_ms: float) -> QuotaRow:
        rate = self.metric.measure(now_ms)
        window_ms = self.rate.window_size_ms(self.metric.config, now_ms)
        owed_ms = max(0.0, self.pacer.due_ms - now_ms)
        bound = self.pacer.bound
        return QuotaRow(self.entity, self.kind, self.rule, rate, bound, window_ms, owed_ms)

    def has_history(self, now_ms: float) -> bool:
        """Return whether the sensor or the schedule still knows anything."""
        return self.pacer.due_ms > now_ms or self.metric.measure(now_ms) > 0


class ClientQuotas:
    """The quotas of one client, shared by its connections; made by `QuotaManager.client`."""

    __slots__ = ("_generation", "_manager", "_matches", "_meters", "_users", "identity")

    def __init__(self, manager: "QuotaManager", identity: ClientIdentity) -> None:
        self.identity = identity
        self._manager = manager
        self._users = 0
        self._generation = -1
        self._matches: dict[QuotaKind, Match] = {}
        self._meters: dict[QuotaKind, _Meter] = {}

    def has(self, kind: QuotaKind) -> bool:
        """Return whether a rule bounds this kind of the client's traffic."""
        if self._generation != self._manager.generation:
            self._resolve()
        return kind in self._matches

    def charge(self, kind: QuotaKind, value: float, now_ms: float) -> Charge | None:
        """Record traffic; return how to hold the response that it belongs to, None to let it go.

        Call it once for each response, also when that will not be held.

        Args:
            kind: which quota to charge.
            value: bytes; for `request_percentage` the milliseconds that the upstream was busy.
            now_ms: the monotonic time; it must not go back.

        """
        if self._generation != self._manager.generation:
            self._resolve()
        match = self._matches.get(kind)
        if match is None:
            return None
        meter = self._meters.get(kind)
        if meter is None or meter.sensor.retired:
            meter = self._meters[kind] = self._manager._meter(kind, match, now_ms)
        if kind is QuotaKind.REQUEST_PERCENTAGE:
            value /= BUSY_MS_PER_PERCENT
        delay_ms = meter.hold_ms(value, now_ms)
        if not delay_ms:
            return None
        self._manager._count_violation(meter)
        return Charge(now_ms + delay_ms, delay_ms, kind, meter.entity)

    def close(self) -> None:
        """Give the handle back, once for each `QuotaManager.client`. Sensors stay until idle."""
        self._users -= 1
        if self._users == 0:
            self._manager._forget(self)

    def _resolve(self) -> None:
        self._generation = self._manager.generation
        self._meters.clear()
        matches = ((kind, self._manager.table.match(kind, self.identity)) for kind in QuotaKind)
        self._matches = {kind: match for kind, match in matches if match is not None}


class QuotaManager:
    """All sensors of all clients, under rules that may change at run time.

    A rule with scope `each` gives every client a sensor until there are `max_client_entities` of
    them for a kind. Further clients share one sensor of their rule, named `other`: they are held
    to one bound together, never unmetered.

    Args:
        settings: the rules and how to measure.
        instruments: where violations are counted.
        registry: keeps the sensors; make it with `settings.max_sensors`. It must only be expired
            through this manager.
        on_overflow: is told once per rule and kind that clients share its sensor `other`.

    """

    def __init__(
        self,
        settings: QuotaSettings,
        instruments: Instruments,
        registry: Registry,
        on_overflow: Callable[[Rule, QuotaKind], None] | None = None,
    ) -> None:
        self._instruments = instruments
        self._registry = registry
        self._on_overflow = on_overflow
        self._clients: dict[ClientIdentity, ClientQuotas] = {}
        self._meters: dict[str, _Meter] = {}
        self._client_sensors: Counter[QuotaKind] = Counter()
        self.generation = -1
        """Counts the updates; handles look up their rules again when it changes."""
        self.update(settings)

    def update(self, settings: QuotaSettings) -> None:
        """Put other rules in force; what was measured for an entity that remains is kept."""
        self.settings = settings
        self.table = RuleTable(settings.rules)
        self.generation += 1
        self._has_outdated = bool(self._meters)
        self._overflowed: set[str] = set()

    def client(self, identity: ClientIdentity) -> ClientQuotas:
        """Return the client's handle, the same for all its connections; `close` it when done."""
        quotas = self._clients.get(identity)
        if quotas is None:
            quotas = self._clients[identity] = ClientQuotas(self, identity)
        quotas._users += 1
        return quotas

    def snapshot(self, now_ms: float) -> list[QuotaRow]:
        """Return a row for each sensor in use."""
        return [meter.row(now_ms) for meter in self._meters.values()]

    def expire(self, now_ms: float) -> int:
        """Drop the sensors that are idle for an hour or that no rule names any more.

        Call it every minute or so. Returns how many were dropped.
        """
        before = len(self._meters)
        self._expire_idle(now_ms)
        if self._has_outdated:
            # A handle in use renews its sensors at the next charge. One that does not has nothing
            # to lose as soon as the history is empty.
            outdated = [m for m in self._meters.values() if m.generation != self.generation]
            for meter in outdated:
                if not meter.has_history(now_ms):
                    self._registry.remove(meter.sensor.name)
                    self._drop(meter)
            self._has_outdated = any(not meter.sensor.retired for meter in outdated)
        return before - len(self._meters)

    def _meter(self, kind: QuotaKind, match: Match, now_ms: float) -> _Meter:
        """Return the sensor for a match: the one in use, a new one, or the rule's overflow."""
        rule = match.rule
        meter = self._meters.get(_sensor_name(kind, match.entity))
        if meter is None:
            self._expire_idle(now_ms)
            if rule.is_open and not self._has_room(kind):
                meter = self._overflow(kind, rule, now_ms)
            else:
                meter = self._create(kind, match.entity, rule, now_ms)
                meter.is_clients = rule.is_open
                self._client_sensors[kind] += meter.is_clients
        if meter.generation != self.generation:
            meter.follow(rule, self.settings, self.generation, now_ms)
        return meter

    def _has_room(self, kind: QuotaKind) -> bool:
        return (
            self._client_sensors[kind] < self.settings.max_client_entities
            and len(self._registry) < self._registry.max_sensors
        )

    def _overflow(self, kind: QuotaKind, rule: Rule, now_ms: float) -> _Meter:
        entity = self.table.overflow_entity(kind, rule)
        name = _sensor_name(kind, entity)
        if name not in self._overflowed:
            self._overflowed.add(name)
            if self._on_overflow is not None:
                self._on_overflow(rule, kind)
        return self._meters.get(name) or self._create(kind, entity, rule, now_ms)

    def _create(self, kind: QuotaKind, entity: str, rule: Rule, now_ms: float) -> _Meter:
        # Only sensors whose number the rules decide get here without room: they must be measured.
        self._registry.max_sensors = max(self._registry.max_sensors, len(self._registry) + 1)
        name = _sensor_name(kind, entity)
        sensor = self._registry.get_or_create(name, lambda: Sensor(name), now_ms)
        meter = self._meters[name] = _Meter(kind, entity, sensor, rule)
        return meter

    def _expire_idle(self, now_ms: float) -> None:
        for name in self._registry.expire(now_ms):
            if name in self._meters:
                self._drop(self._meters[name])

    def _drop(self, meter: _Meter) -> None:
        del self._meters[meter.sensor.name]
        self._client_sensors[meter.kind] -= meter.is_clients
        if meter.violations is not None:
            # Make room for the label sets of the clients to come.
            labels = {"quota_entity": meter.entity, "quota": str(meter.kind)}
            self._instruments.violations_total.forget(**labels)
            self._instruments.throttled_responses_total.forget(**labels)

    def _count_violation(self, meter: _Meter) -> None:
        if meter.violations is None:
            meter.violations = self._instruments.violations_total.of(meter.entity, str(meter.kind))
        meter.violations.inc()

    def _forget(self, quotas: ClientQuotas) -> None:
        self._clients.pop(quotas.identity, None)


def _sensor_name(kind: QuotaKind, entity: str) -> str:
    return f"{kind}:{entity}"
