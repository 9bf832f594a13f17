"""What the drivers of one query were given, and which connections of its client are theirs.

What is advertised to a driver binds the next batch of its run. So a connection has to be known for
the driver's: an executor, or the driver of another run, gets the real log ends.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from proxy.progress.query import MAX_PARTITIONS
from proxy.progress.report import BatchRange
from proxy.state import Json
from proxy.wire.topic_partition import TopicPartition

from .backpressure_record import BackpressureRecord, by_partition, by_topic

PartitionOffsets = Mapping[TopicPartition, int]

MISSED_ANSWERS = 3
"""A partition that a driver did not look up in so many answers is read no more."""

LATE_REPORT_MS = 100.0
"""Where a report came later than that after its batch, none is waited for at the next look-up."""

REFUSED_GROWTH = 2
"""How many times more is advertised to a driver that planned no batch of what it got."""

MAX_PLANNED = 6
"""Ends of a partition kept with its log end then: Spark may report a batch several later."""

MAX_INSTANCES = 8
"""Kafka clients of one query: it has one for each of its sources."""

MAX_STEP, MAX_BACK = 1000, 8
"""By how much a correlation id may be above the last, as a client that connects again and again
sends a request each time; and by how much below: several brokers are asked at the same time."""

MIN_KNOWN = 16
"""Lower ones mean nothing: Spark's admin client looks up with request 6, 10, 14 and so on."""


@dataclass(slots=True, eq=False)
class QueryConnection:
    """What is known of one connection of the client."""

    opened_ms: float
    """Monotonic; so are all times here."""
    is_executor: bool = False
    """Whether it fetches."""
    is_known: bool = False
    """Whether it is the driver's whatever signs of life there are."""
    first_id: int | None = None
    """The correlation id of its first look-up, 0 if that was of log starts; None before it."""
    waits_since_ms: float | None = None
    """Since when an answer has waited for a report; None: none waits."""
    wait_failed: bool = False
    """Whether one waited in vain, and no report came since."""
    answers_ms: deque[float] = field(
        default_factory=lambda: deque([-math.inf] * MISSED_ANSWERS, MISSED_ANSWERS)
    )
    """When the last look-ups of log ends were answered; long ago where there were fewer."""


NO_CONNECTION = QueryConnection(-math.inf)
"""Stands for the connection where nobody looks up anything."""


@dataclass(slots=True)
class AdvertisedEnd:
    """One partition, as a driver knows it; a connection of None is one of an earlier process."""

    log_end: int
    """The real one when it was last looked up."""
    offset: int
    """What was advertised instead, or the same."""
    answered_ms: float
    answered_on: QueryConnection | None = None
    """Of the last answer: when, and on which connection."""
    raised_ms: float = -math.inf
    raised_on: QueryConnection | None = None
    """The same of the last that advertised more than the one before."""
    idle_offset: int = 0
    """All below had been read when the query was idle."""
    planned: tuple[tuple[int, int], ...] = ()
    """The latest offsets that were advertised, each with the real end then."""
    previous: int | None = None
    """What was advertised until it was raised last."""
    new: int = 0
    """By how much the log had grown at the last look-up since the one before."""


