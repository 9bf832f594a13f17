"""What happened to a query's progress that somebody should know: never silently."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from proxy.wire.topic_partition import TopicPartition

MAX_EVENTS = 50
"""The latest events of one query that are kept."""


class ProgressEventKind(StrEnum):
    """What an event is about."""

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
    NAMES = "names"
    """The rules, the client and its listener do not name one client id."""
    CLIENT_SHARED = "client_shared"
    """Another query says that it reads with the client id, too."""
    INTERVAL = "interval"
    """The rule's batch_interval is not that of the query's trigger."""
    TRIGGER = "trigger"
    """The query's trigger makes no batches that could be shaped."""
    REPORTS = "reports"
    """What is known from reports is older than it should be."""


ADVICE = frozenset(
    map(ProgressEventKind, ("names", "client_shared", "interval", "trigger", "reports"))
)
"""The kinds that say what to mend in a configuration or a job."""

ALARMS = (
    frozenset({ProgressEventKind.STUCK, ProgressEventKind.SKIPPED, ProgressEventKind.TOO_MANY})
    | ADVICE
)
"""The kinds that are worth a warning."""


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """One thing that happened; `query` is a label, `at_ms` monotonic."""

    kind: ProgressEventKind
    query: str
    topic: str | None
    partition: int | None
    text: str
    at_ms: float


OnEvent = Callable[[ProgressEvent], None]


@dataclass(eq=False)
class ChangeLog:
    """What happens to one query, and which of its partitions' records are out of date."""

    name: str
    """The label: the query's name, or its id, or the client id while neither is known."""
    on_event: OnEvent
    changed: Callable[[TopicPartition], None]
    """Called when a partition's record is out of date, or the partition is gone."""
    events: deque[ProgressEvent] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))

    def add_event(
        self, kind: ProgressEventKind, key: TopicPartition | None, text: str, now_ms: float
    ) -> None:
        """Record an event, of a partition or of the query, and pass it on."""
        topic, partition = (None, None) if key is None else key
        event = ProgressEvent(kind, self.name, topic, partition, text, now_ms)
        self.events.append(event)
        self.on_event(event)
