"""Follow the fetch session of one client on one connection: what was asked for and answered.

In an incremental fetch session (KIP-227) a request names only what has changed, and a response
leaves out partitions without news. So the session's partitions are kept, each with the offset that
it was last asked from.
"""

from collections import deque
from functools import partial
from typing import Protocol

from proxy.progress.topics import TopicNames
from proxy.wire.fetch import (
    INITIAL_EPOCH,
    NO_SESSION,
    FetchedPartition,
    FetchRequestPartitions,
    TopicKey,
)

MAX_SESSION_PARTITIONS = 10_000
"""Kept of a session. The offsets of further partitions are not known when they are answered."""

_Positions = dict[tuple[TopicKey, int], int]


class FetchFollower(Protocol):
    """Who is told what was asked for and answered. `topic_id` is None before Fetch version 13."""

    def fetch_asked(
        self, topic: str, partition: int, topic_id: bytes | None, offset: int, now_ms: float
    ) -> None:
        """Learn from which offset a partition is asked for, as the client wrote it."""

    def fetch_answered(
        self,
        topic: str,
        partition: int,
        topic_id: bytes | None,
        asked_offset: int | None,
        answer: FetchedPartition,
        now_ms: float,
    ) -> None:
        """Learn what was answered; `asked_offset` is None when it is not known."""


class _Session:
    """Partitions with the offsets that they were last asked from."""

    __slots__ = ("latest", "positions", "session_id")

    def __init__(self, session_id: int) -> None:
        self.session_id = session_id
        """NO_SESSION until the broker has made one."""
        self.positions: _Positions = {}
        self.latest: _Asked | None = None
        """The request that was applied last."""


class _Asked:
    """A request that was applied to a session, and what later ones have changed since.

    Requests may be pipelined, and further ones may be read while a response passes. Changes are
    kept here rather than the positions: most often there are none.
    """

    __slots__ = ("later", "overwritten", "session")

    def __init__(self, session: _Session) -> None:
        self.session = session
        self.overwritten: dict[tuple[TopicKey, int], int | None] = {}
        """By the next request: what was there before."""
        self.later: _Asked | None = None

    def offset(self, key: tuple[TopicKey, int]) -> int | None:
        """Return from where the partition was asked for as of this request, None if not known."""
        asked: _Asked | None = self
        while asked is not None:
            if key in asked.overwritten:
                return asked.overwritten[key]
            asked = asked.later
        return self.session.positions.get(key)


class FetchTracker:
    """Keeps the fetch session of one client on one connection.

    Following may begin in the middle of a session: its partitions are then known as they are named.
    Of several sessions on the connection only the newest is kept. Times are monotonic.
    """

    def __init__(self, names: TopicNames, follower: FetchFollower) -> None:
        self._names = names
        self._follower = follower
        self._session: _Session | None = None
        self._pending: deque[tuple[FetchRequestPartitions, _Asked]] = deque()

    def asked(self, ask: FetchRequestPartitions, now_ms: float) -> None:
        """Take note of a request that is sent on to the broker."""
        self._pending.append((ask, self._begin(ask) if ask.is_full else self._go_on(ask)))
        follower, names = self._follower, self._names
        topic: TopicKey | None = None
        name: str | None = None
        topic_id: bytes | None = None
        for key, index, offset in ask.positions:
            if key != topic:
                topic = key
                topic_id = key if isinstance(key, bytes) else None
                name = names.name(key) if isinstance(key, bytes) else key
            if name is not None:
                follower.fetch_asked(name, index, topic_id, offset, now_ms)
            elif topic_id is not None:
                again = partial(
                    follower.fetch_asked,
                    partition=index,
                    topic_id=topic_id,
                    offset=offset,
                    now_ms=now_ms,
                )
                names.when_known(topic_id, again)

    def observer(self, ask: FetchRequestPartitions, now_ms: float) -> "_Answer":
        """Return the observer of the response to that request, which begins now.

        Responses come in the order of the requests; those left out are taken for never answered.
        Raises ValueError for a request that was not shown, or that was answered before.
        """
        while self._pending:
            shown, asked = self._pending.popleft()
            if shown is ask:
                return _Answer(self, ask, asked, now_ms)
        raise ValueError("a response to a request that was not shown")

    def answered(
        self, ask: FetchRequestPartitions, asked: _Asked, error_code: int, session_id: int
    ) -> None:
        """Take note of what the broker says of the session."""
        session = asked.session
        if not ask.is_full:
            if (error_code or session_id != ask.session_id) and session is self._session:
                self._session = None
        elif ask.session_epoch == INITIAL_EPOCH and not error_code and session_id != NO_SESSION:
            session.session_id = session_id
            self._session = session

    def told(self, asked: _Asked, answer: FetchedPartition, now_ms: float) -> None:
        """Pass the answer for one partition on."""
        topic, index = answer.topic, answer.partition
        offset = asked.offset((topic, index))
        if isinstance(topic, str):
            self._follower.fetch_answered(topic, index, None, offset, answer, now_ms)
            return
        name = self._names.name(topic)
        if name is not None:
            self._follower.fetch_answered(name, index, topic, offset, answer, now_ms)
            return
        again = partial(
            self._follower.fetch_answered,
            partition=index,
            topic_id=topic,
            asked_offset=offset,
            answer=answer,
            now_ms=now_ms,
        )
        self._names.when_known(topic, again)

    def _begin(self, ask: FetchRequestPartitions) -> _Asked:
        """Apply a full request. It closes the session that it names; the answer makes a new one."""
        if self._session is not None and self._session.session_id == ask.session_id:
            self._session = None
        session = _Session(NO_SESSION)
        session.positions = {
            (topic, index): offset
            for topic, index, offset in ask.positions[:MAX_SESSION_PARTITIONS]
        }
        asked = session.latest = _Asked(session)
        return asked

    def _go_on(self, ask: FetchRequestPartitions) -> _Asked:
        """Apply an incremental request."""
        session = self._session
        if session is None or session.session_id != ask.session_id:
            session = self._session = _Session(ask.session_id)
        positions = session.positions
        before = session.latest
        overwritten = before.overwritten if before is not None else {}
        for topic, index, offset in ask.positions:
            key = (topic, index)
            if key in positions or len(positions) < MAX_SESSION_PARTITIONS:
                overwritten.setdefault(key, positions.get(key))
                positions[key] = offset
        for key in ask.forgotten:
            if key in positions:
                overwritten.setdefault(key, positions.pop(key))
        asked = session.latest = _Asked(session)
        if before is not None:
            before.later = asked
        return asked


class _Answer:
    """The observer of one response."""

    __slots__ = ("_ask", "_asked", "_now_ms", "_tracker")

    def __init__(
        self, tracker: FetchTracker, ask: FetchRequestPartitions, asked: _Asked, now_ms: float
    ) -> None:
        self._tracker = tracker
        self._ask = ask
        self._asked = asked
        self._now_ms = now_ms

    def session(self, error_code: int, session_id: int) -> None:
        """See FetchObserver."""
        self._tracker.answered(self._ask, self._asked, error_code, session_id)

    def partition(self, fetched: FetchedPartition) -> None:
        """See FetchObserver."""
        self._tracker.told(self._asked, fetched, self._now_ms)
