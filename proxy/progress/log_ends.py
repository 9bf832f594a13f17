"""Asks the cluster where the logs of followed partitions begin and end.

So lag stays true while a query that would be told the ends through the proxy is down.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from typing import Protocol

from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from structlog import get_logger

from proxy.progress.link import Address, ClusterAccess, Link, LinkError, Partition, by_topic, named
from proxy.wire.offsets import EARLIEST, LATEST, READ_UNCOMMITTED

LOG_END_INTERVAL_S = 10.0

POLL_TIMEOUT_S = 30.0
"""For all questions of one poll."""

_CONSUMER = -1
"""Who asks, as Kafka numbers replicas."""

_log = get_logger(__name__)


class LogBook(Protocol):
    """Who wants to know the ends of logs."""

    def partitions(self) -> Iterable[Partition]:
        """Return the partitions that are followed."""

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
        self._leaders: dict[Partition, Address] = {}
        self._absent: frozenset[Partition] = frozenset()
        self._problem: str | None = None
        """What was logged last; None when all is well."""

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return self._link.connections

    async def run(self) -> None:
        """Ask again and again, until cancelled."""
        try:
            while True:
                try:
                    async with asyncio.timeout(POLL_TIMEOUT_S):
                        await self.poll()
                except TimeoutError:
                    self._say(f"not done in {POLL_TIMEOUT_S:g} s")
                except LinkError as error:
                    self._say(str(error))
                else:
                    self._say(None)
                await asyncio.sleep(LOG_END_INTERVAL_S)
        finally:
            await self._link.drop()

    async def poll(self) -> None:
        """Ask once, all leaders at the same time.

        Raises LinkError, after all others were heard, when somebody could not be asked.
        """
        followed = frozenset(self._book.partitions())
        self._leaders = {part: at for part, at in self._leaders.items() if part in followed}
        failures: list[LinkError | None] = []
        if unknown := followed - self._leaders.keys():
            failures.append(await self._find_leaders(unknown))
        if not any(failures):
            self._say_absent(followed - self._leaders.keys())
        by_leader = self._by_leader(followed)
        failures += await asyncio.gather(*(self._ask(*each) for each in by_leader.items()))
        for failure in filter(None, failures):
            raise failure

    async def look_up(self, partitions: Collection[Partition]) -> dict[Partition, int]:
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

    async def _find_leaders(self, partitions: Collection[Partition]) -> LinkError | None:
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

    def _by_leader(self, partitions: Iterable[Partition]) -> dict[Address, list[Partition]]:
        """Return whom to ask for which of them; those without a known leader are left out."""
        by_leader: dict[Address, list[Partition]] = {}
        for partition in partitions:
            if partition in self._leaders:
                by_leader.setdefault(self._leaders[partition], []).append(partition)
        return by_leader

    async def _ask(self, leader: Address, partitions: list[Partition]) -> LinkError | None:
        """Ask a leader; return why that was not possible."""
        try:
            async for partition, offset in self._offsets(leader, partitions, EARLIEST):
                self._book.log_start(*partition, offset, self._clock_ms())
            async for partition, offset in self._offsets(leader, partitions, LATEST):
                self._book.log_end(*partition, offset, self._clock_ms())
        except LinkError as error:
            for partition in partitions:
                self._leaders.pop(partition, None)
            return error
        return None

    async def _offsets(
        self, leader: Address, partitions: Iterable[Partition], timestamp: int
    ) -> AsyncIterator[tuple[Partition, int]]:
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
                    elif offset >= 0:
                        yield (topic, number), offset

    def _say(self, problem: str | None) -> None:
        """Log each problem once, and when it is over."""
        if problem == self._problem:
            return
        if problem is None:
            _log.info("log ends read again")
        else:
            _log.warning("log ends not read, lag may be out of date", error=problem)
        self._problem = problem

    def _say_absent(self, absent: frozenset[Partition]) -> None:
        if absent - self._absent:
            _log.warning("followed partitions have no leader or are gone", partitions=named(absent))
        self._absent = absent
