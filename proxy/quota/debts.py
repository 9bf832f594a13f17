"""What clients owe, told from one member to another. Sans-I/O."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from .entities import ClientIdentity, QuotaKind
from .meter import Meter, sensor_name

if TYPE_CHECKING:
    from .manager import QuotaManager

MAX_PENDING = 10_000
"""Sensors that are not there yet and owe something: as many as clients have sensors by default."""


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


@dataclass(frozen=True, slots=True)
class PendingDebt:
    """What a sensor owes that is not there yet."""

    until_ms: float
    held_until_ms: float = -math.inf
    """Until when what is charged first waits."""
    of: Debt | None = None
    """What it was taken over from, if known."""


class PendingDebts:
    """What sensors owe that are not there yet, by their names. Bounded: the first make room."""

    def __init__(self) -> None:
        self._debts: dict[str, PendingDebt] = {}

    def __len__(self) -> int:
        return len(self._debts)

    def add(self, name: str, debt: PendingDebt, now_ms: float) -> None:
        """Keep until when a sensor owes; an earlier time than what is known changes nothing."""
        known = self._debts.pop(name, debt)
        if len(self._debts) >= MAX_PENDING:
            self._drop_expired(now_ms)
            if len(self._debts) >= MAX_PENDING:
                del self._debts[next(iter(self._debts))]
        self._debts[name] = max(known, debt, key=lambda each: each.until_ms)

    def settle(self, meter: Meter, now_ms: float) -> None:
        """Have a new sensor owe what was kept for it."""
        debt = self._debts.pop(meter.sensor.name, None)
        if debt is not None:
            meter.owe(debt.until_ms, now_ms, debt.held_until_ms)

    def debts(self, now_ms: float) -> list[Debt]:
        """Return what is left of those that were taken over."""
        return [
            replace(
                debt.of,
                owed_ms=debt.until_ms - now_ms,
                held_ms=max(debt.held_until_ms - now_ms, 0.0),
            )
            for debt in self._debts.values()
            if debt.of is not None
        ]

    def _drop_expired(self, now_ms: float) -> None:
        kept = {name: debt for name, debt in self._debts.items() if debt.until_ms > now_ms}
        self._debts = kept


class SharedQuotas:
    """The quotas of clients that go to several members: visits, and handovers of what is owed.

    Each member measures and paces what comes to it. The owner of a client charges its sensors with
    what the client has had elsewhere, too, and says what they owe; elsewhere no less is owed then.
    """

    def __init__(self, manager: "QuotaManager") -> None:
        self._manager = manager

    def charge_visit(
        self, identity: ClientIdentity, address: str, kind: QuotaKind, amount: float, now_ms: float
    ) -> tuple[str | None, float]:
        """Charge what a client has had at another member; return the sensor's entity and its debt.

        To be called by the client's owner. `amount` is bytes, or busy milliseconds. The debt is
        milliseconds, 0 or more, for `owe`. Nothing is held. The entity is None, and 0 is owed,
        where no rule bounds the client.
        """
        quotas = self._manager.client(identity, address)
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
        """Have a client's sensor, or that of an entity, owe at least so much from now on.

        A sensor that is not there yet owes it once it is. More than an hour, or what is carried of
        time, is cut to that. Nothing happens where no rule bounds the client.
        """
        if not owed_ms >= 0:
            raise ValueError(f"what is owed must be 0 or more, not {owed_ms!r}")
        entity = client if isinstance(client, str) else self._entity_of(client, kind)
        if entity is None:
            return
        self._owe(sensor_name(kind, entity), PendingDebt(now_ms + owed_ms), now_ms)

    def debts(self, covers: Callable[[ClientIdentity], bool], now_ms: float) -> list[Debt]:
        """Return what the sensors of some clients owe, also of those that have left.

        Not what clients owe together that have no sensor of their own.
        """
        walk = self.owing(covers, lambda: now_ms)
        return [debt for debt in walk if debt is not None]

    def owing(
        self,
        covers: Callable[[ClientIdentity], bool],
        clock_ms: Callable[[], float],
        least_ms: float = 0.0,
    ) -> Iterator[Debt | None]:
        """Yield what there is of `debts` above `least_ms`; None for a step without one."""
        for meter in self._manager.meters():
            client = meter.used_by
            if client is None or meter.is_overflow or meter.sensor.retired:
                yield None
                continue
            owed_ms = meter.debt_ms(clock_ms())
            if owed_ms > least_ms and covers(client):
                held_ms = meter.owed_ms(clock_ms())
                yield Debt(client, meter.entity, meter.kind, owed_ms, held_ms)
            else:
                yield None
        for debt in self._manager.pending_debts.debts(clock_ms()):
            yield debt if debt.owed_ms > least_ms and covers(debt.identity) else None

    def keep_strictly(
        self, covers: Callable[[ClientIdentity], bool], clock_ms: Callable[[], float]
    ) -> Iterator[None]:
        """Keep the bounds of some clients by schedule for a while, in small steps.

        To be done when they come from a member that has measured them until now: by what was
        measured here, they had nothing for a while, and would get all that at once.
        """
        for meter in self._manager.meters():
            client = meter.used_by
            if client is not None and meter.is_enforced and covers(client):
                meter.share(clock_ms())
            yield

    def take_debts(self, debts: Iterable[Debt], now_ms: float) -> None:
        """Have sensors owe what their clients owed elsewhere, or before, as `owe` does."""
        for debt in debts:
            pending = PendingDebt(now_ms + debt.owed_ms, now_ms + debt.held_ms, debt)
            self._owe(debt.name, pending, now_ms)

    def _owe(self, name: str, debt: PendingDebt, now_ms: float) -> None:
        meter = self._manager.meter_named(name)
        if meter is not None:
            meter.owe(debt.until_ms, now_ms, debt.held_until_ms)
        elif debt.until_ms > now_ms:
            self._manager.pending_debts.add(name, debt, now_ms)

    def _entity_of(self, identity: ClientIdentity, kind: QuotaKind) -> str | None:
        for meter in self._manager.sensors_of(identity):
            if meter.kind is kind:
                return meter.entity
        match = self._manager.table.match(kind, identity)
        return None if match is None else match.entity
