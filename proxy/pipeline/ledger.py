"""The completion ledger: when everything made from a source batch is done, whatever its tree.

JStorm's Acker. A source batch is a root, and every edge of its tree has a random 64-bit id, not 0.
Making an edge and finishing it each xor its id into the root's value; when all that was made is
finished the value is 0. (That it is 0 before has a chance of 2^-64 per change.)

The edges that wait are output ranges that a consuming stage has not completed. Produced offsets of
a partition are one edge for each stage that consumes the topic. An edge is anchored to all roots of
what its batch read, and has one id that counts in the tree of each of them. A range that is
completed in part is split: the rest gets an id of its own.

The state has it under `ledger/PIPELINE/`, each part quoted, with hexadecimal ids and times in
wall-clock seconds:

- `root/ID`: its value is the xor of all in `at`; earlier programs wrote one for each stage there;
- `group/NUMBER`: the roots of an anchor;
- `edge/STAGE/TOPIC/PARTITION/START`: an edge that waits, and the number of its anchor;
- `lane/STAGE/TOPIC/PARTITION`: what is known of the offsets there that are no edges;
- `stage/STAGE`: up to when its reports are complete;
- `early/NUMBER`: a batch that waits for the one that feeds it;
- `written/STAGE`: what it has written since its last report; of a handover, until it is taken up.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from random import Random
from typing import Annotated, Any

from pydantic import ConfigDict, Field, create_model

from metrics.clock import MS_PER_SECOND
from proxy.progress.offset_ranges import OffsetRanges
from proxy.state.state_records import RecordFormat
from proxy.wire.topic_partition import TopicPartition

BUCKETS = 3
"""As in Storm: a root times out after its time, and at most half of that later."""

ID_BITS = 64

ROUND_MS = 3
"""Decimals of a millisecond that survive in wall-clock seconds kept as a float."""


@dataclass(frozen=True, slots=True)
class WallClockOffset:
    """The distance of the clocks, taken once: a clock set anew matters only at the next start."""

    offset_ms: float

    def to_s(self, time_ms: float) -> float:
        """Return the wall-clock seconds of a monotonic time."""
        return (time_ms + self.offset_ms) / MS_PER_SECOND

    def to_ms(self, time_s: float) -> float:
        """Return the monotonic time of wall-clock seconds."""
        return round(time_s * MS_PER_SECOND - self.offset_ms, ROUND_MS)


TIMED_OUT = "timed_out"
"""Why a root ended of which nobody said that it failed."""


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """The batch of a first stage that a root stands for: its number there, and what it read."""

    stage: str
    batch: int
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EndedRoot:
    """How a root ended."""

    root: int
    owner: SourceBatch
    started_ms: float
    ended_ms: float
    reason: str
    """Why it was not completed; empty when it was."""


@dataclass(slots=True)
class Root:
    """What is kept of a root."""

    value: int
    owner: SourceBatch | None
    """None until `init`: an ack or a fail came before it."""
    started_ms: float
    failed: str | None = None
    turn: int = 0
    """The bucket in which it was first heard of."""


@dataclass(slots=True)
class LedgerAnomalyCounts:
    """What came of the reports, since the start."""

    late_acks: int = 0
    """Acks for roots that had ended."""
    repeated_records: int = 0
    """Records of input that the stage had completed before."""
    foreign_records: int = 0
    """Records of input from a stage's topic that no stage is known to have produced."""
    unanchored_ranges: int = 0
    """Ranges of output of batches that read nothing of a pending root."""
    unknown_stages: int = 0
    """Of earlier versions, for those who read the field."""
    unknown_topics: int = 0
    """Ranges of topics that the stage does not consume or produce any more."""
    repeated_inits: int = 0
    """Of a root that has an owner."""
    unknown_fails: int = 0
    """Of a root that is not there: it has ended."""
    ownerless: int = 0
    """Roots that fell out without an owner: acks that came after the end, or without a begin."""


