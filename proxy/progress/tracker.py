"""Follows one connection of a query's client: its fetch session, and what the query was given.

In an incremental session (KIP-227) a request names only what has changed, and a response leaves out
partitions without news. So each is kept with the offset that it was last asked from. All partitions
of a topic come at once, each a dictionary look-up and a few comparisons while a reader reads on.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from proxy.progress.topics import TopicNames
from proxy.wire.fetch import (
    INITIAL_EPOCH,
    NO_SESSION,
    FetchedPartition,
    FetchPosition,
    FetchRequestPartitions,
    TopicKey,
)
from proxy.wire.fetch_response import FetchObserver
from proxy.wire.list_offsets import (
    EARLIEST,
    LATEST,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    OffsetLookup,
)
from proxy.wire.topic_partition import TopicPartition

from .offset_ranges import SkipReason
from .partition import PartitionProgress
from .query import QueryProgress

OFFSET_OUT_OF_RANGE = 1

MAX_CURSORS = 20_000
"""Of one connection, before those are dropped that the query let go of: twice a query's bound."""

MAX_SESSION_PARTITIONS = 10_000
"""Kept of a session. The offsets of further partitions are not known when they are answered."""

MAX_AGE_MS = 200.0
"""What a broker said longer ago is not said again. The age counts from when the Fetch was sent: a
response may have waited for a quota, or for a client that reads slowly."""

_LATEST = {READ_UNCOMMITTED: 1, READ_COMMITTED: 2}
"""Which of the three offsets below a broker answers, by isolation level."""

_ByTopic = list[tuple[TopicKey, list[tuple[int, int]]]]
"""Partitions of topics, with offsets."""

NOTHING: Mapping[Any, Any] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class FetchedLogs:
    """The logs of the partitions that the latest Fetch response on a connection gave records of.

    Spark's executors look up the earliest and the latest offset after each poll, only to tell lost
    records from invisible ones. The response that the poll got has said both a moment before.
    Those without records do not count: their client has come to the end, where it matters what was
    written a moment ago. Nor do those that a fetch session leaves out, for they have none, nor any
    with an error. Times are monotonic.
    """

    _fetched: list[tuple[str, Sequence[FetchedPartition]]] = field(default_factory=list)
    """What is not yet among the logs: most responses are followed by no look-up."""
    _logs: dict[TopicPartition, tuple[int, int, int]] = field(default_factory=dict)
    """Log start, high watermark and last stable offset; -1 where the response does not say."""
    _asked_ms: float = 0.0

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


@dataclass(slots=True, eq=False)
class ReadCursor:
    """Where one connection is in one partition."""

    progress: PartitionProgress
    topic_id: bytes | None
    fetch_offset: int
    """Of the last request."""
    delivered_to: int
    """What was delivered from `fetch_offset` to here is recorded already."""
    records_bytes: int = 0
    """Of records that came since that request and whose last offset is not known."""
    out_of_range: bool = False


