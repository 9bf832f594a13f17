"""Decide whose turn it is among those who wait, in groups within groups.

A group's members share what it gets by their weights, by start-time fair queueing (Goyal, Vin and
Cheng, 1996): the next one is who had least for its weight since it began to wait. So who wants less
than its share does not wait for those that want more, however many connections they have. A member
with a guarantee that got less than that is next before all others (mClock's reservation tags:
Gulati, Merchant and Varman, OSDI 2010). What it got so counts in its weight's share, too. A group
is a member of the group around it (H-PFQ: Bennett and Zhang, 1996). Connections of one client take
their turns in the order in which they came.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, NamedTuple, TypeAlias, TypeVar

TURN_BYTES = 64 * 1024
"""About what a turn brings. Who wants less than its share saves up so much of it, or as much as its
next request or a turn of others brings, and needs not wait until all others had their turn."""

MOST_SAVED_BYTES = 1 << 20
"""No more is saved up for a turn of others: Kafka's largest record batch by default, which a turn
brings whole. Who was just being answered has missed so much."""

MOST_KNOWN = 1000
"""Beside those that wait so many are remembered, who had a turn last."""

MOST_LEFT = 64
"""So many entries of those that left before their turn are kept beyond one for each that waits."""

NEWCOMER_MS = 10_000.0
"""For so long after its first request a client is new."""

LATE_GUARANTEE_MS = 1000.0
"""Of a guarantee: what a member gets later that it did not get while it waited."""

AHEAD_TURNS = 4
"""So many of the largest turns a member that lives by its guarantee is ahead of its weight's share
at most: it comes back to that soon when others leave."""

TURN_DECAY = 0.99
"""By how much the largest turn counts less with each one that comes."""


class TurnNode(NamedTuple):
    """A member of a group, which is a client or a group itself."""

    key: Hashable
    weight: float = 1.0
    """Above 0."""
    guaranteed: float = 0.0
    """Bytes per ms."""
    is_kept: bool = False
    """Whether what its own members had is known on while none of them waits: for a few groups."""


TurnPath: TypeAlias = tuple[TurnNode, ...]
"""From the outermost group's member to the client."""


def newcomer_path(step: TurnNode, address: str | None) -> TurnPath:
    """Return the end of the path to a client that is new: those of one address are one member.

    Who makes up a name for each request would be as many members as it has requests waiting.
    """
    if address is None:
        return (step,)
    return TurnNode((address, step.weight), step.weight), step


W = TypeVar("W", bound=Hashable)

_Heap: TypeAlias = list[tuple[float, int, Hashable]]
"""Keys, each with the number of its entry, by what orders them."""


@dataclass(slots=True, eq=False)
class _TurnTaker:
    """What is known of a member that waits, or had a turn lately."""

    had: float
    """In bytes for a weight of 1, as if it had always wanted its share."""
    served_ms: float
    """Until when its guarantee is served."""
    began: float = math.inf
    """What it had when its last turn began."""
    turn_bytes: float = 0.0
    """What that has brought so far."""
    is_by_guarantee: bool = False
    """Whether that turn was for its guarantee."""


@dataclass(slots=True, eq=False)
class FairOrder:
    """The order of turns of a group's members that wait, by what each of them had."""

    _waiting: dict[Hashable, tuple[int, TurnNode]] = field(default_factory=dict)
    """With the number of the entry that is valid."""
    _heap: _Heap = field(default_factory=list)
    """Who has the least is next."""
    _late: _Heap = field(default_factory=list)
    """Those with a guarantee by until when it is served."""
    _members: dict[Hashable, _TurnTaker] = field(default_factory=dict)
    """Who had a turn last is last."""
    _level: float = 0.0
    """What they had whose turn was last."""
    _largest: float = float(TURN_BYTES)
    _numbers: Iterator[int] = field(default_factory=count)

    def first(self, now_ms: float) -> Hashable:
        """Return the one whose turn it is; somebody must wait."""
        late = self._valid(self._late)
        if late and late[0][0] <= now_ms:
            return late[0][2]
        return self._valid(self._heap)[0][2]

    def join(self, step: TurnNode, size: int, now_ms: float) -> None:
        """Begin to wait, with a request of so many bytes.

        Who is new comes later by these: a client with a name for each request would be first.
        """
        key, weight, guaranteed, _ = step
        level, member = self._level, self._members.get(key)
        if member is None:
            if len(self._members) >= MOST_KNOWN + len(self._waiting):
                del self._members[next(iter(self._members))]
            member = self._members[key] = _TurnTaker(level, now_ms)
            had = level + size / weight
        else:
            saved = max(TURN_BYTES, size, min(self._largest, MOST_SAVED_BYTES))
            member.had = had = max(member.had, level - saved / weight)
        if guaranteed:
            saved_ms = max(TURN_BYTES, size) / guaranteed
            member.served_ms = max(member.served_ms, now_ms - saved_ms)
        self._enter(step, had)

    def leave(self, key: Hashable) -> None:
        """Wait no longer."""
        del self._waiting[key]
        for heap in (self._heap, self._late):
            if len(heap) > 2 * len(self._waiting) + MOST_LEFT:
                heap[:] = [entry for entry in heap if self._is_valid(entry)]
                heapify(heap)

    def take(self, key: Hashable, size: int, now_ms: float) -> None:
        """Have one take its turn, which costs so many bytes; it goes on waiting."""
        _, step = self._waiting[key]
        member = self._members.pop(key, None) or _TurnTaker(self._level, now_ms)
        self._members[key] = member
        self._largest = max(self._largest * TURN_DECAY, member.turn_bytes)
        member.began, member.turn_bytes = member.had, 0.0
        member.is_by_guarantee = step.guaranteed > 0 and member.served_ms <= now_ms
        if member.is_by_guarantee:
            member.served_ms = max(member.served_ms, now_ms - LATE_GUARANTEE_MS)
        else:
            self._level = max(self._level, self._valid(self._heap)[0][0])
        self.took(step, size)

    def took(self, step: TurnNode, size: int) -> None:
        """Count so many bytes more of the last turn of one that has had any; also less than 0."""
        key, weight, guaranteed, _ = step
        member = self._members.get(key)
        if member is None:
            return
        member.turn_bytes += size
        more = size / weight
        if member.is_by_guarantee and guaranteed:
            member.served_ms += size / guaranteed
            most = self._level + AHEAD_TURNS * max(self._largest, member.turn_bytes) / weight
            more = min(more, max(most - member.had, 0.0))
        member.had += more
        if key in self._waiting:
            self._enter(step, member.had)

    def behind(self, step: TurnNode) -> float:
        """Return how many bytes less than its share it had when its turn came; below 0: more."""
        member = self._members.get(step.key)
        return 0.0 if member is None else (self._level - member.began) * step.weight

    def _enter(self, step: TurnNode, had: float) -> None:
        key, number = step.key, next(self._numbers)
        self._waiting[key] = number, step
        heappush(self._heap, (had, number, key))
        if step.guaranteed:
            heappush(self._late, (self._members[key].served_ms, number, key))

    def _is_valid(self, entry: tuple[float, int, Hashable]) -> bool:
        waiting = self._waiting.get(entry[2])
        return waiting is not None and waiting[0] == entry[1]

    def _valid(self, heap: _Heap) -> _Heap:
        """Return a heap whose first entry is valid."""
        while heap and not self._is_valid(heap[0]):
            heappop(heap)
        return heap


