"""Keep what members have counted, so that no counter of a machine goes back when one restarts."""

import math
import re
from collections.abc import Collection, Iterator, Mapping

from .combined_values import combine
from .family_text import Series, Values

LEAST_KEPT_SETS = 1000
"""Room for the labels that clients do not choose, however few clients are to have series."""

_LE = re.compile(rb'(?:^|(?<=,))le="[^"]*",?')
_SUM = b"_sum"


class KeptCounters:
    """One family of counters or histograms: last values by member, and the base of each series.

    The base is what members have counted that do not show it any more. What a member's earlier run
    counted stays in it. Of clients that a running member forgot, it stays while another member
    shows the same series, which would fall otherwise; else the series ends, as with one process.
    Series that nobody shows any more are kept for `max_label_sets` sets of labels at most (but
    LEAST_KEPT_SETS): the oldest end then, and begin at 0 when they come again.
    """

    def __init__(self, *, is_histogram: bool, max_label_sets: int) -> None:
        self._is_histogram = is_histogram
        self._max_sets = max(max_label_sets, LEAST_KEPT_SETS)
        self._last: dict[str, Values] = {}
        self._base: dict[Series, float] = {}  # the latest additions last

    def take(self, answers: Mapping[str, Values], ended: Collection[str]) -> None:
        """Replace last values; `ended` are members whose last ones are those of a dead run.

        A member in neither of them keeps its own.
        """
        for member in ended:
            for series, last in self._last.pop(member, {}).items():
                self._add(series, float(last))
        forgotten: list[tuple[str, Series, float]] = []
        for member, values in answers.items():
            before = self._last.get(member, {})
            gone = self._forgotten(before, values)
            forgotten += ((member, series, float(before[series])) for series in gone)
            self._last[member] = values
        for member, series, value in forgotten:
            if any(series in shown for other, shown in self._last.items() if other != member):
                self._add(series, value)
            else:
                self._base.pop(series, None)
        if len(self._base) > self._max_sets:
            self._trim()

    def values(self) -> dict[Series, bytes]:
        """Return what all members have counted together."""
        return combine(tuple(self._last.values()), base=self._base)

    def __len__(self) -> int:
        """Return how many values are kept."""
        return sum(map(len, self._last.values())) + len(self._base)

    def _add(self, series: Series, value: float) -> None:
        base = self._base.pop(series, 0.0)
        total = base + value
        # Rounded up, as the sum with what other members show would fall otherwise.
        if math.isfinite(total) and math.fsum((base, value, -total)) > 0:
            total = math.nextafter(total, math.inf)
        self._base[series] = total

    def _forgotten(self, before: Values, after: Values) -> Iterator[Series]:
        """Yield the series of a run that ended, and those that began anew since."""
        fallen = []
        for series, value in before.items():
            now = after.get(series)
            if now is None:
                yield series
            elif now != value and float(now) < float(value):
                fallen.append(series)
        if not self._is_histogram:
            yield from fallen
        elif fallen:
            # All of one histogram together, or its buckets would not fit each other. Its sum may
            # fall by itself.
            sets = {_label_set(series) for series in fallen if not _is_sum(series)}
            yield from (each for each in before if each in after and _label_set(each) in sets)

    def _trim(self) -> None:
        shown = set[Series]().union(*self._last.values())
        hidden: dict[bytes, list[Series]] = {}
        for series in self._base:
            if series not in shown:
                label_set = _label_set(series) if self._is_histogram else series
                hidden.setdefault(label_set, []).append(series)
        for label_set in list(hidden)[: -self._max_sets]:
            for series in hidden[label_set]:
                del self._base[series]


def _label_set(series: Series) -> bytes:
    """Return the labels of one of a histogram's series, but for its bucket's bound."""
    labels = series.partition(b"{")[2]
    return _LE.sub(b"", labels).rstrip(b"},")


def _is_sum(series: Series) -> bool:
    return series.partition(b"{")[0].endswith(_SUM)