class Ledger:
    """The roots of one pipeline, in the rotating buckets of Storm's RotatingMap.

    A root stays in the bucket of the turn in which it was first heard of, and falls out when turn
    + BUCKETS has begun. Turns are counted on the wall clock, to go on after a restart. `mark` is
    called with what changed or went. Raises ValueError when `timeout_ms` is not above 0 and finite.
    """

    def __init__(
        self, timeout_ms: float, random: Random, wall: WallClockOffset, mark: Callable[..., None]
    ) -> None:
        self._mark = mark
        self._random = random
        self._wall = wall
        self.roots: dict[int, Root] = {}
        """By id, in the order of their turns; also those that have no owner. For reading."""
        self._turn_ms = 0.0
        self._latest_turn = 0
        self.pending_batches = 0
        """Roots with an owner."""
        self.pending_bytes = 0
        """What their batches have read."""
        self.counts = LedgerAnomalyCounts()
        self._ended: list[EndedRoot] = []
        self.outcomes: Counter[str] = Counter()
        """How many roots ended, by the reason of EndedRoot."""
        self.set_timeout(timeout_ms)

    def take_ended(self) -> list[EndedRoot]:
        """Return the roots that ended since the last call, in that order."""
        ended, self._ended = self._ended, []
        return ended

    def pending(self) -> Iterator[tuple[int, Root, SourceBatch]]:
        """Yield the roots with an owner, those that came first first; change nothing meanwhile."""
        for root, entry in self.roots.items():
            if entry.owner is not None:
                yield root, entry, entry.owner

    @property
    def failures(self) -> int:
        """How many roots have failed or timed out."""
        return self.outcomes.total() - self.outcomes[""]

    def oldest_first(self) -> list[int]:
        """Return the roots in the order in which they started."""
        return sorted(self.roots, key=self._age)

    def new_id(self) -> int:
        """Return an id for an edge: 64 bits, never 0."""
        while not (number := self._random.getrandbits(ID_BITS)):
            pass
        return number

    def new_root(self) -> int:
        """Return an id for a root that no root has."""
        while (root := self.new_id()) in self.roots:
            pass
        return root

    def init(
        self, root: int, value: int, owner: SourceBatch, started_ms: float, now_ms: float
    ) -> None:
        """Begin a root with the xor of its first edges, which may end it at once."""
        entry = self._entry(root, now_ms)
        if entry.owner is not None:
            self.counts.repeated_inits += 1
            return
        entry.owner, entry.started_ms = owner, started_ms
        self._count(owner, 1)
        self._apply(root, entry, value, now_ms)

    def ack(self, root: int, value: int, now_ms: float) -> None:
        """Xor what a stage has finished and made into a root's value, which may end it.

        One that is not there, not begun yet or ended, is kept without owner, and falls out in time.
        """
        self._apply(root, self._entry(root, now_ms), value, now_ms)

    def fail(self, root: int, reason: str, now_ms: float) -> None:
        """End a root as failed, when its owner is there. The first reason stays."""
        entry = self.roots.get(root)
        if entry is None:
            self.counts.unknown_fails += 1
            return
        if entry.failed is None:
            entry.failed = reason
        self._apply(root, entry, 0, now_ms)

    def tick(self, now_ms: float) -> None:
        """End the roots whose time is over; call it at least a few times in a timeout."""
        turn = self._turn(now_ms)
        old = takewhile(lambda root: self.roots[root].turn + BUCKETS <= turn, self.roots)
        # In an order that does not depend on what a restart has made of the buckets.
        for root in sorted(old, key=self._age):
            self._end(root, now_ms, TIMED_OUT)

    def set_timeout(self, timeout_ms: float) -> None:
        """Set another timeout, also for the roots that are there. Raises ValueError as at first."""
        if not 0 < timeout_ms < math.inf:
            raise ValueError(f"the timeout must be above 0 ms, not {timeout_ms}")
        old_ms, self._turn_ms = self._turn_ms, timeout_ms / (BUCKETS - 1)
        if old_ms != self._turn_ms:
            for entry in self.roots.values():
                entry.turn = math.floor((entry.turn + 0.5) * old_ms / self._turn_ms)

    def heard_ms(self, entry: Root) -> float:
        """Return when a root was first heard of, to half a turn."""
        return (entry.turn + 0.5) * self._turn_ms - self._wall.offset_ms

    def restore(self, root: int, entry: Root, heard_ms: float, now_ms: float) -> None:
        """Restore a root; those heard of first first. Raises ValueError when it is there."""
        if root in self.roots:
            raise ValueError("the root is there already")
        entry.turn = self._turn(min(heard_ms, now_ms))
        self.roots[root] = entry
        if entry.owner is not None:
            self._count(entry.owner, 1)

    def _age(self, root: int) -> tuple[float, int]:
        return self.roots[root].started_ms, root

    def _entry(self, root: int, now_ms: float) -> Root:
        entry = self.roots.get(root)
        if entry is None:
            entry = self.roots[root] = Root(0, None, now_ms, turn=self._turn(now_ms))
        return entry

    def _count(self, owner: SourceBatch, batches: int) -> None:
        self.pending_batches += batches
        self.pending_bytes += owner.size_bytes * batches

    def _apply(self, root: int, entry: Root, value: int, now_ms: float) -> None:
        self._mark("root", root)
        entry.value ^= value
        if entry.owner is not None and (entry.failed is not None or not entry.value):
            self._end(root, now_ms, entry.failed or "")

    def _end(self, root: int, now_ms: float, reason: str) -> None:
        self._mark("root", root)
        entry = self.roots.pop(root)
        if entry.owner is None:
            self.counts.ownerless += 1
            return
        self._count(entry.owner, -1)
        self.outcomes[reason] += 1
        self._ended.append(EndedRoot(root, entry.owner, entry.started_ms, now_ms, reason))

    def _turn(self, now_ms: float) -> int:
        turn = math.floor((now_ms + self._wall.offset_ms) / self._turn_ms)
        if turn != self._latest_turn:  # one int object for all roots of a turn
            self._latest_turn = turn
        return self._latest_turn


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


