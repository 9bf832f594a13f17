"""Durations as people write them in YAML: `20s`, `500ms`."""

from decimal import Decimal
from typing import Final

from proxy.quota.values import NUMBER_AND_UNIT, BadValueError, shown

Seconds = float
"""A duration in seconds. Kafka counts in milliseconds; who hands one on to it converts."""

DURATION_UNITS: Final = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
}
"""Seconds in each unit of time."""

MAX_DURATION_S: Final = Decimal(365 * 24 * 3600)
"""The longest duration, a year: more is a slip, and far more overflows the clocks below."""

MIN_INTERVAL_S: Final = 0.001
"""The shortest batch interval: Spark counts in milliseconds."""

_DURATION_FIX = f"write a number and one of {' '.join(DURATION_UNITS)}, such as 20s"


def parse_duration(value: object) -> Seconds:
    """Read a duration above 0: a number and a unit from `DURATION_UNITS`.

    Returns:
        Seconds, above 0 and at most `MAX_DURATION_S`.

    Raises:
        BadValueError: for anything else; a plain number too, because nobody can see its unit.

    """
    seconds = parse_duration_or_zero(value)
    if seconds <= 0:
        raise BadValueError(f"{shown(value)} is not above 0", _DURATION_FIX)
    return seconds


def parse_duration_or_zero(value: object) -> Seconds:
    """Read a duration that may be 0; a 0 needs no unit.

    Raises BadValueError as `parse_duration`, except for 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadValueError(f"{shown(value)} is not a duration", _DURATION_FIX)
    match = NUMBER_AND_UNIT.fullmatch(str(value))
    if match is None:
        raise BadValueError(f"{shown(value)} is not a duration", _DURATION_FIX)
    number, unit = match["number"], match["unit"]
    if not unit and Decimal(number) == 0:
        return 0.0
    if not unit:
        raise BadValueError(f"{shown(value)} has no unit", f"write {number}s or {number}ms")
    if unit not in DURATION_UNITS:
        raise BadValueError(
            f"{shown(value)} is not a duration", _likely_duration(number, unit.strip())
        )
    seconds = Decimal(number) * DURATION_UNITS[unit]
    if seconds > MAX_DURATION_S:
        raise BadValueError(f"{shown(value)} is more than a year", "write a shorter duration")
    return float(seconds)


def _likely_duration(number: str, unit: str) -> str:
    """Return what `20S`, `20 s`, `20sec` or `500msec` may have meant."""
    word = unit.lower()
    if not word.isalpha():
        return _DURATION_FIX
    for start, name in (("ms", "ms"), ("mil", "ms"), ("s", "s"), ("m", "m"), ("h", "h")):
        if word.startswith(start):
            return f"write {number}{name}"
    return _DURATION_FIX


def format_duration(seconds: Seconds) -> str:
    """Write a duration in its largest whole unit; `parse_duration_or_zero` reads it back."""
    exact = Decimal(repr(seconds))
    for name in ("h", "m", "s"):
        count = exact / DURATION_UNITS[name]
        if exact and count == count.to_integral_value():
            return f"{int(count)}{name}"
    return f"{(exact / DURATION_UNITS['ms']).normalize():f}ms"


def format_number(number: float) -> str:
    """Write a finite number in digits alone: 1000000, not 1e6 or 1000000.0."""
    return f"{Decimal(repr(number)).normalize():f}"
