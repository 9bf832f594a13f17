"""The store of slots in a topic: records in memory, each change written before it counts."""

import asyncio
from collections.abc import AsyncIterable, Callable, Collection, Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any, TypeVar

from kafka.errors import OffsetOutOfRangeError
from structlog import get_logger

from proxy.cluster.broker_connection import BrokerConnection
from proxy.cluster.kafka_client import Bootstrap
from proxy.cluster.upstream import NonRetriableError, UpstreamError, misread_is_bad_response
from proxy.state.store import ClosedError, Record, StateError, Store
from proxy.wire.list_offsets import EARLIEST, LATEST, READ_UNCOMMITTED

from .messages import (
    WRITER_HEADER,
    Content,
    Place,
    damaged_error,
    decode_batches,
    size_of,
)
from .producer import Producer
from .slot_table import GroupFence, SlotTable
from .state_topic import MAX_RECORD_BYTES, FencedError, NotReadyError, StateTopic

MAX_STATE_BYTES = 256 * 2**20
"""Of all keys and values together; they are in memory."""

MESSAGE_TOO_LARGE = 10
FORBIDDEN = frozenset({29, 30, 31, 53})
"""Authorization failed for the topic, the group, the cluster, the transactional id."""

STORE_TIMEOUT_S = 10.0
"""For a write with all its attempts."""

LOAD_TIMEOUT_S = 60.0
"""To read the whole topic, and to become its owner."""

CLOSE_TIMEOUT_S, END_LIMIT_S = 2.0, 5.0
"""For the last write of a store that is closed, and with those under way before it; what hangs by
then is ended as in a crash."""

FOLLOW_PAUSE_S = 0.2
"""Between looks at whether another machine has the common slot now."""

FOLLOW_LIMIT_S, FOLLOW_RETRY_S = 10.0, 1.0
"""To read what comes next in the common slot, and after what could not be read."""

GRACE_S = 0.2
"""For a transaction of another that is under way: an order of magnitude longer than one takes."""

KAFKA_ERRORS = (UpstreamError, NonRetriableError, FencedError)
"""What the brokers say."""

LEAST_RECORD_BYTES = 64
"""For so much a record counts at least that was read: whoever may write must not fill our memory
with empty ones."""

Value = TypeVar("Value")

_log = get_logger(__name__)


class BootstrapForLoop(Bootstrap):
    """The way of another event loop, whose certificate is shown here too, also one set later."""

    def __init__(self, way: Bootstrap) -> None:
        super().__init__(way.servers, login=way.login)
        self._way = way

    async def connect(self, *args: Any, **kwargs: Any) -> BrokerConnection:
        """Connect as the other way would."""
        self.tls = self._way.tls
        return await super().connect(*args, **kwargs)


