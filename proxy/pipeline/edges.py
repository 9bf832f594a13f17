"""The edges that wait: output ranges that a consuming stage has not completed, and whose they are.

Produced offsets of a partition are one edge for each stage that consumes the topic. An edge belongs
to a group of roots, which all edges of one batch share, and has one id that counts in the tree of
each of them. A range that is completed in part is split: the rest gets an id of its own.

Nothing here is approximate: a batch that reads what came of k roots makes edges of all k. That
costs a group of k roots for each batch and k acks for each that completes some of it; what is made
of m batches of k roots each belongs to all of them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from .lane import Group, Lane, LaneKey

MAX_EDGES = 500_000
"""Edges that wait, and roots of their groups, that a pipeline keeps: at most about 32 bytes for
each edge and for each root, and 150 more for each group."""

FEW_ROOTS = 1_024
"""So many of the oldest roots are looked at first when some must go."""


@dataclass(slots=True)
class Covered:
    """What a completed range covered."""

    acks: list[tuple[Group, int]] = field(default_factory=list)
    """For each edge its group and what to ack: its id, xor the ids of what is left of it."""
    records: int = 0
    """Offsets of edges."""
    repeated: int = 0
    """Offsets that were completed before."""
    foreign: int = 0
    """Offsets that no stage is known to have produced."""


class EdgeTable:
    """The edges of one pipeline that wait.

    Args:
        new_id: makes the id of an edge: 64 bits, not 0.

    """

    def __init__(self, new_id: Callable[[], int]) -> None:
        self._new_id = new_id
        self._next_group = 1
        self.lanes: dict[LaneKey, Lane] = {}
        self.size = 0
        """Edges, and roots of their groups."""
        self.dirty_edges: set[tuple[LaneKey, int]] = set()
        """Lanes and starts where an edge changed or went since this was cleared; so the others."""
        self.dirty_groups: dict[int, Group] = {}
        self.dirty_lanes: set[LaneKey] = set()

    def lane(self, key: LaneKey) -> Lane:
        """Return the lane of that key, a new one when there was none."""
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(key)
        return lane

    def group(self, roots: tuple[int, ...]) -> Group:
        """Make a group; it lives as long as there is an edge of it."""
        group = Group(self._next_group, roots)
        self._next_group += 1
        return group

    def produced(
        self, key: LaneKey, start: int, end: int, group: Group | None
    ) -> tuple[int, list[Group]]:
        """Add an edge from `start` to before `end`.

        An edge that goes on where one of its group ends is added to that one.

        Args:
            key: where it waits.
            start: its first offset.
            end: the offset behind its last one; above `start`.
            group: whose it is; None when it belongs to no root. Then there is no edge, but it is
                known what the offsets are.

        Returns:
            What the edge adds to the value of each root, and the groups of edges that had the
            same offsets: the log was cut or made anew, so those will never be completed. They
            have lost these offsets without an ack.

        """
        lane = self.lane(key)
        replaced = [old for old, _ in self._cut(lane, start, end)[0]]
        lane.unmark_done(start, end)
        lane.known_to = end
        self.dirty_lanes.add(key)
        if group is None:
            return 0, replaced
        edge = self._new_id()
        index = bisect_left(lane.starts, start, lane.head)
        before = index - 1
        if (
            before >= lane.head
            and lane.ends[before] == start
            and lane.groups[before] is group
            and lane.ids[before] != edge  # together they would be 0
        ):
            lane.ends[before] = end
            lane.ids[before] ^= edge
            self.dirty_edges.add((key, lane.starts[before]))
        else:
            lane.starts.insert(index, start)
            lane.ends.insert(index, end)
            lane.ids.insert(index, edge)
            lane.groups.insert(index, group)
            self._count(group, 1)
            self.dirty_edges.add((key, start))
        return edge, replaced

    def completed(self, key: LaneKey, start: int, end: int) -> Covered:
        """Take away what a stage has completed; what is left of an edge gets a new id."""
        covered = Covered()
        if start >= end:
            return covered
        lane = self.lane(key)
        covered.acks, covered.records = self._cut(lane, start, end)
        # An edge is never completed already: producing forgets that.
        covered.repeated = lane.done_within(start, end)
        covered.foreign = end - start - covered.records - covered.repeated
        lane.mark_done(start, end)
        self.dirty_lanes.add(key)
        return covered

    def remove(self, keys: Iterable[LaneKey]) -> set[int]:
        """Remove whole lanes; return the roots that waited there."""
        roots: set[int] = set()
        for key in keys:
            lane = self.lanes.pop(key)
            self.dirty_lanes.add(key)
            for start, _, _, group in lane.edges():
                roots.update(group.roots)
                self._count(group, -1)
                self.dirty_edges.add((key, start))
        return roots

    def sweep(self, roots: set[int]) -> None:
        """Remove all roots but these, and the edges that belong to none. O(size)."""
        gone: list[Group] = []
        for group in self.groups():
            if roots.issuperset(group.roots):
                continue
            kept = tuple(root for root in group.roots if root in roots)
            self.size -= len(group.roots) - len(kept)
            group.roots = kept
            self.dirty_groups[group.number] = group
            if not kept:
                gone.append(group)
        if not gone:
            return
        for key, lane in self.lanes.items():
            for start, group in lane.keep_rooted():
                self._count(group, -1)
                self.dirty_edges.add((key, start))

    def groups(self) -> Collection[Group]:
        """Return the groups of all edges, each once. O(size)."""
        groups: dict[Group, None] = {}
        for lane in self.lanes.values():
            groups.update(dict.fromkeys(lane.groups[lane.head :]))
        return groups.keys()

    def excess(self, oldest_first: Sequence[int], bound: int) -> list[int]:
        """Return which roots must go until the size is within a bound. O(size); see `sweep`."""
        groups = self.groups()
        tried = FEW_ROOTS
        while True:
            going, size = self._going(groups, oldest_first[:tried], bound)
            if size <= bound or tried >= len(oldest_first):
                return going
            tried *= 8

    def _going(
        self, groups: Iterable[Group], roots: Sequence[int], bound: int
    ) -> tuple[list[int], int]:
        """Take roots in turn until the size is within the bound; return them and the size."""
        wanted = set(roots)
        groups_of: dict[int, list[Group]] = {}
        left: dict[Group, int] = {}
        for group in groups:
            if not wanted.isdisjoint(group.roots):
                left[group] = len(group.roots)
                for root in wanted.intersection(group.roots):
                    groups_of.setdefault(root, []).append(group)
        size, going = self.size, []
        for root in roots:
            if size <= bound:
                break
            if root not in groups_of:
                continue
            going.append(root)
            for group in groups_of[root]:
                left[group] -= 1
                size -= 1 if left[group] else 1 + group.edges
        return going, size

    def restore_group(self, number: int, roots: tuple[int, ...]) -> Group:
        """Take up a group as it was."""
        self._next_group = max(self._next_group, number + 1)
        return Group(number, roots)

    def restore_edge(self, key: LaneKey, start: int, end: int, edge: int, group: Group) -> None:
        """Take up an edge as it was. Raises ValueError when another one has such offsets."""
        lane = self.lane(key)
        index = bisect_left(lane.starts, start)
        if (index and lane.ends[index - 1] > start) or (
            index < len(lane.starts) and lane.starts[index] < end
        ):
            raise ValueError("another edge has some of its offsets")
        lane.replace(index, index, [(start, end)], [edge], [group])
        self._count(group, 1)

    def _cut(self, lane: Lane, start: int, end: int) -> tuple[list[tuple[Group, int]], int]:
        """Take the range out of the edges; return what to ack, and how many offsets they had."""
        low = bisect_right(lane.ends, start, lane.head)
        high = bisect_left(lane.starts, end, low)
        acks: list[tuple[Group, int]] = []
        if low >= high:
            return acks, 0
        rests: list[tuple[int, int]] = []
        ids: list[int] = []
        groups: list[Group] = []
        records = 0
        for index in range(low, high):
            first, last, value = lane.starts[index], lane.ends[index], lane.ids[index]
            group = lane.groups[index]
            records += min(last, end) - max(first, start)
            self.dirty_edges.add((lane.key, first))
            for rest in ((first, min(last, start)), (max(first, end), last)):
                if rest[0] < rest[1]:
                    rests.append(rest)
                    ids.append(self._new_id())
                    groups.append(group)
                    value ^= ids[-1]
                    self.dirty_edges.add((lane.key, rest[0]))
                    self._count(group, 1)
            self._count(group, -1)
            acks.append((group, value))
        lane.replace(low, high, rests, ids, groups)
        return acks, records

    def _count(self, group: Group, edges: int) -> None:
        was = group.edges
        group.edges += edges
        self.size += edges
        if not was or not group.edges:
            self.size += len(group.roots) if group.edges else -len(group.roots)
            self.dirty_groups[group.number] = group
