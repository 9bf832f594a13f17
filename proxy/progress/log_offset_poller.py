"""Asks where followed logs begin and end: lag stays true when a query is down, or busy."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain

from kafka.protocol.consumer import ListOffsetsRequest
from structlog import get_logger

from metrics.clock import clock_ms
from proxy.cluster.kafka_client import (
    MAX_REQUEST_PARTITIONS,
    KafkaClient,
    chunks_by_topic,
    format_partitions,
)
from proxy.cluster.upstream import Address, UpstreamError, misread_is_bad_response
from proxy.slices import TimeSlicer
from proxy.wire.list_offsets import EARLIEST, LATEST, READ_UNCOMMITTED
from proxy.wire.topic_partition import TopicPartition

from .query_registry import QueryRegistry

LOG_END_INTERVAL_S = 10.0
"""Between two questions about all partitions that are followed."""

STALE_END_INTERVAL_S = 0.2
"""Between two questions about those whose end is known, but was not learned lately."""

RETRY_PAUSE_S = 1.0
"""Besides, when somebody could not be asked."""

MAX_OFFSETS_PER_S = 2500
"""Asked for by each of these two, of all brokers together; the others come later. Each takes some
15 µs of the event loop's time."""

SLICE = 250
"""Partitions in one question: the event loop does other work between two."""

LIST_OFFSETS_VERSION = 2
"""The first with an isolation level. Since Kafka 0.11."""

_CONSUMER = -1
"""Who asks, as Kafka numbers replicas."""

_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class LogOffsetPoller:
    """Keeps the ends and starts of followed logs in the registry, over a connection to each leader.

    Nothing is opened while no partition is followed. Topics that are not there are left out and
    looked for again; asking never makes one. `client` is closed when `run` ends.
    """

    _registry: QueryRegistry
    _client: KafkaClient
    _followed: Set[TopicPartition] = frozenset()
    _absent: frozenset[TopicPartition] = frozenset()
    _failing: set[TopicPartition] = field(default_factory=set)
    """Those that had an error, or no leader: left out until all are asked for."""
    _slices: TimeSlicer = field(default_factory=TimeSlicer)
    _problems: dict[object, str | None] = field(default_factory=dict)
    """By poll."""
    _logged_problem: str | None = None

    async def run(self) -> None:
        """Ask again and again, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._repeat(self.poll, LOG_END_INTERVAL_S))
                tasks.create_task(self._repeat(self._poll_stale, STALE_END_INTERVAL_S))
        finally:
            self._client.close()

    async def poll(self) -> None:
        """Ask for the start and the end of all that is followed, all leaders at the same time.

        Raises UpstreamError, after all others have answered, when a broker could not be asked.
        """
        followed = set(await self._slices.collect(self._registry.partitions()))
        self._client.forget(*(self._followed - followed))
        self._followed = followed
        self._failing.clear()
        await self._ask_leaders(followed, (EARLIEST, LATEST), self._log_absent)

    async def _poll_stale(self) -> None:
        """Ask for the ends that should be known better, as in `poll`."""
        stale = set(await self._slices.collect(self._registry.stale(clock_ms())))
        asked = stale - self._failing - self._absent
        await self._ask_leaders(asked, (LATEST,), self._failing.update)

    async def _repeat(self, poll: Callable[[], Awaitable[None]], interval_s: float) -> None:
        while True:
            problem = None
            try:
                await poll()
            except UpstreamError as error:
                problem = str(error)
            self._log_problem(poll, problem)
            await asyncio.sleep(interval_s + (RETRY_PAUSE_S if problem else 0.0))

    async def look_up(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the log ends of the partitions that are there. Raises UpstreamError."""
        by_leader = await self._client.leaders(partitions)
        return {
            partition: end
            for leader, of_leader in by_leader.items()
            async for partition, end in self._offsets(leader, of_leader, LATEST)
        }

    async def _ask_leaders(
        self,
        partitions: Set[TopicPartition],
        timestamps: Sequence[int],
        on_absent: Callable[[Set[TopicPartition]], None],
    ) -> None:
        """Ask all leaders at the same time. Raises UpstreamError when one could not be asked."""
        failures: list[BaseException | None] = []
        await asyncio.sleep(0)  # there may be thousands: other work comes between two walks
        try:
            by_leader = await self._client.leaders(partitions)
            await asyncio.sleep(0)
            on_absent(partitions - set(chain.from_iterable(by_leader.values())))
        except UpstreamError as error:
            failures.append(error)
            by_leader = self._client.known_leaders(partitions)
        await asyncio.sleep(0)
        asked = (
            self._ask(leader, of_leader, timestamps, MAX_OFFSETS_PER_S / len(by_leader))
            for leader, of_leader in by_leader.items()
        )
        failures += await asyncio.gather(*asked, return_exceptions=True)
        for failure in filter(None, failures):
            raise failure

    async def _ask(
        self,
        leader: Address,
        partitions: list[TopicPartition],
        timestamps: Sequence[int],
        offsets_per_s: float,
    ) -> None:
        """Ask a leader, a slice at a time. Raises UpstreamError when that is not possible."""
        for start in range(0, len(partitions), SLICE):
            some = partitions[start : start + SLICE]
            for timestamp in timestamps:
                async for partition, offset in self._offsets(leader, some, timestamp):
                    for reader in self._registry.readers_of(*partition):
                        if timestamp == LATEST:
                            reader.record_lookup_end(offset, clock_ms(), client_saw_it=False)
                        else:
                            reader.log.record_start(offset)
                await asyncio.sleep(len(some) / offsets_per_s)

    async def _offsets(
        self, leader: Address, partitions: Iterable[TopicPartition], timestamp: int
    ) -> AsyncIterator[tuple[TopicPartition, int]]:
        """Yield each partition's offset; find the leader of one with an error anew next time."""
        for topics in chunks_by_topic(dict.fromkeys(partitions, timestamp)):
            request = ListOffsetsRequest[LIST_OFFSETS_VERSION](
                replica_id=_CONSUMER, isolation_level=READ_UNCOMMITTED, topics=list(topics.items())
            )
            answer = await self._client.ask(request, leader)
            with misread_is_bad_response():
                rows = [(topic.name, row) for topic in answer.topics for row in topic.partitions]
            if len(rows) > MAX_REQUEST_PARTITIONS:
                raise UpstreamError("bad_response", "more partitions than were asked for")
            for name, row in rows:
                partition = name, row.partition_index
                if row.error_code:
                    self._client.forget(partition)
                    self._failing.add(partition)
                elif row.offset >= 0:
                    yield partition, row.offset

    def _log_problem(self, poll: object, problem: str | None) -> None:
        """Log each problem once, and when all is well again."""
        self._problems[poll] = problem
        problem = next(filter(None, self._problems.values()), None)
        if problem is None and self._logged_problem is not None:
            _log.info("log ends read again")
        elif problem != self._logged_problem:
            _log.warning("log ends not read, lag may be out of date", error=problem)
        self._logged_problem = problem

    def _log_absent(self, absent: Set[TopicPartition]) -> None:
        if absent - self._absent:
            _log.warning(
                "followed partitions have no leader or are gone",
                partitions=format_partitions(absent),
            )
        self._absent = frozenset(absent)
