"""Show figures of things that come and go: each scrape looks at those that are there."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from .exposition import PREFIX, streamed
from .instruments import OTHER

TOTAL = "_total"
HIGHEST = "_seconds"
"""How names end whose highest value is shown under `other`, in place of the sum."""

ValueOf: TypeAlias = Callable[[Any, float], float | None]
"""Return the value of a thing at a time; None, where it is not known, is not shown."""


class FigureTable(NamedTuple):
    """Gauges, and counters, whose names end in TOTAL: the text and the value of each."""

    labels: tuple[str, ...]
    figures: Mapping[str, tuple[str, ValueOf]]


FigureRows: TypeAlias = Iterable[tuple[tuple[str, ...], object]]
"""Things with the values of their labels, no two the same. Others may come and go between two."""


class FigureCollector(Collector):
    """A prometheus_client collector of tables, each with who lists its rows at a scrape.

    The first `max_label_sets` rows of a table (ValueError: below 1) have series of their own, in
    the order in which they came. The others are added up, with OTHER for all labels. Scrape in the
    thread that changes the things.
    """

    def __init__(
        self,
        tables: Iterable[tuple[FigureTable, Callable[[], FigureRows]]],
        clock_ms: Callable[[], float],
        max_label_sets: int,
    ) -> None:
        if max_label_sets < 1:
            raise ValueError(f"max_label_sets must be 1 or more, not {max_label_sets}")
        self._tables = tuple(tables)
        self._clock_ms = clock_ms
        self.max_label_sets = max_label_sets

    def collect(self) -> Iterable[Family]:
        """Yield the families.

        A thing is looked at when its sample is read, which can be done once. So who reads thousands
        of them can do other work between two.
        """
        for (labels, figures), list_rows in self._tables:
            for name, (text, value_of) in figures.items():
                kind = "counter" if name.endswith(TOTAL) else "gauge"
                samples = self._samples(PREFIX + name, labels, list_rows(), value_of)
                yield streamed(PREFIX + name.removesuffix(TOTAL), text, kind, samples)

    def _samples(
        self, name: str, labels: tuple[str, ...], rows: FigureRows, value_of: ValueOf
    ) -> Iterator[Sample]:
        others: float | None = None
        for number, (values, thing) in enumerate(rows):
            value = value_of(thing, self._clock_ms())
            if value is None:
                continue
            if number < self.max_label_sets:
                yield Sample(name, dict(zip(labels, values, strict=True)), value)
            elif others is None:
                others = value
            else:
                others = max(others, value) if name.endswith(HIGHEST) else others + value
        if others is not None:
            yield Sample(name, dict.fromkeys(labels, OTHER), others)
