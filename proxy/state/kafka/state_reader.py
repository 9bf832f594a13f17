"""Reads the topic from its start, and later on from where it was, as far as is committed."""

import struct
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from aiokafka.errors import KafkaError
from aiokafka.record.memory_records import MemoryRecords
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest

from proxy.wire.list_offsets import EARLIEST, LATEST, READ_COMMITTED

from .messages import Content, Place, damaged, read_message
from .state_topic import StateTopic

FETCH_VERSION = 11
LIST_OFFSETS_VERSION = 2
FETCH_BYTES = 4 * 2**20
"""At a time; a longer batch comes whole."""

FETCH_WAIT_MS = 500
"""Who reads on waits at the broker for so long, then asks again."""

_CONSUMER = -1
"""Who asks, as Kafka numbers replicas."""

_CONTROL_KEY = struct.Struct(">hh")
"""Version and kind of a transaction's last message."""
_ABORT = 0


class StateReader:
    """Reads partitions from their `positions`, or from EARLIEST, on; nothing that was aborted."""

    def __init__(self, topic: StateTopic, positions: Mapping[int, int]) -> None:
        self._topic = topic
        self.positions = dict(positions)
        """Offset of what is read next, by partition."""

    async def read(self) -> AsyncIterator[tuple[Place, Content]]:
        """Yield what was not read yet, as far as it is committed now; raises also StateError."""
        retry = self._topic.client.retry
        whole = [number for number, position in self.positions.items() if position == EARLIEST]
        self.positions |= await retry(partial(offsets, self._topic, whole, EARLIEST))
        ends = await retry(partial(offsets, self._topic, self.positions, LATEST))
        while left := [number for number, end in ends.items() if self.positions[number] < end]:
            for part in await retry(partial(self.fetch, left)):
                for each in self._committed(part):
                    yield each

    async def wait(self) -> dict[Place, Content]:
        """Return what is committed next, or nothing when FETCH_WAIT_MS are over; raises as `read`.

        For partitions of one leader whose positions are known.
        """
        parts = await self._topic.client.retry(lambda: self.fetch(self.positions))
        return {place: content for part in parts for place, content in self._committed(part)}

    async def fetch(self, partitions: Iterable[int], isolation: int = READ_COMMITTED) -> list[Any]:
        """Return what one of the leaders has of these partitions, at their positions."""
        leader, led = next(iter((await self._topic.leaders(list(partitions))).items()))
        topic = FetchRequest.FetchTopic(
            topic=self._topic.name,
            partitions=[
                FetchRequest.FetchTopic.FetchPartition(
                    partition=number,
                    fetch_offset=self.positions[number],
                    partition_max_bytes=FETCH_BYTES,
                )
                for number in led
            ],
        )
        request = FetchRequest[FETCH_VERSION](
            max_wait_ms=FETCH_WAIT_MS,
            min_bytes=1,
            max_bytes=FETCH_BYTES,
            isolation_level=isolation,
            topics=[topic],
            forgotten_topics_data=[],
        )
        response = await self._topic.client.ask(request, leader)
        doing = f"read topic {self._topic.name}"
        self._topic.check(response.error_code, doing)
        parts: list[Any] = [part for topic in response.responses for part in topic.partitions]
        for part in parts:
            self._topic.check(part.error_code, doing)
        return parts

    def _committed(self, part: Any) -> Iterator[tuple[Place, Content]]:
        number = part.partition_index
        aborted = part.aborted_transactions or ()
        failed = sorted(((each.first_offset, each.producer_id) for each in aborted), reverse=True)
        failing: set[int] = set()
        for batch, records in batches(self._topic.name, part):
            while failed and failed[-1][0] <= batch.base_offset:
                failing.add(failed.pop()[1])
            if batch.is_control_batch:
                # Compaction may have left nothing of it.
                if records and _CONTROL_KEY.unpack_from(records[0].key)[1] == _ABORT:
                    failing.discard(batch.producer_id)
            elif not (batch.is_transactional and batch.producer_id in failing):
                for record in records:
                    if record.offset >= self.positions[number]:
                        yield read_message(self._topic.name, number, record)
            self.positions[number] = batch.next_offset


async def offsets(
    topic: StateTopic, partitions: Collection[int], timestamp: int, isolation: int = READ_COMMITTED
) -> dict[int, int]:
    """Return the offsets of these partitions at EARLIEST or LATEST; raises as `StateTopic.check`.

    LATEST that is committed lies before the first transaction that is under way.
    """
    found: dict[int, int] = {}
    for leader, led in (await topic.leaders(partitions)).items():
        request = ListOffsetsRequest[LIST_OFFSETS_VERSION](
            replica_id=_CONSUMER,
            isolation_level=isolation,
            topics=[(topic.name, [(number, timestamp) for number in led])],
        )
        for part in (await topic.client.ask(request, leader)).topics[0].partitions:
            topic.check(part.error_code, f"look for the ends of topic {topic.name}")
            found[part.partition_index] = part.offset
    return found


def batches(topic: str, part: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the batches of a fetched partition, with their records; raises StateError."""
    read = MemoryRecords(bytes(part.records or b""))
    while read.has_next():
        batch = read.next_batch()
        place = f"the batch at offset {batch.base_offset} of topic {topic} "
        place += f"(partition {part.partition_index})"
        if not batch.validate_crc():
            raise damaged(place, "its checksum is wrong")
        try:
            yield batch, list(batch)
        except KafkaError as error:
            raise damaged(place, str(error)) from error
