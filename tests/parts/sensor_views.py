"""What sensors measure and hold at a time, for tests that compare it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from proxy.admin.sensor_rows import BudgetPart, SensorRow, rows_by_client
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.meters import Clock
from proxy.quota.pacer import MAX_CARRY_MS
from proxy.quota.rules import Rule


@dataclass(frozen=True, slots=True)
class SensorView:
    """A sensor at a time; as a row of a client, but of unrounded figures."""

    entity: str
    kind: QuotaKind
    rule: Rule
    rate: float
    bound: float
    window_ms: float
    owed_ms: float
    holds: int
    held_ms: float
    hold_until_ms: float | None
    waiting: int
    throttled: bool
    clients: tuple[ClientIdentity, ...]
    client_count: int
    static_bound: float | None
    reason: str | None
    enforced: bool
    would_throttle: int
    above_s: int
    part: BudgetPart | None
    leased: float | None
    used_by: ClientIdentity | None


def view_of(row: SensorRow, now_ms: float) -> SensorView:
    """Return what a row's sensor measures and holds."""
    meter = row.meter
    holds, above = meter.holds, None if meter.is_enforced else meter.above
    return SensorView(
        entity=meter.entity,
        kind=meter.kind,
        rule=meter.rule,
        rate=meter.rate.measure(now_ms),
        bound=meter.shown_bound,
        window_ms=meter.rate.window_size_ms(now_ms),
        owed_ms=min(meter.owed_ms(now_ms), MAX_CARRY_MS),
        holds=holds.events(now_ms) if holds else 0,
        held_ms=holds.measure(now_ms) if holds else 0.0,
        hold_until_ms=meter.held_until_ms if meter.held_until_ms > now_ms else None,
        waiting=meter.waiting,
        throttled=meter.is_throttled,
        clients=row.clients,
        client_count=row.client_count,
        static_bound=meter.rule.ceilings[meter.kind] if meter.is_adaptive else None,
        reason=meter.adapted.reason if meter.adapted and meter.is_adaptive else None,
        enforced=meter.is_enforced,
        would_throttle=above.events(now_ms) if above else 0,
        above_s=int(above.measure(now_ms)) if above else 0,
        part=row.part,
        leased=meter.leased,
        used_by=meter.used_by,
    )


def views(groups: Iterable[Iterable[SensorRow]], clock_ms: Clock) -> Iterator[SensorView]:
    """Yield each row of some groups as it is when it comes."""
    return (view_of(row, clock_ms()) for rows in groups for row in rows)


def sensors_in_use(quotas: QuotaManager, clock_ms: Clock) -> Iterator[SensorView]:
    """Yield all sensors in use."""
    return views(rows_by_client(quotas, clock_ms), clock_ms)
