"""Give each client its quotas: the sensors that its rules charge its traffic to. Sans-I/O."""

from collections.abc import Callable, Iterator

from metrics import Instruments, Registry

from .client_quotas import ClientQuotas
from .debts import SharedQuotas
from .entities import ClientIdentity, QuotaKind
from .meter import Meter, QuotaRow
from .meters import Clock, Meters, OnState
from .row_groups import group_rows
from .rules import QuotaSettings, Rule


class QuotaManager(Meters):
    """All sensors, and the handles of all connected clients."""

    def __init__(
        self,
        settings: QuotaSettings,
        instruments: Instruments,
        registry: Registry[Meter],
        on_overflow: Callable[[Rule, QuotaKind], None] = lambda *_: None,
        on_state: OnState = lambda *_: None,
    ) -> None:
        super().__init__(settings, instruments, registry, on_overflow, on_state)
        self._clients: dict[ClientIdentity, ClientQuotas] = {}
        self._settled = self.generation
        self.shared = SharedQuotas(self, self.client, self.sensors_of)
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

    def rows(self, clock_ms: Clock) -> Iterator[QuotaRow | None]:
        """Yield a row for each sensor in use; None for a step without a row."""
        for rows in self.row_groups(clock_ms):
            yield from rows or (None,)

    def row_groups(self, clock_ms: Clock) -> Iterator[list[QuotaRow]]:
        """Yield the rows of what is one client to operators together; [] for a step without."""
        return group_rows(tuple(self._clients.values()), self, clock_ms)

    def sensors_of(self, client: ClientIdentity) -> tuple[Meter, ...]:
        """Return the sensors that a connected client's latest traffic was charged to."""
        quotas = self._clients.get(client)
        charged = quotas.charged if quotas and quotas.users else ()
        return tuple(meter for meter in charged if not meter.retired)
