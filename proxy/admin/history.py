"""Keeps the last ten minutes of rate against bound for the clients closest to their bounds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, zip_longest
from operator import itemgetter

from metrics.clock import MS_PER_SECOND
from proxy.admin.pagination import PageBuilder, PageRequest
from proxy.quota.meter import Meter
from proxy.quota.meters import Clock
from proxy.state import Document

HISTORY_INTERVAL_MS = 5_000.0  # between two samples
SAMPLES = 120  # kept for each series: ten minutes
MAX_SERIES = 200  # about 12 kB each

Series = tuple[tuple[float, float], ...]
"""Rates of a sensor, each with the bound of its time, the oldest first, to the latest tick."""


class RateHistory:
    """Rate and bound over time, for a limited number of sensors.

    When there are more, those stay that came closest to their bound, or furthest above it, in the
    time remembered; shares of the bound compare bytes with percent. A sensor without traffic since
    it was last seen here is not taken in; one that is gone is forgotten. `readings` measures each
    sensor when it is asked for the next.
    """

    def __init__(self, readings: Callable[[Clock], Iterable[tuple[Meter, float]]]) -> None:
        self._readings = readings
        self._series: dict[str, Series] = {}
        """By the names of their sensors."""
        self._next_ms = 0.0
        """When the next sample is due; 0 before the first one."""

    def sample(self, clock_ms: Clock) -> Iterator[None]:
        """Take a sample if it is time to, in small steps, between which `document` may be called.

        To be done every second or so.
        """
        now_ms = clock_ms()
        if now_ms < self._next_ms:
            return
        # From one due time to the next, so that late ticks do not stretch the ten minutes.
        due_ms = self._next_ms or now_ms
        self._next_ms = max(due_ms + HISTORY_INTERVAL_MS, now_ms + HISTORY_INTERVAL_MS / 2)
        highest = PageBuilder[tuple[float, bool, str, Series]](
            PageRequest(MAX_SERIES), urgency=itemgetter(0, 1)
        )
        for meter, measured in self._readings(clock_ms):
            before = self._series.get(meter.name, ())
            if before or measured > 0:
                series = *before[1 - SAMPLES :], (measured, meter.shown_bound)
                peak = max(rate / bound for rate, bound in series)
                highest.add((peak, len(before) > 0, meter.name, series))
            yield
        self._series = {name: series for _, _, name, series in highest.rows()}

    def document(self, of: Meter) -> dict[str, object] | None:
        """Return the samples of a sensor for JSON, or None when there are none.

        `rates` has one figure for each `interval_s`, the oldest first and the last of the latest
        tick. `bounds` has a pair (position in `rates`, bound) wherever the bound changes.
        """
        series = self._series.get(of.name)
        if series is None:
            return None
        rates = [round(rate, 1) for rate, _ in series]
        return chart_document(
            HISTORY_INTERVAL_MS / MS_PER_SECOND, rates, (bound for _, bound in series)
        )


def chart_document(
    interval_s: float, rates: list[float], bounds: Iterable[float]
) -> dict[str, object]:
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
    return chart_document(
        known[0]["interval_s"], list(map(of_interval, rates))[::-1], reversed(of_each)
    )


def _bound_of_each(chart: Document) -> Iterator[float]:
    """Yield the bound for each rate."""
    starts, bound = dict(map(tuple, chart["bounds"])), 0.0
    for position in range(len(chart["rates"])):
        bound = starts.get(position, bound)
        yield bound
