"""What waits at one stage of one partition: edges in order, and what was completed before."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter

MAX_DONE_RANGES = 64
"""Completed ranges that a lane remembers, the highest. They only tell what is completed a second
time from what nobody has produced."""

COMPACT_AT = 64
"""So many edges at the head of a lane are gone, and more than half, until it is made shorter."""

NOTHING_KNOWN = -1

MAX_OFFSET = 2**63 - 1

LaneKey = tuple[str, str, int]
"""Consuming stage, topic, partition."""


@dataclass(frozen=True, slots=True)
class TopicRange:
    """Offsets of one partition, from `start` up to but not including `end`.

    Raises ValueError when they cannot be.
    """

    topic: str
    partition: int
    start: int
    end: int

    def __post_init__(self) -> None:
        if self.partition < 0 or not 0 <= self.start <= self.end <= MAX_OFFSET:
            raise ValueError(f"{self} cannot be")


@dataclass(slots=True, eq=False)
class Group:
    """The roots that the edges of a batch belong to."""

    number: int
    roots: tuple[int, ...]
    edges: int = 0
    """How many edges there are; without any the group is gone."""


class Lane:
    """What waits at one stage of one partition, in order.

    Edges lie in parallel arrays, 32 bytes each; those before `head` are gone.
    """

    __slots__ = ("done", "ends", "groups", "head", "ids", "key", "known_to", "starts")

    def __init__(self, key: LaneKey) -> None:
        self.key = key
        self.head = 0
        self.starts = array("q")
        self.ends = array("q")
        self.ids = array("Q")
        self.groups: list[Group] = []
        self.done: list[tuple[int, int]] = []
        """What was completed: disjoint ranges in order, which do not touch."""
        self.known_to = NOTHING_KNOWN
        """Where the latest range ends that was produced; below, what is no edge is foreign."""

    def __len__(self) -> int:
        return len(self.starts) - self.head

    def edges(self) -> Iterator[tuple[int, int, int, Group]]:
        """Go through the edges in order: start, end, id, group."""
        for index in range(self.head, len(self.starts)):
            yield self.starts[index], self.ends[index], self.ids[index], self.groups[index]

    def index_of(self, start: int) -> int | None:
        """Return where the edge that starts there is; None when there is none."""
        index = bisect_left(self.starts, start, self.head)
        return index if index < len(self.starts) and self.starts[index] == start else None

    def replace(
        self, low: int, high: int, edges: list[tuple[int, int]], ids: list[int], group: list[Group]
    ) -> None:
        """Put edges in the place of others, mostly fewer in the place of the first ones."""
        if low == self.head and len(edges) <= high - low:
            low = self.head = high - len(edges)
        self.starts[low:high] = array("q", [edge[0] for edge in edges])
        self.ends[low:high] = array("q", [edge[1] for edge in edges])
        self.ids[low:high] = array("Q", ids)
        self.groups[low:high] = group
        if self.head >= COMPACT_AT and self.head * 2 > len(self.starts):
            self._drop_head()

    def keep_rooted(self) -> list[tuple[int, Group]]:
        """Remove the edges whose group has no roots; return their starts and groups."""
        self._drop_head()
        kept = [bool(group.roots) for group in self.groups]
        if all(kept):
            return []
        gone = [
            (start, group)
            for start, group in zip(self.starts, self.groups, strict=True)
            if not group.roots
        ]
        self.starts = array("q", compress(self.starts, kept))
        self.ends = array("q", compress(self.ends, kept))
        self.ids = array("Q", compress(self.ids, kept))
        self.groups = list(compress(self.groups, kept))
        return gone

    def done_within(self, start: int, end: int) -> int:
        """Return how many offsets of a range were completed before."""
        return sum(max(min(high, end) - max(low, start), 0) for low, high in self.done)

    def mark_done(self, start: int, end: int) -> None:
        """Remember a range as completed."""
        apart = [(low, high) for low, high in self.done if high < start or low > end]
        for low, high in self.done:
            if high >= start and low <= end:
                start, end = min(start, low), max(end, high)
        self.done = sorted([*apart, (start, end)])[-MAX_DONE_RANGES:]

    def unmark_done(self, start: int, end: int) -> None:
        """Forget that a range was completed: its offsets are used again."""
        if self.done and self.done[-1][1] > start:
            cut = [((low, min(high, start)), (max(low, end), high)) for low, high in self.done]
            left = [(low, high) for pair in cut for low, high in pair if low < high]
            self.done = left[-MAX_DONE_RANGES:]

    def _drop_head(self) -> None:
        del self.starts[: self.head], self.ends[: self.head], self.ids[: self.head]
        del self.groups[: self.head]
        self.head = 0


def merged(ranges: Iterable[TopicRange]) -> list[TopicRange]:
    """Return the same offsets in ranges in order that do not touch; empty ones are left out."""
    found: list[TopicRange] = []
    for one in sorted(ranges, key=attrgetter("topic", "partition", "start")):
        last = found[-1] if found else None
        if one.start == one.end:
            continue
        if (
            last is not None
            and (last.topic, last.partition) == (one.topic, one.partition)
            and one.start <= last.end
        ):
            found[-1] = replace(last, end=max(last.end, one.end))
        else:
            found.append(one)
    return found
