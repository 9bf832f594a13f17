"""Values as people write them: sizes, durations, numbers, and what to say of a bad one."""

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Final

from metrics.clock import MS_PER_SECOND

SIZE_UNITS: Final = dict(kB=10**3, MB=10**6, GB=10**9, KiB=2**10, MiB=2**20, GiB=2**30)  # noqa: C408
"""Bytes in each unit of size. Case counts: `mB` is nothing that anyone means."""

MAX_SIZE_BYTES: Final = 2**63 - 1
"""The largest size: what a signed 64 bit counter, Kafka's own type for sizes, can hold."""

MAX_COUNT: Final = 2**31 - 1
"""The largest number of things."""

MAX_NUMBER: Final = 10**12
"""The largest rate, gain or percentage: more is a slip, and far more overflows what is computed."""

MIN_NUMBER: Final = 1e-9
"""The smallest but 0, also of weights: less is a slip, and what far less divides is infinite."""

MAX_DIGITS: Final = 400
"""Before the point, and behind it, where the smallest float needs most of them. To compute with
millions of them takes minutes."""

_DIGITS = rf"[0-9]{{1,{MAX_DIGITS}}}"
NUMBER_AND_UNIT: Final = re.compile(
    rf"(?P<number>{_DIGITS}(?:\.{_DIGITS})?)(?P<unit>[^0-9].*|)", re.ASCII
)

DURATION_UNITS: Final = {
    name: Decimal(value) for name, value in (("ms", "0.001"), ("s", 1), ("m", 60), ("h", 3600))
}
"""Seconds in each unit of time."""

MAX_DURATION_S: Final = Decimal(365 * 24 * 3600)
"""The longest duration, a year: more is a slip, and far more overflows the clocks below."""

_SIZE_FIX = f"write whole bytes, or a number and one of {' '.join(SIZE_UNITS)}, such as 10MiB"
_DURATION_FIX = f"write a number and one of {' '.join(DURATION_UNITS)}, such as 20s"

_EXPONENT: Final = re.compile(r"[-+]?[0-9]+(\.[0-9]+)?[eE][-+]?[0-9]+", re.ASCII)
"""A number with an exponent. PyYAML takes most of them for text; Helm writes small numbers so."""
_COUNT_FIX = "write a number of 1 or more without quotes, such as 100"
_SHOWN_LENGTH = 60


class BadValueError(ValueError):
    """A value that cannot be used: `message` says what is wrong with it, `fix` how to mend it.

    `key` is the part of the value that is meant, or empty.
    """

    def __init__(self, message: str, fix: str, key: str = "") -> None:
        super().__init__(message)
        self.message, self.fix, self.key = message, fix, key


