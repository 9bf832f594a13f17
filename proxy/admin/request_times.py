"""Where requests spent their time of late: in the broker, in the proxy, held; for each API."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from metrics import HistogramChild

SAMPLE_INTERVAL_MS = 15_000.0
KEPT_SAMPLES = 20
"""With them the figures are of the last five minutes."""

MAX_SHOWN = 20  # APIs, those with most requests first
MEDIAN, HIGH = 0.5, 0.99

PARTS = ("broker", "proxy", "hold")

Parts = tuple[HistogramChild, HistogramChild, HistogramChild]
"""In the order of PARTS."""


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
        return [document for _, document in found[:MAX_SHOWN]]

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
                times = zip(PARTS, map(_part_time, parts, recent), strict=True)
                shown = {name: time._asdict() for name, time in times}
                yield measured, {"api": api, "measured": measured, **shown}


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
