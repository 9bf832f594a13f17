"""Give each client its quotas: the sensors that its rules charge its traffic to. Sans-I/O."""

from collections.abc import Iterator

from metrics import Instruments

from .client_quotas import ClientQuotas
from .debts import SharedQuotas
from .entities import TRAFFIC_KINDS, ClientIdentity
from .meter import Meter, QuotaRow, sensor_name
from .meters import Clock, Meters
from .rules import QuotaSettings


class QuotaManager(Meters):
    """All sensors, and the handles of all connected clients."""

    def __init__(self, settings: QuotaSettings, instruments: Instruments) -> None:
        super().__init__(settings, instruments)
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
        """Yield the rows of what is one client to operators together; [] for a step without.

        What only one connected client is charged to is that client's. An entity's other sensors,
        shared by several clients or left by all, are together; but those left by all go to a client
        that is charged to another sensor of the entity: it has most likely come back.
        """
        self.take_all_back(clock_ms)
        # Most sensors have one client: a list for each would bring on Python's full collections.
        first: dict[str, ClientQuotas] = {}
        more: dict[str, list[ClientIdentity]] = {}
        for quotas in tuple(self._clients.values()):
            for meter in quotas.charged if quotas.users else ():
                if first.setdefault(meter.name, quotas) is not quotas:
                    more.setdefault(meter.name, []).append(quotas.identity)
            yield []

        def only_client(name: str) -> ClientQuotas | None:
            return None if name in more else first.get(name)

        def beside(name: str, entity: str) -> list[str]:
            names = _names_of(entity)
            client = only_client(name)
            if client is None and name not in first:
                client = next(filter(None, map(only_client, names)), None)
            if client is None:
                return [each for each in names if only_client(each) is None]
            own = [each for each in client.charged if only_client(each.name) is client]
            entities = dict.fromkeys(each.entity for each in own)
            left = [each for of in entities for each in _names_of(of) if each not in first]
            return [each.name for each in own] + left

        walked: set[str] = set()
        for meter in self.registry:
            rows: list[QuotaRow] = []
            if meter.name not in walked:
                # Each once, the sensor itself always.
                for name in dict.fromkeys((meter.name, *beside(meter.name, meter.entity))):
                    found = self.registry.get(name)
                    if found is not None and name not in walked:
                        client = first.get(name)
                        charged = () if client is None else (client.identity, *more.get(name, ()))
                        rows.append(found.row(charged, clock_ms()))
                    walked.add(name)
            yield rows

    def sensors_of(self, client: ClientIdentity) -> tuple[Meter, ...]:
        """Return the sensors that a connected client's latest traffic was charged to."""
        quotas = self._clients.get(client)
        charged = quotas.charged if quotas and quotas.users else ()
        return tuple(meter for meter in charged if not meter.retired)


def _names_of(entity: str) -> list[str]:
    """Return the names of the sensors that an entity may have."""
    return [sensor_name(kind, entity) for kind in TRAFFIC_KINDS]
