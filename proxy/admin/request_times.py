"""Where requests spent their time of late: in the broker, in the proxy, held; for each API.

And how late the event loop is: what every client of the proxy waits for as well.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from operator import attrgetter, itemgetter
from typing import Any

from metrics import HistogramChild
from metrics.clock import MS_PER_SECOND
from proxy.state import Document

SAMPLE_INTERVAL_MS = 15_000.0
KEPT_SAMPLES = 20  # with them the figures are of the last five minutes
MAX_APIS_SHOWN = 20  # APIs, those with most requests first
QUANTILES = {"p50_s": 0.5, "p99_s": 0.99}
"""What is shown of each part, in seconds: estimated from buckets, as Prometheus does."""

TIME_PARTS = ("broker", "proxy", "hold")

HISTOGRAMS = "histograms"
"""Key of what the quantiles are estimated from: `bounds` in seconds, and how many are in each
bucket, by part. For who adds several processes up: quantiles cannot be added."""


class RecentKafkaApiTimes:
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


LAG_INTERVAL_S = 0.1
"""Between two measurements. A stall that is longer is always seen; they cost some 0.02 % of a
core."""


async def watch_loop_lag(observe: Callable[[float], None], clock_ms: Callable[[], float]) -> None:
    """Call `observe` with how late a timer was, in seconds, until cancelled."""
    while True:
        due_ms = clock_ms() + LAG_INTERVAL_S * MS_PER_SECOND
        await asyncio.sleep(LAG_INTERVAL_S)
        observe(max(clock_ms() - due_ms, 0.0) / MS_PER_SECOND)