@dataclass(slots=True, eq=False)
class QueryDrivers:
    """What was advertised to the drivers of one query, and what shows which connection is theirs.

    A connection is the present driver's when it does not fetch, and

    - it was open when the run gave a sign of life, a report or a heartbeat; or
    - it was opened while such a one was open; or
    - its requests began where those of such a one had ended: a Kafka client counts them from 0 over
      all its connections, as correlation ids (NetworkClient.nextCorrelationId of the Java client);
      or
    - the run was resumed from an earlier process and has given a sign of life since, as long as no
      connection is proved to be the driver's otherwise.

    Where something never was, its time is long ago.
    """

    detached: bool = False
    """Whether no adaptive rule is left for the query."""
    rate: float | None = None
    """Records per second for the next batch; None when not known, and 0 lets none begin."""
    start_rate: float | None = None
    """The same of a slow start under a processing-time trigger, while nothing is known of what a
    batch costs: then the driver gets what came in since its look-up before, if that is more."""
    why: str = "the driver has not asked yet"
    """What came of the driver's last look-up, for people."""
    offsets: int | None = None
    """For the next batch by that, over all partitions; None: it is not clamped."""
    least_offsets: int = 0
    """So many at least are advertised for a batch: the driver planned none of fewer, as it does
    with the option minOffsetsPerTrigger. 0: none was refused in this run."""
    advertised: dict[TopicPartition, AdvertisedEnd] = field(default_factory=dict)
    starts: dict[TopicPartition, int] = field(default_factory=dict)
    """Starts of logs that the driver was given, before the first batch of its run."""
    connections: set[QueryConnection] = field(default_factory=set)
    request_ids: list[int] = field(default_factory=list)
    """The highest correlation id of each Kafka client of the driver."""
    alive_ms: float = -math.inf
    """When the run gave its latest sign of life."""
    event_ms: float = -math.inf
    """When the driver saw the latest event of this run that was reported."""
    is_late: bool = False
    """Whether the latest batch was reported late, as where Spark has much to do."""
    waited_ms: float = -math.inf
    """After that the run was seen between two batches, all before being reported."""
    answered_ms: float = math.inf
    """When the present run got its first answer; far ahead if it has none."""
    resumed_ms: float = -math.inf
    """When the run of an earlier process was resumed."""
    resumed_alive_ms: float = -math.inf
    """When that run gave its first sign of life."""
    is_resumed: bool = False
    """Whether the present run is that one, as it or its driver has shown."""
    _trusts_all: bool = False

    @property
    def awaits_run(self) -> bool:
        """Whether a run was resumed, and neither it nor its driver has shown up since."""
        return self.resumed_ms > -math.inf and not self.is_resumed

    def kept(self) -> dict[str, Json]:
        """Return what a BackpressureRecord has of them."""
        ends = self.advertised.items()
        return {
            "instances": self.request_ids,
            "least_offsets": self.least_offsets,
            "told": by_topic({key: [e.offset, e.log_end, e.idle_offset] for key, e in ends}),
            "starts": by_topic(self.starts),
        }

    def resume(self, record: BackpressureRecord, now_ms: float) -> None:
        """Resume a run of an earlier process, which ended with all its connections."""
        for key, (offset, log_end, idle_offset) in by_partition(record.told).items():
            if len(self.advertised) < MAX_PARTITIONS:
                end = AdvertisedEnd(log_end, offset, now_ms, idle_offset=idle_offset)
                self.advertised[key] = end
        for key, start in by_partition(record.starts).items():
            self.record_start(key, start)
        self.request_ids = record.instances[-MAX_INSTANCES:]
        self.least_offsets, self.resumed_ms = record.least_offsets, now_ms

    def begin_run(
        self, began_ms: float | None, done: Mapping[TopicPartition, int | None] | None
    ) -> None:
        """Forget what was advertised to the drivers of earlier runs, and who they were.

        What is not completed (beyond `done`; None: all is) may be the end of a batch with which
        this run begins, from the checkpoint: a run that is stopped or fails gives its batch up. And
        what was advertised after the last event may have been given to the driver of this run.
        """
        for key, end in list(self.advertised.items()):
            is_pending = done is not None and end.offset > (done[key] or 0)
            if end.answered_ms <= self.event_ms and not is_pending:
                del self.advertised[key]
        if done is None:
            self.starts.clear()
        self.request_ids.clear()
        self.alive_ms = self.event_ms = self.waited_ms = self.resumed_ms = -math.inf
        self.is_resumed = self._trusts_all = False
        self.least_offsets = 0
        if self.answered_ms < (began_ms or math.inf):
            self.answered_ms = math.inf

    def record_report(self, event_ms: float, now_ms: float) -> None:
        """Record a report on an event of the run, which the driver saw at `event_ms`."""
        self.event_ms = max(self.event_ms, event_ms)
        self.record_alive(event_ms, now_ms)
        for connection in self.connections:
            connection.wait_failed = False

    def record_alive(self, at_ms: float, now_ms: float) -> None:
        """Record a sign of life of the run, which it gave at `at_ms`."""
        self.alive_ms = max(self.alive_ms, at_ms)
        if self.resumed_ms == -math.inf:
            return
        if not self.is_resumed:
            self.is_resumed = self._trusts_all = True
        if self.resumed_alive_ms < self.resumed_ms:
            self.resumed_alive_ms = now_ms
        if self._trusts_all:
            self._trusts_all = not any(map(self._is_proved, self.connections))

    def record_batch(self, offsets: int | None, age_ms: float) -> None:
        """Record that a batch of so many offsets, if known, was reported so long after its end."""
        self.is_late = age_ms > LATE_REPORT_MS
        self.starts.clear()
        if offsets and offsets * REFUSED_GROWTH <= self.least_offsets:
            self.least_offsets = 0  # it does plan batches of so few

    def record_idle(self, event_ms: float, unread: Collection[TopicPartition]) -> None:
        """Record that all that was advertised by then is done, but of partitions in `unread`."""
        for key, end in self.advertised.items():
            if end.answered_ms < event_ms and key not in unread:
                end.idle_offset = end.offset

    def record_end(
        self,
        key: TopicPartition,
        log_end: int,
        offset: int,
        connection: QueryConnection,
        now_ms: float,
    ) -> bool:
        """Record what is advertised; return whether it is another offset than before."""
        end = self.advertised.get(key)
        if end is None:
            if len(self.advertised) < MAX_PARTITIONS:
                made = log_end, offset, now_ms, connection, now_ms, connection
                self.advertised[key] = AdvertisedEnd(*made, planned=((offset, log_end),))
            return True
        is_other = offset != end.offset
        if offset > end.offset:
            end.raised_ms, end.raised_on, end.previous = now_ms, connection, end.offset
            end.planned = (*end.planned[1 - MAX_PLANNED :], (offset, log_end))
        end.new = log_end - end.log_end
        end.log_end, end.offset, end.idle_offset = log_end, offset, min(end.idle_offset, offset)
        end.answered_ms, end.answered_on = now_ms, connection
        return is_other

    def record_start(self, key: TopicPartition, offset: int) -> bool:
        """Record the start of a log that the driver was given; return whether it is new."""
        is_new = self.starts.get(key) != offset
        if key in self.starts or len(self.starts) < MAX_PARTITIONS:
            self.starts[key] = offset
        return is_new

    def grown(self, log_ends: PartitionOffsets) -> int:
        """Return by how much all logs have grown from one look-up to the next, to these ends."""
        return sum(
            log_ends[key] - end.log_end if key in log_ends else end.new
            for key, end in self.advertised.items()
        )

    def left_out(self, ranges: Mapping[TopicPartition, BatchRange]) -> int | None:
        """Return how many offsets were beyond a batch when it was planned; None: not known."""
        known = [
            log_end - offset
            for key in self.advertised.keys() & ranges.keys()
            for offset, log_end in self.advertised[key].planned
            if offset == ranges[key].end
        ]
        return sum(known) if known else None

    def record_lookup(self, connection: QueryConnection, request_id: int) -> None:
        """Record a look-up of log ends on a connection that does not fetch, before its answer."""
        if connection.first_id is None:
            connection.first_id = request_id
        # By its first: those of a client that has just begun come near any other's after a while.
        first_id = connection.first_id
        goes_on = first_id >= MIN_KNOWN and self._request_before(first_id) is not None
        if goes_on and not self.is_driver(connection):
            connection.is_known = True
            self.is_resumed |= self.awaits_run  # the driver of the run that was resumed is back
        if not self.is_driver(connection):
            return
        index = self._request_before(request_id)
        if index is None:
            self.request_ids = [*self.request_ids[1 - MAX_INSTANCES :], request_id]
        else:
            self.request_ids[index] = max(self.request_ids[index], request_id)

    def connect(self, connection: QueryConnection) -> None:
        """Add a connection that was opened."""
        connection.is_known = any(map(self._is_proved, self.connections))
        self.connections.add(connection)

    def is_driver(self, connection: QueryConnection) -> bool:
        """Return whether a connection is the present driver's, for certain."""
        return not connection.is_executor and (self._trusts_all or self._is_proved(connection))

    def _is_proved(self, connection: QueryConnection) -> bool:
        is_proved = connection.is_known or connection.opened_ms < self.alive_ms
        return is_proved and not connection.is_executor

    def _request_before(self, request_id: int) -> int | None:
        """Return which of `request_ids` a request goes on from; None: it is another client's."""
        steps = (request_id - latest for latest in self.request_ids)
        return next((i for i, step in enumerate(steps) if -MAX_BACK <= step <= MAX_STEP), None)
