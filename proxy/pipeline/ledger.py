"""The completion ledger: when everything made from a source batch is done, whatever its tree.

JStorm's Acker in one process, so that a root begins before it is acked. A source batch is a root,
and every edge of its tree has a random 64-bit id, not 0. Making an edge and finishing it each xor
its id into the root's value; when all that was made is finished the value is 0. (That it is 0
before has a chance of 2^-64 per change.)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from random import Random
from typing import Any

from metrics.clock import MS_PER_SECOND

GRACE = 1.25
"""Of the timeout: after so long a root has failed. Earlier programs kept to a quarter of a timeout
when it was first heard of; theirs fail not before the timeout, and at most half of it later."""

ID_BITS = 64

LedgerItem = tuple[Any, ...]
"""What a record of the state is of: its kind, and which one."""

ROUND_MS = 3
"""Decimals of a millisecond that survive in wall-clock seconds kept as a float."""


@dataclass(frozen=True, slots=True)
class WallTime:
    """The distance of the clocks, taken once: a clock set anew matters only at the next start."""

    offset_ms: float

    @classmethod
    def at(cls, now_ms: float, now_s: float) -> "WallTime":
        """Return it by the two clocks read at one moment."""
        return cls(now_s * MS_PER_SECOND - now_ms)

    def to_s(self, time_ms: float) -> float:
        """Return the wall-clock seconds of a monotonic time."""
        return (time_ms + self.offset_ms) / MS_PER_SECOND

    def to_ms(self, time_s: float) -> float:
        """Return the monotonic time of wall-clock seconds."""
        return round(time_s * MS_PER_SECOND - self.offset_ms, ROUND_MS)


class RootOutcome(StrEnum):
    """How a root ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """The batch of a first stage that a root stands for: its number there, and what it read."""

    stage: str
    batch: int
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EndedRoot:
    """How a root ended; `reason` says why it failed, and is empty otherwise."""

    root: int
    owner: SourceBatch
    started_ms: float
    ended_ms: float
    outcome: RootOutcome
    reason: str = ""


@dataclass(slots=True)
class Root:
    """What is kept of a root."""

    value: int
    owner: SourceBatch
    started_ms: float
    heard_ms: float
    """When it was first heard of."""


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
    unknown_topics: int = 0
    """Ranges of topics that the stage does not consume or produce."""
    repeated_inits: int = 0
    unknown_fails: int = 0
    ownerless: int = 0
    """The last three are of earlier versions, for those who read the fields."""


class Ledger:
    """The roots of one pipeline; they time out by when they were first heard of, see GRACE.

    `mark` is called with what changed or went. Raises ValueError when `timeout_ms` is not above 0
    and finite.
    """

    def __init__(
        self, timeout_ms: float, random: Random, mark: Callable[[LedgerItem], None]
    ) -> None:
        self._mark = mark
        self._random = random
        self.roots: dict[int, Root] = {}
        """By id, those heard of first first. For reading."""
        self.pending_bytes = 0
        """What the batches of the roots have read."""
        self.counts = CompletionCounts()
        self.set_timeout(timeout_ms)

    @property
    def pending_batches(self) -> int:
        """How many roots there are."""
        return len(self.roots)

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
        self.restore(root, Root(value, owner, started_ms, now_ms))
        return self.ack(root, 0, now_ms)

    def ack(self, root: int, value: int, now_ms: float) -> EndedRoot | None:
        """Xor what a stage has finished and made into a root's value; return how it ended, if so.

        The root must be there.
        """
        self._mark(("root", root))
        entry = self.roots[root]
        entry.value ^= value
        return None if entry.value else self._end(root, now_ms, RootOutcome.COMPLETED)

    def fail(self, root: int, reason: str, now_ms: float) -> EndedRoot | None:
        """End a root as failed; None when it has ended."""
        return self._end(root, now_ms, RootOutcome.FAILED, reason) if root in self.roots else None

    def tick(self, now_ms: float) -> list[EndedRoot]:
        """End the roots whose time is over; call it at least a few times in a timeout."""
        until_ms = now_ms - self._timeout_ms * GRACE
        old = takewhile(lambda root: self.roots[root].heard_ms <= until_ms, self.roots)
        late = sorted(old, key=self._age)
        return [self._end(root, now_ms, RootOutcome.TIMED_OUT) for root in late]

    def set_timeout(self, timeout_ms: float) -> None:
        """Set another timeout, also for the roots that are there. Raises ValueError as at first."""
        if not 0 < timeout_ms < math.inf:
            raise ValueError(f"the timeout must be above 0 ms, not {timeout_ms}")
        self._timeout_ms = timeout_ms

    def restore(self, root: int, entry: Root) -> None:
        """Add a root as it was; those heard of first first. Raises ValueError when it is there."""
        if root in self.roots:
            raise ValueError("the root is there already")
        self.roots[root] = entry
        self.pending_bytes += entry.owner.size_bytes

    def _age(self, root: int) -> tuple[float, int]:
        return self.roots[root].started_ms, root

    def _end(self, root: int, now_ms: float, outcome: RootOutcome, reason: str = "") -> EndedRoot:
        self._mark(("root", root))
        entry = self.roots.pop(root)
        self.pending_bytes -= entry.owner.size_bytes
        return EndedRoot(root, entry.owner, entry.started_ms, now_ms, outcome, reason)
