"""Look after the offset look-ups on a connection: wait for a report, tell the driver less."""

import math
from collections import deque

from proxy.progress.query import QueryProgress
from proxy.wire.list_offsets import (
    EARLIEST,
    LATEST,
    READ_UNCOMMITTED,
    OffsetLookup,
    change_offsets,
    read_list_offsets_response,
)
from proxy.wire.topic_partition import TopicPartition

from .clamp import Clamp
from .pressure import QueryPressure

MISSED_ANSWERS = 3
"""A partition that a driver did not ask for in so many answers is read no more."""


class DriverLookups:
    """The ListOffsets look-ups on one connection of a followed client.

    Executors look up offsets too; they are known by their fetching and are told the truth.

    Args:
        query: takes note of the log ends.
        pressure: on the client's query; None when its rule is not adaptive.
        opened_ms: the monotonic time.

    """

    __slots__ = (
        *("_answers_ms", "_clamp", "_query", "_vain", "_waits_since_ms"),
        *("is_executor", "opened_ms"),
    )

    def __init__(
        self, query: QueryProgress, pressure: QueryPressure | None, opened_ms: float
    ) -> None:
        self._query = query
        self.opened_ms = opened_ms
        self.is_executor = False
        """Whether the connection fetches."""
        self._clamp: Clamp | None = None
        self._answers_ms: deque[float] = deque(maxlen=MISSED_ANSWERS)
        self._waits_since_ms: float | None = None
        self._vain = False
        self.follow(pressure)

    def follow(self, pressure: QueryPressure | None) -> None:
        """Go on under the rule that applies now; None: it is not adaptive."""
        clamp = pressure.clamp if pressure is not None else None
        if clamp is self._clamp:
            return
        if self._clamp is not None:
            self._clamp.trust.leave(self)
        self._clamp = clamp
        self._waits_since_ms = None
        if clamp is not None:
            clamp.trust.join(self)

    def fetched(self) -> None:
        """Record that the connection fetches: it is an executor's, from now on."""
        self.is_executor = True

    def closed(self) -> None:
        """Let go; may be called twice."""
        self.follow(None)

    @property
    def oldest_answer_ms(self) -> float:
        """When the first of the last MISSED_ANSWERS was given; long ago if there were fewer."""
        is_full = len(self._answers_ms) == MISSED_ANSWERS
        return self._answers_ms[0] if is_full else -math.inf

    def wait_ms(self, ask: OffsetLookup, now_ms: float) -> float:
        """Return how long the answer should still wait for a report; 0: not at all.

        Ask again after a while, until it is 0; then call `answered`.
        """
        clamp = self._clamp
        if clamp is None or self.is_executor:
            return 0.0
        clamp.trust.asks(self, ask.correlation_id)
        if self._vain:
            return 0.0
        since_ms = now_ms if self._waits_since_ms is None else self._waits_since_ms
        until_ms = clamp.waits_until_ms(self._query, self, ask, since_ms, now_ms)
        if until_ms == -math.inf:
            return 0.0
        self._waits_since_ms = since_ms
        # One wait in vain is enough until the reports are back.
        self._vain = until_ms <= now_ms
        return max(0.0, until_ms - now_ms)

    def answered(self, ask: OffsetLookup, version: int, frame: bytes, now_ms: float) -> bytes:
        """Return the response as the driver may see it; record what it says.

        `frame` is whole, length included. Partitions with an error or without an offset, and other
        timestamps than LATEST, stay as they are. Raises MalformedResponse.
        """
        clamp = None if self.is_executor else self._clamp
        if clamp is not None:
            clamp.trust.asks(self, ask.correlation_id)
        latest: dict[TopicPartition, int] = {}
        for key, answer in read_list_offsets_response(version, frame).items():
            if answer.error_code or answer.offset < 0:
                continue
            timestamp = ask.timestamps.get(key)
            if timestamp == EARLIEST:
                self._query.log_start(*key, answer.offset, now_ms)
                if clamp is not None:
                    clamp.tell_earliest(self._query, key, answer.offset, now_ms)
            elif timestamp == LATEST:
                latest[key] = answer.offset
                if ask.isolation_level == READ_UNCOMMITTED:  # else it is the last stable offset
                    self._query.log_end(*key, answer.offset, now_ms)
        if clamp is None or not latest:
            return frame
        if self._waits_since_ms is not None:
            clamp.on_wait(self._waits_since_ms, now_ms)
            self._waits_since_ms = None
        answers = clamp.tell(self._query, self, latest, now_ms, is_overdue=self._vain)
        self._answers_ms.append(now_ms)
        return change_offsets(version, frame, answers)

    def reported(self) -> None:
        """Record that reports come: waiting for one may be worth it again."""
        self._vain = False
