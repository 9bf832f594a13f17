"""The completion ledger: when everything made from a source batch is done, whatever its tree.

JStorm's Acker. A source batch is a root, and every edge of its tree has a random 64-bit id, not 0.
Making an edge and finishing it each xor its id into the root's value; when all that was made is
finished the value is 0. (That it is 0 before has a chance of 2^-64 per change.)

Here the value has a lane of 64 bits for each stage, the first stage's lowest: an edge counts in the
lane of the stage that it waits at (`at`). The lowest lane that is not 0 then tells which stage
holds the root. The acker's own value is the xor of all lanes; that every lane is 0 includes that
it is, and asks for no less of a tree that is done. With one stage it is the acker itself.

Memory per root: an entry, its owner and its value, of 8.5 bytes for each stage up to the last one
that it waits at.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from .buckets import RotatingMap
from .walltime import WallTime

BUCKETS = 3
"""As in Storm: a root times out after its time, and at most half of that later."""

ID_BITS = 64
ID_MASK = (1 << ID_BITS) - 1


class Outcome(StrEnum):
    """How a root ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


PIPELINE_CHANGED = "pipeline_changed"
"""Reason: it waited at a stage that is no longer in the pipeline."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The batch of a first stage that a root stands for."""

    stage: str
    batch: int
    """Its number at the stage."""
    size_bytes: int = 0
    """What it read."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a root ended; told once."""

    root: int
    owner: Owner
    started_ms: float
    ended_ms: float
    outcome: Outcome
    reason: str = ""
    """Why it failed; empty otherwise."""


@dataclass(slots=True)
class Entry:
    """What is kept of a root."""

    value: int
    owner: Owner | None
    """None until `init`: an ack or a fail came before it."""
    started_ms: float
    failed: str | None = None
    """Why it failed, while there is no owner to tell."""


@dataclass(slots=True)
class LedgerCounts:
    """What was asked of the ledger and changed nothing, since it was made."""

    repeated_inits: int = 0
    """Of a root that has an owner."""
    unknown_fails: int = 0
    """Of a root that is not there: it has ended."""
    ownerless: int = 0
    """Roots that fell out without an owner: acks that came after the end, or without a begin."""


