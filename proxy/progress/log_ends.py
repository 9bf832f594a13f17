"""Asks the cluster where the logs of followed partitions begin and end.

So lag stays true while nothing passes that says so: a query that is down, or busy with a batch.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from typing import Protocol

from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from structlog import get_logger

from proxy.progress.link import Address, ClusterAccess, Link, LinkError, by_topic, named
from proxy.wire.list_offsets import EARLIEST, LATEST, READ_UNCOMMITTED
from proxy.wire.topic_partition import TopicPartition

LOG_END_INTERVAL_S = 10.0
"""Between two questions about all partitions that are followed."""

STALE_END_INTERVAL_S = 0.2
"""Between two questions about those whose end is known, but was not learned lately."""

RETRY_PAUSE_S = 1.0
"""Besides, when somebody could not be asked."""

MAX_OFFSETS_PER_S = 2500
"""So many are asked for in a second, of all brokers together, by each of these two; the others come
later. Each takes some 15 µs of the event loop's time."""

SLICE = 250
"""Partitions in one question: the event loop does other work between two."""

_CONSUMER = -1
"""Who asks, as Kafka numbers replicas."""

_log = get_logger(__name__)


class LogBook(Protocol):
    """Who wants to know the ends of logs."""

    def partitions(self) -> Iterable[TopicPartition]:
        """Return the partitions that are followed."""

    def stale(self, now_ms: float) -> Iterable[TopicPartition]:
        """Return those of them whose end should be known better."""

    def log_end(self, topic: str, partition: int, offset: int, now_ms: float) -> None:
        """Learn the offset that the next record will have (read_uncommitted)."""

    def log_start(self, topic: str, partition: int, offset: int, now_ms: float) -> None:
        """Learn the offset of the first record that is still there."""


