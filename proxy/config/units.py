"""Sizes and durations as people write them in YAML: `10MiB`, `20s`."""

import re
from decimal import Decimal
from typing import Final

from proxy.config.problems import BadValueError, shown

Seconds = float
"""A duration in seconds. Kafka counts in milliseconds; who hands one on to it converts."""

SIZE_UNITS: Final = {
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
"""Bytes in each unit of size. Case counts: `mB` is nothing that anyone means."""

DURATION_UNITS: Final = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
}
"""Seconds in each unit of time."""

MAX_SIZE_BYTES: Final = 2**63 - 1
"""The largest size: what a signed 64 bit counter, Kafka's own type for sizes, can hold."""

MAX_DURATION_S: Final = Decimal(365 * 24 * 3600)
"""The longest duration, a year: more is a slip, and far more overflows the clocks below."""

_NUMBER_AND_UNIT = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>.*)", re.ASCII)
_SIZE_FIX = f"write whole bytes, or a number and one of {' '.join(SIZE_UNITS)}, such as 10MiB"
_DURATION_FIX = f"write a number and one of {' '.join(DURATION_UNITS)}, such as 20s"


def parse_size(value: object) -> int:
    """Read a size: a whole number of bytes, or a number and a unit from `SIZE_UNITS`.

    A fraction such as `1.5MiB` is rounded to whole bytes.

    Returns:
        Bytes, from 1 to `MAX_SIZE_BYTES`.

    Raises:
        BadValueError: for anything else.

    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise BadValueError(f"{shown(value)} is not a size", _SIZE_FIX)
    size = Decimal(value) if isinstance(value, int) else _size_in_bytes(value)
    size_bytes = int(size.to_integral_value())
    if size_bytes <= 0:
        raise BadValueError(f"{shown(value)} is not above 0 bytes", _SIZE_FIX)
    if size_bytes > MAX_SIZE_BYTES:
        raise BadValueError(f"{shown(value)} is larger than 2^63-1 bytes", "write a smaller size")
    return size_bytes


def _size_in_bytes(text: str) -> Decimal:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise BadValueError(f"{shown(text)} is not a size", _SIZE_FIX)
    number, unit = match["number"], match["unit"]
    if unit in SIZE_UNITS:
        return Decimal(number) * SIZE_UNITS[unit]
    if not unit and "." not in number:
        return Decimal(number)
    if not unit:
        raise BadValueError(f"{shown(text)} is a fraction of bytes", _SIZE_FIX)
    raise BadValueError(f"{shown(text)} is not a size", _likely_sizes(number, unit.strip()))


def _likely_sizes(number: str, unit: str) -> str:
    """Say what `10mb`, `10M` or `10MiB/s` may have meant."""
    start = unit[:1].lower()
    binary = unit[1:2].lower() == "i"
    likely = [
        f"{number}{name} ({int(Decimal(number) * size_bytes):,} bytes)"
        for name, size_bytes in SIZE_UNITS.items()
        if name[0].lower() == start and ("i" in name or not binary)
    ]
    return f"write {' or '.join(likely)}" if likely else _SIZE_FIX


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

    Raises:
        BadValueError: as `parse_duration`, except for 0.

    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadValueError(f"{shown(value)} is not a duration", _DURATION_FIX)
    match = _NUMBER_AND_UNIT.fullmatch(str(value))
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
    """Say what `20S`, `20 s`, `20sec` or `500msec` may have meant."""
    word = unit.lower()
    if not word.isalpha():
        return _DURATION_FIX
    for start, name in (("ms", "ms"), ("mil", "ms"), ("s", "s"), ("m", "m"), ("h", "h")):
        if word.startswith(start):
            return f"write {number}{name}"
    return _DURATION_FIX


def format_size(size_bytes: int) -> str:
    """Write a size in the shortest form that `parse_size` reads back unchanged."""
    forms = [str(size_bytes)]
    for name, unit_bytes in SIZE_UNITS.items():
        if size_bytes % unit_bytes == 0:
            forms.append(f"{size_bytes // unit_bytes}{name}")
    return min(forms, key=len)


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