class Ledger:
    """The roots of one pipeline.

    Turns of the buckets are counted on the wall clock, so that a ledger taken up from its records
    goes on with the same ones.

    Args:
        stages: names in topological order, each once; one lane each.
        timeout_ms: a root fails when it is older, by up to 1/(BUCKETS - 1) of it. Above 0, finite.
        random: makes ids; `random.SystemRandom()`, or a seeded one for the same ids again.
        wall: the wall clock.

    Raises ValueError when the timeout is out of range or a stage is named twice.

    """

    def __init__(
        self, stages: Sequence[str], timeout_ms: float, random: Random, wall: WallTime
    ) -> None:
        self._random = random
        self._wall = wall
        self._roots: RotatingMap[int, Entry] = RotatingMap(BUCKETS)
        self._turn_ms = _turn_length_ms(timeout_ms)
        self._shifts = _shifts(stages)
        self.counts = LedgerCounts()
        self.dirty: set[int] = set()
        """Roots that changed or went since this was cleared."""

    @property
    def stages(self) -> Collection[str]:
        """The names of the stages, in topological order."""
        return self._shifts.keys()

    def __len__(self) -> int:
        """How many roots there are, with those that have no owner."""
        return len(self._roots)

    def __contains__(self, root: int) -> bool:
        return root in self._roots

    def get(self, root: int) -> Entry | None:
        """Return what is kept of a root; None when it is not there."""
        return self._roots.get(root)

    def roots(self) -> set[int]:
        """Return the ids of all roots."""
        return self._roots.keys()

    def items(self) -> Iterator[tuple[int, Entry]]:
        """Go through the roots, those that came first first; nothing may change meanwhile."""
        return self._roots.items()

    def new_id(self) -> int:
        """Return an id for an edge: 64 bits, never 0."""
        while True:
            number = self._random.getrandbits(ID_BITS)
            if number:
                return number

    def new_root(self) -> int:
        """Return an id for a root that no root has."""
        while True:
            root = self.new_id()
            if root not in self._roots:
                return root

    def at(self, stage: str, edge: int) -> int:
        """Return what an edge that waits at a stage counts in a value. KeyError: no such stage."""
        return edge << self._shifts[stage]

    def init(
        self, root: int, value: int, owner: Owner, started_ms: float, now_ms: float
    ) -> Ended | None:
        """Begin a root.

        Args:
            root: its id, of `new_root`.
            value: the xor of its first edges, each as `at` gives it; 0 when it has none.
            owner: whom it stands for.
            started_ms: when the batch began.
            now_ms: the time.

        Returns:
            How it ended, if it ended at once. A root that has an owner stays as it is.

        """
        entry = self._entry(root, now_ms)
        if entry.owner is not None:
            self.counts.repeated_inits += 1
            return None
        entry.owner = owner
        entry.started_ms = started_ms
        return self._apply(root, entry, value, now_ms)

    def ack(self, root: int, value: int, now_ms: float) -> Ended | None:
        """Xor what a stage has finished and made into a root's value.

        Args:
            root: its id. One that is not there has not begun yet, or has ended: it is kept for
                the one time, without owner, and falls out like any other.
            value: of the edges consumed and produced, each as `at` gives it.
            now_ms: the time.

        Returns:
            How the root ended, if it did.

        """
        return self._apply(root, self._entry(root, now_ms), value, now_ms)

    def fail(self, root: int, reason: str, now_ms: float) -> Ended | None:
        """End a root as failed; return how it ended. One that is not there: nothing happens.

        One without owner is told when the owner comes. The first reason stays.
        """
        entry = self._roots.get(root)
        if entry is None:
            self.counts.unknown_fails += 1
            return None
        if entry.failed is None:
            entry.failed = reason
        return self._apply(root, entry, 0, now_ms)

    def tick(self, now_ms: float) -> list[Ended]:
        """End the roots whose time is over; call it at least a few times in a timeout."""
        ended: list[Ended] = []
        fallen = self._roots.rotate(self._turn(now_ms))
        # In an order that does not depend on what a restart has made of the buckets.
        for root, entry in sorted(fallen, key=lambda one: (one[1].started_ms, one[0])):
            self.dirty.add(root)
            if entry.owner is None:
                self.counts.ownerless += 1
            else:
                ended.append(_ended(root, entry.owner, entry, now_ms, Outcome.TIMED_OUT))
        return ended

    def holder(self, root: int) -> str | None:
        """Return the first stage in topological order that a root waits at; None when nowhere."""
        entry = self._roots.get(root)
        return None if entry is None else next(iter(self.parts(entry.value)), None)

    def parts(self, value: int) -> dict[str, int]:
        """Return the lanes of a value that are not 0, by stage, in topological order."""
        return {
            stage: part
            for stage, shift in self._shifts.items()
            if (part := value >> shift & ID_MASK)
        }

    def whole(self, parts: dict[str, int]) -> int:
        """Return the value of lanes by stage. KeyError: no such stage."""
        value = 0
        for stage, part in parts.items():
            value ^= self.at(stage, part)
        return value

    def update(self, stages: Sequence[str], timeout_ms: float, now_ms: float) -> list[Ended]:
        """Follow a reload; roots that wait at a stage that is gone fail.

        Raises ValueError as at the start; then nothing changed.
        """
        turn_ms, shifts = _turn_length_ms(timeout_ms), _shifts(stages)
        stranded: list[int] = []
        if list(shifts) != list(self._shifts):
            old = {root: self.parts(entry.value) for root, entry in self._roots.items()}
            self._shifts = shifts
            for root, entry in self._roots.items():
                here = {stage: part for stage, part in old[root].items() if stage in shifts}
                entry.value = self.whole(here)
                if len(here) < len(old[root]):
                    stranded.append(root)
        if turn_ms != self._turn_ms:
            roots = list(self._roots.turns())
            self._roots = RotatingMap(BUCKETS)
            for turn, root, entry in roots:
                self._roots.put(root, entry, math.floor((turn + 0.5) * self._turn_ms / turn_ms))
            self._turn_ms = turn_ms
        ended = (self.fail(root, PIPELINE_CHANGED, now_ms) for root in sorted(stranded))
        return [end for end in ended if end is not None]

    def heard_ms(self, root: int) -> float:
        """Return when a root was first heard of, to half a turn. KeyError: it is not there."""
        turn = self._roots.turn_of(root)
        if turn is None:
            raise KeyError(root)
        return (turn + 0.5) * self._turn_ms - self._wall.offset_ms

    def restore(self, root: int, entry: Entry, heard_ms: float, now_ms: float) -> None:
        """Take up a root as it was; one that was heard of in the future is heard of now."""
        self._roots.put(root, entry, self._turn(min(heard_ms, now_ms)))

    def _entry(self, root: int, now_ms: float) -> Entry:
        entry = self._roots.get(root)
        if entry is None:
            entry = Entry(0, None, now_ms)
            self._roots.put(root, entry, self._turn(now_ms))
        return entry

    def _apply(self, root: int, entry: Entry, value: int, now_ms: float) -> Ended | None:
        self.dirty.add(root)
        entry.value ^= value
        owner = entry.owner
        if owner is None or (entry.failed is None and entry.value):
            return None
        self._roots.pop(root)
        outcome = Outcome.COMPLETED if entry.failed is None else Outcome.FAILED
        return _ended(root, owner, entry, now_ms, outcome)

    def _turn(self, now_ms: float) -> int:
        return math.floor((now_ms + self._wall.offset_ms) / self._turn_ms)


def _ended(root: int, owner: Owner, entry: Entry, now_ms: float, outcome: Outcome) -> Ended:
    return Ended(root, owner, entry.started_ms, now_ms, outcome, entry.failed or "")


def _turn_length_ms(timeout_ms: float) -> float:
    if not 0 < timeout_ms < math.inf:
        raise ValueError(f"the timeout must be above 0 ms, not {timeout_ms}")
    return timeout_ms / (BUCKETS - 1)


def _shifts(stages: Sequence[str]) -> dict[str, int]:
    shifts = {stage: index * ID_BITS for index, stage in enumerate(stages)}
    if len(shifts) < len(stages):
        raise ValueError("a stage is named twice")
    return shifts
