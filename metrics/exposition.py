"""Show figures of things that come and go, and the scrapes of several members as one.

Each scrape looks at the things that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias, cast

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

PREFIX = "kafka_quota_proxy_"
OTHER = "other"
"""Value of an open label once there are too many sets."""

_HELP = b"# HELP "

TOTAL = "_total"
HIGHEST = "_seconds"
"""How names end whose highest value is shown under `other`, in place of the sum."""

ValueOf: TypeAlias = Callable[[Any, float], float | None]
"""Return the value of a thing at a time; None, where it is not known, is not shown."""


def join_scrapes(scrapes: Iterable[bytes]) -> list[memoryview]:
    """Return the parts of one text of several, each as `generate_latest` writes it.

    No series is in two. Each family has the HELP and TYPE of the first scrape that has it, and the
    samples of all as they are written. Nothing is copied: one step for megabytes would keep all
    other threads waiting.
    """
    families: dict[bytes, list[memoryview]] = {}
    for scrape in scrapes:
        text = memoryview(scrape)
        with suppress(IndexError, ValueError):  # what another process says may be cut off
            for start, end in pairwise([*_family_starts(scrape), len(scrape)]):
                type_line = scrape.index(b"\n", start) + 1
                samples = scrape.index(b"\n", type_line) + 1
                name = scrape[start + len(_HELP) : type_line].split()[0]
                parts = families.setdefault(name, [text[start:samples]])
                if samples < end:
                    parts.append(text[samples:end])
    return list(chain.from_iterable(families.values()))


def lazy_family(name: str, text: str, kind: str, samples: Iterator[Sample]) -> Family:
    """Return a family whose samples are made as they are read, which can be done once."""
    family = Family(name, text, kind)
    family.samples = cast(list[Sample], samples)
    return family


def child_samples(child: Collector, labels: Mapping[str, str]) -> Iterator[Sample]:
    """Yield the samples of one label set of a metric, with these labels before their own."""
    for family in child.collect():
        for sample in family.samples:
            yield sample._replace(labels={**labels, **sample.labels})


def _family_starts(scrape: bytes) -> Iterator[int]:
    """Yield where the lines with HELP begin; a single byte is looked for, which is fast."""
    at = -1
    while (at := scrape.find(b"#", at + 1)) >= 0:
        # In a label a line's end is escaped: what begins a line is never part of one.
        if scrape.startswith(_HELP, at) and scrape[at - 1 : at] in (b"\n", b""):
            yield at


class MetricTable(NamedTuple):
    """Gauges, and counters, whose names end in TOTAL: the text and the value of each."""

    labels: tuple[str, ...]
    figures: Mapping[str, tuple[str, ValueOf]]


_DROPPED = "Log lines that could not be written."

OF_LOG = MetricTable((), {"log_lines_dropped_total": (_DROPPED, lambda log, _: log.dropped)})
"""A process has one log, whatever it relays."""


MetricRows: TypeAlias = Iterable[tuple[tuple[str, ...], object]]
"""Things with the values of their labels, no two the same. Others may come and go between two."""


class MetricTableCollector(Collector):
    """A prometheus_client collector of tables, each with who lists its rows at a scrape.

    The first `max_label_sets` rows of a table (ValueError: below 1) have series of their own, in
    the order in which they came. The others are added up, with OTHER for all labels. Scrape in the
    thread that changes the things.
    """

    def __init__(
        self,
        tables: Iterable[tuple[MetricTable, Callable[[], MetricRows]]],
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
                yield lazy_family(PREFIX + name.removesuffix(TOTAL), text, kind, samples)

    def _samples(
        self, name: str, labels: tuple[str, ...], rows: MetricRows, value_of: ValueOf
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
