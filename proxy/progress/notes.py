"""What happened to a query's progress that somebody should know: never silently."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .partition import PartitionProgress


class NoteKind(StrEnum):
    """What a note is about."""

    LOST_REPORTS = "lost_reports"
    """Offsets were completed by batches whose reports did not arrive."""
    SKIPPED = "skipped"
    """Offsets that the query will not read, or has not read in order."""
    REPLAY = "replay"
    """A new run began below what was completed."""
    RESET = "reset"
    """The query went back: what was completed is to be completed again."""
    RECREATED = "recreated"
    """The topic is another one under the same name, or its log was cut."""
    STUCK = "stuck"
    UNSTUCK = "unstuck"
    MERGED = "merged"
    """A bound was reached: figures became coarse on the safe side."""
    LEFT = "left"
    """A partition that the query reads no more."""
    TAKEN_OVER = "taken_over"
    """Another query reads with the client id from now on."""
    COMMITTED_BACKWARDS = "committed_backwards"
    TOO_MANY = "too_many"
    """A bound was reached: something is not followed."""
    FORGOTTEN = "forgotten"
    """A query that was away for long."""


ALARMS = frozenset({NoteKind.STUCK, NoteKind.SKIPPED, NoteKind.TOO_MANY})
"""The kinds that are worth a warning."""


class SkipReason(StrEnum):
    """Why a range was skipped."""

    RETENTION = "retention"
    """The broker removed it before the query had read it."""
    OUT_OF_RANGE = "out_of_range"
    """The query asked for it, was told that it is not there, and went on behind it."""
    NEW_CHECKPOINT = "new_checkpoint"
    """Another query, with a checkpoint of its own, took over and began behind it."""
    RECREATED = "recreated"
    """It was unread when the topic was made anew."""
    UNEXPLAINED = "unexplained"
    """A batch began behind the end of the one before, and no report was lost."""
    SEVERAL = "several"
    """Older ranges with different reasons, shown as one."""


@dataclass(frozen=True, slots=True)
class Note:
    """One thing that happened."""

    kind: NoteKind
    query: str
    """The query's label."""
    topic: str | None
    partition: int | None
    text: str
    """What happened, in words, with the figures."""
    at_ms: float
    """Monotonic time."""


class PartitionSink(Protocol):
    """Who is told what happens to a partition."""

    def note(
        self, kind: NoteKind, partition: "PartitionProgress | None", text: str, now_ms: float
    ) -> None:
        """Take note of what happened; without a partition it happened to the query."""

    def changed(self, partition: "PartitionProgress") -> None:
        """Learn that what is completed, or what a record says beside it, has changed."""


OnNote = Callable[[Note], None]
"""Is told what happened."""
