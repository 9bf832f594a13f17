"""A small sketch of many rates: how often each was seen, to within a tenth."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

BUCKETS_PER_DOUBLING = 8
"""A bucket's upper edge is 9 % above its lower one."""


@dataclass(slots=True)
class RateSketch:
    """Rates above 0, in bytes per second, in buckets whose edges grow by the same factor."""

    counts: Counter[int] = field(default_factory=Counter)
    """How many rates are in each bucket; its number is that of the upper edge."""
    peak: float = 0.0
    """The highest rate."""
    total_bytes: int = 0

    def add(self, rate: float, size_bytes: int) -> None:
        """Record a rate above 0, and the bytes behind it."""
        self.counts[math.ceil(math.log2(rate) * BUCKETS_PER_DOUBLING)] += 1
        self.peak = max(self.peak, rate)
        self.total_bytes += size_bytes

    @classmethod
    def merged(cls, sketches: Iterable[Self]) -> Self:
        """Return the sketch of all rates of these."""
        whole = cls()
        for each in sketches:
            whole.counts.update(each.counts)
            whole.peak = max(whole.peak, each.peak)
            whole.total_bytes += each.total_bytes
        return whole

    @property
    def count(self) -> int:
        """How many rates were recorded."""
        return self.counts.total()

    def quantile(self, share: float) -> float:
        """Return a rate that this share of the rates, 0 to 1, does not exceed.

        At most 9 % above the lowest such rate, and never above the peak. 0 without any rates.
        """
        left = share * self.count
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                return min(math.exp2(bucket / BUCKETS_PER_DOUBLING), self.peak)
        return self.peak
