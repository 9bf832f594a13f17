"""Follows the fetch session of one client on one connection: what was asked for and answered.

In an incremental session (KIP-227) a request names only what has changed, and a response leaves out
partitions without news. So each is kept with the offset that it was last asked from.
"""

from collections import deque
from dataclasses import dataclass
from functools import partial

from proxy.progress.topics import TopicNames
from proxy.wire.fetch import (
    INITIAL_EPOCH,
    NO_SESSION,
    FetchedPartition,
    FetchRequestPartitions,
    TopicKey,
)

from .reader import Reader

MAX_SESSION_PARTITIONS = 10_000
"""Kept of a session. The offsets of further partitions are not known when they are answered."""


@dataclass(slots=True, eq=False)
class FetchSession:
    """Partitions with the offsets that they were last asked from."""

    session_id: int
    """NO_SESSION until the broker has made one."""
    positions: dict[tuple[TopicKey, int], int]
    latest: "FetchInFlight | None" = None
    """The request that was applied last."""


class FetchInFlight:
    """A request that was applied to a session, and the FetchObserver of its response.

    Requests may be pipelined, and further ones may be read while a response passes. What they
    change is kept here rather than the positions: most often there is nothing.
    """

    __slots__ = ("ask", "later", "now_ms", "overwritten", "session_asked", "tracker")

    def __init__(
        self, tracker: "FetchTracker", ask: FetchRequestPartitions, session: FetchSession
    ) -> None:
        self.tracker = tracker
        self.ask = ask
        self.session_asked = session
        self.overwritten: dict[tuple[TopicKey, int], int | None] = {}
        """By the next request: what was there before."""
        self.later: FetchInFlight | None = None
        self.now_ms = 0.0
        """When the response began."""
        if session.latest is not None:
            session.latest.later = self
        session.latest = self

    def session(self, error_code: int, session_id: int) -> None:
        """See FetchObserver."""
        session, ask, tracker = self.session_asked, self.ask, self.tracker
        if session is tracker.session:
            if error_code or session_id != ask.session_id:
                tracker.session = None
        elif ask.session_epoch == INITIAL_EPOCH and not error_code and session_id != NO_SESSION:
            session.session_id = session_id
            tracker.session = session

    def partition(self, fetched: FetchedPartition) -> None:
        """See FetchObserver."""
        topic, index = key = fetched.topic, fetched.partition
        asked: FetchInFlight | None = self
        while asked is not None and key not in asked.overwritten:
            asked = asked.later
        positions = self.session_asked.positions if asked is None else asked.overwritten
        offset = positions.get(key)
        reader, names = self.tracker.reader, self.tracker.names
        if isinstance(topic, str):
            reader.fetch_answered(topic, index, None, offset, fetched, self.now_ms)
        elif (name := names.known.get(topic)) is not None:
            reader.fetch_answered(name, index, topic, offset, fetched, self.now_ms)
        else:
            args = (index, topic, offset, fetched, self.now_ms)
            names.when_known(topic, lambda known: reader.fetch_answered(known, *args))


class FetchTracker:
    """Keeps the fetch session of one client on one connection.

    Following may begin in the middle of a session: its partitions are then known as they are named.
    Of several sessions on the connection only the newest is kept. Times are monotonic. `reader`
    gets each position that is asked for, and each partition that is answered.
    """

    def __init__(self, names: TopicNames, reader: Reader) -> None:
        self.names = names
        self.reader = reader
        self.session: FetchSession | None = None
        self._in_flight: deque[FetchInFlight] = deque()

    def asked(self, ask: FetchRequestPartitions, now_ms: float) -> None:
        """Record a request that is sent on to the broker."""
        session = self._begin(ask) if ask.is_full else self._apply(ask)
        self._in_flight.append(FetchInFlight(self, ask, session))
        asked, names = self.reader.fetch_asked, self.names
        for topic, index, offset in ask.positions:
            if isinstance(topic, str):
                asked(topic, index, None, offset, now_ms)
            elif (name := names.known.get(topic)) is not None:
                asked(name, index, topic, offset, now_ms)
            else:
                again = partial(
                    asked, partition=index, topic_id=topic, offset=offset, now_ms=now_ms
                )
                names.when_known(topic, again)

    def observer(self, ask: FetchRequestPartitions, now_ms: float) -> FetchInFlight:
        """Return the observer of the response to that request, which begins now.

        Responses come in the order of the requests; those left out are taken for never answered.
        Raises ValueError for a request that was not shown, or that was answered before.
        """
        while self._in_flight:
            asked = self._in_flight.popleft()
            if asked.ask is ask:
                asked.now_ms = now_ms
                return asked
        raise ValueError("a response to a request that was not shown")

    def _begin(self, ask: FetchRequestPartitions) -> FetchSession:
        """Return a session for a full request, which closes the one that it names."""
        if self.session is not None and self.session.session_id == ask.session_id:
            self.session = None
        some = ask.positions[:MAX_SESSION_PARTITIONS]
        return FetchSession(NO_SESSION, {(topic, index): offset for topic, index, offset in some})

    def _apply(self, ask: FetchRequestPartitions) -> FetchSession:
        """Return the session that an incremental request names, as it is after that."""
        session = self.session
        if session is None or session.session_id != ask.session_id:
            session = self.session = FetchSession(ask.session_id, {})
        positions = session.positions
        overwritten = session.latest.overwritten if session.latest is not None else {}
        for topic, index, offset in ask.positions:
            key = (topic, index)
            if key in positions or len(positions) < MAX_SESSION_PARTITIONS:
                overwritten.setdefault(key, positions.get(key))
                positions[key] = offset
        for key in ask.forgotten:
            if key in positions:
                overwritten.setdefault(key, positions.pop(key))
        return session
