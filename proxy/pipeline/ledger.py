"""The completion ledger: when everything made from a source batch is done, whatever its tree.

JStorm's Acker. A source batch is a root, and every edge of its tree has a random 64-bit id, not 0.
Making an edge and finishing it each xor its id into the root's value; when all that was made is
finished the value is 0. (That it is 0 before has a chance of 2^-64 per change.)
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from random import Random

from metrics.clock import MS_PER_SECOND

BUCKETS = 3
"""As in Storm: a root times out after its time, and at most half of that later."""

ID_BITS = 64

ROUND_MS = 3
"""Decimals of a millisecond that survive in wall-clock seconds kept as a float."""


@dataclass(frozen=True, slots=True)
class WallTime:
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
class CompletionCounts:
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
        self, timeout_ms: float, random: Random, wall: WallTime, mark: Callable[..., None]
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
        self.counts = CompletionCounts()
        self.set_timeout(timeout_ms)

    def pending(self) -> Iterator[tuple[int, Root, SourceBatch]]:
        """Yield the roots with an owner, those that came first first; change nothing meanwhile."""
        for root, entry in self.roots.items():
            if entry.owner is not None:
                yield root, entry, entry.owner

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
    ) -> EndedRoot | None:
        """Begin a root with the xor of its first edges; return how it ended, if at once."""
        entry = self._entry(root, now_ms)
        if entry.owner is not None:
            self.counts.repeated_inits += 1
            return None
        entry.owner, entry.started_ms = owner, started_ms
        self._count(owner, 1)
        return self._apply(root, entry, value, now_ms)

    def ack(self, root: int, value: int, now_ms: float) -> EndedRoot | None:
        """Xor what a stage has finished and made into a root's value; return how it ended, if so.

        One that is not there, not begun yet or ended, is kept without owner, and falls out in time.
        """
        return self._apply(root, self._entry(root, now_ms), value, now_ms)

    def fail(self, root: int, reason: str, now_ms: float) -> EndedRoot | None:
        """End a root as failed, when its owner is there. The first reason stays."""
        entry = self.roots.get(root)
        if entry is None:
            self.counts.unknown_fails += 1
            return None
        if entry.failed is None:
            entry.failed = reason
        return self._apply(root, entry, 0, now_ms)

    def tick(self, now_ms: float) -> list[EndedRoot]:
        """End the roots whose time is over; call it at least a few times in a timeout."""
        turn = self._turn(now_ms)
        old = takewhile(lambda root: self.roots[root].turn + BUCKETS <= turn, self.roots)
        # In an order that does not depend on what a restart has made of the buckets.
        fallen = sorted(old, key=self._age)
        ended = [self._end(root, now_ms, TIMED_OUT) for root in fallen]
        return [each for each in ended if each is not None]

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

    def _apply(self, root: int, entry: Root, value: int, now_ms: float) -> EndedRoot | None:
        self._mark("root", root)
        entry.value ^= value
        if entry.owner is None or (entry.failed is None and entry.value):
            return None
        return self._end(root, now_ms, entry.failed or "")

    def _end(self, root: int, now_ms: float, reason: str) -> EndedRoot | None:
        self._mark("root", root)
        entry = self.roots.pop(root)
        if entry.owner is None:
            self.counts.ownerless += 1
            return None
        self._count(entry.owner, -1)
        return EndedRoot(root, entry.owner, entry.started_ms, now_ms, reason)

    def _turn(self, now_ms: float) -> int:
        turn = math.floor((now_ms + self._wall.offset_ms) / self._turn_ms)
        if turn != self._latest_turn:  # one int object for all roots of a turn
            self._latest_turn = turn
        return self._latest_turn
