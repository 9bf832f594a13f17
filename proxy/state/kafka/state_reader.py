"""Reads the topic from its start, and later on from where it was, as far as is committed."""

import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aiokafka.errors import KafkaError
from aiokafka.record.memory_records import MemoryRecords
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest

from proxy.wire.list_offsets import EARLIEST, LATEST, READ_COMMITTED

from .messages import Message, damaged
from .state_topic import StateTopic

FETCH_VERSION = 11
LIST_OFFSETS_VERSION = 2
FETCH_BYTES = 4 * 2**20
"""At a time; a longer batch comes whole."""

FETCH_WAIT_MS = 500

_CONSUMER = -1
"""Who asks, as Kafka numbers replicas."""

_CONTROL_KEY = struct.Struct(">hh")
"""Version and kind of a transaction's last message."""
_ABORT = 0


class StateReader:
    """The topic's messages from `position` on (None: all), without those of failed transactions."""

    def __init__(self, topic: StateTopic, position: int | None = None) -> None:
        self._topic = topic
        self._position = position

    async def read(self) -> AsyncIterator[Message]:
        """Yield what was not read yet, as far as it is committed now; raises also StateError."""
        retry = self._topic.client.retry
        if self._position is None:
            self._position = await retry(lambda: self._offset(EARLIEST))
        end = await retry(lambda: self._offset(LATEST))
        while self._position < end:
            for message in self._committed(await retry(self._fetch)):
                yield message

    async def _offset(self, timestamp: int) -> int:
        request = ListOffsetsRequest[LIST_OFFSETS_VERSION](
            replica_id=_CONSUMER,
            isolation_level=READ_COMMITTED,
            topics=[(self._topic.name, [(0, timestamp)])],
        )
        found = (await self._topic.ask_leader(request)).topics[0].partitions[0]
        self._topic.check(found.error_code, f"look for the ends of topic {self._topic.name}")
        return int(found.offset)

    async def _fetch(self) -> Any:
        partition = FetchRequest.FetchTopic.FetchPartition(
            partition=0, fetch_offset=self._position, partition_max_bytes=FETCH_BYTES
        )
        topic = FetchRequest.FetchTopic(topic=self._topic.name, partitions=[partition])
        request = FetchRequest[FETCH_VERSION](
            max_wait_ms=FETCH_WAIT_MS,
            min_bytes=1,
            max_bytes=FETCH_BYTES,
            isolation_level=READ_COMMITTED,
            topics=[topic],
            forgotten_topics_data=[],
        )
        response = await self._topic.ask_leader(request)
        doing = f"read topic {self._topic.name}"
        self._topic.check(response.error_code, doing)
        part = response.responses[0].partitions[0]
        self._topic.check(part.error_code, doing)
        return part

    def _committed(self, part: Any) -> Iterator[Message]:
        aborted = part.aborted_transactions or ()
        failed = sorted(((each.first_offset, each.producer_id) for each in aborted), reverse=True)
        failing: set[int] = set()
        batches = MemoryRecords(bytes(part.records or b""))
        while batches.has_next():
            batch = batches.next_batch()
            place = f"the batch at offset {batch.base_offset} of topic {self._topic.name}"
            if not batch.validate_crc():
                raise damaged(place, "its checksum is wrong")
            while failed and failed[-1][0] <= batch.base_offset:
                failing.add(failed.pop()[1])
            try:
                records = list(batch)
            except KafkaError as error:
                raise damaged(place, str(error)) from error
            if batch.is_control_batch:
                # Compaction may have left nothing of it.
                if records and _CONTROL_KEY.unpack_from(records[0].key)[1] == _ABORT:
                    failing.discard(batch.producer_id)
            elif not (batch.is_transactional and batch.producer_id in failing):
                for record in records:
                    if self._position is None or record.offset >= self._position:
                        yield Message(
                            record.key or b"", record.value, tuple(record.headers), record.offset
                        )
            self._position = batch.next_offset
