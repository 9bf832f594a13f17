"""Lists the sensors in use as operators see them: what is one client's to them is together."""

from collections.abc import Iterator
from dataclasses import dataclass

from proxy.admin.budget_shares import BudgetPart, BudgetShares
from proxy.quota.entities import TRAFFIC_KINDS, ClientIdentity
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import Meter, sensor_name
from proxy.quota.meters import Clock
from proxy.quota.rules import Budget

SHOWN_CLIENTS = 20
"""How many clients a row names; it counts them all."""


@dataclass(frozen=True, slots=True)
class SensorRow:
    """A sensor with the connected clients whose latest traffic was charged to it."""

    meter: Meter
    clients: tuple[ClientIdentity, ...]
    """At most SHOWN_CLIENTS."""
    client_count: int
    part: BudgetPart | None
    """Of a budget; None where it shares none."""

    def share(self, now_ms: float) -> float:
        """Return the part of its bound that is used."""
        return self.meter.metric.measure(now_ms) / self.meter.shown_bound


def row_groups(
    quotas: QuotaManager, clock_ms: Clock, shares: BudgetShares | None = None
) -> Iterator[list[SensorRow]]:
    """Yield the rows of what is one client to operators together; [] for a step without.

    What only one connected client is charged to is that client's. An entity's other sensors, shared
    by several clients or left by all, are together; but those left by all go to a client that is
    charged to another sensor of the entity: it has most likely come back. `shares` is filled with
    what clients have of budgets.
    """
    quotas.take_all_back(clock_ms)
    shares = BudgetShares() if shares is None else shares
    for meter in quotas.registry if quotas.table.budgets else ():
        shares.add(meter, clock_ms())
        yield []
    shares.settle()
    # Most sensors have one client: a list for each would bring on Python's full collections.
    first: dict[str, ClientIdentity] = {}
    more: dict[str, list[ClientIdentity]] = {}
    for client in quotas.clients():
        for meter in quotas.sensors_of(client):
            if first.setdefault(meter.name, client) is not client:
                more.setdefault(meter.name, []).append(client)
        yield []

    def only_client(name: str) -> ClientIdentity | None:
        return None if name in more else first.get(name)

    def beside(name: str, entity: str) -> list[str]:
        names = _names_of(entity)
        client = only_client(name)
        if client is None and name not in first:
            client = next(filter(None, map(only_client, names)), None)
        if client is None:
            return [each for each in names if only_client(each) is None]
        own = [each for each in quotas.sensors_of(client) if only_client(each.name) is client]
        entities = dict.fromkeys(each.entity for each in own)
        left = [each for of in entities for each in _names_of(of) if each not in first]
        return [each.name for each in own] + left

    walked: set[str] = set()
    for meter in quotas.registry:
        rows: list[SensorRow] = []
        if meter.name not in walked and not isinstance(meter.rule, Budget):
            # Each once, the sensor itself always.
            for name in dict.fromkeys((meter.name, *beside(meter.name, meter.entity))):
                found = quotas.registry.get(name)
                if found is not None and name not in walked:
                    clients = (first[name], *more.get(name, ())) if name in first else ()
                    part = shares.part(found, clock_ms())
                    rows.append(SensorRow(found, clients[:SHOWN_CLIENTS], len(clients), part))
                walked.add(name)
        yield rows


def _names_of(entity: str) -> list[str]:
    """Return the names of the sensors that an entity may have."""
    return [sensor_name(kind, entity) for kind in TRAFFIC_KINDS]
