"""Real quotas on virtual time."""

import sys
from typing import Any

from parts.sensor_views import SensorView, sensors_in_use
from parts.virtual_time import VirtualTime
from prometheus_client import CollectorRegistry

from metrics import Instruments
from metrics.exposition import PREFIX, MetricTableCollector
from proxy.quota.client_quotas import ClientQuotas
from proxy.quota.entities import CONSUMER_BYTE_RATE, ClientIdentity, QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import NS_PER_MS, ByteLease, Meter
from proxy.quota.meters import OF_SENSORS, Clock, ThrottleDecision
from proxy.quota.rules import QuotaManagerSettings, Rule


def sensor_collector(quotas: QuotaManager, clock_ms: Clock) -> MetricTableCollector:
    return MetricTableCollector([(OF_SENSORS, quotas.metric_rows)], clock_ms, sys.maxsize)


def shown_figure(
    quotas: QuotaManager, name: str, entity: str, kind: QuotaKind = CONSUMER_BYTE_RATE
) -> float | None:
    """Return what a scrape has of a sensor under a name without prefix; None: it has nothing."""
    exposed = CollectorRegistry()
    table = OF_SENSORS._replace(figures={name: OF_SENSORS.figures[name]})
    exposed.register(MetricTableCollector([(table, quotas.metric_rows)], lambda: 0.0, sys.maxsize))
    labels = {"quota_entity": entity, "quota": str(kind)}
    return exposed.get_sample_value(PREFIX + name, labels)


class QuotaWorld(VirtualTime):
    """A manager with real instruments and sensors, of rules and other `QuotaManagerSettings`."""

    def __init__(self, *rules: Rule, **settings: Any) -> None:
        self.open_quotas(QuotaManagerSettings(rules=rules, **settings))

    def open_quotas(self, settings: QuotaManagerSettings, **listeners: Any) -> None:
        """Make what a process keeps of quotas; the manager gets the listeners."""
        self.prometheus = CollectorRegistry()
        self.instruments = Instruments(self.prometheus, max_label_sets=settings.max_client_entities)
        self.quotas = QuotaManager(settings, self.instruments)
        for name, listener in listeners.items():
            setattr(self.quotas, name, listener)

    @property
    def sensors(self) -> list[Meter]:
        return list(self.quotas.iter_meters())

    def client_quotas(
        self,
        client_id: str | None = "c",
        user: str | None = None,
        listener: str = "default",
        address: str | None = None,
    ) -> ClientQuotas:
        return self.quotas.client(ClientIdentity(listener, user, client_id), address)

    def rows(self, now_ms: float) -> list[SensorView]:
        return list(sensors_in_use(self.quotas, lambda: now_ms))


def figures_of(charge: ThrottleDecision | None) -> tuple[float, int, QuotaKind, str] | None:
    """Return what a charge says, to be compared with that of other sensors."""
    if charge is None:
        return None
    return charge.due_ms, charge.delay_ms, charge.meter.kind, charge.meter.entity


def taken(lease: ByteLease, size: int, now_ms: float) -> bool:
    """Take so much of a lease, as the lane does; return whether there is enough."""
    left, _, until_ns = lease.cells
    if left < size or now_ms * NS_PER_MS >= until_ns:
        return False
    lease.cells[0] -= size
    lease.cells[1] += size
    return True
