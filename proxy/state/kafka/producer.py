"""Writes messages to the topic in one transaction, and keeps all other writers out.

The transactional id is the topic's name. Kafka gives each that begins to use it a higher epoch and
refuses the earlier ones, whatever they still had on its way: that is how the newest proxy fences
the one before it. When a connection broke we go on with our own next epoch, which Kafka gives only
to the one that had the last (KIP-360): two proxies do not take the state from each other in turn.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

from aiokafka.record.default_records import DefaultRecordBatchBuilder
from kafka.protocol.producer import (
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
)

from metrics.clock import MS_PER_SECOND
from proxy.cluster.upstream import RefusedError, UpstreamError

from .messages import Message
from .state_topic import FencedError, StateTopic

TRANSACTION_TIMEOUT_MS = 60_000
"""The brokers give up a transaction after this time; longer than any of our writes takes."""

CONCURRENT_WAIT_S = 0.005
"""The transaction before is decided, and for some ms not written down everywhere."""

CONCURRENT_TRIES = 1000
"""Then all is tried anew."""

BATCH_BYTES = 512 * 2**10
"""At a time: below what any topic takes. A longer record goes alone."""

INIT_PRODUCER_ID_VERSION = 3
ADD_PARTITIONS_VERSION = 1
PRODUCE_VERSION = 7
END_TXN_VERSION = 1
PRODUCE_TIMEOUT_MS = 5000
INVALID_TXN_STATE = 48
CONCURRENT_TRANSACTIONS = 51
ACKS_ALL = -1
NO_ID = NO_EPOCH = -1
SEQUENCES = 2**31
_MAGIC = 2


class Producer:
    """The one that may write; for one task at a time."""

    def __init__(self, topic: StateTopic) -> None:
        self._topic = topic
        self._id, self._epoch, self._sequence = NO_ID, NO_EPOCH, 0
        self._between = False
        """Whether we know that no transaction of ours is under way."""
        self.position = 0
        """Offset behind the last message that was appended."""

    async def take_over(self) -> None:
        """Become the one that may write, undoing what another one had begun; raises as `write`."""
        self._id, self._epoch = NO_ID, NO_EPOCH
        await self._topic.client.retry(self._init)

    async def write(self, messages: Sequence[Message]) -> None:
        """Write all messages or none; when this returned they are kept.

        What was not answered is tried again as a whole: writing the same once more changes nothing.
        After an error it may be that they were written all the same. Raises as `StateTopic.check`.
        """
        try:
            await self._topic.client.retry(lambda: self._write(messages))
        except RefusedError:
            # What was begun would hold up readers until the brokers give it up.
            with suppress(UpstreamError, RefusedError, FencedError):
                await self._end(commit=False)
            raise

    async def _write(self, messages: Sequence[Message]) -> None:
        if not self._between:
            await self._end(commit=False)
            await self._init()
        self._between = False
        await self._add_partition()
        for records, count in self._batches(messages):
            await self._produce(records, count)
        await self._end(commit=True)
        self._between = True

    async def _init(self) -> None:
        request = InitProducerIdRequest[INIT_PRODUCER_ID_VERSION](
            transactional_id=self._topic.name,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            producer_id=self._id,
            producer_epoch=self._epoch,
        )
        response = await self._ask(request, f"begin to write to topic {self._topic.name}")
        self._id, self._epoch, self._sequence = response.producer_id, response.producer_epoch, 0
        self._between = True

    async def _add_partition(self) -> None:
        def error_code(response: Any) -> int:
            (topic,) = response.results_by_topic_v3_and_below
            (partition,) = topic.results_by_partition
            return int(partition.partition_error_code)

        request = AddPartitionsToTxnRequest[ADD_PARTITIONS_VERSION](
            v3_and_below_transactional_id=self._topic.name,
            v3_and_below_producer_id=self._id,
            v3_and_below_producer_epoch=self._epoch,
            v3_and_below_topics=[(self._topic.name, [0])],
        )
        await self._ask(request, f"begin a transaction on topic {self._topic.name}", error_code)

    async def _produce(self, records: bytes, count: int) -> None:
        request = ProduceRequest[PRODUCE_VERSION](
            transactional_id=self._topic.name,
            acks=ACKS_ALL,
            timeout_ms=PRODUCE_TIMEOUT_MS,
            topic_data=[(self._topic.name, [(0, records)])],
        )
        response = await self._topic.ask_leader(request)
        written = response.responses[0].partition_responses[0]
        self._topic.check(written.error_code, f"write to topic {self._topic.name}")
        self._sequence = (self._sequence + count) % SEQUENCES
        self.position = written.base_offset + count

    async def _end(self, *, commit: bool) -> None:
        request = EndTxnRequest[END_TXN_VERSION](
            transactional_id=self._topic.name,
            producer_id=self._id,
            producer_epoch=self._epoch,
            committed=commit,
        )
        allowed = () if commit else (INVALID_TXN_STATE,)  # there may be none to undo
        await self._ask(request, f"end a transaction on topic {self._topic.name}", allowed=allowed)

    async def _ask(
        self,
        request: Any,
        doing: str,
        error_code: Callable[[Any], int] = attrgetter("error_code"),
        allowed: Collection[int] = (),
    ) -> Any:
        """Ask the coordinator, again while it is at the transaction before; check its answer."""
        for _ in range(CONCURRENT_TRIES):
            response = await self._topic.ask_coordinator(request)
            code = error_code(response)
            if code != CONCURRENT_TRANSACTIONS:
                break
            await asyncio.sleep(CONCURRENT_WAIT_S)
        if code not in allowed:
            self._topic.check(code, doing)
        return response

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
                count, now_ms, rest[-1].key, rest[-1].value, list(rest[-1].headers)
            ):
                rest.pop()
                count += 1
            yield bytes(batch.build()), count
