"""A map whose entries fall out by their age, without a look at each of them."""

from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RotatingMap(Generic[K, V]):
    """A map in buckets, one for each turn (Storm's RotatingMap): an old bucket falls out whole.

    No value is None.

    A turn is a number that counts up with time. A key stays in the bucket of the turn in which it
    came. With `buckets` of them, what came in turn t falls out when turn t + buckets has begun:
    after more than `buckets - 1` turns and at most `buckets`. Looking a key up costs a look into
    each bucket, newest first. Raises ValueError when `buckets` is below 2.
    """

    __slots__ = ("_buckets", "_newest_first", "buckets")

    def __init__(self, buckets: int) -> None:
        if buckets < 2:  # noqa: PLR2004 - with one, what has just come would fall out
            raise ValueError(f"buckets must be 2 or more, not {buckets}")
        self.buckets = buckets
        self._buckets: dict[int, dict[K, V]] = {}
        self._newest_first: tuple[dict[K, V], ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self._newest_first))

    def __contains__(self, key: K) -> bool:
        return self.get(key) is not None

    def get(self, key: K) -> V | None:
        """Return the value of a key; None when there is none."""
        for bucket in self._newest_first:
            if key in bucket:
                return bucket[key]
        return None

    def put(self, key: K, value: V, turn: int) -> None:
        """Add a key that is not there yet."""
        bucket = self._buckets.get(turn)
        if bucket is None:
            bucket = self._buckets[turn] = {}
            self._buckets = dict(sorted(self._buckets.items()))
            self._newest_first = tuple(reversed(self._buckets.values()))
        bucket[key] = value

    def pop(self, key: K) -> V | None:
        """Remove a key; return its value, None when there was none."""
        for bucket in self._newest_first:
            if key in bucket:
                return bucket.pop(key)
        return None

    def turn_of(self, key: K) -> int | None:
        """Return the turn in which a key came; None when it is not there."""
        return next((turn for turn, bucket in self._buckets.items() if key in bucket), None)

    def rotate(self, turn: int) -> list[tuple[K, V]]:
        """Remove what is too old for this turn, and return it, oldest first."""
        fallen: list[tuple[K, V]] = []
        old = [number for number in self._buckets if number + self.buckets <= turn]
        for number in old:
            fallen += self._buckets.pop(number).items()
        if old:
            self._newest_first = tuple(reversed(self._buckets.values()))
        return fallen

    def keys(self) -> set[K]:
        """Return all keys."""
        return set[K]().union(*self._newest_first)

    def items(self) -> Iterator[tuple[K, V]]:
        """Go through all, those of the oldest bucket first; nothing may change meanwhile."""
        for bucket in self._buckets.values():
            yield from bucket.items()

    def turns(self) -> Iterator[tuple[int, K, V]]:
        """Go through all with their turns, oldest first; nothing may change meanwhile."""
        for turn, bucket in self._buckets.items():
            for key, value in bucket.items():
                yield turn, key, value
