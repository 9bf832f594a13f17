"""Keeps what takes a while to make for a time that is long beside it."""

import math
from collections.abc import Callable
from typing import Generic, TypeVar

COST_FACTOR = 20.0
"""So many times as long as it took to make a thing is it shown again: many may be looking, and no
client's traffic moves in that time."""

T = TypeVar("T")


class Cached(Generic[T]):
    """A thing that `make` makes again when COST_FACTOR times as long has passed as that took.

    `clock_ms` is the monotonic time.
    """

    def __init__(self, make: Callable[[], T], clock_ms: Callable[[], float]) -> None:
        self._make = make
        self._clock_ms = clock_ms
        self._made: T | None = None
        self._stale_ms = -math.inf

    def get(self) -> T:
        """Return it as it was made last, or made now."""
        started_ms = self._clock_ms()
        if self._made is None or started_ms >= self._stale_ms:
            self._made = self._make()
            now_ms = self._clock_ms()
            self._stale_ms = now_ms + COST_FACTOR * (now_ms - started_ms)
        return self._made
