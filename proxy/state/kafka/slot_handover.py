"""Reads slots that another machine has written: all that it committed, and nothing may come later.

The machine before may have been killed in the middle of a transaction. Then nobody ends it before
the brokers do, which takes them up to 25 s, and until then nothing behind it can be read. So who
takes the slot ends it: each message names its writer, and Kafka undoes what a writer had begun when
somebody begins to write under its name. One that only was slow begins anew; the group's generation
says whether what it writes counts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

from structlog import get_logger

from proxy.state.store import Record
from proxy.wire.list_offsets import LATEST, READ_UNCOMMITTED

from .messages import Message
from .producer import Producer
from .state_reader import StateReader, batches, offsets
from .state_topic import NotYetError, StateTopic

WRITER_HEADER = "writer"
"""Of each message: the transactional id under which it was written."""

GRACE_S = 0.2
"""For a transaction that is under way: an order of magnitude longer than one takes."""

_log = get_logger(__name__)

Records = dict[int, dict[str, Record]]
"""By slot and key."""


class Handover:
    """Reads slots when nobody writes to them any more.

    `prefix` is what the transactional ids of all machines of the tier begin with. `own` is that of
    this machine, `end_own` ends what it has under way.
    """

    def __init__(
        self,
        topic: StateTopic,
        prefix: str,
        own: str,
        end_own: Callable[[], Awaitable[None]],
    ) -> None:
        self._topic = topic
        self._prefix = prefix
        self._own = own
        self._end_own = end_own

    async def settle(self, slots: Collection[int]) -> None:
        """Return when all that older generations may have committed in these slots can be read.

        The group must have its new generation already: then what the old one may still commit is
        in the log, and undecided at most. Raises as `StateTopic.check` and StateError.
        """
        retry = self._topic.client.retry
        ends = await retry(partial(offsets, self._topic, slots, LATEST, READ_UNCOMMITTED))
        await retry(partial(self._decided, ends, {}))

    async def read(self, slots: Collection[int]) -> tuple[Records, Mapping[int, int]]:
        """Return what is committed in these slots now, and the offsets behind it.

        Raises as `StateTopic.check`, and StateError for what cannot be read.
        """
        reader = StateReader(self._topic, dict.fromkeys(slots))
        found: Records = {slot: {} for slot in slots}
        async for (slot, key), content in reader.read():
            if isinstance(content, Record):
                found[slot][key] = content
            else:
                found[slot].pop(key, None)
        return found, reader.positions

    async def _decided(self, ends: Mapping[int, int], seen: dict[str, float]) -> None:
        """Raise NotYetError while a transaction is under way before these ends."""
        stable = await offsets(self._topic, ends, LATEST)
        if left := {slot: at for slot, at in stable.items() if at < ends[slot]}:
            await self._end_open(left, seen)
            where = f"partition {min(left)} of topic {self._topic.name}"
            raise NotYetError(
                f"a transaction is under way in {where}",
                "let nothing but the machines of this tier write to it: kafka-transactions.sh "
                "find-hanging names others",
            )

    async def _end_open(self, stable: Mapping[int, int], seen: dict[str, float]) -> None:
        """End the first transaction that is under way in each slot, if it is not new to us."""
        now_s = asyncio.get_running_loop().time()
        for writer in await self._writers(stable):
            if now_s - seen.setdefault(writer, now_s) < GRACE_S:
                continue
            del seen[writer]
            _log.info("what another machine has not ended is undone", transactional_id=writer)
            if writer == self._own:
                await self._end_own()
            else:
                await Producer(self._topic, writer).take_over()

    async def _writers(self, stable: Mapping[int, int]) -> set[str]:
        """Return who has begun what stands at the last stable offsets."""
        reader = StateReader(self._topic, stable)
        found: set[str] = set()
        for led in (await self._topic.leaders(stable)).values():
            for part in await reader.fetch(led, READ_UNCOMMITTED):
                for batch, records in batches(self._topic.name, part):
                    if batch.base_offset >= stable[part.partition_index]:
                        found |= self._writer_of(records)
                        break
        return found

    def _writer_of(self, records: Collection[object]) -> set[str]:
        for record in records:
            for name, value in getattr(record, "headers", ()):
                writer = value.decode(errors="replace")
                if name == WRITER_HEADER and writer.startswith(self._prefix):
                    return {writer}
        return set()


def signed(message: Message, slot: int, writer: str) -> Message:
    """Return the message as it is written to a slot by this writer."""
    headers = (*message.headers, (WRITER_HEADER, writer.encode()))
    return Message(message.key, message.value, headers, partition=slot)
