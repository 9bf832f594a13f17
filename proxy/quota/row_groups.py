"""Puts the rows of sensors together that operators take for one client."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .client_quotas import ClientQuotas
from .entities import TRAFFIC_KINDS, ClientIdentity
from .meter import Meter, QuotaRow, sensor_name


@dataclass(frozen=True, slots=True)
class RowGroups:
    """One walk over all sensors.

    What only one connected client is charged to is that client's. The other sensors of an entity,
    which several clients share or which all have left, are together. But what was left by all goes
    to a client that is charged to another sensor of its entity: it has come back, most likely.
    """

    clients: Sequence[ClientQuotas]
    meters: Mapping[str, Meter]
    """By sensor name; may change during the walk."""
    clock_ms: Callable[[], float]
    # Most sensors have one client: a list for each would bring on Python's full collections.
    _first: dict[str, ClientQuotas] = field(default_factory=dict, init=False)
    _more: dict[str, list[ClientIdentity]] = field(default_factory=dict, init=False)
    """Clients by sensor name."""

    def walk(self) -> Iterator[list[QuotaRow]]:
        """Yield groups of rows, each sensor's once; an empty one for a step without rows."""
        for quotas in self.clients:
            for meter in quotas.charged if quotas.users else ():
                name = meter.sensor.name
                if self._first.setdefault(name, quotas) is not quotas:
                    self._more.setdefault(name, []).append(quotas.identity)
            yield []
        walked: set[str] = set()
        for meter in tuple(self.meters.values()):
            if meter.sensor.name in walked:
                yield []
                continue
            # Each once, the sensor itself always.
            names = dict.fromkeys((meter.sensor.name, *self._beside(meter)))
            found = [self.meters[name] for name in names if name in self.meters]
            yield [
                self._row(each)
                for each in found
                if not each.sensor.retired and each.sensor.name not in walked
            ]
            walked.update(names)

    def _row(self, meter: Meter) -> QuotaRow:
        name = meter.sensor.name
        first = self._first.get(name)
        clients = () if first is None else (first.identity, *self._more.get(name, ()))
        return meter.row(clients, self.clock_ms())

    def _beside(self, meter: Meter) -> Iterator[str]:
        """Yield the names of the sensors that are in the same group as one."""
        name = meter.sensor.name
        client = self._only_client(name)
        if client is None:
            names = _names_of(meter.entity)
            if name not in self._first:
                client = next(filter(None, map(self._only_client, names)), None)
            if client is None:
                yield from (each for each in names if self._only_client(each) is None)
                return
        own = [each for each in client.charged if self._only_client(each.sensor.name) is client]
        for each in own:
            yield each.sensor.name
        for entity in dict.fromkeys(each.entity for each in own):
            yield from (left for left in _names_of(entity) if left not in self._first)

    def _only_client(self, name: str) -> ClientQuotas | None:
        return None if name in self._more else self._first.get(name)


def _names_of(entity: str) -> list[str]:
    """Return the names of the sensors that an entity may have."""
    return [sensor_name(kind, entity) for kind in TRAFFIC_KINDS]
