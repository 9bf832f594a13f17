"""What clients owe, told from one member to another. Sans-I/O."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from .client_quotas import ClientQuotas
from .entities import ClientIdentity, QuotaKind
from .meter import Meter, sensor_name
from .meters import Clock, Meters

MAX_PENDING = 10_000
"""Sensors not there yet that owe something: as many as clients have sensors by default."""


@dataclass(frozen=True, slots=True)
class Debt:
    """What one sensor owes."""

    identity: ClientIdentity
    """A client that uses the sensor; all others of it have the same quota key."""
    entity: str
    kind: QuotaKind
    owed_ms: float
    """In how long all that was charged has flowed at the bound; above 0."""
    held_ms: float = 0.0
    """For how long what is charged next waits; a large debt is worked off while some flows."""

    @property
    def name(self) -> str:
        """The sensor's."""
        return sensor_name(self.kind, self.entity)

    def after(self, passed_ms: float) -> "Debt":
        """Return what is left of it after so long, which may be nothing, or less."""
        owed_ms, held_ms = self.owed_ms - passed_ms, max(self.held_ms - passed_ms, 0.0)
        return replace(self, owed_ms=owed_ms, held_ms=held_ms)

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it; `of` reads that."""
        client = self.identity
        return {
            "client": [client.listener, client.user, client.client_id],
            "entity": self.entity,
            "kind": str(self.kind),
            "owed_ms": self.owed_ms,
            "held_ms": self.held_ms,
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Read a `document`. Raises KeyError, TypeError, ValueError for anything else."""
        listener, user, client_id = document["client"]
        identity = ClientIdentity(str(listener), user, client_id)
        kind, owed_ms = QuotaKind(document["kind"]), float(document["owed_ms"])
        held_ms = float(document["held_ms"])
        return cls(identity, str(document["entity"]), kind, owed_ms, held_ms)


class PendingDebt(NamedTuple):
    """What a sensor owes that is not there yet."""

    until_ms: float
    held_until_ms: float = -math.inf
    """Until when what is charged first waits."""
    of: Debt | None = None
    """What it was taken over from, if known."""


class SharedQuotas:
    """The quotas of clients that go to several members: visits, and handovers of what is owed.

    Each member measures and paces what comes to it. The owner of a client charges its sensors with
    what the client has had elsewhere, too, and says what they owe; elsewhere no less is owed then.
    """

    def __init__(
        self,
        meters: Meters,
        client: Callable[[ClientIdentity, str], ClientQuotas],
        sensors_of: Callable[[ClientIdentity], tuple[Meter, ...]],
    ) -> None:
        self._meters = meters
        self._client = client
        self._sensors_of = sensors_of
        self._pending: dict[str, PendingDebt] = {}
        """By the names of sensors. Bounded: the first make room."""
        meters.on_new = self._settle

    def charge_visit(
        self, identity: ClientIdentity, address: str, kind: QuotaKind, amount: float, now_ms: float
    ) -> tuple[str | None, float]:
        """Charge what a client has had at another member; return the sensor's entity and its debt.

        For the client's owner. `amount` is bytes, or busy milliseconds; nothing is held. The debt
        is milliseconds for `owe`. Where no rule bounds the client, the entity is None and the debt
        0.
        """
        quotas = self._client(identity, address)
        try:
            quotas.charge(kind, amount, now_ms)
            meter = quotas.meter_of(kind)
        finally:
            quotas.close()
        if meter is None:
            return None, 0.0
        if meter.is_enforced:
            meter.share(now_ms)
        return meter.entity, meter.debt_ms(now_ms)

    def owe(
        self, client: ClientIdentity | str, kind: QuotaKind, owed_ms: float, now_ms: float
    ) -> None:
        """Have the sensor of a client or entity owe at least so much, now or once it is there.

        More than an hour, or what is carried of time, is cut to that. Without a rule nothing
        happens.
        """
        if not owed_ms >= 0:
            raise ValueError(f"what is owed must be 0 or more, not {owed_ms!r}")
        entity = client if isinstance(client, str) else self._entity_of(client, kind)
        if entity is not None:
            self._owe(sensor_name(kind, entity), PendingDebt(now_ms + owed_ms), now_ms)

    def debts(self, covers: Callable[[ClientIdentity], bool], now_ms: float) -> list[Debt]:
        """Return what clients owe that have sensors of their own, also those that have left."""
        return [debt for debt in self.owing(covers, lambda: now_ms) if debt is not None]

    def owing(
        self, covers: Callable[[ClientIdentity], bool], clock_ms: Clock, least_ms: float = 0.0
    ) -> Iterator[Debt | None]:
        """Yield what there is of `debts` above `least_ms`; None for a step without one."""
        for debt in self._debts(clock_ms):
            is_asked = debt is not None and debt.owed_ms > least_ms and covers(debt.identity)
            yield debt if is_asked else None

    def keep_strictly(
        self, covers: Callable[[ClientIdentity], bool], clock_ms: Clock
    ) -> Iterator[None]:
        """Keep bounds by schedule for a while, in small steps, as others measured the clients."""
        for meter in self._meters.registry:
            client = meter.used_by
            if client is not None and meter.is_enforced and covers(client):
                meter.share(clock_ms())
            yield

    def take_debts(self, debts: Iterable[Debt], now_ms: float) -> None:
        """Have sensors owe what their clients owed elsewhere, or before, as `owe` does."""
        for debt in debts:
            pending = PendingDebt(now_ms + debt.owed_ms, now_ms + debt.held_ms, debt)
            self._owe(debt.name, pending, now_ms)

    def _debts(self, clock_ms: Clock) -> Iterator[Debt | None]:
        """Yield what each sensor owes by itself, and what is kept for those that are not there."""
        for meter in self._meters.registry:
            client, now_ms, owed_ms = meter.used_by, clock_ms(), 0.0
            if not (meter.is_overflow or meter.retired):
                owed_ms = meter.debt_ms(now_ms)
            if client is None or not owed_ms:
                yield None
            else:
                yield Debt(client, meter.entity, meter.kind, owed_ms, meter.owed_ms(now_ms))
        for until_ms, held_until_ms, debt in tuple(self._pending.values()):
            owed_ms, held_ms = until_ms - clock_ms(), max(held_until_ms - clock_ms(), 0.0)
            yield debt and replace(debt, owed_ms=owed_ms, held_ms=held_ms)

    def _owe(self, name: str, debt: PendingDebt, now_ms: float) -> None:
        """Have a sensor owe, now or once it is there; an earlier time than is known is ignored."""
        meter, pending = self._meters.registry.get(name), self._pending
        if meter is not None:
            meter.owe(debt.until_ms, now_ms, debt.held_until_ms)
        elif debt.until_ms > now_ms:
            known = pending.pop(name, debt)
            if len(pending) >= MAX_PENDING:
                for over in [each for each, owed in pending.items() if owed.until_ms <= now_ms]:
                    del pending[over]
            if len(pending) >= MAX_PENDING:
                del pending[next(iter(pending))]
            pending[name] = max(known, debt, key=lambda each: each.until_ms)

    def _settle(self, meter: Meter, now_ms: float) -> None:
        """Have a new sensor owe what was kept for it."""
        debt = self._pending.pop(meter.name, None)
        if debt is not None:
            meter.owe(debt.until_ms, now_ms, debt.held_until_ms)

    def _entity_of(self, identity: ClientIdentity, kind: QuotaKind) -> str | None:
        for meter in self._sensors_of(identity):
            if meter.kind is kind:
                return meter.entity
        match = self._meters.table.match(kind, identity)
        return None if match is None else match.entity
