"""Give each client its quotas: the sensors that its rules charge its traffic to. Sans-I/O."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from metrics import Instruments

from .client_quotas import ClientQuotas
from .debts import Debt, PendingDebt
from .entities import ClientIdentity, QuotaKind
from .meter import Meter, sensor_name
from .meters import Clock, Meters
from .rules import QuotaSettings

MAX_PENDING = 10_000
"""Sensors not there yet that owe something: as many as clients have sensors by default."""


class QuotaManager(Meters):
    """All sensors, and the handles of all connected clients."""

    def __init__(self, settings: QuotaSettings, instruments: Instruments) -> None:
        super().__init__(settings, instruments)
        self._clients: dict[ClientIdentity, ClientQuotas] = {}
        self._settled = self.generation
        self.shared = SharedQuotas(self)
        """For clients that go to several members."""

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
        return list(self._unbounded)

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


class SharedQuotas:
    """The quotas of clients that go to several members: visits, and handovers of what is owed.

    Each member measures and paces what comes to it. The owner of a client charges its sensors with
    what the client has had elsewhere, too, and says what they owe; elsewhere no less is owed then.
    """

    def __init__(self, manager: QuotaManager) -> None:
        self._manager = manager
        self._pending: dict[str, PendingDebt] = {}
        """By the names of sensors. Bounded: the first make room."""
        manager.on_new = self._settle

    def charge_visit(
        self, identity: ClientIdentity, address: str, kind: QuotaKind, amount: float, now_ms: float
    ) -> float:
        """Charge what a client has had at another member; return for how many ms it owes.

        For the client's owner. `amount` is bytes, or busy milliseconds; nothing is held.
        """
        quotas = self._manager.client(identity, address)
        try:
            meter = quotas.meter_of(kind)
            if meter is not None and meter.leased is not None:
                return 0.0  # it had what is leased there
            quotas.charge(kind, amount, now_ms)
            meter = quotas.meter_of(kind)
        finally:
            quotas.close()
        if meter is None:
            return 0.0
        if meter.is_enforced:
            meter.share(now_ms)
        return meter.debt_ms(now_ms)

    def owe(self, client: ClientIdentity, kind: QuotaKind, owed_ms: float, now_ms: float) -> None:
        """Have the sensor of a client owe at least so much, now or once it is there.

        More than an hour, or what is carried of time, is cut to that. Without a rule nothing
        happens.
        """
        if not owed_ms >= 0:
            raise ValueError(f"what is owed must be 0 or more, not {owed_ms!r}")
        sensors = self._manager.sensors_of(client)
        charged = (each for each in sensors if each.kind is kind and not each.rule.is_by_topic)
        of = next(charged, None) or self._manager.table.match(kind, client)
        if of is not None:
            self._owe(sensor_name(kind, of.entity), PendingDebt(now_ms + owed_ms), now_ms)

    def debts(self, covers: Callable[[ClientIdentity], bool], now_ms: float) -> list[Debt]:
        """Return all that `owing` yields."""
        return [debt for debt in self.owing(covers, lambda: now_ms) if debt is not None]

    def owing(
        self, covers: Callable[[ClientIdentity], bool], clock_ms: Clock, least_ms: float = 0.0
    ) -> Iterator[Debt | None]:
        """Yield what clients owe above `least_ms` that have sensors of their own, or had them.

        Also what is kept for sensors that are not there; None for a step without a debt.
        """
        for meter in self._manager.registry:
            client, now_ms, owed_ms = meter.used_by, clock_ms(), 0.0
            if not meter.is_overflow and meter.leased is None:
                owed_ms = meter.debt_ms(now_ms)
            if client is None or owed_ms <= least_ms or not covers(client):
                yield None
            else:
                yield Debt(client, meter.entity, meter.kind, owed_ms, meter.owed_ms(now_ms))
        for until_ms, held_until_ms, debt in tuple(self._pending.values()):
            owed_ms, held_ms = until_ms - clock_ms(), max(held_until_ms - clock_ms(), 0.0)
            if debt is None or owed_ms <= least_ms or not covers(debt.identity):
                yield None
            else:
                yield replace(debt, owed_ms=owed_ms, held_ms=held_ms)

    def pace_immediately(
        self, covers: Callable[[ClientIdentity], bool], clock_ms: Clock
    ) -> Iterator[None]:
        """Keep bounds by schedule for a while, in small steps, as others measured the clients."""
        for meter in self._manager.registry:
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
        """Have a sensor owe, now or once it is there; an earlier time than is known is ignored."""
        meter, pending = self._manager.registry.get(name), self._pending
        if meter is not None and meter.leased is None:
            meter.owe(debt.until_ms, now_ms, debt.held_until_ms)
        elif meter is None and debt.until_ms > now_ms:
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
        if debt is not None and meter.leased is None:
            meter.owe(debt.until_ms, now_ms, debt.held_until_ms)
