"""Combine what several members show for the same series."""

import math
from collections.abc import Callable, Mapping, Sequence

from prometheus_client.utils import floatToGoString

from .family_text import Series, Values
from .merge_rules import MAX, MIN, OWNED, SUM, GaugeRule

_SHARED = (b'quota_entity="other', b'partition="other"')
"""In a series that stands for different things at each member: the sensors of clients without room,
`other` or `other,RULE`, and the partitions without room."""

NOTHING: Mapping[Series, float] = {}


def combine(
    members: Sequence[Values], rule: GaugeRule = SUM, base: Mapping[Series, float] = NOTHING
) -> dict[Series, bytes]:
    """Return the values of all series, those of the first member first.

    A series that one member alone has is written as that one wrote it. `base` is added to what SUM
    gives, its series stand behind the others.
    """
    combined: dict[Series, bytes] = {}
    shared: set[Series] = set()
    for values in members:
        shared |= combined.keys() & values.keys()
        combined.update(values)
    for series in base:
        combined.setdefault(series, b"")
        shared.add(series)
    of = _VALUES[rule]
    for series in shared:
        found = [float(values[series]) for values in members if series in values]
        if series in base:
            found.append(base[series])
        combined[series] = _written(of(series, found))
    return combined


def _written(value: float) -> bytes:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text.encode()


def added(values: Sequence[float]) -> float:
    """Return the sum, rounded once: so it cannot fall when no value does."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinite ones of both signs, or beyond all numbers
        return sum(values)


def _highest(values: Sequence[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _lowest(values: Sequence[float]) -> float:
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def _of_owner(series: Series, values: Sequence[float]) -> float:
    is_shared = any(each in series for each in _SHARED)
    return added(values) if is_shared else _highest(values)


_VALUES: Mapping[GaugeRule, Callable[[Series, Sequence[float]], float]] = {
    SUM: lambda _, values: added(values),
    MIN: lambda _, values: _lowest(values),
    MAX: lambda _, values: _highest(values),
    OWNED: _of_owner,
}
