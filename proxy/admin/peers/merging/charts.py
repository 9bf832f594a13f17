"""Puts together what several members remember of one sensor's rates and bounds."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

Chart = Mapping[str, Any]
"""As `History.document` gives it."""


def merged_chart(charts: Sequence[Chart | None]) -> Chart | None:
    """Return the chart of a sensor that several members have; the first is its owner's.

    All end now. In each interval the highest rate counts: what a client moves elsewhere its owner
    counts as well, so that a sum would have it twice; and after a handover each member knows a
    part of the time. Bounds are the owner's where it knows them.
    """
    known = [chart for chart in charts if chart is not None and chart["rates"]]
    if len(known) < 2:  # noqa: PLR2004 - one has nothing to be merged with
        return known[0] if known else next((each for each in charts if each is not None), None)
    length = max(len(chart["rates"]) for chart in known)
    rates = [0.0] * length
    bounds: list[float | None] = [None] * length
    for chart in known:
        offset = length - len(chart["rates"])
        for position, rate in enumerate(chart["rates"]):
            rates[offset + position] = max(rates[offset + position], rate)
        for position, bound in enumerate(_bound_of_each(chart)):
            if bounds[offset + position] is None:
                bounds[offset + position] = bound
    runs = groupby(enumerate(bounds), key=itemgetter(1))
    return {
        "interval_s": known[0]["interval_s"],
        "rates": rates,
        "bounds": [list(next(run)) for _, run in runs],
    }


def _bound_of_each(chart: Chart) -> list[float]:
    """Return the bound for each rate."""
    starts = [position for position, _ in chart["bounds"]]
    ends = [*starts[1:], len(chart["rates"])]
    bounds: list[float] = []
    for (start, bound), end in zip(chart["bounds"], ends, strict=True):
        bounds += [bound] * (end - start)
    return bounds