@dataclass(slots=True, eq=False)
class Turns(Generic[W]):
    """A group's members that wait, which are groups, or clients with their connections."""

    order: FairOrder = field(default_factory=FairOrder)
    lines: "dict[Hashable, Turns[W] | OrderedDict[W, None]]" = field(default_factory=dict)
    """Of those that wait."""
    kept: "dict[Hashable, Turns[W]]" = field(default_factory=dict)
    """Groups in it that are known on while none waits."""

    def __len__(self) -> int:
        """Return how many connections wait."""
        return sum(map(len, self.lines.values()))

    def first(self, now_ms: float) -> W | None:
        """Return the connection whose turn it is; None when none waits."""
        line: Turns[W] | OrderedDict[W, None] = self
        while isinstance(line, Turns):
            if not line.lines:
                return None
            line = line.lines[line.order.first(now_ms)]
        return next(iter(line))

    def join(self, waiter: W, path: TurnPath, size: int, now_ms: float) -> None:
        """Wait at the end of a client's line, with a request of so many bytes."""
        line: Turns[W] | OrderedDict[W, None] = self
        for depth, step in enumerate(path, 1):
            assert isinstance(line, Turns)
            below = line.lines.get(step.key)
            if below is None:
                below = line.kept.get(step.key)
                if below is None:
                    below = OrderedDict() if depth == len(path) else Turns()
                if step.is_kept and isinstance(below, Turns):
                    line.kept[step.key] = below
                line.lines[step.key] = below
                line.order.join(step, size, now_ms)
            line = below
        assert isinstance(line, OrderedDict)
        line[waiter] = None

    def leave(
        self, waiter: W, path: TurnPath, now_ms: float, taken_bytes: int | None = None
    ) -> None:
        """Wait no longer; `taken_bytes` is what the turn costs if it is taken, else None."""
        groups = self._groups(path)
        if taken_bytes is not None:
            for group, step in zip(groups, path, strict=True):
                group.order.take(step.key, taken_bytes, now_ms)
        line = groups[-1].lines[path[-1].key]
        assert isinstance(line, OrderedDict)
        del line[waiter]
        if line:
            return
        for group, step in zip(reversed(groups), reversed(path), strict=True):
            del group.lines[step.key]
            group.order.leave(step.key)
            if group.lines:
                return

    def took(self, path: TurnPath, size: int) -> None:
        """Count so many bytes more of a client's latest turn."""
        for group, step in zip(self._groups(path), path, strict=False):
            group.order.took(step, size)

    def count(self, path: TurnPath) -> int:
        """Return how many connections wait whose paths begin so."""
        line = self._line(path)
        return 0 if line is None else len(line)

    def connections(self, path: TurnPath) -> tuple[W, ...]:
        """Return the connections of a client that wait, in their order."""
        line = self._line(path)
        return tuple(line) if isinstance(line, OrderedDict) else ()

    def _line(self, path: TurnPath) -> "Turns[W] | OrderedDict[W, None] | None":
        groups = self._groups(path)
        return groups[-1].lines.get(path[-1].key) if len(groups) == len(path) else None

    @property
    def clients(self) -> int:
        """How many clients wait."""
        lines = self.lines.values()
        return sum(len(each.lines) if isinstance(each, Turns) else 1 for each in lines)

    def behind(self, path: TurnPath) -> float:
        """Return how much less than its share a client had when its turn came; others wait."""
        groups = zip(self._groups(path), path, strict=False)
        return max(group.order.behind(step) for group, step in groups)

    def _groups(self, path: TurnPath) -> "list[Turns[W]]":
        """Return the groups along a path, as far as somebody waits there, or they are kept."""
        line: Turns[W] | OrderedDict[W, None] | None = self
        groups: list[Turns[W]] = []
        for step in path:
            if not isinstance(line, Turns):
                break
            groups.append(line)
            line = line.lines.get(step.key) or line.kept.get(step.key)
        return groups
