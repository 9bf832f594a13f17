"""The offset look-ups on a connection: they wait for a report, and get earlier log ends."""

import math
from dataclasses import replace

from proxy.progress.query import QueryProgress
from proxy.wire import list_offsets
from proxy.wire.list_offsets import OffsetLookup
from proxy.wire.topic_partition import TopicPartition

from .driver_view import DriverView
from .drivers import LookupConnection
from .query_backpressure import QueryBackpressure


class OffsetLookups(LookupConnection):
    """The ListOffsets look-ups on one connection of a followed client.

    Executors look up offsets too; they get the real ones. They are known by their fetching, and
    one that has read all ahead, so that it fetches nothing on a new connection, by asking for the
    start of a log amid a run (InternalKafkaConsumer.getAvailableOffsetRange of Spark's Kafka
    source); drivers ask for that before a run's first batch, and of new partitions. So do all where
    `backpressure` is None: the client's rule is not adaptive.
    """

    __slots__ = ("_backpressure", "query")

    def __init__(
        self, query: QueryProgress, backpressure: QueryBackpressure | None, opened_ms: float
    ) -> None:
        super().__init__(opened_ms)
        self.query = query
        self._backpressure: QueryBackpressure | None = None
        self.follow(backpressure)

    def follow(self, backpressure: QueryBackpressure | None) -> None:
        """Clamp by the rule that applies from now on; None: it is not adaptive."""
        before = self._backpressure
        if backpressure is before:
            return
        if before is not None:
            before.clamp.connections.discard(self)
        self._backpressure, self.waits_since_ms = backpressure, None
        if backpressure is not None:
            backpressure.clamp.connect(self)

    def closed(self) -> None:
        """Remove the connection; may be called twice."""
        self.follow(None)

    def wait_ms(self, ask: OffsetLookup, now_ms: float) -> float:
        """Return how long the answer still waits for a report; at 0 it is to be `answered`."""
        view = self._recorded(ask, now_ms)
        if view is None or self.wait_failed or not view.keys:
            return 0.0
        until_ms = view.wait_until_ms()
        if until_ms == -math.inf:
            return 0.0
        self.waits_since_ms = view.asked_ms
        # One wait in vain is enough until the reports are back.
        self.wait_failed = until_ms <= now_ms
        return max(0.0, until_ms - now_ms)

    def answered(self, ask: OffsetLookup, version: int, frame: bytes, now_ms: float) -> bytes:
        """Return the response as the driver may see it; record what it says.

        `frame` is whole, length included. Partitions with an error or without an offset, and other
        timestamps than LATEST, stay as they are. Raises MalformedResponse.
        """
        view, backpressure = self._recorded(ask, now_ms), self._backpressure
        log_ends: dict[TopicPartition, int] = {}
        is_new = False
        for key, answer in list_offsets.read_list_offsets_response(version, frame).items():
            if answer.error_code or answer.offset < 0:
                continue
            timestamp = ask.timestamps.get(key)
            if timestamp == list_offsets.EARLIEST:
                self.query.log_start(*key, answer.offset, now_ms)
                if view is not None:
                    is_new |= view.drivers.record_start(key, answer.offset)
            elif timestamp == list_offsets.LATEST:
                log_ends[key] = answer.offset
                # Else it is the last stable offset.
                if ask.isolation_level == list_offsets.READ_UNCOMMITTED:
                    self.query.log_end(*key, answer.offset, now_ms)
        if view is None or backpressure is None or not (log_ends or is_new):
            return frame
        view = replace(view, keys=log_ends.keys())
        advertised = backpressure.advertise(view, log_ends, is_new=is_new)
        if advertised == log_ends:  # most often, while the query keeps up
            return frame
        return list_offsets.change_offsets(version, frame, advertised)

    def _recorded(self, ask: OffsetLookup, now_ms: float) -> DriverView | None:
        """Record a look-up; return the driver's view, None for an executor or without a rule."""
        backpressure = self._backpressure
        if backpressure is None or self.is_executor:
            return None
        drivers, every = backpressure.clamp, ask.timestamps.items()
        starts = [key for key, asked in every if asked == list_offsets.EARLIEST]
        ends = [key for key, asked in every if asked == list_offsets.LATEST]
        view = DriverView(self.query, drivers, backpressure.measurements, ends, self, now_ms)
        if not view.is_unproved and any(view.completed(key) is not None for key in starts):
            self.is_executor = True
            return None
        if not starts:
            drivers.record_lookup(self, ask.correlation_id)
        self.first_id = self.first_id or 0  # an executor's number may be near the driver's
        return view
