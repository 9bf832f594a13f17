"""Puts the rows of sensors together that operators take for one client."""

from collections.abc import Iterator, Sequence

from .client_quotas import ClientQuotas
from .entities import TRAFFIC_KINDS, ClientIdentity
from .meter import QuotaRow, sensor_name
from .meters import Clock, Meters


def group_rows(
    clients: Sequence[ClientQuotas], meters: Meters, clock_ms: Clock
) -> Iterator[list[QuotaRow]]:
    """Yield groups of rows, each sensor's once; an empty one for a step without rows.

    What only one connected client is charged to is that client's. An entity's other sensors, shared
    by several clients or left by all, are together; but those left by all go to a client that is
    charged to another sensor of the entity: it has most likely come back.
    """
    # Most sensors have one client: a list for each would bring on Python's full collections.
    first: dict[str, ClientQuotas] = {}
    more: dict[str, list[ClientIdentity]] = {}
    for quotas in clients:
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
    for meter in meters.meters():
        rows: list[QuotaRow] = []
        if meter.name not in walked:
            # Each once, the sensor itself always.
            for name in dict.fromkeys((meter.name, *beside(meter.name, meter.entity))):
                found = meters.named(name)
                if found is not None and name not in walked:
                    client = first.get(name)
                    charged = () if client is None else (client.identity, *more.get(name, ()))
                    rows.append(found.row(charged, clock_ms()))
                walked.add(name)
        yield rows


def _names_of(entity: str) -> list[str]:
    """Return the names of the sensors that an entity may have."""
    return [sensor_name(kind, entity) for kind in TRAFFIC_KINDS]
