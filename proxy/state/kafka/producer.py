"""Writes messages to the topic in one transaction, and keeps out all writers of the same name.

That is the transactional id: for the state of one proxy the topic's name. Kafka gives each that
begins to use it a higher epoch and refuses the earlier ones, whatever they still had on its way:
that is how the newest proxy fences the one before it. When a connection broke we go on with our own
next epoch, which Kafka gives only to the one that had the last (KIP-360): two proxies do not take
the state from each other in turn.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
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
from proxy.cluster.kafka_client import TRANSACTION_COORDINATOR
from proxy.cluster.upstream import Address, RefusedError, UpstreamError
from proxy.state.store import StateError

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

REQUEST_BYTES = 16 * 2**20
"""At a time over all partitions, and one batch more; brokers take 100 MiB."""

INIT_PRODUCER_ID_VERSION = 3
ADD_PARTITIONS_VERSION = 1
PRODUCE_VERSION = 7
END_TXN_VERSION = 1
PRODUCE_TIMEOUT_MS = 5000
INVALID_TXN_STATE = 48
CONCURRENT_TRANSACTIONS = 51
OPERATION_NOT_ATTEMPTED = 55
ACKS_ALL = -1
NO_ID = NO_EPOCH = -1
SEQUENCES = 2**31
_MAGIC = 2


class Producer:
    """The one that may write; for one task at a time."""

    timeout_ms = TRANSACTION_TIMEOUT_MS

    def __init__(self, topic: StateTopic, transactional_id: str = "") -> None:
        self._topic = topic
        self.transactional_id = transactional_id or topic.name
        self._transactions = TRANSACTION_COORDINATOR, self.transactional_id
        self.id, self.epoch = NO_ID, NO_EPOCH
        self._sequences: Counter[int] = Counter()
        """How many messages were appended in this epoch, by partition."""
        self._between = False
        """Whether we know that no transaction of ours is under way."""
        self.positions: dict[int, int] = {}
        """Offset behind the last message that was appended, by partition."""

    async def take_over(self) -> None:
        """Become the one that may write, undoing what another one had begun; raises as `write`."""
        self.id, self.epoch = NO_ID, NO_EPOCH
        await self._topic.client.retry(self._init)

    async def write(self, messages: Sequence[Message]) -> None:
        """Write all messages or none; when this returned they are kept.

        What was not answered is tried again as a whole: writing the same once more changes nothing.
        After an error it may be that they were written all the same. Raises as `StateTopic.check`.
        """
        try:
            await self._topic.client.retry(lambda: self._write(messages))
        except (RefusedError, StateError):
            # What was begun would hold up readers until the brokers give it up.
            with suppress(UpstreamError, RefusedError, FencedError):
                await self._end(commit=False)
            raise

    async def before_commit(self, partitions: Sequence[int]) -> None:
        """Do what belongs to the transaction besides the messages in these partitions.

        Raises as `write`, and StateError when it is not to be committed.
        """

    async def _write(self, messages: Sequence[Message]) -> None:
        if not self._between:
            await self._end(commit=False)
            await self._init()
        self._between = False
        partitions = sorted({message.partition for message in messages})
        await self._add_partitions(partitions)
        await self._append(messages)
        await self.before_commit(partitions)
        await self._end(commit=True)
        self._between = True

    async def _init(self) -> None:
        request = InitProducerIdRequest[INIT_PRODUCER_ID_VERSION](
            transactional_id=self.transactional_id,
            transaction_timeout_ms=self.timeout_ms,
            producer_id=self.id,
            producer_epoch=self.epoch,
        )
        response = await self.ask(request, f"begin to write to topic {self._topic.name}")
        self.id, self.epoch = response.producer_id, response.producer_epoch
        self._sequences.clear()
        self._between = True

    async def _add_partitions(self, partitions: Sequence[int]) -> None:
        def error_code(response: Any) -> int:
            (topic,) = response.results_by_topic_v3_and_below
            codes = [int(part.partition_error_code) for part in topic.results_by_partition]
            # Of all but the one that is to blame Kafka says only that they were not tried.
            return max(codes, key=lambda code: (bool(code), code != OPERATION_NOT_ATTEMPTED))

        request = AddPartitionsToTxnRequest[ADD_PARTITIONS_VERSION](
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=self.id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=[(self._topic.name, list(partitions))],
        )
        await self.ask(request, f"begin a transaction on topic {self._topic.name}", error_code)

    async def _append(self, messages: Sequence[Message]) -> None:
        """Append the messages: of each partition one batch at a time, all leaders in turn."""
        rest: dict[int, list[Message]] = {}
        for message in reversed(messages):
            rest.setdefault(message.partition, []).append(message)
        while rest:
            batches: dict[int, tuple[bytes, int]] = {}
            size_bytes = 0
            for number in sorted(rest):
                batches[number] = self._batch(number, rest[number])
                size_bytes += len(batches[number][0])
                if not rest[number]:
                    del rest[number]
                if size_bytes >= REQUEST_BYTES:
                    break
            for leader, led in (await self._topic.leaders(batches)).items():
                await self._produce(leader, {number: batches[number] for number in led})

    async def _produce(self, leader: Address, batches: Mapping[int, tuple[bytes, int]]) -> None:
        request = ProduceRequest[PRODUCE_VERSION](
            transactional_id=self.transactional_id,
            acks=ACKS_ALL,
            timeout_ms=PRODUCE_TIMEOUT_MS,
            topic_data=[
                (self._topic.name, [(number, records) for number, (records, _) in batches.items()])
            ],
        )
        response = await self._topic.client.ask(request, leader)
        for written in response.responses[0].partition_responses:
            self._topic.check(written.error_code, f"write to topic {self._topic.name}")
            self.positions[written.index] = written.base_offset + batches[written.index][1]

    async def _end(self, *, commit: bool) -> None:
        request = EndTxnRequest[END_TXN_VERSION](
            transactional_id=self.transactional_id,
            producer_id=self.id,
            producer_epoch=self.epoch,
            committed=commit,
        )
        allowed = () if commit else (INVALID_TXN_STATE,)  # there may be none to undo
        await self.ask(request, f"end a transaction on topic {self._topic.name}", allowed=allowed)

    async def ask(
        self,
        request: Any,
        doing: str,
        error_code: Callable[[Any], int] = attrgetter("error_code"),
        allowed: Collection[int] = (),
    ) -> Any:
        """Ask the coordinator, again while it is at the transaction before; check its answer.

        Raises as `StateTopic.check`.
        """
        for _ in range(CONCURRENT_TRIES):
            response = await self._topic.ask_coordinator(self._transactions, request)
            code = error_code(response)
            if code != CONCURRENT_TRANSACTIONS:
                break
            await asyncio.sleep(CONCURRENT_WAIT_S)
        if code not in allowed:
            self._topic.check(code, doing)
        return response

    def _batch(self, partition: int, rest: list[Message]) -> tuple[bytes, int]:
        """Take the next messages from the end of `rest`; return their batch and their number."""
        now_ms = int(time.time() * MS_PER_SECOND)
        batch = DefaultRecordBatchBuilder(
            magic=_MAGIC,
            compression_type=0,
            is_transactional=1,
            producer_id=self.id,
            producer_epoch=self.epoch,
            base_sequence=self._sequences[partition],
            batch_size=BATCH_BYTES,
        )
        count = 0
        while rest and batch.append(
            count, now_ms, rest[-1].key, rest[-1].value, list(rest[-1].headers)
        ):
            rest.pop()
            count += 1
        self._sequences[partition] = (self._sequences[partition] + count) % SEQUENCES
        return bytes(batch.build()), count