def merge_ranges(ranges: Iterable[TopicRange]) -> list[TopicRange]:
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


Acks = list[tuple[Anchor, int]]
"""For each edge its anchor and what to ack: its id, xor the ids of what is left of it."""


class PendingEdges:
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

    def complete(self, key: StagePartition, start: int, end: int) -> tuple[Acks, int, int, int]:
        """Remove what a stage has completed, `end` above `start`; a rest of an edge gets a new id.

        Return what to ack, and how many offsets were of edges, completed before, of no known stage.
        """
        acks, records = self._cut(key, start, end)
        # An edge is never completed already: producing forgets that.
        repeated = end - start - self.partitions[key].done.add(start, end)
        self._mark("lane", *key)
        return acks, records, repeated, end - start - records - repeated

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

    def _cut(self, key: StagePartition, start: int, end: int) -> tuple[Acks, int]:
        """Remove the range from the edges; return what to ack, and how many offsets they had."""
        edges = self.partitions[key]
        low = bisect_right(edges.ends, start)
        high = bisect_left(edges.starts, end, low)
        acks: Acks = []
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


_Id = Annotated[str, Field(pattern="^[0-9a-f]{1,16}$")]
_Offset = Annotated[int, Field(ge=0, le=MAX_OFFSET)]
_Known = Annotated[int, Field(ge=-1, le=MAX_OFFSET)]
_Seconds = Annotated[float, Field(allow_inf_nan=False)]
_Pair = Annotated[list[_Offset], Field(min_length=2, max_length=2)]
_Ranges = tuple[TopicRange, ...]
_Size = Annotated[int, Field(ge=0)]


def _format(**fields: Any) -> RecordFormat[Any]:
    strict = ConfigDict(strict=True, extra="forbid", frozen=True)
    required: dict[str, Any] = {name: (kind, ...) for name, kind in fields.items()}
    return RecordFormat("ledger", 1, create_model("LedgerForm", __config__=strict, **required))


_ROOT_TIMES = {"started_s": _Seconds, "heard_s": _Seconds}
LEDGER_RECORDS: Mapping[str, RecordFormat[Any]] = {
    "root": _format(at=dict[str, _Id], owner=SourceBatch | None, **_ROOT_TIMES, failed=str | None),
    "group": _format(roots=list[_Id]),
    "edge": _format(end=_Offset, id=_Id, group=int),
    "lane": _format(known_to=_Known, done=list[_Pair]),
    "stage": _format(settled_s=_Seconds),
    "early": _format(
        **{"stage": str, "batch": int, "inputs": _Ranges, "outputs": _Ranges},
        **{"started_s": _Seconds, "at_s": _Seconds, "size_bytes": _Size},
    ),
    "written": _format(stage=str, ranges=tuple[tuple[TopicRange, _Seconds], ...]),
}
"""By kind, in the order in which they are read: each refers to earlier ones only."""