class LogEnds:
    """Keeps the book informed, over a connection to each leader.

    Nothing is opened while no partition is followed. Topics that are not there are left out and
    looked for again; asking never makes one.

    Args:
        book: wants to know.
        access: how to get to the cluster.
        clock_ms: monotonic, for the book.

    """

    def __init__(self, book: LogBook, access: ClusterAccess, clock_ms: Callable[[], float]) -> None:
        self._book = book
        self._clock_ms = clock_ms
        self._link = Link(access)
        self._leaders: dict[TopicPartition, Address] = {}
        self._absent: frozenset[TopicPartition] = frozenset()
        self._failing: set[TopicPartition] = set()
        """Those that had an error, or no leader, since all were asked for: left out until then."""
        self._problems: dict[object, str | None] = {}
        """What is wrong with each of the two polls."""
        self._problem: str | None = None
        """What was logged last; None when all is well."""

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return self._link.connections

    async def run(self) -> None:
        """Ask again and again, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._repeat(self.poll, LOG_END_INTERVAL_S))
                tasks.create_task(self._repeat(self._poll_stale, STALE_END_INTERVAL_S))
        finally:
            await self._link.drop()

    async def poll(self) -> None:
        """Ask for the start and the end of all that is followed, all leaders at the same time.

        Raises LinkError, after all others were heard, when somebody could not be asked.
        """
        followed = frozenset(self._book.partitions())
        self._leaders = {part: at for part, at in self._leaders.items() if part in followed}
        self._failing.clear()
        unfound: LinkError | None = None
        if unknown := followed - self._leaders.keys():
            unfound = await self._find_leaders(unknown)
        if unfound is None:
            self._say_absent(followed - self._leaders.keys())
        await self._ask_leaders(followed, (EARLIEST, LATEST))
        if unfound is not None:
            raise unfound

    async def _poll_stale(self) -> None:
        """Ask for the ends that should be known better, as in `poll`."""
        stale = frozenset(self._book.stale(self._clock_ms())) - self._failing - self._absent
        unfound: LinkError | None = None
        if unknown := stale - self._leaders.keys():
            unfound = await self._find_leaders(unknown)
        if unfound is None:
            self._failing |= unknown - self._leaders.keys()
        await self._ask_leaders(stale, (LATEST,))
        if unfound is not None:
            raise unfound

    async def _repeat(self, poll: Callable[[], Awaitable[None]], interval_s: float) -> None:
        while True:
            try:
                await poll()
            except LinkError as error:
                self._say(poll, str(error))
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                self._say(poll, None)
            await asyncio.sleep(interval_s)

    async def look_up(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the log ends of these partitions; those that are not there are left out.

        Raises LinkError when a leader could not be asked.
        """
        missing = set(partitions) - self._leaders.keys()
        if missing:
            await self._find_leaders(missing)
        return {
            partition: end
            for leader, of_leader in self._by_leader(partitions).items()
            async for partition, end in self._offsets(leader, of_leader, LATEST)
        }

    async def _find_leaders(self, partitions: Collection[TopicPartition]) -> LinkError | None:
        """Look for the leaders of partitions; return why nobody could be asked."""
        topics = sorted({topic for topic, _ in partitions})
        request = MetadataRequest(topics, allow_auto_topic_creation=False)
        try:
            response = await self._link.ask(request)
        except LinkError as error:
            return error
        brokers = {node_id: (host, port) for node_id, host, port, *_ in response.brokers}
        for _error, topic, _internal, rows in response.topics:
            for _partition_error, number, leader, *_ in rows:
                if leader in brokers and (topic, number) in partitions:  # -1: it has none
                    self._leaders[topic, number] = brokers[leader]
        return None

    def _by_leader(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[Address, list[TopicPartition]]:
        """Return whom to ask for which of them; those without a known leader are left out."""
        by_leader: dict[Address, list[TopicPartition]] = {}
        for partition in partitions:
            if partition in self._leaders:
                by_leader.setdefault(self._leaders[partition], []).append(partition)
        return by_leader

    async def _ask_leaders(
        self, partitions: Iterable[TopicPartition], timestamps: Sequence[int]
    ) -> None:
        """Ask all leaders at the same time. Raises LinkError when one could not be asked."""
        by_leader = self._by_leader(partitions)
        asked = (
            self._ask(leader, of_leader, timestamps, MAX_OFFSETS_PER_S / len(by_leader))
            for leader, of_leader in by_leader.items()
        )
        for failure in filter(None, await asyncio.gather(*asked)):
            raise failure

    async def _ask(
        self,
        leader: Address,
        partitions: list[TopicPartition],
        timestamps: Sequence[int],
        offsets_per_s: float,
    ) -> LinkError | None:
        """Ask a leader, a slice at a time; return why that was not possible."""
        try:
            for start in range(0, len(partitions), SLICE):
                some = partitions[start : start + SLICE]
                for timestamp in timestamps:
                    tell = self._book.log_end if timestamp == LATEST else self._book.log_start
                    async for partition, offset in self._offsets(leader, some, timestamp):
                        tell(*partition, offset, self._clock_ms())
                    await asyncio.sleep(len(some) / offsets_per_s)
        except LinkError as error:
            for partition in partitions:
                self._leaders.pop(partition, None)
            return error
        return None

    async def _offsets(
        self, leader: Address, partitions: Iterable[TopicPartition], timestamp: int
    ) -> AsyncIterator[tuple[TopicPartition, int]]:
        """Yield each partition's offset; one with an error gets its leader anew.

        Raises LinkError.
        """
        for topics in by_topic(dict.fromkeys(partitions, timestamp)):
            request = OffsetRequest(_CONSUMER, READ_UNCOMMITTED, list(topics.items()))
            response = await self._link.ask(request, leader)
            for topic, rows in response.topics:
                for number, error_code, _timestamp, offset in rows:
                    if error_code:
                        self._leaders.pop((topic, number), None)
                        self._failing.add((topic, number))
                    elif offset >= 0:
                        yield (topic, number), offset

    def _say(self, poll: object, problem: str | None) -> None:
        """Log each problem once, and when all is well again."""
        self._problems[poll] = problem
        problem = next(filter(None, self._problems.values()), None)
        if problem == self._problem:
            return
        if problem is None:
            _log.info("log ends read again")
        else:
            _log.warning("log ends not read, lag may be out of date", error=problem)
        self._problem = problem

    def _say_absent(self, absent: frozenset[TopicPartition]) -> None:
        if absent - self._absent:
            _log.warning("followed partitions have no leader or are gone", partitions=named(absent))
        self._absent = absent