class Reader:
    """One connection of a query, as it reads partitions.

    What was delivered is known from the end of an answer, where that could be read, and otherwise
    from the next position: a client that asked from A, got records and then asks from X was given
    all between. One that got none has only moved. `node_id` is the broker's; None when not
    known.
    """

    __slots__ = ("_cursors", "_node_id", "_query", "size")

    def __init__(self, query: QueryProgress, node_id: int | None = None) -> None:
        self._query = query
        self._node_id = node_id
        self._cursors: dict[str, dict[int, ReadCursor]] = {}
        self.size = 0
        """How many partitions are known."""

    def fetch_asked(
        self,
        topic: str,
        topic_id: bytes | None,
        positions: Iterable[tuple[int, int]],
        now_ms: float,
    ) -> None:
        """Record a topic's partitions and offsets in a request; no `topic_id` before version 13."""
        cursors = self._cursors.get(topic, NOTHING)
        for partition, offset in positions:
            cursor = cursors.get(partition)
            if cursor is None or cursor.progress.is_dropped or cursor.topic_id != topic_id:
                self._begin(topic, partition, topic_id, offset, now_ms)
                cursors = self._cursors.get(topic, NOTHING)
                continue
            progress = cursor.progress
            progress.read_ms = now_ms
            if offset != cursor.delivered_to:
                if offset < 0:
                    continue
                if cursor.out_of_range:
                    _pass_over(cursor, offset, now_ms)
                elif cursor.records_bytes and topic_id in (None, progress.log.topic_id):
                    log_end = progress.log.high_watermark
                    if log_end is not None:
                        log_end = _log_end(log_end, cursor.records_bytes, offset)
                        progress.record_high_watermark(log_end, now_ms)
                    progress.deliver(cursor.delivered_to, offset, now_ms)
                    progress.open_ended = None
                progress.record_fetch_offset(offset, now_ms)
            cursor.fetch_offset = cursor.delivered_to = offset
            cursor.records_bytes = 0

    def fetch_answered(
        self,
        topic: str,
        topic_id: bytes | None,
        asked: Mapping[int, int | None],
        answers: Iterable[FetchedPartition],
        now_ms: float,
    ) -> None:
        """Record a topic's partitions in a response; `asked`: from where they were, as is known."""
        cursors, node_id = self._cursors.get(topic, NOTHING), self._node_id
        for partition, error_code, high_watermark, _, log_start, records_bytes, end in answers:
            cursor, asked_offset = cursors.get(partition), asked.get(partition)
            if cursor is None or cursor.progress.is_dropped or cursor.topic_id != topic_id:
                cursor = self._begin(topic, partition, topic_id, asked_offset, now_ms)
                cursors = self._cursors.get(topic, NOTHING)
                if cursor is None:
                    continue
            progress = cursor.progress
            if error_code:
                if error_code == OFFSET_OUT_OF_RANGE and asked_offset is not None:
                    cursor.out_of_range = asked_offset == cursor.fetch_offset
                    progress.out_of_range_at = asked_offset
                continue
            log = progress.log
            if (
                topic_id is not None
                and topic_id != log.topic_id
                and not progress.accepts_topic_id(topic_id, now_ms)
            ):
                continue
            if asked_offset is not None and (
                progress.out_of_range_at is not None or progress.fetched_from is None
            ):
                _go_on(cursor, asked_offset, log_start, now_ms)
            if node_id is not None:
                progress.leader = node_id
            progress.record_high_watermark(_log_end(high_watermark, records_bytes, end), now_ms)
            if records_bytes > 0 and asked_offset is not None and asked_offset >= 0:
                if asked_offset != cursor.fetch_offset:  # the client has gone on meanwhile
                    if end is not None:
                        progress.deliver(asked_offset, end, now_ms)
                elif end is None:
                    cursor.records_bytes = records_bytes
                    progress.open_ended = (cursor.delivered_to, high_watermark)
                elif end > cursor.delivered_to:
                    progress.deliver(cursor.delivered_to, end, now_ms)
                    cursor.delivered_to = end
            if log_start != log.log_start_offset:
                log.record_start(log_start)

    def _begin(
        self, topic: str, partition: int, topic_id: bytes | None, offset: int | None, now_ms: float
    ) -> ReadCursor | None:
        """Return the cursor of a partition that this connection did not read before."""
        progress = self._query.open(topic, partition, now_ms)
        if progress is None:
            self.size -= self._cursors.get(topic, {}).pop(partition, None) is not None
            return None
        if offset is None or offset < 0:
            # Following began amid a session: the position comes with the next request.
            return ReadCursor(progress, topic_id, -1, -1)
        progress.read_ms = now_ms
        progress.record_fetch_offset(offset, now_ms)
        if self.size >= MAX_CURSORS:
            self._cursors = {
                topic: kept
                for topic, cursors in self._cursors.items()
                if (kept := {key: at for key, at in cursors.items() if not at.progress.is_dropped})
            }
            self.size = sum(map(len, self._cursors.values()))
        cursors = self._cursors.setdefault(topic, {})
        self.size += partition not in cursors
        cursor = cursors[partition] = ReadCursor(progress, topic_id, offset, offset)
        return cursor


