"""Divide a client's bytes by topic: exactly where all was walked, else in the sampled proportions.

Whatever was walked, the parts add up to the client's bytes. Pure.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar

from proxy.relay.clients import TopicSampler

Part = TypeVar("Part")


class TopicShares:
    """What was walked of a client in one direction and is not written yet."""

    __slots__ = ("_last", "is_sampled", "sizes", "total_bytes")

    def __init__(self) -> None:
        self._last: dict[str | None, int] = {}
        """The proportions of the last time that there were any: they stand for what had none."""
        self._clear()

    def _clear(self) -> None:
        self.sizes: defaultdict[str | None, int] = defaultdict(int)
        self.total_bytes, self.is_sampled = 0, False

    def take(self, sampler: TopicSampler) -> None:
        """Take from a sampler what it has."""
        for topic, size in sampler.sizes.items():
            self.sizes[topic] += size
        self.total_bytes += sampler.total_bytes
        self.is_sampled |= sampler.is_sampled
        sampler.clear()

    def divide(self, count: int) -> tuple[dict[str | None, int], bool]:
        """Divide so many bytes by topic, None for no topic; say whether that is an estimate.

        Where all was walked, what is more than `count` stays for the next time: its head was not
        counted yet.
        """
        walked = sum(self.sizes.values())
        if not self.total_bytes:
            if count and self._last:
                return apportioned(count, self._last), True
            return {None: count}, False
        if not self.is_sampled:
            parts: dict[str | None, int] = {None: max(count - walked, 0)}
            fitting = walked <= count
            parts.update(self.sizes if fitting else apportioned(count, self.sizes))
            self._last = {None: max(self.total_bytes - walked, 0), **self.sizes}
            left = {} if fitting else {each: n - parts[each] for each, n in self.sizes.items()}
            self._clear()
            self.sizes.update(left)
            self.total_bytes = sum(left.values())
            return parts, False
        self._last = {None: max(self.total_bytes - walked, 0), **self.sizes}
        self._clear()
        return apportioned(count, self._last), True


def apportioned(count: int, weights: Mapping[Part, int]) -> dict[Part, int]:
    """Divide a whole number by weights of 0 or more, not all 0, by largest remainders."""
    total = sum(weights.values())
    parts = {part: count * weight // total for part, weight in weights.items()}
    left = count - sum(parts.values())
    for part in sorted(weights, key=lambda each: -(count * weights[each] % total))[:left]:
        parts[part] += 1
    return parts
