"""Writes to slots in transactions that count only while the writer's generation is the group's.

Each transaction also commits offsets for the group (KIP-447). The group's coordinator takes them
from members of its present generation alone; without them we do not commit the transaction. They
come after the messages: when a generation ends, all that it may still commit is in the log.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kafka.protocol.producer import AddOffsetsToTxnRequest, TxnOffsetCommitRequest

from proxy.cluster.kafka_client import GROUP_COORDINATOR
from proxy.cluster.upstream import RefusedError, name_of

from .producer import Producer
from .state_topic import StateTopic

ADD_OFFSETS_VERSION = 1
TXN_OFFSET_COMMIT_VERSION = 3
"""The first that tells the member's generation. Since Kafka 2.5."""

GENERATION_OVER = frozenset({22, 25, 27, 82})
"""ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID, REBALANCE_IN_PROGRESS, FENCED_INSTANCE_ID."""

SLOT_TRANSACTION_TIMEOUT_MS = 15_000
"""Longer than any write takes. What a machine began that had lost the slot already holds up readers
for so long, and up to 10 s more until the brokers look."""


class GenerationError(RefusedError):
    """The group's coordinator knows the writer no more as a member, or not in this generation."""


@dataclass(frozen=True, slots=True)
class GroupFence:
    """Who writes, as the group's coordinator knows it since the member joined last."""

    group_id: str
    generation: int
    member_id: str
    instance_id: str | None = None


class SlotProducer(Producer):
    """A producer whose transactions the group's coordinator allows; for one task at a time.

    `write` raises GenerationError too. `fence_for` returns the fence to write these slots with,
    or raises StateError when they are not to be written.
    """

    timeout_ms = SLOT_TRANSACTION_TIMEOUT_MS

    def __init__(
        self,
        topic: StateTopic,
        transactional_id: str,
        fence_for: Callable[[Collection[int]], GroupFence],
    ) -> None:
        super().__init__(topic, transactional_id)
        self._fence_for = fence_for
        self.fence: GroupFence | None = None
        """With which was written last."""

    async def before_commit(self, partitions: Sequence[int]) -> None:
        """Ask the group whether this may be written; raises also GenerationError and StateError."""
        fence = self.fence = self._fence_for(partitions)
        doing = f"commit for group {fence.group_id}"
        request = AddOffsetsToTxnRequest[ADD_OFFSETS_VERSION](
            transactional_id=self.transactional_id,
            producer_id=self.id,
            producer_epoch=self.epoch,
            group_id=fence.group_id,
        )
        await self.ask(request, doing)
        request = TxnOffsetCommitRequest[TXN_OFFSET_COMMIT_VERSION](
            transactional_id=self.transactional_id,
            group_id=fence.group_id,
            producer_id=self.id,
            producer_epoch=self.epoch,
            generation_id=fence.generation,
            member_id=fence.member_id,
            group_instance_id=fence.instance_id,
            topics=[
                (self._topic.name, [(slot, self.positions[slot], -1, "") for slot in partitions])
            ],
        )
        response = await self._topic.ask_coordinator((GROUP_COORDINATOR, fence.group_id), request)
        for part in response.topics[0].partitions:
            if part.error_code in GENERATION_OVER:
                raise GenerationError(
                    f"group {fence.group_id} is beyond generation {fence.generation}: "
                    f"{name_of(part.error_code)}",
                    part.error_code,
                )
            self._topic.check(part.error_code, doing)
