"""Picks the largest of many things that come one at a time."""

from heapq import heappush, heapreplace
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Largest(Generic[T]):
    """At most `limit` things, those with the largest keys; of equal ones the earlier stay."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # The number, from 0 down, settles between equal keys: no two things are ever compared.
        self._heap: list[tuple[Any, int, T]] = []
        self._number = 0

    def add(self, key: Any, thing: T) -> None:
        """Take a thing in if its key is among the largest; keys must be comparable."""
        self._number -= 1
        if len(self._heap) < self._limit:
            heappush(self._heap, (key, self._number, thing))
        elif self._heap and key > self._heap[0][0]:
            heapreplace(self._heap, (key, self._number, thing))

    def descending(self) -> list[T]:
        """Return the things, the one with the largest key first."""
        return [thing for _, _, thing in sorted(self._heap, reverse=True)]
