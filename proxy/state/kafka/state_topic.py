"""The topic: made with the right settings, read, asked at its leaders and coordinators.

All versions of requests are the newest that Kafka 2.5 has, and every later one.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from kafka.errors import RetriableError, for_code
from kafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest
from kafka.protocol.producer import ProduceRequest

from proxy.cluster.kafka_client import (
    GROUP_COORDINATOR,
    TRANSACTION_COORDINATOR,
    Bootstrap,
    Coordinated,
    KafkaClient,
)
from proxy.cluster.upstream import (
    NOT_READY,
    UNKNOWN_TOPIC,
    Address,
    NonRetriableError,
    UpstreamError,
    error_name,
    misread_is_bad_response,
)
from proxy.state.store import StateError
from proxy.wire.list_offsets import EARLIEST, LATEST, READ_COMMITTED

from .messages import Content, Place, committed_messages

MAX_REPLICAS = 3

MAX_RECORD_BYTES = 8 * 2**20
"""Of key and value. A record must fit into one batch."""

COMPACT = "compact"
READABLE_COMPRESSION = ("producer", "uncompressed", "gzip")
"""We compress nothing, and Python reads gzip without more libraries."""

CREATE_TIMEOUT_MS = PRODUCE_TIMEOUT_MS = 5000
ACKS_ALL = -1

NEW_TOPIC_LIMIT_S = 60.0
"""For a new topic to be there, with a leader for each partition, whoever makes it."""

FETCH_BYTES = 4 * 2**20
"""At a time; a longer batch comes whole."""

READ_AT_ONCE = 200
"""Messages between two turns of others: some milliseconds."""

FETCH_WAIT_MS = 500
"""Who reads on waits at the broker for so long, then asks again."""

KINDS = {GROUP_COORDINATOR: "group", TRANSACTION_COORDINATOR: "transaction"}
"""Of coordinators, for people."""

CONSUMER = -1
"""Who asks, as Kafka numbers replicas."""

TOPIC_RESOURCE = 2
ALREADY_EXISTS = 36
UNKNOWN_SERVER_ERROR = -1
"""The broker failed over it, as it may when several producers begin under one id at once."""

FENCED = frozenset({47, 48, 49, 59, 90, 120})
"""INVALID_PRODUCER_EPOCH, INVALID_TXN_STATE, INVALID_PRODUCER_ID_MAPPING, UNKNOWN_PRODUCER_ID,
PRODUCER_FENCED, TRANSACTION_ABORTABLE: our transaction, or our producer, is no more."""


class FencedError(Exception):
    """Our producer may not write any more: another one came, or its transaction timed out."""


class NotReadyError(UpstreamError):
    """The brokers answer, and what is waited for has not come yet; with how to mend that."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(NOT_READY, message)
        self.fix = fix


