"""The edges that wait: output ranges that a consuming stage has not completed, and whose they are.

Produced offsets of a partition are one edge for each stage that consumes the topic. An edge is
anchored to all roots of what its batch read, and has one id that counts in the tree of each of
them. A range that is completed in part is split: the rest gets an id of its own.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from proxy.progress.offset_ranges import OffsetRanges
from proxy.wire.topic_partition import TopicPartition

MAX_EDGES = 500_000
"""Edges that wait, and roots of their anchors, that a pipeline keeps: at most about 32 bytes for
each edge and for each root, and 150 more for each anchor."""

MAX_DONE_RANGES = 64
"""Completed ranges of a partition that are remembered, the highest. They only tell what is
completed a second time from what nobody has produced."""

NOTHING_KNOWN = -1

MAX_OFFSET = 2**63 - 1

StagePartition = tuple[str, str, int]
"""Consuming stage, topic, partition."""


@dataclass(frozen=True, slots=True)
class TopicRange:
    """Offsets from `start` up to, without, `end`. Raises ValueError when they cannot be."""

    topic: str
    partition: int
    start: int
    end: int

    def __post_init__(self) -> None:
        if self.partition < 0 or not 0 <= self.start <= self.end <= MAX_OFFSET:
            raise ValueError(f"{self} cannot be")


def merged(ranges: Iterable[TopicRange]) -> list[TopicRange]:
    """Return the same offsets in ranges in order that do not touch; empty ones are left out."""
    found = defaultdict[TopicPartition, OffsetRanges](lambda: OffsetRanges(MAX_OFFSET))
    for one in ranges:
        found[one.topic, one.partition].add(one.start, one.end)
    return [TopicRange(*key, low, high) for key in sorted(found) for low, high in found[key]]


@dataclass(slots=True, eq=False)
class Anchor:
    """The roots that the edges of a batch belong to."""

    number: int
    roots: tuple[int, ...]
    edges: int = 0
    """How many edges there are; without any the anchor is gone."""


Edge = tuple[int, int, int, Anchor]
"""Start, end, id, anchor."""


@dataclass(slots=True)
class PartitionEdges:
    """What waits at one stage of one partition, in order: parallel arrays, 32 bytes an edge."""

    starts: "array[int]" = field(default_factory=lambda: array("q"))
    ends: "array[int]" = field(default_factory=lambda: array("q"))
    ids: "array[int]" = field(default_factory=lambda: array("Q"))
    anchors: list[Anchor] = field(default_factory=list)
    done: OffsetRanges = field(
        default_factory=lambda: OffsetRanges(MAX_DONE_RANGES, drop_lowest=True)
    )
    known_to: int = NOTHING_KNOWN
    """Where the latest range ends that was produced; below, what is no edge is foreign."""

    def __iter__(self) -> Iterator[Edge]:
        return zip(self.starts, self.ends, self.ids, self.anchors, strict=True)

    def replace(self, low: int, high: int, edges: Sequence[Edge]) -> None:
        """Put edges in the place of those from index `low` to before `high`."""
        self.starts[low:high] = array("q", [edge[0] for edge in edges])
        self.ends[low:high] = array("q", [edge[1] for edge in edges])
        self.ids[low:high] = array("Q", [edge[2] for edge in edges])
        self.anchors[low:high] = [edge[3] for edge in edges]


@dataclass(frozen=True, slots=True)
class CompletedRange:
    """What a completed range covered: offsets of edges, completed before, or of no known stage."""

    acks: list[tuple[Anchor, int]]
    """For each edge its anchor and what to ack: its id, xor the ids of what is left of it."""
    records: int
    repeated: int
    foreign: int


class EdgeTable:
    """The edges of one pipeline that wait; `mark` is called with what changed or went."""

    def __init__(self, new_id: Callable[[], int], mark: Callable[..., None]) -> None:
        self._new_id = new_id
        self._mark = mark
        self._next_anchor = 1
        self.partitions = defaultdict[StagePartition, PartitionEdges](PartitionEdges)
        self.size = 0
        """Edges, and roots of their anchors."""
        self.anchors: dict[int, Anchor] = {}
        """By number, those that have an edge."""

    def known_to(self, key: StagePartition) -> int:
        """Return up to which offset it is known who produced what waits there."""
        return self.partitions[key].known_to if key in self.partitions else NOTHING_KNOWN

    def find(self, key: StagePartition, start: int) -> Edge | None:
        """Return the edge that starts there; None when there is none."""
        edges = self.partitions.get(key)
        index = bisect_left(edges.starts, start) if edges is not None else 0
        if edges is None or index == len(edges.starts) or edges.starts[index] != start:
            return None
        return start, edges.ends[index], edges.ids[index], edges.anchors[index]

    def known_ends(self) -> dict[TopicPartition, int]:
        """Return up to where it is known who produced what, where anything is. O(partitions)."""
        ends: dict[TopicPartition, int] = {}
        for (_, topic, partition), edges in self.partitions.items():
            if edges.known_to != NOTHING_KNOWN:
                ends[topic, partition] = max(ends.get((topic, partition), 0), edges.known_to)
        return ends

    def anchor(self, roots: tuple[int, ...], number: int = 0) -> Anchor:
        """Make an anchor with the number that it was written with; 0: the next one."""
        anchor = Anchor(number or self._next_anchor, roots)
        self._next_anchor = max(self._next_anchor, anchor.number + 1)
        return anchor

    def produce(
        self, key: StagePartition, start: int, end: int, anchor: Anchor | None
    ) -> tuple[int, list[Anchor]]:
        """Add an edge from `start` to before `end`, or to one of its anchor that ends at `start`.

        Without an anchor it belongs to no root: there is no edge, but the offsets are known.
        Return what the edge adds to the value of each root, and the anchors of edges that lost
        these offsets without an ack: the log was cut or made anew, so nobody will complete them.
        """
        edges = self.partitions[key]
        replaced = [old for old, _ in self._cut(key, start, end)[0]]
        edges.done.remove(start, end)
        edges.known_to = end
        self._mark("lane", *key)
        if anchor is None:
            return 0, replaced
        edge = self._new_id()
        index = bisect_left(edges.starts, start)
        before = index - 1
        is_next = before >= 0 and edges.ends[before] == start and edges.anchors[before] is anchor
        if is_next and edges.ids[before] != edge:  # together they would be 0
            edges.ends[before] = end
            edges.ids[before] ^= edge
            self._mark("edge", *key, edges.starts[before])
        else:
            edges.replace(index, index, [(start, end, edge, anchor)])
            self._count(anchor, 1)
            self._mark("edge", *key, start)
        return edge, replaced

    def complete(self, key: StagePartition, start: int, end: int) -> CompletedRange:
        """Remove what a stage has completed; what is left of an edge gets a new id."""
        if start >= end:
            return CompletedRange([], 0, 0, 0)
        acks, records = self._cut(key, start, end)
        # An edge is never completed already: producing forgets that.
        repeated = end - start - self.partitions[key].done.add(start, end)
        self._mark("lane", *key)
        return CompletedRange(acks, records, repeated, end - start - records - repeated)

    def remove(self, keys: Iterable[StagePartition]) -> set[int]:
        """Remove all that is known of these; return the roots that waited there."""
        roots: set[int] = set()
        for key in keys:
            self._mark("lane", *key)
            for start, _, _, anchor in self.partitions.pop(key):
                roots.update(anchor.roots)
                self._count(anchor, -1)
                self._mark("edge", *key, start)
        return roots

    def sweep(self, roots: set[int]) -> None:
        """Remove all roots but these, and the edges that belong to none. O(size)."""
        for anchor in self.anchors.values():
            if not roots.issuperset(anchor.roots):
                kept = tuple(root for root in anchor.roots if root in roots)
                self.size -= len(anchor.roots) - len(kept)
                anchor.roots = kept
                self._mark("group", anchor.number)
        for key, edges in self.partitions.items():
            gone = [edge for edge in edges if not edge[3].roots]
            if gone:
                edges.replace(0, len(edges.ids), [edge for edge in edges if edge[3].roots])
            for start, _, _, anchor in gone:
                self._count(anchor, -1)
                self._mark("edge", *key, start)

    def first_stages(self, roots: Iterable[int], order: Sequence[str]) -> dict[int, str]:
        """Return by root the first stage, in that order, that it waits at; those that wait."""
        found: dict[int, str] = {}
        wanted = set(roots)
        for stage in order:
            for (consumer, *_), edges in self.partitions.items():
                if consumer != stage:
                    continue
                for anchor in edges.anchors:
                    if not wanted:
                        return found
                    here = wanted.intersection(anchor.roots)
                    found |= dict.fromkeys(here, stage)
                    wanted -= here
        return found

    def excess(self, oldest_first: Sequence[int], bound: int) -> list[int]:
        """Return which roots must go until the size is within a bound. O(size); see `sweep`."""
        anchors_of: dict[int, list[Anchor]] = {}
        left: dict[Anchor, int] = {}
        for anchor in self.anchors.values():
            left[anchor] = len(anchor.roots)
            for root in anchor.roots:
                anchors_of.setdefault(root, []).append(anchor)
        size, going = self.size, []
        for root in oldest_first:
            if size <= bound:
                break
            if root not in anchors_of:
                continue
            going.append(root)
            for anchor in anchors_of[root]:
                left[anchor] -= 1
                size -= 1 if left[anchor] else 1 + anchor.edges
        return going

    def restore(self, key: StagePartition, edge: Edge) -> None:
        """Restore an edge as it was. Raises ValueError when another one has such offsets."""
        start, end, _, anchor = edge
        edges = self.partitions[key]
        index = bisect_left(edges.starts, start)
        if (index and edges.ends[index - 1] > start) or (
            index < len(edges.starts) and edges.starts[index] < end
        ):
            raise ValueError("another edge has some of its offsets")
        edges.replace(index, index, [edge])
        self._count(anchor, 1)

    def _cut(
        self, key: StagePartition, start: int, end: int
    ) -> tuple[list[tuple[Anchor, int]], int]:
        """Remove the range from the edges; return what to ack, and how many offsets they had."""
        edges = self.partitions[key]
        low = bisect_right(edges.ends, start)
        high = bisect_left(edges.starts, end, low)
        acks: list[tuple[Anchor, int]] = []
        rests: list[Edge] = []
        records = 0
        for index in range(low, high):
            first, last, value = edges.starts[index], edges.ends[index], edges.ids[index]
            anchor = edges.anchors[index]
            records += min(last, end) - max(first, start)
            self._mark("edge", *key, first)
            for rest_start, rest_end in ((first, min(last, start)), (max(first, end), last)):
                if rest_start < rest_end:
                    rests.append((rest_start, rest_end, self._new_id(), anchor))
                    value ^= rests[-1][2]
                    self._mark("edge", *key, rest_start)
                    self._count(anchor, 1)
            self._count(anchor, -1)
            acks.append((anchor, value))
        if acks:
            edges.replace(low, high, rests)
        return acks, records

    def _count(self, anchor: Anchor, edges: int) -> None:
        was = anchor.edges
        anchor.edges += edges
        self.size += edges
        if not was or not anchor.edges:
            self.size += len(anchor.roots) if anchor.edges else -len(anchor.roots)
            self._mark("group", anchor.number)
        if anchor.edges:
            self.anchors[anchor.number] = anchor
        else:
            del self.anchors[anchor.number]