class SlotStore(Store):
    """Records of the slots that this machine has taken, and of the common slot, which all read.

    The topic has a partition for each slot and is made when it does not exist. `put_many` is a
    transaction, and when it returned the brokers have it (acks=all). While no broker answers writes
    fail, after `timeout_s` with all attempts, and a later one works again. A write that is reported
    as failed since the answer to its commit was lost is undone by the next write that works, or by
    `close`; a crash before that may leave it. A write that finds that the topic was made anew has
    the next one write all records of the slots that were taken.

    Writes count only while the group of the tier has this machine in the generation of the newest
    fence; during a change of generation they wait for the next fence. They raise StateError for a
    slot that was not taken. Records of other slots are not there.

    Raises StateError when no broker answers, the topic is not made for slots, or holds what this
    version cannot read, or more than MAX_STATE_BYTES. No other process has lost anything then.

    `way` leads to Kafka 2.5 or later. `tier` and `machine` make the transactional id: no two
    machines of a tier may have one name. Without a tier it is the topic's name, and there is one
    slot. `slot_of_record` returns the slot of a record's key, from 0 to `slots` - 1; `common` is
    the slot that all read. Who `looks` only reads that.
    """

    _instead = "run without a tier"
    """For people: what else can be done when the state cannot be kept in the topic."""
    _make_room = "add machines to the tier, or run without it"
    """The same: when it is too large."""

    def __init__(
        self,
        way: Bootstrap,
        topic: str,
        *,
        tier: str | None = None,
        machine: str = "",
        slots: int = 1,
        common: int = 0,
        slot_of_record: Callable[[str], int] = lambda _key: 0,
        timeout_s: float = STORE_TIMEOUT_S,
        looks: bool = False,
    ) -> None:
        self._timeout_s, self._looks = timeout_s, looks
        self._tier, self._prefix = tier, f"{tier}/"
        self._common = common
        own_way = BootstrapForLoop(way)
        # Who reads much, or waits at a broker for what comes, holds up no write.
        self._topics = tuple(StateTopic(own_way, topic, slots) for _ in range(3))
        self._topic, self._reading, self._following = self._topics
        self.slots = SlotTable(slot_of_record)
        """What is read here, and what may be written."""
        own_id = topic if tier is None else self._prefix + machine
        self._producer = Producer(self._topic, own_id, self.slots.check)
        self._positions: dict[int, int] = {}
        """Offset behind what the records hold, by slot."""
        self._uncertain: set[Place] = set()
        """Of writes that failed; the topic may have there what is not in memory."""
        self._put = asyncio.Lock()
        """For whoever uses the producer."""
        self._changing = asyncio.Lock()
        """For whoever takes or releases slots; before `_put` when both are needed."""
        self._on_change: Callable[[frozenset[str]], None] = lambda _keys: None
        self.is_closed = False
        # Callers may be in an event loop of their own, so the clients' is in a thread of its own.
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._loop = self._runner.get_loop()
        self._closing = asyncio.Event()
        # Daemon: who forgot to close a store can still end.
        self._thread = Thread(target=self._serve, name="kafka-state", daemon=True)
        self._thread.start()
        try:
            self._run(self._open(), "opened")
        except BaseException:
            self._shut_down()
            raise

    def get(self, key: str) -> Record | None:
        """Return the record of that key, or None, also when its slot is not read here."""
        self._check_open()
        return self.slots.at(self.slots.place(key))

    def items(self, prefix: str) -> list[Record]:
        """Return the records read here whose key begins with `prefix`, sorted by key."""
        self._check_open()
        return self.slots.items(prefix)

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> None:
        """Delete keys and write records, all or nothing."""
        new = {record.key: record for record in records}
        changes = partial(self._changes, new, tuple(delete))
        self._run(self._write_all(changes, self._timeout_s), "written")

    def drop_misplaced(self, keys: Collection[str]) -> None:
        """Delete misplaced records of these keys. Raises StateError as `put_many`."""

        def dropped() -> dict[Place, Content]:
            return {place: None for place in self.slots.misplaced() if place[1] in keys}

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

    def follow_common(self, on_change: Callable[[frozenset[str]], None]) -> None:
        """Call this whenever records of the common slot have become other ones elsewhere.

        `on_change` gets their keys, in the store's own thread; it must return soon and not call
        the store's methods that wait. At most once; until `close`.
        """
        self._on_change = on_change
        self._follower = self._start(self._follow())

    def close(self) -> None:
        """Wait for writes under way, undo failed ones, close; a second time does nothing."""
        if self.is_closed:
            return
        # Who comes next takes the state also when it cannot be told so.
        with suppress(StateError, TimeoutError):
            undoing = self._write_all(lambda: self._undoing(self.slots.taken), CLOSE_TIMEOUT_S)
            self._run(asyncio.wait_for(undoing, END_LIMIT_S), "closed")
        self._shut_down()

    def _serve(self) -> None:
        with self._runner:  # which cancels, in the end, what runs still
            self._runner.run(self._closing.wait())

    def _shut_down(self) -> None:
        self.is_closed = True
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
        for topic in self._topics:
            topic.close()

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError

    def _start(self, work: Coroutine[Any, Any, Value]) -> Future[Value]:
        """Begin this in the store's own event loop, and return at once."""
        if self.is_closed:
            work.close()
        self._check_open()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, Value], done: str) -> Value:
        """Run this in the store's own event loop, to its end, or `close`.

        Raises StateError, that the state cannot be `done`, for what the brokers say.
        """
        try:
            return self._start(work).result()
        except CancelledError:
            self._check_open()
            raise
        except KAFKA_ERRORS as error:
            what = f"the state in topic {self._topic.name} cannot be {done}: {error}"
            raise StateError(what, self._fix_of(error)) from error

    @property
    def _rights(self) -> str:
        """For people: what the proxy needs besides the rights on the topic."""
        ids = f"use transactional ids that begin with {self._prefix}"
        return f"read the group of tier {self._tier} and {ids}"

    def _fix_of(self, error: Exception) -> str:
        if isinstance(error, NotReadyError):
            return error.fix
        if not isinstance(error, NonRetriableError):
            return (
                "check that the brokers are up, that the topic is there, and "
                "cluster.bootstrap_servers, tls and sasl"
            )
        topic = self._topic.name
        if error.error_code in FORBIDDEN:
            return (
                f"let quota-proxy create, describe, read and write topic {topic} and "
                f"{self._rights} (kafka-acls.sh), or {self._instead}"
            )
        if error.error_code == MESSAGE_TOO_LARGE:
            return (
                f"raise max.message.bytes of topic {topic} to {MAX_RECORD_BYTES} and a little more"
            )
        return (
            f"see the brokers' log, or make the topic yourself: kafka-topics.sh --create --topic "
            f"{topic} --partitions {self._topic.partitions} --config cleanup.policy=compact"
        )

    def _check_size(self, size_bytes: int) -> None:
        """Raise StateError when the state is larger than it may be."""
        if size_bytes > MAX_STATE_BYTES:
            what = f"the state in topic {self._topic.name} has more than {MAX_STATE_BYTES} bytes"
            raise StateError(what, self._make_room)

    def _changes(self, new: Mapping[str, Record], gone: Collection[str]) -> dict[Place, Content]:
        """Return what writes and deletes these, and undoes failed writes. Raises StateError."""
        place, at = self.slots.place, self.slots.at
        self.slots.check({place(key)[0] for key in (*gone, *new)})
        changes = self._undoing(self.slots.taken)
        gone_places = map(place, gone)
        changes |= {each: None for each in gone_places if at(each) or each in changes}
        changes |= {place(key): record for key, record in new.items()}
        size_bytes = self.slots.size_bytes
        for where, content in changes.items():
            record_bytes = size_of(content)
            if record_bytes > MAX_RECORD_BYTES:
                what = f"the record {where[1]!r} has {record_bytes} bytes, and topic "
                what += f"{self._topic.name} takes {MAX_RECORD_BYTES}"
                raise StateError(what, self._instead)
            size_bytes += record_bytes - size_of(at(where))
        self._check_size(size_bytes)
        return changes

    def _undoing(self, slots: Collection[int]) -> dict[Place, Content]:
        """Return what undoes failed writes to these slots."""
        return {place: self.slots.at(place) for place in self._uncertain if place[0] in slots}

    async def _write_all(
        self, changes_now: Callable[[], Mapping[Place, Content]], limit_s: float
    ) -> None:
        """Write what there is to be written, if there is something, after writes under way."""
        async with self._put:
            if changes := changes_now():
                await self._write(changes, limit_s)

    async def _write(self, changes: Mapping[Place, Content], limit_s: float) -> None:
        self._uncertain |= changes.keys()
        async with self._topic.within(limit_s):
            await self._producer.write(changes)
        positions = {slot: self._producer.positions[slot] for slot, _ in changes}
        if any(at <= self._positions[slot] for slot, at in positions.items()):
            text = "the topic of the state has lost what was in it: all is written to it again"
            _log.error(text, topic=self._topic.name)
            self._uncertain |= {self.slots.place(each.key) for each in self.slots.items("")}
            self._uncertain |= self.slots.misplaced().keys()
            self._positions = dict.fromkeys((*self.slots.taken, self._common), 0)
        self._uncertain -= changes.keys()
        self.slots.change(changes)
        self._positions |= positions

    async def _open(self) -> None:
        await self._reading.ensure(self._timeout_s)
        async with self._reading.within(LOAD_TIMEOUT_S, "not read to its end"):
            await self._read_whole((self._common,))
        if not self._looks:  # only now: what was read may be of no use to us
            async with self._topic.within(LOAD_TIMEOUT_S):
                await self._producer.take_over()

    async def _read(self, positions: Mapping[int, int]) -> dict[Place, Content]:
        """Return what is committed from these positions on. Raises StateError: it is too large."""
        read_to = dict(positions)
        found = await self._collect(self._reading.read(read_to))
        self._positions |= read_to
        return found

    async def _collect(
        self, messages: AsyncIterable[tuple[Place, Content]]
    ) -> dict[Place, Content]:
        """Return what they leave, and delete of what is known here. Raises as `_read`."""
        found: dict[Place, Content] = {}
        size_bytes = 0
        async for place, content in messages:
            size_bytes += _room_of(content) - _room_of(found.pop(place, None))
            self._check_size(size_bytes)
            if content is not None or self.slots.at(place) is not None:
                found[place] = content
        return found

    async def _read_whole(self, slots: Collection[int]) -> None:
        """Replace what is known of these slots by what is committed."""
        found = await self._read(dict.fromkeys(slots, EARLIEST))
        self._uncertain = {place for place in self._uncertain if place[0] not in slots}
        changed = self.slots.replace(slots, found)
        if changed and self._common in slots:
            self._on_change(frozenset(changed))
        self._check_size(self.slots.size_bytes)

    async def _take(self, slots: frozenset[int], fence: GroupFence) -> None:
        async with self._changing:
            losses = self.slots.renew(fence)
            new = slots - self.slots.taken
            try:
                if new:
                    async with self._reading.within(LOAD_TIMEOUT_S, "not read to its end"):
                        await self._settle(new)
                        await self._read_whole(new)
                if not self.slots.took(new, losses):
                    raise StateError(
                        "this machine was put out of its tier's group while it read its slots",
                        "nothing: the group gives it slots again",
                    )
            except BaseException:
                self.slots.replace(new - {self._common}, {})
                raise

    async def _release(self, slots: frozenset[int]) -> None:
        async with self._changing:
            try:
                undoing = partial(self._undoing, slots & self.slots.taken)
                await self._write_all(undoing, self._timeout_s)
            except (*KAFKA_ERRORS, StateError) as error:
                _log.warning("what a failed write left may count", problem=str(error))
            async with self._put:  # what was asked for meanwhile
                self.slots.release(slots)
            self.slots.replace(slots - {self._common}, {})

    async def _settle(self, slots: Collection[int]) -> None:
        """Return when all that older generations may have committed in these slots can be read.

        The group must have its new generation already: then what the old one may still commit is in
        the log, and undecided at most. The brokers end a transaction in which the machine before
        was killed only after up to 25 s, and nothing behind it can be read before. So who takes the
        slot ends it: each message names its writer, and Kafka undoes what a writer had begun when
        somebody begins to write under its name. One that only was slow begins anew; the group's
        generation says whether what it writes counts.
        """
        topic, retry = self._reading, self._reading.retry
        ends = await retry(partial(topic.offsets, slots, LATEST, READ_UNCOMMITTED))
        began_s = self._loop.time()

        async def decided() -> None:
            """Raise NotReadyError while a transaction is under way before these ends."""
            stable = await topic.offsets(ends, LATEST)
            left = {slot: at for slot, at in stable.items() if at < ends[slot]}
            if not left:
                return
            if self._loop.time() - began_s >= GRACE_S:
                for writer in await self._open_writers(left):
                    text = "what another machine has not ended is undone"
                    _log.info(text, transactional_id=writer)
                    await self._end_writer(writer)
            raise NotReadyError(
                f"a transaction is under way in partition {min(left)} of topic {topic.name}",
                "let nothing but the machines of this tier write to it: kafka-transactions.sh "
                "find-hanging names others",
            )

        await retry(decided)

    async def _open_writers(self, stable: Mapping[int, int]) -> set[str]:
        """Return who of the tier has begun what stands at these last stable offsets."""
        topic = self._reading
        found: set[str] = set()
        for led in (await topic.by_leader(stable)).values():
            for part in await topic.fetch({each: stable[each] for each in led}, READ_UNCOMMITTED):
                start = stable[part.partition_index]
                begun = (
                    each
                    for each in decode_batches(topic.name, part)
                    if each[0].base_offset >= start
                )
                _, messages = next(begun, (None, iter(())))
                if (first := next(messages, None)) is not None:
                    writer = dict(first.headers).get(WRITER_HEADER) or b""
                    found.add(writer.decode(errors="replace"))
        return {writer for writer in found if writer.startswith(self._prefix)}

    async def _end_writer(self, transactional_id: str) -> None:
        """Undo what is under way under this id; the one that has it begins anew."""
        if transactional_id == self._producer.transactional_id:
            async with self._put:
                await self._producer.take_over()
        else:
            await Producer(self._reading, transactional_id).take_over()

    async def _follow(self) -> None:
        """Keep the records of the common slot as they are in the topic while another has it."""
        failing = False
        while True:
            if self._common in self.slots.taken:
                await asyncio.sleep(FOLLOW_PAUSE_S)
                continue
            try:
                with misread_is_bad_response():
                    await self._read_on()
                if failing:
                    _log.info("the common slot is followed again")
                failing = False
            except (*KAFKA_ERRORS, StateError) as error:
                if not failing:
                    _log.warning("the common slot is not followed", problem=str(error))
                failing = True
                await asyncio.sleep(FOLLOW_RETRY_S)

    async def _read_on(self) -> None:
        """Read what comes next in the common slot, unless it was read or written meanwhile."""
        topic, common = self._following, self._common
        began = self._positions[common]
        positions = {common: began}
        async with topic.within(FOLLOW_LIMIT_S):
            try:
                parts = await topic.retry(partial(topic.fetch, {common: began}))
            except NonRetriableError as error:
                if error.error_code != OffsetOutOfRangeError.errno:
                    raise
                # It was made anew; who has the slot writes to it all that there was.
                self._positions |= await topic.offsets((common,), EARLIEST)
                return
        found = await self._collect(topic.committed(parts, positions))
        if positions[common] == began and any(part.records for part in parts):
            place = f"what is at offset {began} of topic {topic.name} (partition {common})"
            raise damaged_error(place, "no batch ends behind that")
        if self._positions[common] == began and common not in self.slots.taken:
            self._positions |= positions
            if changed := self.slots.change(found):
                self._on_change(frozenset(changed))


def _room_of(content: Content) -> int:
    return 0 if content is None else max(size_of(content), LEAST_RECORD_BYTES)
