"""Give each client its quotas: the sensors that its rules charge its traffic to. Sans-I/O.

And what clients owe, told from one member to another.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from pydantic import Field

from metrics import Instruments
from proxy.state import JsonDataclass

from .client_quotas import ClientQuotas
from .entities import ClientIdentity, QuotaKind
from .meter import Meter, sensor_name
from .meters import Clock, Meters
from .rules import QuotaManagerSettings

MAX_PENDING = 10_000
"""Sensors not there yet that owe something: as many as clients have sensors by default."""


@dataclass(frozen=True, slots=True)
class SensorDebt(JsonDataclass):
    """What one sensor owes."""

    identity: Annotated[ClientIdentity, Field(alias="client")]
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

    def after(self, passed_ms: float) -> "SensorDebt":
        """Return what is left of it after so long, which may be nothing, or less."""
        owed_ms, held_ms = self.owed_ms - passed_ms, max(self.held_ms - passed_ms, 0.0)
        return replace(self, owed_ms=owed_ms, held_ms=held_ms)


class QuotaManager(Meters):
    """All sensors, the handles of all connected clients, and what these owe.

    Clients may go to several members. Each member measures and paces what comes to it. The owner of
    a client charges its sensors with what the client has had elsewhere, too, and says what they
    owe; elsewhere no less is owed then.
    """

    def __init__(self, settings: QuotaManagerSettings, instruments: Instruments) -> None:
        super().__init__(settings)
        self._clients: dict[ClientIdentity, ClientQuotas] = {}
        self._settled = self.generation
        self._pending: dict[str, SensorDebt] = {}
        """Of sensors not there yet, by their names: until when they owe, and hold what comes, in ms
        of the clock. Bounded: the first make room."""
        self.on_new = self._settle
        instruments.throttling_paused.set_function(lambda: bool(self.table.pauses))
        instruments.unbounded_clients.set_function(lambda: len(self.unbounded()))
        for kind in QuotaKind:
            count = partial(self._count_sharing, kind)
            instruments.overflow_clients.labels(str(kind)).set_function(count)

    def client(self, identity: ClientIdentity, address: str | None = None) -> ClientQuotas:
        """Return the client's handle, the same for all its connections; `close` it when done."""
        quotas = self._clients.get(identity)
        if quotas is None:
            quotas = self._clients[identity] = ClientQuotas(self, self._clients, identity, address)
        quotas.users += 1
        if quotas.users == 1:
            quotas.resolve()
        return quotas

    def clients(self) -> list[ClientIdentity]:
        """Return all connected clients."""
        return list(self._clients)

    def unbounded(self) -> list[ClientIdentity]:
        """Return connected clients that no rule bounds as of their last request or `settling`."""
        return [identity for identity, each in self._clients.items() if not each.matches]

    def _count_sharing(self, kind: QuotaKind) -> int:
        """Return how many connected clients share a sensor, as there is no room for their own."""
        clients = (each for each in self._clients.values() if kind in each.matches)
        used = (each.meters.get(kind) or each.before.get(kind) for each in clients)
        return sum(meter is not None and meter.is_overflow for meter in used)

    def settling(self) -> Iterator[bool]:
        """Look up the rules of clients that were silent since the last update; run it every second.

        As all iterators here it goes in small steps, between which other calls may come.
        """
        while (generation := self.generation) != self._settled:
            for quotas in tuple(self._clients.values()):
                is_silent = quotas.generation != self.generation
                if is_silent:
                    quotas.resolve()
                yield is_silent
            self._settled = generation

    def sensors_of(self, client: ClientIdentity) -> tuple[Meter, ...]:
        """Return the sensors that a connected client's latest traffic was charged to."""
        quotas = self._clients.get(client)
        charged = quotas.charged if quotas and quotas.users else ()
        return tuple(meter for meter in charged if not meter.retired)

    def charge_visit(
        self, identity: ClientIdentity, address: str, kind: QuotaKind, amount: float, now_ms: float
    ) -> float:
        """Charge what a client has had at another member; return for how many ms it owes.

        For the client's owner. `amount` is bytes, or busy milliseconds; nothing is held.
        """
        quotas = self.client(identity, address)
        try:
            meter = quotas.meters.get(kind)
            if meter is not None and meter.leased is not None:
                return 0.0  # it had what is leased there
            quotas.charge(kind, amount, now_ms)
            meter = quotas.meters.get(kind)
        finally:
            quotas.close()
        if meter is None:
            return 0.0
        meter.share(now_ms)
        return meter.debt_ms(now_ms)

    def owe(self, client: ClientIdentity, kind: QuotaKind, owed_ms: float, now_ms: float) -> None:
        """Have the sensor of a client owe at least so much, now or once it is there.

        More than an hour, or what is carried of time, is cut to that. Without a rule nothing
        happens.
        """
        if not owed_ms >= 0:
            raise ValueError(f"what is owed must be 0 or more, not {owed_ms!r}")
        sensors = self.sensors_of(client)
        charged = (each for each in sensors if each.kind is kind and not each.rule.is_by_topic)
        of = next(charged, None) or self.table.match(kind, client)
        if of is not None:
            self._owe(SensorDebt(client, of.entity, kind, owed_ms), now_ms)

    def debts(self, covers: Callable[[ClientIdentity], bool], now_ms: float) -> list[SensorDebt]:
        """Return all that `owing` yields."""
        return [debt for debt in self.owing(covers, lambda: now_ms) if debt is not None]

    def owing(
        self, covers: Callable[[ClientIdentity], bool], clock_ms: Clock, least_ms: float = 0.0
    ) -> Iterator[SensorDebt | None]:
        """Yield what clients owe above `least_ms` that have sensors of their own, or had them.

        Also what is kept for sensors that are not there; None for a step without a debt.
        """
        for meter in self.iter_meters():
            client, now_ms, owed_ms = meter.used_by, clock_ms(), 0.0
            if not meter.is_overflow and meter.leased is None:
                owed_ms = meter.debt_ms(now_ms)
            if client is None or owed_ms <= least_ms or not covers(client):
                yield None
            else:
                yield SensorDebt(client, meter.entity, meter.kind, owed_ms, meter.owed_ms(now_ms))
        for debt in tuple(self._pending.values()):
            left = debt.after(clock_ms())
            yield left if left.owed_ms > least_ms and covers(debt.identity) else None

    def pace_immediately(
        self, covers: Callable[[ClientIdentity], bool], clock_ms: Clock
    ) -> Iterator[None]:
        """Keep bounds by schedule for a while, in small steps, as others measured the clients."""
        for meter in self.iter_meters():
            client = meter.used_by
            if client is not None and covers(client):
                meter.share(clock_ms())
            yield

    def take_debts(self, debts: Iterable[SensorDebt], now_ms: float) -> None:
        """Have sensors owe what their clients owed elsewhere, or before, as `owe` does."""
        for debt in debts:
            self._owe(debt, now_ms)

    def _owe(self, debt: SensorDebt, now_ms: float) -> None:
        """Have a sensor owe, now or once it is there; an earlier time than is known is ignored."""
        meter, pending = self.by_name.get(debt.name), self._pending
        if meter is not None:
            meter.owe(debt.owed_ms, debt.held_ms, now_ms)
        elif debt.owed_ms > 0:
            until = debt.after(-now_ms)
            known = pending.pop(debt.name, until)
            if len(pending) >= MAX_PENDING:
                for over in [name for name, each in pending.items() if each.owed_ms <= now_ms]:
                    del pending[over]
            if len(pending) >= MAX_PENDING:
                del pending[next(iter(pending))]
            pending[debt.name] = max(known, until, key=lambda each: each.owed_ms)

    def _settle(self, meter: Meter, now_ms: float) -> None:
        """Have a new sensor owe what was kept for it."""
        if (until := self._pending.pop(meter.name, None)) is not None:
            debt = until.after(now_ms)
            meter.owe(debt.owed_ms, debt.held_ms, now_ms)
