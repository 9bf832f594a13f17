"""Where requests spent their time of late: in the broker, in the proxy, held; for each API."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from operator import itemgetter
from typing import Any, NamedTuple

from metrics import HistogramChild

SAMPLE_INTERVAL_MS = 15_000.0
KEPT_SAMPLES = 20
"""With them the figures are of the last five minutes."""

MAX_APIS_SHOWN = 20  # APIs, those with most requests first
MEDIAN, HIGH = 0.5, 0.99

TIME_PARTS = ("broker", "proxy", "hold")

HISTOGRAMS = "histograms"
"""Key of what the quantiles are estimated from: `bounds` in seconds, and how many are in each
bucket, by part. For who adds several processes up: quantiles cannot be added."""

Parts = tuple[HistogramChild, HistogramChild, HistogramChild]
"""In the order of TIME_PARTS."""


class PartTime(NamedTuple):
    """Of one part, in seconds; estimated from buckets, as Prometheus does."""

    p50_s: float
    p99_s: float


class RequestTimes:
    """The histograms of all APIs, less what they were five minutes ago."""

    def __init__(self, histograms: Callable[[], Mapping[str, Parts]]) -> None:
        self._histograms = histograms
        self._samples: deque[dict[str, list[list[int]]]] = deque(maxlen=KEPT_SAMPLES)
        self._next_ms = -SAMPLE_INTERVAL_MS

    def sample(self, now_ms: float) -> None:
        """Remember the histograms of now, if it is time to."""
        if now_ms >= self._next_ms:
            self._next_ms = now_ms + SAMPLE_INTERVAL_MS
            self._samples.append(
                {
                    api: [list(child.counts) for child in parts]
                    for api, parts in self._histograms().items()
                }
            )

    def documents(self) -> list[Mapping[str, object]]:
        """Return a document for each API that had requests measured."""
        found = sorted(self._documents(), key=lambda each: each[0], reverse=True)
        return [document for _, document in found[:MAX_APIS_SHOWN]]

    def _documents(self) -> Iterator[tuple[int, Mapping[str, object]]]:
        before = self._samples[0] if self._samples else {}
        for api, parts in self._histograms().items():
            old = before.get(api) or [[0] * len(child.counts) for child in parts]
            recent = [
                [now - then for now, then in zip(child.counts, counts, strict=True)]
                for child, counts in zip(parts, old, strict=True)
            ]
            measured = sum(recent[0])
            if measured:
                times = zip(TIME_PARTS, map(_part_time, parts, recent), strict=True)
                shown = {name: time._asdict() for name, time in times}
                counted = {
                    name: {"bounds": list(child.bounds), "counts": counts}
                    for name, child, counts in zip(TIME_PARTS, parts, recent, strict=True)
                }
                about = {"api": api, "measured": measured, HISTOGRAMS: counted}
                yield measured, {**about, **shown}


def merged_times(documents: Iterable[Mapping[str, Any]]) -> list[Mapping[str, object]]:
    """Return the documents of several processes as those of one, without histograms.

    Where one has no histograms, or buckets of its own, the longest times of all are given.
    """
    by_api: dict[str, list[Mapping[str, Any]]] = {}
    for each in documents:
        by_api.setdefault(each["api"], []).append(each)
    merged: list[Mapping[str, object]] = [
        {
            "api": api,
            "measured": sum(each["measured"] for each in found),
            **{part: _merged_part(part, found)._asdict() for part in TIME_PARTS},
        }
        for api, found in by_api.items()
    ]
    return nlargest(MAX_APIS_SHOWN, merged, key=itemgetter("measured"))


def without_histograms(document: Mapping[str, Any]) -> Mapping[str, object]:
    """Return a document as people are shown it."""
    return {key: value for key, value in document.items() if key != HISTOGRAMS}


def _merged_part(part: str, documents: Sequence[Mapping[str, Any]]) -> PartTime:
    counted = [each.get(HISTOGRAMS, {}).get(part) for each in documents]
    bounds = counted[0] and counted[0]["bounds"]
    if bounds and all(each and each["bounds"] == bounds for each in counted):
        counts = [sum(column) for column in zip(*(each["counts"] for each in counted), strict=True)]
        return PartTime(*(quantile(share, bounds, counts) for share in (MEDIAN, HIGH)))
    return PartTime(*(max(each[part][key] for each in documents) for key in PartTime._fields))


def _part_time(child: HistogramChild, counts: Sequence[int]) -> PartTime:
    return PartTime(*(quantile(share, child.bounds, counts) for share in (MEDIAN, HIGH)))


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
