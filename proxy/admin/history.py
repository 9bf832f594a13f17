"""Keeps the last ten minutes of rate against bound for the clients closest to their bounds."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import nlargest
from itertools import groupby

from proxy.quota.entities import QuotaKind
from proxy.quota.meter import QuotaRow

INTERVAL_MS = 5_000.0
"""Between two samples."""

SAMPLES = 120
"""Samples kept for each series: ten minutes."""

MAX_SERIES = 200
"""How many series are kept; about 5 kB each."""

MS_PER_SECOND = 1000.0

Key = tuple[str, QuotaKind]
Snapshot = Callable[[float], Sequence[QuotaRow]]


class _Series:
    """Samples of one sensor, the oldest first; the last is of the latest tick."""

    __slots__ = ("bounds", "rates")

    def __init__(self, samples: int) -> None:
        self.rates: deque[float] = deque(maxlen=samples)
        self.bounds: deque[float] = deque(maxlen=samples)

    def add(self, row: QuotaRow) -> None:
        self.rates.append(row.rate)
        self.bounds.append(row.bound)

    def peak(self) -> float:
        """Return the highest share of the bound."""
        return max(map(_share, self.rates, self.bounds))


class History:
    """Rate and bound over time, for a limited number of sensors.

    When there are more, those stay that came closest to their bound, or furthest above it, in the
    time remembered; shares of the bound compare bytes with percent. A sensor without traffic since
    it was last seen here is not taken in; one that is gone is forgotten.

    Args:
        snapshot: gives the rows of a time, `QuotaManager.snapshot`.
        interval_ms: between two samples; above 0.
        samples: how many are kept of each series.
        max_series: how many series are kept.

    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        interval_ms: float = INTERVAL_MS,
        samples: int = SAMPLES,
        max_series: int = MAX_SERIES,
    ) -> None:
        self._snapshot = snapshot
        self._interval_ms = interval_ms
        self._samples = samples
        self._max_series = max_series
        self._series: dict[Key, _Series] = {}
        self._next_ms: float | None = None

    def __len__(self) -> int:
        """How many series are kept."""
        return len(self._series)

    def tick(self, now_ms: float) -> bool:
        """Take a sample if one is due; call it every second or so. Returns whether it was.

        Args:
            now_ms: the monotonic time.

        """
        due_ms = now_ms if self._next_ms is None else self._next_ms
        if now_ms < due_ms:
            return False
        # From one due time to the next, so that late ticks do not stretch the ten minutes.
        self._next_ms = max(due_ms + self._interval_ms, now_ms + self._interval_ms / 2)
        rows = {(row.entity, row.kind): row for row in self._snapshot(now_ms)}
        self._series = {key: kept for key, kept in self._series.items() if key in rows}
        new = (key for key, row in rows.items() if row.rate > 0 and key not in self._series)
        for key in nlargest(self._max_series, new, key=lambda key: share(rows[key])):
            self._series[key] = _Series(self._samples)
        for key, kept in self._series.items():
            kept.add(rows[key])
        if len(self._series) > self._max_series:
            self._series = dict(
                nlargest(self._max_series, self._series.items(), key=lambda item: item[1].peak())
            )
        return True

    def document(self, row: QuotaRow) -> dict[str, object] | None:
        """Return the samples of a row's sensor for JSON, or None when there are none.

        `rates` has one figure for each `interval_s`, the oldest first and the last of the latest
        tick. `bounds` has a pair (position in `rates`, bound) wherever the bound changes.
        """
        series = self._series.get((row.entity, row.kind))
        if series is None:
            return None
        return {
            "interval_s": self._interval_ms / MS_PER_SECOND,
            "rates": [round(rate, 1) for rate in series.rates],
            "bounds": list(_changes(series.bounds)),
        }


def share(row: QuotaRow) -> float:
    """Return a row's rate as a share of its bound; above 1 is over it."""
    return _share(row.rate, row.bound)


def _share(rate: float, bound: float) -> float:
    return rate / bound


def _changes(bounds: Iterable[float]) -> Iterable[tuple[int, float]]:
    for bound, run in groupby(enumerate(bounds), key=lambda pair: pair[1]):
        yield next(run)[0], bound
