"""Reads the topic from its start, and later on from where it was, as far as is committed."""

import struct
from collections.abc import Iterator
from typing import Any

from aiokafka.errors import KafkaError
from aiokafka.record.memory_records import MemoryRecords
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest

from .link import Deadline, Link, UnansweredError
from .messages import Message, damaged

FETCH_VERSION = 11
LIST_OFFSETS_VERSION = 2
READ_COMMITTED = 1
EARLIEST = -2
LATEST = -1
"""With READ_COMMITTED: the last stable offset."""

FETCH_BYTES = 4 * 2**20
"""At a time; a longer batch comes whole."""

FETCH_WAIT_MS = 500

_CONTROL_KEY = struct.Struct(">hh")
"""Version and kind of a transaction's last message."""
_ABORT = 0


class Log:
    """The messages of the topic's only partition, without those of transactions that failed.

    Args:
        position: offset of the first message to read; None: of the oldest there is.

    """

    def __init__(self, link: Link, topic: str, position: int | None = None) -> None:
        self._link = link
        self._topic = topic
        self._position = position

    def read(self, deadline: Deadline) -> Iterator[Message]:
        """Yield what was not read yet, as far as it is committed now.

        Raises:
            UnansweredError: it could not be read in time.
            RefusedError: it may not be read.
            StateError: a batch is damaged.

        """
        if self._position is None:
            self._position = deadline.retry(lambda: self._offset(EARLIEST, deadline))
        end = deadline.retry(lambda: self._offset(LATEST, deadline))
        while self._position < end:
            if not deadline.left_s:
                raise UnansweredError(f"topic {self._topic} could not be read to its end in time")
            part = deadline.retry(lambda: self._fetch(deadline))
            yield from self._committed(part)

    def _offset(self, moment: int, deadline: Deadline) -> int:
        partition = ListOffsetsRequest.ListOffsetsTopic.ListOffsetsPartition(
            partition_index=0, timestamp=moment
        )
        topic = ListOffsetsRequest.ListOffsetsTopic(name=self._topic, partitions=[partition])
        request = ListOffsetsRequest[LIST_OFFSETS_VERSION](
            replica_id=-1, isolation_level=READ_COMMITTED, topics=[topic]
        )
        answer = self._ask(request, deadline).topics[0].partitions[0]
        self._link.check(answer.error_code, f"look for the ends of topic {self._topic}")
        return int(answer.offset)

    def _fetch(self, deadline: Deadline) -> Any:
        partition = FetchRequest.FetchTopic.FetchPartition(
            partition=0, fetch_offset=self._position, partition_max_bytes=FETCH_BYTES
        )
        topic = FetchRequest.FetchTopic(topic=self._topic, partitions=[partition])
        request = FetchRequest[FETCH_VERSION](
            max_wait_ms=FETCH_WAIT_MS,
            min_bytes=1,
            max_bytes=FETCH_BYTES,
            isolation_level=READ_COMMITTED,
            topics=[topic],
            forgotten_topics_data=[],
        )
        answer = self._ask(request, deadline)
        self._link.check(answer.error_code, f"read topic {self._topic}")
        part = answer.responses[0].partitions[0]
        self._link.check(part.error_code, f"read topic {self._topic}")
        return part

    def _ask(self, request: Any, deadline: Deadline) -> Any:
        leader = self._link.leader(self._topic, deadline)
        return self._link.ask(request, deadline, leader)

    def _committed(self, part: Any) -> Iterator[Message]:
        failed = sorted(
            ((each.first_offset, each.producer_id) for each in part.aborted_transactions or ()),
            reverse=True,
        )
        failing: set[int] = set()
        batches = MemoryRecords(bytes(part.records or b""))
        while batches.has_next():
            batch = batches.next_batch()
            place = f"the batch at offset {batch.base_offset} of topic {self._topic}"
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
