"""The store of a tier's machine: the slots that it has of a topic, fenced by the group."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial

from structlog import get_logger

from proxy.cluster.kafka_client import Bootstrap
from proxy.cluster.upstream import RefusedError, UpstreamError
from proxy.state.store import Record, StateError
from proxy.wire.list_offsets import EARLIEST, LATEST, READ_UNCOMMITTED

from .messages import WRITER_HEADER, Content, Place
from .producer import GenerationError, Producer
from .slot_table import LOST_FIX, GroupFence
from .state_reader import StateReader, batches, offsets
from .state_topic import FencedError, NotYetError
from .topic_store import LOAD_TIMEOUT_S, STORE_TIMEOUT_S, TopicStore

TIER_SEPARATOR = "/"
"""Between tier and machine in a transactional id."""

FOLLOW_PAUSE_S = 0.2
"""Between looks at whether another machine has the common slot now."""

FOLLOW_RETRY_S = 1.0
"""After what could not be read."""

FOLLOW_LIMIT_S = 10.0

GRACE_S = 0.2
"""For a transaction that is under way: an order of magnitude longer than one takes."""

OnChange = Callable[[frozenset[str]], None]
"""Gets the keys of the records that changed."""

_log = get_logger(__name__)


class SlotStore(TopicStore):
    """Records of the slots that this machine has taken, and of the common slot, which all read.

    The topic has a partition for each slot and is made when it does not exist. What is written
    counts only while the group of the tier has this machine in the generation of the newest fence.
    A write during a change of generation waits for the next fence. Writes raise StateError for a
    slot that was not taken. Records of other slots are not there: `get` returns None.

    Raises StateError when no broker answers, the topic is not made for slots, or holds what this
    version cannot read.

    `tier` and `machine` make the transactional id: no two machines of a tier may have one name.
    Slots are 0 to `slots` - 1; `common` is the slot that is always read.
    """

    _instead = "run without a tier"
    _make_room = "add machines to the tier, or run without it"

    def __init__(
        self,
        way: Bootstrap,
        topic: str,
        *,
        tier: str,
        machine: str,
        slots: int,
        common: int,
        slot_of_record: Callable[[str], int],
        timeout_s: float = STORE_TIMEOUT_S,
    ) -> None:
        self._prefix = tier + TIER_SEPARATOR
        """What the transactional ids of all machines of the tier begin with."""
        ids = f"use transactional ids that begin with {self._prefix}"
        self._rights = f"read the group of tier {tier} and {ids}"
        super().__init__(way, topic, slots, slot_of_record, timeout_s)
        # Who reads much, or waits at a broker for what comes, holds up no write.
        self._reading, self._following = self._new_topic(), self._new_topic()
        self._common = common
        self._producer = Producer(self._topic, self._prefix + machine, self._slots.fence_for)
        self._on_change: OnChange | None = None
        self._changing = asyncio.Lock()
        """For whoever takes or releases slots; before `_put` when both are needed."""
        self._begin(self._open())

    def misplaced(self) -> list[Record]:
        """Return the records of taken slots that belong to other slots by now.

        `slot_of_record` says so since the rules are other ones. No other method finds them: write
        them at the machine that has their slot, then `drop_misplaced` here.
        """
        self._loop.check_open()
        return list(self._slots.misplaced(self.taken).values())

    def drop_misplaced(self, keys: Collection[str]) -> None:
        """Delete misplaced records of these keys. Raises StateError as `put_many`."""

        def dropped() -> dict[Place, Content]:
            misplaced = self._slots.misplaced(self.taken)
            return {(slot, key): None for slot, key in misplaced if key in keys}

        self._run(self._write_all(dropped, self._timeout_s), "written")

    def take(self, slots: Collection[int], fence: GroupFence) -> None:
        """Read these slots to their end, then let them be written; renews the fence of all.

        The group has generation `fence.generation` already. Slots that are taken stay as they are.
        Raises StateError: they cannot be read, or were lost meanwhile; none of them is taken then.
        """
        self._run(self._take(frozenset(slots), fence), "read")

    def release(self, slots: Collection[int]) -> None:
        """Wait for the writes to these slots that are under way, undo failed ones, forget all.

        In a generation in which nobody else has them yet, whose fence was given: the last writes
        count. The common slot is still read.
        """
        self._run(self._release(frozenset(slots)), "released")

    def fence(self, fence: GroupFence) -> None:
        """Write in this generation from now on: slots that are kept, or are released next.

        A member with another id has lost its slots, as after `lost`. Does not wait.
        """
        self._slots.renew(fence)

    def lost(self) -> None:
        """Write no more before slots are taken anew; what was read stays readable. Does not wait.

        For a machine that is out of its group: others may have its slots.
        """
        self._slots.lose()

    def follow_common(self, on_change: OnChange) -> None:
        """Call this whenever records of the common slot have become other ones elsewhere.

        `on_change` gets their keys, in the store's own thread; it must return soon and not call
        the store's methods that wait. At most once; until `close`.
        """
        self._on_change = on_change
        self._follower: Future[None] = self._loop.start(self._follow())

    async def _open(self) -> None:
        await self._reading.ensure(self._timeout_s)
        async with self._topic.client.within(LOAD_TIMEOUT_S):
            await self._producer.take_over()
        async with self._reading.client.within(LOAD_TIMEOUT_S, "not read to its end"):
            await self._read_whole((self._common,))

    async def _begin_anew(self, error: FencedError | GenerationError) -> None:
        if isinstance(error, GenerationError):
            await self._topic.client.retry(partial(self._renewed, error))
        else:
            # Another machine has undone what we had begun, as it was told that we are gone. The
            # group says whether that is so.
            await self._producer.take_over()

    async def _renewed(self, error: GenerationError) -> None:
        """Raise NotYetError while there is no fence but the one that was refused."""
        if self._slots.fence == self._producer.fence:
            what = f"{error}, and this machine is in no newer one yet"
            raise NotYetError(what, LOST_FIX)

    async def _end_writer(self, transactional_id: str) -> None:
        """Undo what is under way under this id; the one that has it begins anew."""
        if transactional_id == self._producer.transactional_id:
            async with self._put:
                await self._producer.take_over()
        else:
            await Producer(self._reading, transactional_id).take_over()

    async def _settle(self, slots: Collection[int]) -> None:
        """Return when all that older generations may have committed in these slots can be read.

        The group must have its new generation already: then what the old one may still commit is in
        the log, and undecided at most. The machine before may have been killed in the middle of a
        transaction. Then nobody ends it before the brokers do, which takes them up to 25 s, and
        until then nothing behind it can be read. So who takes the slot ends it: each message names
        its writer, and Kafka undoes what a writer had begun when somebody begins to write under its
        name. One that only was slow begins anew; the group's generation says whether what it writes
        counts.
        """
        topic, retry = self._reading, self._reading.client.retry
        ends = await retry(partial(offsets, topic, slots, LATEST, READ_UNCOMMITTED))
        seen_s: dict[str, float] = {}

        async def decided() -> None:
            """Raise NotYetError while a transaction is under way before these ends."""
            stable = await offsets(topic, ends, LATEST)
            left = {slot: at for slot, at in stable.items() if at < ends[slot]}
            if not left:
                return
            now_s = asyncio.get_running_loop().time()
            for writer in await self._open_writers(left):
                if now_s - seen_s.setdefault(writer, now_s) >= GRACE_S:
                    del seen_s[writer]
                    text = "what another machine has not ended is undone"
                    _log.info(text, transactional_id=writer)
                    await self._end_writer(writer)
            raise NotYetError(
                f"a transaction is under way in partition {min(left)} of topic {topic.name}",
                "let nothing but the machines of this tier write to it: kafka-transactions.sh "
                "find-hanging names others",
            )

        await retry(decided)

    async def _open_writers(self, stable: Mapping[int, int]) -> set[str]:
        """Return who of the tier has begun what stands at these last stable offsets."""
        topic, reader = self._reading, StateReader(self._reading, stable)
        found: set[str] = set()
        for led in (await topic.leaders(stable)).values():
            for part in await reader.fetch(led, READ_UNCOMMITTED):
                start = stable[part.partition_index]
                read = batches(topic.name, part)
                records = next((each for batch, each in read if batch.base_offset >= start), [])
                for record in records[:1]:
                    writer = dict(record.headers).get(WRITER_HEADER) or b""
                    found.add(writer.decode(errors="replace"))
        return {writer for writer in found if writer.startswith(self._prefix)}

    async def _take(self, slots: frozenset[int], fence: GroupFence) -> None:
        async with self._changing:
            losses = self._slots.renew(fence)
            new = slots - self.taken
            try:
                if new:
                    async with self._reading.client.within(LOAD_TIMEOUT_S, "not read to its end"):
                        await self._settle(new)
                        await self._read_whole(new)
                if not self._slots.took(new, losses):
                    raise StateError(
                        "this machine was put out of its tier's group while it read its slots",
                        "nothing: the group gives it slots again",
                    )
            except BaseException:
                self._slots.replace(new - {self._common}, {})
                raise

    async def _read_whole(self, slots: Collection[int]) -> None:
        """Replace what is known of these slots by what is committed."""
        reader = StateReader(self._reading, dict.fromkeys(slots, EARLIEST))
        found = await self._read(reader)
        self._uncertain = {place for place in self._uncertain if place[0] not in slots}
        changed = self._slots.replace(slots, found)
        self._positions |= reader.positions
        if self._common in slots:
            self._report(changed)
        self._check_size(self._slots.size_bytes)

    async def _release(self, slots: frozenset[int]) -> None:
        async with self._changing:
            try:
                undoing = partial(self._undoing, slots & self.taken)
                await self._write_all(undoing, self._timeout_s)
            except (UpstreamError, RefusedError, FencedError, StateError) as error:
                _log.warning("what a failed write left may count", problem=str(error))
            async with self._put:  # what was asked for meanwhile
                self._slots.release(slots)
            self._slots.replace(slots - {self._common}, {})

    async def _follow(self) -> None:
        """Keep the records of the common slot as they are in the topic while another has it."""
        failing = False
        while True:
            if self._common in self.taken:
                await asyncio.sleep(FOLLOW_PAUSE_S)
                continue
            try:
                await self._read_on()
                if failing:
                    _log.info("the common slot is followed again")
                failing = False
            except (UpstreamError, RefusedError, FencedError, StateError) as error:
                if not failing:
                    _log.warning("the common slot is not followed", problem=str(error))
                failing = True
                await asyncio.sleep(FOLLOW_RETRY_S)

    async def _read_on(self) -> None:
        """Read what comes next in the common slot, unless it was read or written meanwhile."""
        began = self._positions[self._common]
        reader = StateReader(self._following, {self._common: began})
        async with self._following.client.within(FOLLOW_LIMIT_S):
            found = await reader.wait()
        if self._positions[self._common] == began and self._common not in self.taken:
            changed = self._slots.change(found)
            self._positions |= reader.positions
            self._report(changed)

    def _report(self, changed: set[str]) -> None:
        """Call who follows the common slot with the keys of its records that changed."""
        if not changed or self._on_change is None:
            return
        try:
            self._on_change(frozenset(changed))
        except Exception:  # its fault must not end the reading
            _log.exception("a change of the common slot was not taken up")
