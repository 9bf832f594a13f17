"""Answers a Prometheus scrape without keeping the event loop from the clients' traffic for long."""

from collections.abc import Iterable, Iterator
from itertools import islice

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from proxy.admin.slices import Slices

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SAMPLES_AT_ONCE = 50
"""Samples that are read and written in one step; it takes about half a millisecond."""


class _FamilyPart(Collector):
    """Some samples of a family."""

    def __init__(self, family: Metric, samples: Iterable[Sample]) -> None:
        self._part = Metric(family.name, family.documentation, family.type, family.unit)
        self._part.samples = list(samples)

    def collect(self) -> Iterable[Metric]:
        return (self._part,)


async def scrape(registry: CollectorRegistry, slices: Slices) -> bytearray:
    """Return all metrics in Prometheus' text format.

    Sensors are measured here, in the thread that feeds them, each at its own moment.
    """
    text = bytearray()
    # Not joined in the end: several megabytes take milliseconds.
    await slices.collect(map(text.extend, scrape_pieces(registry)))
    return text


def scrape_pieces(registry: CollectorRegistry) -> Iterator[bytes]:
    """Yield the text that `generate_latest` gives, a few samples in each piece.

    Families must not have `_created` series, which would stand behind the others.
    """
    for family in registry.collect():
        head = generate_latest(_FamilyPart(family, ()))
        yield head
        samples = iter(family.samples)
        while some := tuple(islice(samples, SAMPLES_AT_ONCE)):
            yield generate_latest(_FamilyPart(family, some)).removeprefix(head)