def _log_end(high_watermark: int, records_bytes: int, end: int | None) -> int:
    """Return where a log ends: a broker may look that up a moment before it reads the records."""
    return end if end is not None and 0 < end - high_watermark < records_bytes else high_watermark


def _pass_over(cursor: ReadCursor, offset: int, now_ms: float) -> None:
    """Record that a reader goes on at `offset`, after its position was out of range."""
    progress, lost_from = cursor.progress, cursor.fetch_offset
    cursor.out_of_range = False
    if progress.out_of_range_at is None:
        return  # another reader has gone on, and was given more since
    log_start = progress.log.log_start_offset
    there_from = offset if log_start is None or log_start <= lost_from else min(offset, log_start)
    progress.pass_over(lost_from, there_from, SkipReason.OUT_OF_RANGE, now_ms)
    if progress.out_of_range_at == lost_from:
        progress.out_of_range_at = None


def _go_on(cursor: ReadCursor, asked_offset: int, log_start: int, now_ms: float) -> None:
    """Record a position that was answered after one out of range, or first in a run or log."""
    progress = cursor.progress
    lost_from = progress.out_of_range_at
    if lost_from is not None and asked_offset >= lost_from:
        progress.out_of_range_at = None
        if asked_offset == lost_from:  # it is there after all
            cursor.out_of_range = False
        else:
            there_from = asked_offset if log_start < 0 else min(asked_offset, log_start)
            progress.pass_over(lost_from, there_from, SkipReason.OUT_OF_RANGE, now_ms)
    if progress.fetched_from is None:
        progress.record_fetch_offset(asked_offset, now_ms)


@dataclass(slots=True, eq=False)
class FetchSession:
    """Partitions with the offsets that they were last asked from."""

    session_id: int
    """NO_SESSION until the broker has made one."""
    positions: dict[TopicKey, dict[int, int]] = field(default_factory=dict)
    """By topic and partition."""
    size: int = 0
    """How many there are."""

    def set_all(self, topic: TopicKey, offsets: Sequence[tuple[int, int]]) -> None:
        """Set the offsets of some partitions of a topic, those that there is room for."""
        known = self.positions.get(topic) or {}
        before = len(known)
        if self.size + len(offsets) <= MAX_SESSION_PARTITIONS:
            known.update(offsets)
        else:
            room = MAX_SESSION_PARTITIONS - self.size + before
            for index, offset in offsets:
                if index in known or len(known) < room:
                    known[index] = offset
        if len(known) > before:
            self.positions[topic] = known
            self.size += len(known) - before

    def forget(self, topic: TopicKey, index: int) -> None:
        """Forget a partition, if it is there."""
        known = self.positions.get(topic)
        if known is None or known.pop(index, None) is None:
            return
        self.size -= 1
        if not known:
            del self.positions[topic]


