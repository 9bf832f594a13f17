"""What the drivers of a query know of the ends of the log, because they were told it here."""

import math
from collections.abc import Collection, ItemsView, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from proxy.wire.topic_partition import TopicPartition

MAX_PLANNED = 6
"""Ends of a partition that are remembered with where its log ended then: Spark may tell of a batch
when several more have been planned."""

MAX_PARTITIONS = 10_000
"""Of one query; the ends of further ones are always told truly."""


@dataclass(slots=True)
class AdvertisedEnd:
    """One partition, as a driver of this client knows it."""

    log_end: int
    """The real end when it was last answered."""
    offset: int
    """What was told instead, or the same."""
    answered_ms: float
    """When."""
    answered_on: object | None
    """On which connection; None: in an earlier process."""
    raised_ms: float
    """When it last became more."""
    raised_on: object | None
    """On which connection; None: in an earlier process."""
    idle_offset: int = 0
    """All below had been read when the query was idle."""
    previous: int | None = None
    """What was told until it last became more."""
    planned: tuple[tuple[int, int], ...] = ()
    """The latest offsets that were told, each with the real end then."""


class AdvertisedEndState(NamedTuple):
    """What is kept of a partition in the state."""

    offset: int
    latest: int
    idle_offset: int


class AdvertisedEnds:
    """All partitions of one query, over all connections of its drivers."""

    __slots__ = ("_told", "starts")

    def __init__(self) -> None:
        self._told: dict[TopicPartition, AdvertisedEnd] = {}
        self.starts: dict[TopicPartition, int] = {}
        """Starts of logs that the driver was told, before the first batch of its run."""

    def __contains__(self, key: TopicPartition) -> bool:
        return key in self._told

    def __len__(self) -> int:
        return len(self._told)

    def get(self, key: TopicPartition) -> AdvertisedEnd | None:
        """Return what was told of a partition; None when nothing was."""
        return self._told.get(key)

    def __iter__(self) -> Iterator[TopicPartition]:
        return iter(self._told)

    def items(self) -> ItemsView[TopicPartition, AdvertisedEnd]:
        """Return all partitions of which something was told."""
        return self._told.items()

    @property
    def withheld(self) -> int:
        """How many offsets the driver was not told of, when it asked last."""
        return sum(told.log_end - told.offset for told in self._told.values())

    def begin_run(self, event_ms: float, done: Mapping[TopicPartition, int | None] | None) -> None:
        """Forget what was told up to the last event of the run before.

        But not where it is more than is done, if this is another run of the same query; None: it
        is not.
        """
        self._told = {
            key: told
            for key, told in self._told.items()
            if told.answered_ms > event_ms or (done is not None and told.offset > (done[key] or 0))
        }
        if done is None:
            self.starts.clear()

    def idle(self, event_ms: float, unread: Collection[TopicPartition]) -> None:
        """Record that all that was told by then is done, but of partitions in `unread`."""
        for key, told in self._told.items():
            if told.answered_ms < event_ms and key not in unread:
                told.idle_offset = told.offset

    def record(
        self, key: TopicPartition, latest: int, offset: int, connection: object, now_ms: float
    ) -> bool:
        """Take note of what is told; return whether it is another offset than before."""
        told = self._told.get(key)
        if told is None:
            if len(self._told) < MAX_PARTITIONS:
                self._told[key] = AdvertisedEnd(
                    log_end=latest,
                    offset=offset,
                    answered_ms=now_ms,
                    answered_on=connection,
                    raised_ms=now_ms,
                    raised_on=connection,
                    planned=((offset, latest),),
                )
            return True
        is_other = offset != told.offset
        if offset > told.offset:
            told.raised_ms, told.raised_on, told.previous = now_ms, connection, told.offset
            told.planned = (*told.planned[1 - MAX_PLANNED :], (offset, latest))
        told.log_end, told.offset, told.answered_ms, told.answered_on = (
            latest,
            offset,
            now_ms,
            connection,
        )
        told.idle_offset = min(told.idle_offset, offset)
        return is_other

    def record_start(self, key: TopicPartition, offset: int) -> bool:
        """Take note of the start of a log that the driver was told; return whether it is new."""
        is_new = self.starts.get(key) != offset
        if key in self.starts or len(self.starts) < MAX_PARTITIONS:
            self.starts[key] = offset
        return is_new

    def left(self, ends: Mapping[TopicPartition, int]) -> int | None:
        """Return how many offsets were in the logs beyond a batch with these ends.

        That is when it was planned; None when it is not known.
        """
        known = [
            latest - end
            for key, end in ends.items()
            if (told := self._told.get(key)) is not None
            for offset, latest in told.planned
            if offset == end
        ]
        return sum(known) if known else None

    def kept(self) -> dict[TopicPartition, AdvertisedEndState]:
        """Return what `restore` needs, in a later process."""
        return {
            key: AdvertisedEndState(told.offset, told.log_end, told.idle_offset)
            for key, told in self._told.items()
        }

    def restore(
        self,
        ends: Mapping[TopicPartition, AdvertisedEndState],
        starts: Mapping[TopicPartition, int],
        now_ms: float,
    ) -> None:
        """Take up what an earlier process told: some time before now."""
        for key, end in ends.items():
            if len(self._told) < MAX_PARTITIONS:
                self._told[key] = AdvertisedEnd(
                    log_end=end.latest,
                    offset=end.offset,
                    answered_ms=now_ms,
                    answered_on=None,
                    raised_ms=-math.inf,
                    raised_on=None,
                    idle_offset=end.idle_offset,
                )
        for key, start in starts.items():
            self.record_start(key, start)
