"""What the latest Fetch response on one connection says of logs, for look-ups that ask the same.

Spark's executors look up the earliest and the latest offset after each poll, only to tell lost
records from invisible ones. The response that the poll got has said both a moment before.
"""

from collections.abc import Sequence

from proxy.wire.fetch import FetchedPartition
from proxy.wire.list_offsets import (
    EARLIEST,
    LATEST,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    OffsetLookup,
)
from proxy.wire.topic_partition import TopicPartition

MAX_AGE_MS = 200.0
"""What a broker said longer ago is not said again. The age counts from when the Fetch was sent: a
response may have waited for a quota, or for a client that reads slowly."""

_LATEST = {READ_UNCOMMITTED: 1, READ_COMMITTED: 2}
"""Which of the three offsets below a broker answers, by isolation level."""


class FetchedLogs:
    """The logs of the partitions that the latest Fetch response gave records of.

    Those without records do not count: their client has come to the end, where it matters what was
    written a moment ago. Nor do those that a fetch session leaves out, for they have none, nor any
    with an error. Times are monotonic.
    """

    __slots__ = ("_asked_ms", "_fetched", "_logs")

    def __init__(self) -> None:
        self._fetched: list[tuple[str, Sequence[FetchedPartition]]] = []
        """What is not yet among the logs: most responses are followed by no look-up."""
        self._logs: dict[TopicPartition, tuple[int, int, int]] = {}
        """Log start, high watermark and last stable offset; -1 where the response does not say."""
        self._asked_ms = 0.0

    def begin_response(self, asked_ms: float) -> None:
        """Forget the response before; `asked_ms` is when the request of this one was sent."""
        self._fetched.clear()
        self._logs.clear()
        self._asked_ms = asked_ms

    def record(self, topic: str, fetched: Sequence[FetchedPartition]) -> None:
        """Record what the response says of partitions whose topic has this name."""
        self._fetched.append((topic, fetched))

    def offsets(self, lookup: OffsetLookup, now_ms: float) -> dict[TopicPartition, int] | None:
        """Return the answer for each partition of a look-up; None if not all of it is known."""
        if now_ms - self._asked_ms > MAX_AGE_MS or not lookup.timestamps:
            return None
        for topic, fetched in self._fetched:
            for partition, error_code, high, stable, start, records_bytes, _ in fetched:
                if not error_code and records_bytes > 0:
                    self._logs[topic, partition] = start, high, stable
        self._fetched.clear()
        found: dict[TopicPartition, int] = {}
        for key, timestamp in lookup.timestamps.items():
            latest = _LATEST.get(lookup.isolation_level) if timestamp == LATEST else None
            which = 0 if timestamp == EARLIEST else latest
            log = self._logs.get(key)
            if which is None or log is None or log[which] < 0:
                return None
            found[key] = log[which]
        return found