class StateTopic(KafkaClient):
    """A topic of so many partitions, and who asks its brokers; that raises as `check`."""

    def __init__(self, way: Bootstrap, name: str, partitions: int = 1) -> None:
        super().__init__(way)
        self.name, self.partitions = name, partitions

    async def by_leader(self, partitions: Collection[int]) -> dict[Address, list[int]]:
        """Return these partitions by their leader. Raises UpstreamError when one has none."""
        wanted = [(self.name, number) for number in partitions]
        leaders = await self.leaders(wanted)
        if sum(map(len, leaders.values())) < len(wanted):
            finding = "is not there" if await self._find() is None else "has no leader"
            raise UpstreamError(NOT_READY, f"topic {self.name} {finding}")
        return {leader: [number for _, number in led] for leader, led in leaders.items()}

    async def ask_coordinator(self, of: Coordinated, request: Any) -> Any:
        """Send a request to who looks after transactions or a group; return its response."""
        doing = f"look for the {KINDS[of[0]]} coordinator"
        coordinator = await self.coordinator(of, lambda code: self.check(code, doing))
        return await self.ask(request, coordinator)

    def check(self, error_code: int, doing: str, reason: str | None = None) -> None:
        """Raise what an error code of Kafka means to us; do nothing for 0.

        Raises UpstreamError when it may pass, after which leader and coordinator are looked for
        anew; NonRetriableError when it will not; FencedError.
        """
        if not error_code:
            return
        if error_code in FENCED:
            raise FencedError(f"the brokers say {error_name(error_code)}")
        text = f"{doing}: {error_name(error_code)}"
        if error_code == UNKNOWN_SERVER_ERROR or issubclass(for_code(error_code), RetriableError):
            self.forget_all()
            raise UpstreamError(NOT_READY, text)
        raise NonRetriableError(f"{text}, {reason}" if reason else text, error_code)

    async def ensure(self, limit_s: float) -> None:
        """Make the topic if there is none, and check that state can be kept in it.

        `limit_s` is for a topic that is there. Raises StateError when state can not be kept in it,
        UpstreamError, and NonRetriableError when the proxy may not make it, or not see its
        settings.
        """
        # At once when nobody answers; what comes later is given the time.
        with misread_is_bad_response():
            (seen,) = (await self.metadata([self.name])).topics
        async with self.within(NEW_TOPIC_LIMIT_S if seen.error_code else limit_s):
            await self._ensure()

    async def read(self, positions: dict[int, int]) -> AsyncIterator[tuple[Place, Content]]:
        """Yield what is committed now from these offsets, or EARLIEST, on; raises also StateError.

        `positions`, by partition, go along.
        """
        retry = self.retry
        whole = [number for number, position in positions.items() if position == EARLIEST]
        positions.update(await retry(partial(self.offsets, whole, EARLIEST)))
        ends = await retry(partial(self.offsets, positions, LATEST))
        while left := {at: positions[at] for at, end in ends.items() if positions[at] < end}:
            parts = await retry(partial(self.fetch, left))
            async for each in self.committed(parts, positions):
                yield each

    async def committed(
        self, parts: Iterable[Any], positions: dict[int, int]
    ) -> AsyncIterator[tuple[Place, Content]]:
        """Yield `committed_messages` of what was fetched; others have turns meanwhile."""
        with misread_is_bad_response():
            for part in parts:
                for number, each in enumerate(committed_messages(self.name, part, positions)):
                    if not number % READ_AT_ONCE:
                        await asyncio.sleep(0)
                    yield each

    async def fetch(
        self, positions: Mapping[int, int], isolation: int = READ_COMMITTED
    ) -> list[Any]:
        """Return what one of the leaders has of these partitions, or gets in FETCH_WAIT_MS."""
        leader, led = next(iter((await self.by_leader(positions)).items()))
        partitions = [
            FetchRequest.FetchTopic.FetchPartition(
                partition=number, fetch_offset=positions[number], partition_max_bytes=FETCH_BYTES
            )
            for number in led
        ]
        request = FetchRequest[11](
            max_wait_ms=FETCH_WAIT_MS,
            min_bytes=1,
            max_bytes=FETCH_BYTES,
            isolation_level=isolation,
            topics=[FetchRequest.FetchTopic(topic=self.name, partitions=partitions)],
            forgotten_topics_data=[],
        )
        response = await self.ask(request, leader)
        parts: list[Any] = [part for topic in response.responses for part in topic.partitions]
        for answer in (response, *parts):
            self.check(answer.error_code, f"read topic {self.name}")
        return parts

    async def produce(
        self, batches: Mapping[int, bytes], transactional_id: str | None = None
    ) -> dict[int, int]:
        """Append a batch to each of these partitions; return the offset at which each begins."""
        starts: dict[int, int] = {}
        for leader, led in (await self.by_leader(batches)).items():
            request = ProduceRequest[7](
                transactional_id=transactional_id,
                acks=ACKS_ALL,
                timeout_ms=PRODUCE_TIMEOUT_MS,
                topic_data=[(self.name, [(number, batches[number]) for number in led])],
            )
            (topic,) = (await self.ask(request, leader)).responses
            for part in topic.partition_responses:
                self.check(part.error_code, f"write to topic {self.name}")
                starts[part.index] = part.base_offset
        return starts

    async def offsets(
        self, partitions: Collection[int], timestamp: int, isolation: int = READ_COMMITTED
    ) -> dict[int, int]:
        """Return the offsets of these partitions at EARLIEST or LATEST.

        LATEST that is committed lies before the first transaction that is under way.
        """
        found: dict[int, int] = {}
        for leader, led in (await self.by_leader(partitions)).items():
            request = ListOffsetsRequest[2](
                replica_id=CONSUMER,
                isolation_level=isolation,
                topics=[(self.name, [(number, timestamp) for number in led])],
            )
            for part in (await self.ask(request, leader)).topics[0].partitions:
                self.check(part.error_code, f"look for the ends of topic {self.name}")
                found[part.partition_index] = part.offset
        return found

    @staticmethod
    def settings(replicas: int) -> Mapping[str, str]:
        """Return what the topic is made with."""
        return {
            "cleanup.policy": COMPACT,
            # Whatever the cluster does to other topics, we must be able to read this one.
            "compression.type": "uncompressed",
            # What is acknowledged outlives the loss of a broker, and one may be away meanwhile.
            "min.insync.replicas": str(MAX_REPLICAS - 1) if replicas >= MAX_REPLICAS else "1",
            # With more than a batch adds to its only record.
            "max.message.bytes": str(MAX_RECORD_BYTES + 1024),
            # Only closed segments are compacted. Small ones, closed soon, keep the start quick.
            "segment.bytes": str(16 * 2**20),
            "segment.ms": str(60 * 60 * 1000),
            "min.cleanable.dirty.ratio": "0.1",
            # For readers on their way only, and reading takes a minute at most.
            "delete.retention.ms": str(60 * 60 * 1000),
        }

    async def _ensure(self) -> None:
        retry, name = self.retry, self.name
        if await retry(self._find) is None:
            await retry(self._create)
        await retry(lambda: self.by_leader([0]))
        found = await retry(self._find)
        self._check_partitions(len(found.partitions) if found is not None else 0)
        await retry(lambda: self.by_leader(range(self.partitions)))
        configs = await retry(self._configs)
        policy, compression = configs.get("cleanup.policy"), configs.get("compression.type")
        if policy != COMPACT:
            wrong = f"would lose state: its cleanup.policy is {policy}, not {COMPACT}"
            setting = f"cleanup.policy={COMPACT}"
        elif compression not in READABLE_COMPRESSION:
            wrong = f"is compressed by the brokers: its compression.type is {compression}"
            setting = "compression.type=uncompressed"
        else:
            return
        raise StateError(
            f"topic {name} {wrong}",
            f"set it: kafka-configs.sh --alter --topic {name} --add-config {setting}, or name "
            "another topic as state.topic",
        )

    def _check_partitions(self, found: int) -> None:
        wanted = self.partitions
        if found == wanted:
            return
        has = f"has {found} partitions"
        if wanted == 1:
            wrong = f"{has}, and state needs a topic of one, as only that keeps the order"
        else:
            has = has if found != 1 else "is that of a proxy without a tier"
            wrong = f"{has}, and the state of a tier needs one of {wanted}, one for each slot"
        fix = "name another topic as state.topic; quota-proxy makes it"
        raise StateError(f"topic {self.name} {wrong}", fix)

    async def _find(self) -> Any | None:
        (found,) = (await self.metadata([self.name])).topics
        if found.error_code == UNKNOWN_TOPIC:
            return None
        self.check(found.error_code, f"look for topic {self.name}")
        return found

    async def _create(self) -> None:
        cluster = await self.metadata([self.name])
        replicas = min(MAX_REPLICAS, len(cluster.brokers))
        topic = CreateTopicsRequest.CreatableTopic(
            name=self.name,
            num_partitions=self.partitions,
            replication_factor=replicas,
            assignments=[],
            configs=list(self.settings(replicas).items()),
        )
        request = CreateTopicsRequest[4](
            topics=[topic], timeout_ms=CREATE_TIMEOUT_MS, validate_only=False
        )
        addresses = {broker.node_id: (broker.host, broker.port) for broker in cluster.brokers}
        response = await self.ask(request, addresses.get(cluster.controller_id))
        (made,) = response.topics
        if made.error_code != ALREADY_EXISTS:  # by another proxy, or by us when the answer was lost
            self.check(made.error_code, f"make topic {self.name}", made.error_message)

    async def _configs(self) -> dict[str, str]:
        resource = TOPIC_RESOURCE, self.name, ["cleanup.policy", "compression.type"]
        request = DescribeConfigsRequest[1](resources=[resource], include_synonyms=False)
        (found,) = (await self.ask(request)).results
        doing = f"see the settings of topic {self.name}"
        self.check(found.error_code, doing, found.error_message)
        return {config.name: config.value for config in found.configs}
