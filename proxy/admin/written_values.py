"""Writes values as documents show them."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_UNITS, _STEP = ("B", "KiB", "MiB", "GiB", "TiB"), 1024.0
MAX_TEXT_CHARS = 300  # of one error or reason in the status document


def iso(at_s: float | None) -> str | None:
    """Write a time since the epoch as ISO 8601 in UTC, to the second."""
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")


def left_s(until_s: float | None, now_s: float) -> float | None:
    """Return for how long something goes on that ends then, in seconds for JSON."""
    return None if until_s is None else round(max(until_s - now_s, 0.0), 1)


def rounded(rate: float | None, digits: int = 1) -> float | None:
    """Return a figure as documents show it."""
    return None if rate is None else round(rate, digits)


def cut(text: str | None) -> str | None:
    """Return a text as the status document shows it: at most MAX_TEXT_CHARS of it."""
    return text if text is None or len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}…"


def size_text(size: float, digits: int = 4, last: str = "GiB") -> str:
    """Write bytes for people, in steps of 1024 up to the `last` unit."""
    for unit in _UNITS:
        if unit == last:
            break
        if size < _STEP:
            return f"{size:.{digits}g} {unit}"
        size /= _STEP
    return f"{size:.4g} {last}"


def picked(row: object, *names: str) -> dict[str, Any]:
    """Return some members of a document, or attributes of another object, in this order."""
    if isinstance(row, Mapping):
        return {name: row[name] for name in names}
    return {name: getattr(row, name) for name in names}
