"""Ends what another machine has begun in slots, before they are read.

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

from proxy.wire.list_offsets import LATEST, READ_UNCOMMITTED

from .messages import WRITER_HEADER
from .state_reader import StateReader, batches, offsets
from .state_topic import NotYetError, StateTopic

GRACE_S = 0.2
"""For a transaction that is under way: an order of magnitude longer than one takes."""

_log = get_logger(__name__)


async def settle(
    topic: StateTopic,
    slots: Collection[int],
    prefix: str,
    end_writer: Callable[[str], Awaitable[None]],
) -> None:
    """Return when all that older generations may have committed in these slots can be read.

    The group must have its new generation already: then what the old one may still commit is in
    the log, and undecided at most. `prefix` is what the transactional ids of all machines of the
    tier begin with; `end_writer` ends what is under way under such an id. Raises as
    `StateTopic.check` and StateError.
    """
    retry = topic.client.retry
    ends = await retry(partial(offsets, topic, slots, LATEST, READ_UNCOMMITTED))
    seen_s: dict[str, float] = {}

    async def decided() -> None:
        """Raise NotYetError while a transaction is under way before these ends."""
        stable = await offsets(topic, ends, LATEST)
        left = {slot: at for slot, at in stable.items() if at < ends[slot]}
        if not left:
            return
        now_s = asyncio.get_running_loop().time()
        for writer in await _open_writers(topic, left, prefix):
            if now_s - seen_s.setdefault(writer, now_s) >= GRACE_S:
                del seen_s[writer]
                _log.info("what another machine has not ended is undone", transactional_id=writer)
                await end_writer(writer)
        raise NotYetError(
            f"a transaction is under way in partition {min(left)} of topic {topic.name}",
            "let nothing but the machines of this tier write to it: kafka-transactions.sh "
            "find-hanging names others",
        )

    await retry(decided)


async def _open_writers(topic: StateTopic, stable: Mapping[int, int], prefix: str) -> set[str]:
    """Return who of the tier has begun what stands at these last stable offsets."""
    reader = StateReader(topic, stable)
    found: set[str] = set()
    for led in (await topic.leaders(stable)).values():
        for part in await reader.fetch(led, READ_UNCOMMITTED):
            start = stable[part.partition_index]
            read = batches(topic.name, part)
            records = next((each for batch, each in read if batch.base_offset >= start), [])
            for record in records[:1]:
                writer = (dict(record.headers).get(WRITER_HEADER) or b"").decode(errors="replace")
                if writer.startswith(prefix):
                    found.add(writer)
    return found
