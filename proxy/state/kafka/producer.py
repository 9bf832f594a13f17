"""Writes messages to the topic in one transaction, and keeps out all writers of the same name.

That is the transactional id. Kafka gives each that begins to use it a higher epoch and refuses the
earlier ones, whatever they still had on its way: so the newest proxy fences the one before it. When
a connection broke we go on with our own next epoch, which Kafka gives only to the one that had the
last (KIP-360): two proxies do not take the state from each other in turn.

In a tier each transaction also commits offsets for the group (KIP-447), whose coordinator takes
them from members of its present generation alone; without them we do not commit the transaction.
They come after the messages: when a generation ends, all that it may still commit is in the log.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

from aiokafka.record.default_records import DefaultRecordBatchBuilder
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)

from proxy.cluster.kafka_client import GROUP_COORDINATOR, TRANSACTION_COORDINATOR
from proxy.cluster.upstream import NonRetriableError, UpstreamError, error_name
from proxy.state.store import StateError

from .messages import Content, Message, Place, to_message
from .slot_table import LOST_FIX, GroupFence
from .state_topic import FencedError, NotReadyError, StateTopic

TRANSACTION_TIMEOUT_MS = 15_000
"""Longer than any write takes. What a machine began that had lost the slot already holds up readers
for so long, and up to 10 s more until the brokers look."""

CONCURRENT_WAIT_S, CONCURRENT_TRIES = 0.005, 1000
"""The transaction before is decided, and for some ms not written down everywhere."""

BATCH_BYTES = 512 * 2**10
"""At a time: below what any topic takes. A longer record goes alone."""

REQUEST_BYTES = 16 * 2**20
"""At a time over all partitions, and one batch more; brokers take 100 MiB."""

GENERATION_OVER = frozenset({22, 25, 27, 82})
"""ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID, REBALANCE_IN_PROGRESS, FENCED_INSTANCE_ID."""

INVALID_TXN_STATE, CONCURRENT_TRANSACTIONS, OPERATION_NOT_ATTEMPTED = 48, 51, 55
NO_ID = NO_EPOCH = -1
NO_TIME = -1
"""The time of messages: brokers refuse those that a clock is an hour ahead for, and need none."""

SEQUENCES = 2**31

FenceFor = Callable[[Collection[int]], GroupFence | None]
"""Returns the group's fence to write these slots with, or None where no group decides.