def shown(value: object) -> str:
    """Name a value in a message: text in quotes, a collection by its kind."""
    match value:
        case None:
            return "nothing"
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case str():
            more = "..." if len(value) > _SHOWN_LENGTH else ""
            return f'"{value[:_SHOWN_LENGTH]}{more}"'
        case int() if abs(value) >= 10**_SHOWN_LENGTH:
            return f"a number of more than {_SHOWN_LENGTH} digits"
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_size(value: object) -> int:
    """Read a size, rounded to bytes, from 1 to `MAX_SIZE_BYTES`. Raises BadValueError else."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise BadValueError(f"{shown(value)} is not a size", _SIZE_FIX)
    size_bytes = value if isinstance(value, int) else round(_size_in_bytes(value))
    if size_bytes <= 0:
        raise BadValueError(f"{shown(value)} is not above 0 bytes", _SIZE_FIX)
    if size_bytes > MAX_SIZE_BYTES:
        raise BadValueError(f"{shown(value)} is larger than 2^63-1 bytes", "write a smaller size")
    return size_bytes


def _size_in_bytes(text: str) -> Decimal:
    match = NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise BadValueError(f"{shown(text)} is not a size", _SIZE_FIX)
    number, unit = match["number"], match["unit"]
    if unit in SIZE_UNITS:
        return Decimal(number) * SIZE_UNITS[unit]
    if unit:
        raise BadValueError(f"{shown(text)} is not a size", _likely_sizes(number, unit.strip()))
    if "." in number:
        raise BadValueError(f"{shown(text)} is a fraction of bytes", _SIZE_FIX)
    return Decimal(number)


def _likely_sizes(number: str, unit: str) -> str:
    """Return what `10mb`, `10M` or `10MiB/s` may have meant."""
    binary = unit[1:2].lower() == "i"
    likely = [
        f"{number}{name} ({int(Decimal(number) * size_bytes):,} bytes)"
        for name, size_bytes in SIZE_UNITS.items()
        if name[0].lower() == unit[:1].lower() and ("i" in name or not binary)
    ]
    return f"write {' or '.join(likely)}" if likely else _SIZE_FIX


def format_size(size_bytes: int) -> str:
    """Return a size in the shortest form that `parse_size` reads back unchanged."""
    units = [("", 1), *SIZE_UNITS.items()]
    forms = (
        f"{size_bytes // of_unit}{name}" for name, of_unit in units if not size_bytes % of_unit
    )
    return min(forms, key=len)


def format_ms(duration_ms: float) -> str:
    """Write a duration in its largest whole unit; `parse_duration_or_zero` reads it back."""
    exact = Decimal(repr(duration_ms / MS_PER_SECOND))
    for name in ("h", "m", "s"):
        count = exact / DURATION_UNITS[name]
        if exact and count == count.to_integral_value():
            return f"{int(count)}{name}"
    return f"{(exact / DURATION_UNITS['ms']).normalize():f}ms"


def format_number(number: float) -> str:
    """Write a finite number in digits alone: 1000000, not 1e6 or 1000000.0."""
    return f"{Decimal(repr(number)).normalize():f}"


def parse_duration(value: object) -> float:
    """Read a duration in seconds, above 0 and up to a year. Raises BadValueError otherwise."""
    seconds = parse_duration_or_zero(value)
    if seconds <= 0:
        raise BadValueError(f"{shown(value)} is not above 0", _DURATION_FIX)
    return seconds


def parse_duration_or_zero(value: object) -> float:
    """Read a duration as `parse_duration`, or 0, which needs no unit."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadValueError(f"{shown(value)} is not a duration", _DURATION_FIX)
    text = shown(value) if isinstance(value, int) else str(value)
    match = NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise BadValueError(f"{shown(value)} is not a duration", _DURATION_FIX)
    number, unit = match["number"], match["unit"]
    if not unit and Decimal(number) == 0:
        return 0.0
    if not unit:
        raise BadValueError(f"{shown(value)} has no unit", f"write {number}s or {number}ms")
    if unit not in DURATION_UNITS:
        fix = _likely_duration(number, unit.strip())
        raise BadValueError(f"{shown(value)} is not a duration", fix)
    seconds = Decimal(number) * DURATION_UNITS[unit]
    if seconds > MAX_DURATION_S:
        raise BadValueError(f"{shown(value)} is more than a year", "write a shorter duration")
    return float(seconds)


def _likely_duration(number: str, unit: str) -> str:
    """Return what `20S`, `20 s`, `20sec` or `500msec` may have meant."""
    names = {"ms": "ms", "mil": "ms", "s": "s", "m": "m", "h": "h"}
    start = re.match("ms|mil|s|m|h", unit.lower()) if unit.isalpha() else None
    return f"write {number}{names[start[0]]}" if start else _DURATION_FIX


def number_parser(what: str, fix: str, *, zero: bool = False) -> Callable[[object], float]:
    """Return a parser of numbers above 0, or with `zero` from 0 on; `what` is as "a rate"."""

    def parse(value: object) -> float:
        number = value
        if isinstance(value, str) and _EXPONENT.fullmatch(value):
            number = float(value)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise BadValueError(f"{shown(value)} is not {what}", fix)
        if not 0 <= number < math.inf or not (number or zero):  # NaN fits no comparison
            least = "of 0 or more" if zero else "above 0"
            raise BadValueError(f"{shown(value)} is not {what} {least}", fix)
        if number > MAX_NUMBER:
            raise BadValueError(f"{shown(value)} is too large", f"write at most {MAX_NUMBER}")
        if 0 < number < MIN_NUMBER:
            least = format_number(MIN_NUMBER)
            raise BadValueError(f"{shown(value)} is too small", f"write at least {least}")
        return float(number)

    return parse


def parse_count(value: object) -> float:
    """Read a whole number from 1 to `MAX_COUNT`. Raises BadValueError for all else."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadValueError(f"{shown(value)} is not a whole number", _COUNT_FIX)
    if not 0 < value <= MAX_COUNT:
        raise BadValueError(f"{shown(value)} is not from 1 to {MAX_COUNT}", _COUNT_FIX)
    return float(value)


def parse_text(value: object) -> str:
    """Return text that is not empty. Raises BadValueError for anything else."""
    if not isinstance(value, str):
        raise BadValueError(f"{shown(value)} is not text", "put it in quotes")
    if not value:
        raise BadValueError("is empty text", "write a name")
    return value
