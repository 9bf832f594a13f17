"""Writes messages to the topic in one transaction, and keeps all other writers out.

The transactional id is the topic's name. Kafka gives each that begins to use it a higher epoch and
refuses the earlier ones, whatever they still had on its way: that is how the newest proxy fences
the one before it. When a connection broke we go on with our own next epoch, which Kafka gives only
to the one that had the last (KIP-360): two proxies do not take the state from each other in turn.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from aiokafka.record.default_records import DefaultRecordBatchBuilder
from kafka.protocol.producer import (
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
)

from metrics.clock import MS_PER_SECOND

from .link import (
    CONCURRENT_TRANSACTIONS,
    Deadline,
    FencedError,
    Link,
    RefusedError,
    UnansweredError,
)
from .messages import Message

TRANSACTION_TIMEOUT_MS = 60_000
"""The brokers give up a transaction after this time; longer than any of our writes takes."""

CONCURRENT_WAIT_S = 0.005
"""The transaction before is decided, and for some ms not written down everywhere."""

BATCH_BYTES = 512 * 2**10
"""At a time: below what any topic takes. A longer record goes alone."""

INIT_PRODUCER_ID_VERSION = 3
ADD_PARTITIONS_VERSION = 1
PRODUCE_VERSION = 7
END_TXN_VERSION = 1
INVALID_TXN_STATE = 48
ACKS_ALL = -1
NO_ID = -1
NO_EPOCH = -1
SEQUENCES = 2**31
_MAGIC = 2


class Producer:
    """The one that may write; not for several threads at a time."""

    def __init__(self, link: Link, topic: str) -> None:
        self._link = link
        self._topic = topic
        self._id = NO_ID
        self._epoch = NO_EPOCH
        self._sequence = 0
        self._between = False
        """Whether we know that no transaction of ours is under way."""
        self.position = 0
        """Offset behind the last message that was appended."""

    def take_over(self, deadline: Deadline) -> None:
        """Become the one that may write; what another one had begun is undone.

        Raises UnansweredError and RefusedError, and FencedError when yet another one comes.
        """
        self._id, self._epoch = NO_ID, NO_EPOCH
        deadline.retry(lambda: self._init(deadline))

    def write(self, messages: Sequence[Message], deadline: Deadline) -> None:
        """Write all messages or none; when this returned they are kept.

        What was not answered is tried again as a whole: writing the same once more changes nothing.
        After an error it may be that they were written all the same.

        Raises:
            UnansweredError: not in time.
            RefusedError: the topic does not take them, or the proxy may not write to it.
            FencedError: another one has taken over, or the brokers gave up our transaction.

        """
        try:
            deadline.retry(lambda: self._write(messages, deadline))
        except RefusedError:
            # What was begun would hold up readers until the brokers give it up.
            with suppress(UnansweredError, RefusedError, FencedError):
                self._end(commit=False, deadline=deadline)
            raise

    def _write(self, messages: Sequence[Message], deadline: Deadline) -> None:
        if not self._between:
            self._end(commit=False, deadline=deadline)
            self._init(deadline)
        self._between = False
        self._add_partition(deadline)
        for records, count in self._batches(messages):
            self._produce(records, count, deadline)
        self._end(commit=True, deadline=deadline)
        self._between = True

    def _init(self, deadline: Deadline) -> None:
        request = InitProducerIdRequest[INIT_PRODUCER_ID_VERSION](
            transactional_id=self._topic,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            producer_id=self._id,
            producer_epoch=self._epoch,
        )
        answer = self._ask_coordinator(request, lambda answer: answer.error_code, deadline)
        self._link.check(answer.error_code, f"begin to write to topic {self._topic}")
        self._id, self._epoch = answer.producer_id, answer.producer_epoch
        self._sequence = 0
        self._between = True

    def _add_partition(self, deadline: Deadline) -> None:
        def error_code(answer: Any) -> int:
            (topic,) = answer.results_by_topic_v3_and_below
            (partition,) = topic.results_by_partition
            return int(partition.partition_error_code)

        topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=self._topic, partitions=[0])
        request = AddPartitionsToTxnRequest[ADD_PARTITIONS_VERSION](
            v3_and_below_transactional_id=self._topic,
            v3_and_below_producer_id=self._id,
            v3_and_below_producer_epoch=self._epoch,
            v3_and_below_topics=[topic],
        )
        answer = self._ask_coordinator(request, error_code, deadline)
        self._link.check(error_code(answer), f"begin a transaction on topic {self._topic}")

    def _produce(self, records: bytes, count: int, deadline: Deadline) -> None:
        partition = ProduceRequest.TopicProduceData.PartitionProduceData(index=0, records=records)
        topic = ProduceRequest.TopicProduceData(name=self._topic, partition_data=[partition])
        request = ProduceRequest[PRODUCE_VERSION](
            transactional_id=self._topic,
            acks=ACKS_ALL,
            timeout_ms=deadline.left_ms,
            topic_data=[topic],
        )
        leader = self._link.leader(self._topic, deadline)
        answer = self._link.ask(request, deadline, leader).responses[0].partition_responses[0]
        self._link.check(answer.error_code, f"write to topic {self._topic}")
        self._sequence = (self._sequence + count) % SEQUENCES
        self.position = answer.base_offset + count

    def _end(self, *, commit: bool, deadline: Deadline) -> None:
        request = EndTxnRequest[END_TXN_VERSION](
            transactional_id=self._topic,
            producer_id=self._id,
            producer_epoch=self._epoch,
            committed=commit,
        )
        answer = self._ask_coordinator(request, lambda answer: answer.error_code, deadline)
        if commit or answer.error_code != INVALID_TXN_STATE:  # there may be none to undo
            self._link.check(answer.error_code, f"end a transaction on topic {self._topic}")

    def _ask_coordinator(
        self, request: Any, error_code: Callable[[Any], int], deadline: Deadline
    ) -> Any:
        while True:
            coordinator = self._link.coordinator(self._topic, deadline)
            answer = self._link.ask(request, deadline, coordinator)
            if error_code(answer) != CONCURRENT_TRANSACTIONS or not deadline.left_s:
                return answer
            time.sleep(CONCURRENT_WAIT_S)

    def _batches(self, messages: Sequence[Message]) -> Iterator[tuple[bytes, int]]:
        """Yield batches as Kafka wants them, with the number of records in each."""
        now_ms = int(time.time() * MS_PER_SECOND)
        rest = list(reversed(messages))
        while rest:
            batch = DefaultRecordBatchBuilder(
                magic=_MAGIC,
                compression_type=0,
                is_transactional=1,
                producer_id=self._id,
                producer_epoch=self._epoch,
                base_sequence=self._sequence,
                batch_size=BATCH_BYTES,
            )
            count = 0
            while rest and batch.append(
                count,
                timestamp=now_ms,
                key=rest[-1].key,
                value=rest[-1].value,
                headers=list(rest[-1].headers),
            ):
                rest.pop()
                count += 1
            yield bytes(batch.build()), count