@dataclass(slots=True, eq=False)
class FetchAnswer(FetchObserver):
    """What one response says; `session_asked` is as its request has made it."""

    tracker: "FetchTracker"
    ask: FetchRequestPartitions
    session_asked: FetchSession
    now_ms: float
    logs: FetchedLogs | None = None
    """Gets the response too, for look-ups that are answered from it."""

    def session(self, error_code: int, session_id: int) -> None:
        """See FetchObserver."""
        session, ask, tracker = self.session_asked, self.ask, self.tracker
        if session is tracker.session:
            if error_code or session_id != ask.session_id:
                tracker.session = None
        elif ask.session_epoch == INITIAL_EPOCH and not error_code and session_id != NO_SESSION:
            session.session_id = session_id
            tracker.session = session

    def partitions(self, topic: TopicKey, fetched: Sequence[FetchedPartition]) -> None:
        """See FetchObserver."""
        reader, names = self.tracker.reader, self.tracker.names
        offsets = self.session_asked.positions.get(topic, NOTHING)
        name: str | None
        if isinstance(topic, str):
            name, topic_id = topic, None
        else:
            name, topic_id = names.known.get(topic), topic
        if name is not None:
            reader.fetch_answered(name, topic_id, offsets, fetched, self.now_ms)
            if self.logs is not None:
                self.logs.record(name, fetched)
        elif topic_id is not None:
            for each in fetched:  # one by one: TopicNames bounds how many wait
                asked = {each[0]: offsets.get(each[0])}
                rest = topic_id, asked, (each,), self.now_ms
                names.when_known(topic_id, reader.fetch_answered, *rest)

    def ended(self) -> None:
        """See FetchObserver. A client does not name again from where it asked last."""
        for topic, offsets in _by_topic(self.ask.latest):
            self.session_asked.set_all(topic, offsets)


class FetchTracker:
    """Keeps the fetch session of one client on one connection.

    A request is applied to its session when it is answered, as the broker does: requests may be
    pipelined, and further ones may be read while a response passes. Following may begin in the
    middle of a session: its partitions are then known as they are named. Of several sessions on the
    connection only the newest is kept. Times are monotonic. `reader` gets each position that is
    asked for, and each partition that is answered.
    """

    def __init__(self, names: TopicNames, reader: Reader) -> None:
        self.names = names
        self.reader = reader
        self.session: FetchSession | None = None
        self.fetched_logs = FetchedLogs()
        self._in_flight: deque[tuple[FetchRequestPartitions, _ByTopic]] = deque()

    def asked(self, ask: FetchRequestPartitions, now_ms: float) -> None:
        """Record a request that is sent on to the broker."""
        topics = _by_topic(ask.positions)
        self._in_flight.append((ask, topics))
        asked, names = self.reader.fetch_asked, self.names
        for topic, offsets in topics:
            if isinstance(topic, str):
                asked(topic, None, offsets, now_ms)
            elif (name := names.known.get(topic)) is not None:
                asked(name, topic, offsets, now_ms)
            else:
                for each in offsets:  # one by one: TopicNames bounds how many wait
                    names.when_known(topic, asked, topic, (each,), now_ms)

    def observer(self, ask: FetchRequestPartitions, now_ms: float) -> FetchAnswer:
        """Return the observer of the response to that request, which begins now.

        Responses come in the order of the requests; those left out are taken for never answered.
        Raises ValueError for a request that was not shown, or that was answered before.
        """
        while self._in_flight:
            asked, topics = self._in_flight.popleft()
            session = self._apply(asked, topics)
            if asked is ask:
                return FetchAnswer(self, ask, session, now_ms)
        raise ValueError("a response to a request that was not shown")

    def _apply(self, ask: FetchRequestPartitions, topics: _ByTopic) -> FetchSession:
        """Return the session of a request, changed as it says."""
        session = self.session
        is_named = session is not None and session.session_id == ask.session_id
        if ask.is_full and is_named:  # which it closes
            self.session = None
        if ask.is_full or session is None or not is_named:
            session = FetchSession(NO_SESSION if ask.is_full else ask.session_id)
        for topic, offsets in topics:
            session.set_all(topic, offsets)
        if not ask.is_full:
            self.session = session
            for topic, index in ask.forgotten:
                session.forget(topic, index)
        return session


def _by_topic(positions: Sequence[FetchPosition]) -> _ByTopic:
    """Return partitions with their offsets, those in a row of one topic together."""
    topics: _ByTopic = []
    last: TopicKey | None = None
    for topic, index, offset in positions:
        if topic is not last:
            last, offsets = topic, [(index, offset)]
            topics.append((topic, offsets))
        else:
            offsets.append((index, offset))
    return topics