Raises StateError: they are not to be written.
"""


class Producer:
    """The one that may write, as far as `fence_for` says; for one task."""

    def __init__(
        self, topic: StateTopic, transactional_id: str, fence_for: FenceFor = lambda _slots: None
    ) -> None:
        self._topic = topic
        self.transactional_id = transactional_id
        self._transactions = TRANSACTION_COORDINATOR, transactional_id
        self._fence_for = fence_for
        self.begin_anew: Callable[[], Awaitable[None]] = self.take_over
        """Called after it was fenced. Raises StateError when it may write no more."""
        self._over: tuple[GroupFence | None, str] = None, ""
        """The fence that the group refused in this write, and how it said so."""
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
        await self._topic.retry(self._init)

    async def write(self, changes: Mapping[Place, Content]) -> None:
        """Write all changes or none; when this returned they are kept.

        What was not answered is tried again as a whole: writing the same once more changes nothing.
        After an error it may be that they were written all the same. Raises as `StateTopic.check`,
        and StateError for slots that are not to be written.
        """
        self._over = None, ""
        messages: dict[int, list[Message]] = {}
        for (slot, key), content in changes.items():
            message = to_message(key, content, self.transactional_id)
            messages.setdefault(slot, []).append(message)
        try:
            while True:
                with suppress(FencedError):
                    return await self._topic.retry(partial(self._write, messages))
                # In a tier another machine has undone what we had begun, as it was told that we are
                # gone. The group says whether that is so.
                await self.begin_anew()
        except (NonRetriableError, StateError):
            # What was begun would hold up readers until the brokers give it up.
            with suppress(UpstreamError, NonRetriableError, FencedError):
                await self._end(commit=False)
            raise

    async def _write(self, messages: Mapping[int, Sequence[Message]]) -> None:
        partitions = sorted(messages)
        self._fence(partitions)
        if not self._between:
            await self._end(commit=False)
            await self._init()
        self._between = False
        await self._add_partitions(partitions)
        await self._append(messages)
        if (fence := self._fence(partitions)) is not None:
            await self._commit_offsets(fence, partitions)
        await self._end(commit=True)
        self._between = True

    def _fence(self, partitions: Sequence[int]) -> GroupFence | None:
        """Return with what to write. Raises StateError, or NotReadyError while that was refused."""
        fence = self._fence_for(partitions)
        if fence is not None and fence == self._over[0]:
            raise NotReadyError(self._over[1], LOST_FIX)
        return fence

    @property
    def _identity(self) -> dict[str, Any]:
        return {
            "transactional_id": self.transactional_id,
            "producer_id": self.id,
            "producer_epoch": self.epoch,
        }

    async def _init(self) -> None:
        request = InitProducerIdRequest[3](
            **self._identity, transaction_timeout_ms=TRANSACTION_TIMEOUT_MS
        )
        response = await self._ask(request, f"begin to write to topic {self._topic.name}")
        self.id, self.epoch = response.producer_id, response.producer_epoch
        self._sequences.clear()
        self._between = True

    async def _add_partitions(self, partitions: Sequence[int]) -> None:
        def error_code(response: Any) -> int:
            (topic,) = response.results_by_topic_v3_and_below
            codes = [int(part.partition_error_code) for part in topic.results_by_partition]
            # Of all but the one that is to blame Kafka says only that they were not tried.
            return max(codes, key=lambda code: (bool(code), code != OPERATION_NOT_ATTEMPTED))

        request = AddPartitionsToTxnRequest[1](
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=self.id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=[(self._topic.name, list(partitions))],
        )
        await self._ask(request, f"begin a transaction on topic {self._topic.name}", error_code)

    async def _append(self, messages: Mapping[int, Sequence[Message]]) -> None:
        """Append the messages: of each partition one batch at a time, all leaders in turn."""
        rest = {number: list(reversed(each)) for number, each in messages.items()}
        while rest:
            batches: dict[int, bytes] = {}
            counts: dict[int, int] = {}
            size_bytes = 0
            for number in sorted(rest):
                if size_bytes < REQUEST_BYTES:
                    batches[number], counts[number] = self._batch(number, rest[number])
                    size_bytes += len(batches[number])
            rest = {number: each for number, each in rest.items() if each}
            starts = await self._topic.produce(batches, self.transactional_id)
            self.positions |= {number: start + counts[number] for number, start in starts.items()}

    async def _commit_offsets(self, fence: GroupFence, slots: Sequence[int]) -> None:
        """Ask the group whether this may be written; raises NotReadyError when it may not."""
        doing = f"commit for group {fence.group_id}"
        add = AddOffsetsToTxnRequest[1](**self._identity, group_id=fence.group_id)
        await self._ask(add, doing)
        commit = TxnOffsetCommitRequest[3](
            **self._identity,
            group_id=fence.group_id,
            generation_id=fence.generation,
            member_id=fence.member_id,
            group_instance_id=fence.instance_id,
            topics=[(self._topic.name, [(slot, self.positions[slot], -1, "") for slot in slots])],
        )
        response = await self._topic.ask_coordinator((GROUP_COORDINATOR, fence.group_id), commit)
        for part in response.topics[0].partitions:
            if part.error_code in GENERATION_OVER:
                over = f"{fence.generation}: {error_name(part.error_code)}"
                text = f"group {fence.group_id} is beyond generation {over}"
                self._over = fence, f"{text}, and this machine is in no newer one yet"
                await self._end(commit=False)  # it would hold up readers
                raise NotReadyError(self._over[1], LOST_FIX)
            self._topic.check(part.error_code, doing)

    async def _end(self, *, commit: bool) -> None:
        request = EndTxnRequest[1](**self._identity, committed=commit)
        allowed = () if commit else (INVALID_TXN_STATE,)  # there may be none to undo
        await self._ask(request, f"end a transaction on topic {self._topic.name}", allowed=allowed)

    async def _ask(
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
        batch = DefaultRecordBatchBuilder(
            magic=2,
            compression_type=0,
            is_transactional=1,
            producer_id=self.id,
            producer_epoch=self.epoch,
            base_sequence=self._sequences[partition],
            batch_size=BATCH_BYTES,
        )
        count = 0
        while rest and batch.append(count, NO_TIME, *rest[-1]):
            rest.pop()
            count += 1
        self._sequences[partition] = (self._sequences[partition] + count) % SEQUENCES
        return bytes(batch.build()), count
