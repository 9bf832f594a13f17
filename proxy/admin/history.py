"""Keeps what was measured in the last minutes, for the status.

That is rate against bound, of the clients closest to their bounds; and where requests spent their
time, for each API: in the broker, in the proxy, held.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import groupby, zip_longest
from operator import attrgetter, itemgetter
from typing import Any

from metrics import HistogramChild
from metrics.clock import MS_PER_SECOND
from proxy.admin.pages import Largest
from proxy.quota.entities import QuotaKind
from proxy.quota.meter import Meter
from proxy.quota.meters import Clock
from proxy.state import Document

HISTORY_INTERVAL_MS = 5_000.0  # between two samples of rates
SAMPLES = 120  # kept for each series: ten minutes
MAX_SERIES = 200  # about 12 kB each

SAMPLE_INTERVAL_MS = 15_000.0  # between two samples of times
KEPT_SAMPLES = 20  # with them the figures are of the last five minutes
MAX_APIS_SHOWN = 20  # APIs, those with most requests first
QUANTILES = {"p50_s": 0.5, "p99_s": 0.99}
"""What is shown of each part, in seconds: estimated from buckets, as Prometheus does."""

TIME_PARTS = ("broker", "proxy", "hold")

HISTOGRAMS = "histograms"
"""Key of what the quantiles are estimated from: `bounds` in seconds, and how many are in each
bucket, by part. For who adds several processes up: quantiles cannot be added."""

SensorKey = tuple[str, QuotaKind]
Series = tuple[tuple[float, float], ...]
"""Rates of a sensor, each with the bound of its time, the oldest first, to the latest tick."""


class History:
    """Rate and bound over time, for a limited number of sensors.

    When there are more, those stay that came closest to their bound, or furthest above it, in the
    time remembered; shares of the bound compare bytes with percent. A sensor without traffic since
    it was last seen here is not taken in; one that is gone is forgotten. `readings` measures each
    sensor when it is asked for the next.
    """

    def __init__(self, readings: Callable[[Clock], Iterable[tuple[Meter, float]]]) -> None:
        self._readings = readings
        self._series: dict[SensorKey, Series] = {}
        self._next_ms: float | None = None

    def due(self, now_ms: float) -> bool:
        """Return whether to take a sample now, once for each; ask every second or so."""
        due_ms = now_ms if self._next_ms is None else self._next_ms
        if now_ms < due_ms:
            return False
        # From one due time to the next, so that late ticks do not stretch the ten minutes.
        self._next_ms = max(due_ms + HISTORY_INTERVAL_MS, now_ms + HISTORY_INTERVAL_MS / 2)
        return True

    def sample(self, clock_ms: Clock) -> Iterator[None]:
        """Take a sample in small steps, between which `document` may be called."""
        highest: Largest[tuple[SensorKey, Series]] = Largest(MAX_SERIES)
        for meter, measured in self._readings(clock_ms):
            key = meter.entity, meter.kind
            before = self._series.get(key, ())
            if before or measured > 0:
                series = *before[1 - SAMPLES :], (measured, meter.shown_bound)
                peak = max(rate / bound for rate, bound in series)
                highest.add((peak, len(before) > 0), (key, series))
            yield
        self._series = dict(highest.descending())

    def document(self, of: Meter) -> dict[str, object] | None:
        """Return the samples of a sensor for JSON, or None when there are none.

        `rates` has one figure for each `interval_s`, the oldest first and the last of the latest
        tick. `bounds` has a pair (position in `rates`, bound) wherever the bound changes.
        """
        series = self._series.get((of.entity, of.kind))
        if series is None:
            return None
        rates = [round(rate, 1) for rate, _ in series]
        return chart(HISTORY_INTERVAL_MS / MS_PER_SECOND, rates, (bound for _, bound in series))


def chart(interval_s: float, rates: list[float], bounds: Iterable[float]) -> dict[str, object]:
    """Return rates and the bound of each as a document has them."""
    runs = groupby(enumerate(bounds), key=itemgetter(1))
    return {"interval_s": interval_s, "rates": rates, "bounds": [next(run) for _, run in runs]}


def merged_chart(
    charts: Sequence[Document | None], of_interval: Callable[[Iterable[float]], float] = max
) -> Document | None:
    """Return the chart of a sensor that several members have; the first is its owner's.

    All end now. `of_interval` makes one rate of those of an interval. That is the highest: what a
    client moves elsewhere its owner counts as well, so that a sum would have it twice; and after a
    handover each member knows a part of the time. Bounds are the owner's where it knows them.
    """
    known = [each for each in charts if each is not None]
    if not known:
        return None
    rates = zip_longest(*(reversed(chart["rates"]) for chart in known), fillvalue=0.0)
    bounds = zip_longest(*(reversed(list(_bound_of_each(chart))) for chart in known))
    of_each = [next(bound for bound in column if bound is not None) for column in bounds]
    return chart(known[0]["interval_s"], list(map(of_interval, rates))[::-1], reversed(of_each))


def _bound_of_each(chart: Document) -> Iterator[float]:
    """Yield the bound for each rate."""
    starts, bound = dict(map(tuple, chart["bounds"])), 0.0
    for position in range(len(chart["rates"])):
        bound = starts.get(position, bound)
        yield bound


class RequestTimes:
    """The histograms of all APIs, less what they were five minutes ago.

    `apis` has an object for each, with its histograms as TIME_PARTS.
    """

    def __init__(self, apis: Mapping[str, object]) -> None:
        self._apis = apis
        self._samples: deque[dict[str, list[list[int]]]] = deque(maxlen=KEPT_SAMPLES)
        self._next_ms = -SAMPLE_INTERVAL_MS

    def sample(self, now_ms: float) -> None:
        """Remember the histograms of now, if it is time to."""
        if now_ms >= self._next_ms:
            self._next_ms = now_ms + SAMPLE_INTERVAL_MS
            self._samples.append(
                {api: [list(child.counts) for child in parts] for api, parts in self._histograms()}
            )

    def documents(self) -> list[Document]:
        """Return a document for each API that had requests measured, with HISTOGRAMS."""
        before = self._samples[0] if self._samples else {}
        return _busiest(_document(api, parts, before.get(api)) for api, parts in self._histograms())

    def _histograms(self) -> Iterator[tuple[str, Sequence[HistogramChild]]]:
        parts = attrgetter(*TIME_PARTS)
        return ((api, parts(each)) for api, each in self._apis.items())


def _document(
    api: str, parts: Sequence[HistogramChild], before: Sequence[Sequence[int]] | None
) -> Document:
    old = before or [[0] * len(child.counts) for child in parts]
    histograms: dict[str, dict[str, Any]] = {
        name: {
            "bounds": list(child.bounds),
            "counts": [now - then for now, then in zip(child.counts, counts, strict=True)],
        }
        for name, child, counts in zip(TIME_PARTS, parts, old, strict=True)
    }
    times = {name: _quantiles(**each) for name, each in histograms.items()}
    measured = sum(histograms[TIME_PARTS[0]]["counts"])
    return {"api": api, "measured": measured, HISTOGRAMS: histograms, **times}


def merged_times(documents: Iterable[Document]) -> list[Document]:
    """Return the documents of some processes as those of one, without histograms.

    Where one has no histograms, or buckets of its own, the longest times of all are given.
    """
    by_api: dict[str, list[Document]] = {}
    for each in documents:
        by_api.setdefault(each["api"], []).append(each)
    return _busiest(
        {
            "api": api,
            "measured": sum(each["measured"] for each in found),
            **{part: _merged_part(part, found) for part in TIME_PARTS},
        }
        for api, found in by_api.items()
    )


def _busiest(documents: Iterable[Document]) -> list[Document]:
    measured = (each for each in documents if each["measured"])
    return nlargest(MAX_APIS_SHOWN, measured, key=itemgetter("measured"))


def _merged_part(part: str, documents: Sequence[Document]) -> dict[str, float]:
    counted = [each.get(HISTOGRAMS, {}).get(part) for each in documents]
    bounds = counted[0] and counted[0]["bounds"]
    if bounds and all(each and each["bounds"] == bounds for each in counted):
        columns = zip(*(each["counts"] for each in counted), strict=True)
        return _quantiles(bounds, list(map(sum, columns)))
    return {key: max(each[part][key] for each in documents) for key in QUANTILES}


def _quantiles(bounds: Sequence[float], counts: Sequence[int]) -> dict[str, float]:
    return {key: quantile(share, bounds, counts) for key, share in QUANTILES.items()}


def quantile(share: float, bounds: Sequence[float], counts: Sequence[int]) -> float:
    """Return the value below which this share of what was counted lies; 0 for nothing counted.

    Within a bucket all values count as evenly spread. Of the last one, which has no upper bound,
    its lower bound is given.
    """
    rank, seen, lower = share * sum(counts), 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and seen + count >= rank:
            return lower + (bound - lower) * (rank - seen) / count
        seen, lower = seen + count, bound
    return lower if seen < sum(counts) else 0.0
