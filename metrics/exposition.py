"""Show the registry's sensors and their bounds to Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from .registry import Registry
from .sensor import Sensor

PREFIX = "kafka_quota_proxy_"
BOUND_METRIC = "bound_bytes"
BOUND_HELP = "Bound that the quota sets for the measured value, in the same unit."

Labels = tuple[tuple[str, str], ...]


class _ReadLate:
    """Samples that are made one by one, when they are read."""

    def __init__(self, make: Callable[[], Iterator[Sample]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Sample]:
        return self._make()


def read_late(family: Family, make: Callable[[], Iterator[Sample]]) -> Family:
    """Set the samples of an empty family: what `make` yields whenever they are read.

    So who reads thousands of them can do other work between two.
    """
    family.samples = cast(list[Sample], _ReadLate(make))
    return family


class SensorCollector(Collector):
    """A prometheus_client collector: register it, and each scrape measures every sensor.

    One gauge family per metric name. Each metric with a quota has a sample with its labels in
    the family `bound_bytes` as well. Of two metrics that share name and labels the earlier one is
    shown, since a scrape with a doubled series is refused as a whole.

    `clock_ms` gives monotonic milliseconds, from the clock that the sensors are fed with. Measuring
    drops old samples, so scrape in the thread that records.
    """

    def __init__(self, registry: Registry, clock_ms: Callable[[], float]) -> None:
        self._registry = registry
        self._clock_ms = clock_ms

    def collect(self) -> Iterable[Family]:
        """Return the families; none while there are no sensors.

        A sensor is measured when its sample is read, and left out if it has gone by then.
        """
        sensors = tuple(self._registry)
        helps: dict[str, str] = {}
        for sensor in sensors:
            for metric in sensor.metrics:
                helps.setdefault(metric.name.name, metric.name.description)
                if metric.config.quota is not None:
                    helps.setdefault(BOUND_METRIC, BOUND_HELP)
        return [self._family(name, text, sensors) for name, text in helps.items()]

    def _family(self, name: str, description: str, sensors: tuple[Sensor, ...]) -> Family:
        family = Family(PREFIX + name, description, "gauge")
        values = self._bounds if name == BOUND_METRIC else self._measured

        def samples() -> Iterator[Sample]:
            shown: set[Labels] = set()
            for sensor in sensors:
                for labels, value in () if sensor.retired else values(sensor, name):
                    if labels not in shown:
                        shown.add(labels)
                        yield Sample(family.name, dict(labels), value)

        return read_late(family, samples)

    def _measured(self, sensor: Sensor, name: str) -> Iterator[tuple[Labels, float]]:
        for metric in sensor.metrics:
            if metric.name.name == name:
                yield metric.name.labels, metric.measure(self._clock_ms())

    def _bounds(self, sensor: Sensor, _: str) -> Iterator[tuple[Labels, float]]:
        for metric in sensor.metrics:
            if metric.config.quota is not None:
                yield metric.name.labels, metric.config.quota.bound
