"""Fetches that read on, each from where the one before ended, are recorded as one, soon after."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.progress.tracker import NOTHING, FetchedLogOffsets, FetchExchange
from proxy.relay.intercept_queue import InterceptQueue
from proxy.wire.fetch import FetchedPartition, TopicKey
from proxy.wire.fetch_response import MAX_UNSHOWN

ROW_BYTES = 256
"""About what a FetchedPartition takes."""


@dataclass(slots=True, eq=False)
class CoalescedFetchRecorder:
    """Those of one connection that wait to be recorded."""

    _unshown: InterceptQueue
    """Has them recorded soon."""
    _answered: "UnrecordedFetch | None" = None
    """The last one, with all those that it stands for."""
    _asked: "UnrecordedFetch | None" = None
    """Reads on from there, and has no response yet."""

    def asked(self, fetch: "UnrecordedFetch") -> None:
        """Record a request that was sent on; later if it reads on from what waits."""
        if self._answered is not None and self._asked is None and fetch.goes_on(self._answered):
            self._asked = fetch
        else:
            self.record()
            fetch.asked(fetch.sent_ms)

    def answered(self, fetch: "UnrecordedFetch") -> None:
        """Record a response, soon."""
        before = self._answered
        if before is not None and fetch is self._asked:
            fetch.stand_for(before)
            self._asked = None
        else:
            self.record()
            self._unshown.add(fetch.answered_ms, self.record)
        self._keep(fetch)

    def record(self) -> None:
        """Record all that waits."""
        if self._answered is None:
            return
        answered, asked = self._answered, self._asked
        self._asked = None
        self._keep(None)
        answered.record()
        if asked is not None:
            asked.asked(asked.sent_ms)

    def _keep(self, answered: "UnrecordedFetch | None") -> None:
        new, old = (0 if each is None else each.rows for each in (answered, self._answered))
        self._unshown.cells[0] += ROW_BYTES * (new - old)
        self._answered = answered


@dataclass(slots=True, eq=False, kw_only=True)
class UnrecordedFetch(FetchExchange):
    """A Fetch, and what its response says until that is recorded."""

    sent_ms: float
    run: CoalescedFetchRecorder
    logs: FetchedLogOffsets | None = None
    """Gets the response at once, for look-ups that are answered from it."""
    answers: list[tuple[TopicKey, Sequence[FetchedPartition]]] = field(default_factory=list)
    rows: int = 0
    """How many partitions these are."""
    first: "UnrecordedFetch | None" = None
    """Stands for all before it that read on from one another: what it asked for, and the last
    response."""
    is_alone: bool = False
    """Whether it is recorded as it is shown."""

    def record_alone(self) -> None:
        """Record the request, and what is shown of its response at once."""
        self.run.record()
        self.is_alone = True
        self.asked(self.sent_ms)

    def partitions(self, topic: TopicKey, fetched: Sequence[FetchedPartition]) -> None:
        """See FetchObserver."""
        if self.logs is not None and (name := self.names.name_of(topic)) is not None:
            self.logs.record(name, fetched)
        if self.is_alone:
            FetchExchange.partitions(self, topic, fetched)
            return
        self.answers.append((topic, fetched))
        self.rows += len(fetched)
        if self.rows > MAX_UNSHOWN:
            self.run.record()
            self.record_answers()

    def ended(self) -> None:
        """See FetchObserver."""
        if self.is_alone:
            FetchExchange.ended(self)
        else:
            self.run.answered(self)

    def goes_on(self, before: "UnrecordedFetch") -> bool:
        """Return whether it asks just for what is behind all that another one was given.

        For all that the other one asked for, and got: then nothing else is to be known of that.
        """
        offsets, offsets_before = self.offsets(), before.offsets()
        topics = len(before.answers)
        if self.reader is not before.reader or not len(offsets) == len(offsets_before) == topics:
            return False
        for topic, rows in before.answers:
            ats, starts = offsets.get(topic, NOTHING), offsets_before.get(topic, NOTHING)
            if not len(ats) == len(starts) == len(rows):
                return False
            for index, error_code, _, _, _, records_bytes, end in rows:
                at, start = ats.get(index), starts.get(index)
                if error_code or at is None or start is None or at < start:
                    return False
                if at != (start if end is None else end) and (end is not None or not records_bytes):
                    return False
        return True

    def stand_for(self, before: "UnrecordedFetch") -> None:
        """Have another one, from which it goes on, recorded with it, and what that stands for."""
        first, before.first = before.first, None
        if first is not None:
            first.answers, first.answered_ms = before.answers, before.answered_ms
        self.first = first or before

    def record(self) -> None:
        """Record the response, and all that it stands for as one."""
        first = self.first
        if first is not None:
            for each, (topic, rows) in enumerate(first.answers):
                at, start = self.offsets()[topic], first.offsets()[topic]
                # Records of earlier ones count, also where the last response had none.
                given = [(*row[:5], row[5] or at[row[0]] - start[row[0]], row[6]) for row in rows]
                first.answers[each] = topic, given
            first.record_answers()
            self.asked(self.sent_ms)
        self.record_answers()
        FetchExchange.ended(self)

    def record_answers(self) -> None:
        """Record what the response has said so far."""
        for topic, fetched in self.answers:
            FetchExchange.partitions(self, topic, fetched)
        self.answers, self.rows = [], 0
