"""The store of a tier's machine: the slots that it has of a topic, fenced by the group."""

import ssl
from asyncio import Lock, timeout
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from structlog import get_logger

from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.login import Login
from proxy.cluster.upstream import NOT_READY, Address, RefusedError, UpstreamError
from proxy.state.store import Record, StateError, Store

from .kafka_store import CLOSE_TIMEOUT_S, LOAD_TIMEOUT_S, STORE_TIMEOUT_S
from .limits import MAX_STATE_BYTES, Explanation
from .loop_thread import LoopThread
from .messages import Content, to_message
from .slot_fence import GenerationError, GroupFence, NotYetError, SlotProducer
from .slot_follow import CommonFollower, OnChange
from .slot_handover import Handover, signed
from .slot_holds import LOST_FIX, SlotHolds
from .slot_records import Place, SlotRecords
from .state_topic import FencedError, StateTopic

TIER_SEPARATOR = "/"
"""Between tier and machine in a transactional id."""

END_LIMIT_S = 5.0
"""For the last writes of a store that is closed; what hangs by then is ended as in a crash."""

_log = get_logger(__name__)

Value = TypeVar("Value")


class SlotStore(Store):
    """Records of the slots that this machine has taken, and of the common slot, which all read.

    The topic has a partition for each slot and is made when it does not exist. `put_many` is a
    transaction, whatever slots it writes to; it counts only while the group of the tier has this
    machine in the generation of the newest fence. A write during a change of generation waits for
    the next fence. Writes raise StateError for a slot that was not taken, and fail and are undone
    as those of `KafkaStore`. Records of other slots are not there: `get` returns None.

    Raises StateError when no broker answers, the topic is not made for slots, or holds what this
    version cannot read.

    `servers`, at least one, have Kafka 2.5 or later. `tier` and `machine` make the transactional
    id: no two machines of a tier may have one name. `slot_of_record` returns the slot of a
    record's key, 0 to `slots` - 1; `common` is the slot that is always read. `timeout_s` is for
    each write with all its attempts.
    """

    def __init__(
        self,
        servers: Sequence[Address],
        topic: str,
        *,
        tier: str,
        machine: str,
        slots: int,
        common: int,
        slot_of_record: Callable[[str], int],
        tls: ssl.SSLContext | None = None,
        login: Login | None = None,
        timeout_s: float = STORE_TIMEOUT_S,
    ) -> None:
        self._common = common
        self._timeout_s = timeout_s
        self._bootstrap = Bootstrap(servers, tls, login=login)
        # Who reads much, or waits at a broker for what comes, holds up no write.
        self._clients = [KafkaClient(self._bootstrap) for _ in range(3)]
        writing, reading, following = (StateTopic(each, topic, slots) for each in self._clients)
        prefix = tier + TIER_SEPARATOR
        self._explanation = Explanation(
            topic,
            partitions=slots,
            rights=f"read the group of tier {tier} and use transactional ids that begin with "
            f"{prefix}",
            instead="run without a tier",
            make_room="add machines to the tier, or run without it",
        )
        self._records = SlotRecords(slot_of_record)
        self._holds = SlotHolds()
        self._reading = reading.client
        self._writing = writing.client
        self._producer = SlotProducer(writing, prefix + machine, self._holds.fence_for)
        self._handover = Handover(reading, prefix, self._producer.transactional_id, self._end_own)
        self._follower = CommonFollower(following, common, self._holds, self._records)
        self._uncertain: set[Place] = set()
        """Of writes that failed; the topic may have there what is not in memory."""
        self._changing = Lock()
        """For whoever takes or releases slots."""
        self._put = Lock()
        """For whoever uses the producer; after `_changing` when both are needed."""
        self._closed = False
        self._loop = LoopThread("slot-store")
        try:
            self._run(self._open(reading), "opened")
        except BaseException:
            self._shut_down()
            raise

    @property
    def taken(self) -> frozenset[int]:
        """The slots that may be written."""
        return self._holds.taken

    def use_tls(self, tls: ssl.SSLContext | None) -> None:
        """Connect with another certificate from now on."""
        self._bootstrap.tls = tls

    def get(self, key: str) -> Record | None:
        """Return the record of that key, or None, also when its slot is not read here."""
        self._check_open()
        return self._records.at(self._records.place(key))

    def items(self, prefix: str) -> list[Record]:
        """Return the records read here whose key begins with `prefix`, sorted by key."""
        self._check_open()
        return self._records.items(prefix)

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> int:
        """Delete keys and write records, all or nothing; return how many were deleted."""
        new = {record.key: record for record in records}
        return self._run(self._change(new, tuple(delete)), "written")

    def strays(self) -> list[Record]:
        """Return the records of taken slots that belong to other slots by now.

        `slot_of_record` says so since the rules are other ones. No other method finds them: write
        them at the machine that has their slot, then `drop_strays` here.
        """
        self._check_open()
        taken = self._holds.taken
        found = self._records.strays().items()
        return [record for (slot, _), record in found if slot in taken]

    def drop_strays(self, keys: Collection[str]) -> None:
        """Delete strays of these keys. Raises StateError as `put_many`."""
        self._run(self._drop_strays(frozenset(keys)), "written")

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
        self._holds.renew(fence)

    def lost(self) -> None:
        """Write no more before slots are taken anew; what was read stays readable. Does not wait.

        For a machine that is out of its group: others may have its slots.
        """
        self._holds.lose()

    def follow_common(self, on_change: OnChange) -> None:
        """Call this whenever records of the common slot have become other ones elsewhere.

        `on_change` gets their keys, in the store's own thread; it must return soon and not call
        the store's methods that wait. At most once; until `close`.
        """
        self._check_open()
        self._following: Future[None] = self._loop.start(self._follower.run(on_change))

    def close(self) -> None:
        """Wait for writes under way, undo failed ones, close; a second time does nothing."""
        if self._closed:
            return
        with suppress(StateError):
            self._run(self._flush_at_end(), "closed")
        self._closed = True
        self._shut_down()

    def _run(self, work: Coroutine[Any, Any, Value], done: str) -> Value:
        try:
            self._check_open()
        except RuntimeError:
            work.close()
            raise
        with self._explained(done):
            return self._loop.run(work)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the state in topic {self._explanation.topic} is closed")

    def _shut_down(self) -> None:
        self._loop.close(*(client.close for client in self._clients))

    async def _open(self, topic: StateTopic) -> None:
        await topic.ensure(self._timeout_s)
        async with self._writing.within(LOAD_TIMEOUT_S):
            await self._producer.take_over()
        async with self._reading.within(LOAD_TIMEOUT_S, "not read to its end"):
            await self._read((self._common,))

    async def _change(self, new: Mapping[str, Record], gone: Collection[str]) -> int:
        place, at = self._records.place, self._records.at
        async with self._put:
            self._holds.fence_for({place(key)[0] for key in (*gone, *new)})
            there = {key for key in gone if at(place(key))}
            changes = self._undoing(self._holds.taken)
            changes |= {place(key): None for key in gone if key in there or place(key) in changes}
            changes |= {place(key): record for key, record in new.items()}
            if changes:
                self._explanation.size_with(
                    {key: content for (_, key), content in changes.items()},
                    lambda key: at(place(key)),
                    self._records.size_bytes,
                    MAX_STATE_BYTES,
                )
                await self._write(changes, self._timeout_s)
            return len(there)

    async def _drop_strays(self, keys: frozenset[str]) -> None:
        async with self._put:
            taken = self._holds.taken
            changes: dict[Place, Content] = {
                (slot, key): None
                for slot, key in self._records.strays()
                if key in keys and slot in taken
            }
            if changes:
                await self._write(changes, self._timeout_s)

    async def _flush(self, slots: Collection[int], limit_s: float) -> None:
        """Write again what failed writes may have changed in these slots."""
        async with self._put:
            if changes := self._undoing(slots):
                await self._write(changes, limit_s)

    async def _flush_at_end(self) -> None:
        """Flush, unless what has the producer is not done in time."""
        with suppress(TimeoutError):
            async with timeout(END_LIMIT_S):
                await self._flush(self._holds.taken, CLOSE_TIMEOUT_S)

    def _undoing(self, slots: Collection[int]) -> dict[Place, Content]:
        """Return what undoes failed writes to these slots."""
        return {place: self._records.at(place) for place in self._uncertain if place[0] in slots}

    def _forget_uncertain(self, slots: Collection[int]) -> None:
        self._uncertain = {place for place in self._uncertain if place[0] not in slots}

    async def _write(self, changes: Mapping[Place, Content], limit_s: float) -> None:
        slots = {slot for slot, _ in changes}
        writer = self._producer.transactional_id
        messages = [
            signed(to_message(key, content), slot, writer)
            for (slot, key), content in changes.items()
        ]
        self._uncertain |= changes.keys()
        async with self._writing.within(limit_s):
            written = False
            while not written:
                try:
                    await self._producer.write(messages)
                    written = True
                except FencedError:
                    # Another machine has undone what we had begun, as it was told that we are
                    # gone. The group says whether that is so.
                    await self._producer.take_over()
                except GenerationError as error:
                    await self._writing.retry(partial(self._renewed, error))
                    self._holds.fence_for(slots)
        self._uncertain -= changes.keys()
        self._records.change(changes)
        if self._common in slots:
            self._follower.position = self._producer.positions[self._common]

    async def _renewed(self, error: GenerationError) -> None:
        """Raise NotYetError while there is no fence but the one that was refused."""
        if self._holds.fence == self._producer.fence:
            what = f"{error}, and this machine is in no newer one yet"
            raise NotYetError(what, LOST_FIX)

    async def _end_own(self) -> None:
        async with self._put:
            await self._producer.take_over()

    async def _take(self, slots: frozenset[int], fence: GroupFence) -> None:
        async with self._changing:
            losses = self._holds.renew(fence)
            new = slots - self._holds.taken
            try:
                async with self._reading.within(LOAD_TIMEOUT_S, "not read to its end"):
                    if new:
                        await self._handover.settle(new)
                        await self._read(new)
                if not self._holds.took(new, losses):
                    raise StateError(
                        "this machine was put out of its tier's group while it read its slots",
                        "nothing: the group gives it slots again",
                    )
            except BaseException:
                self._records.forget(new - {self._common})
                raise

    async def _read(self, slots: Collection[int]) -> None:
        found, positions = await self._handover.read(slots)
        self._forget_uncertain(slots)
        changed = self._records.replace(found)
        if self._common in slots:
            self._follower.was_read(positions[self._common], changed)
        self._explanation.check_size(self._records.size_bytes, MAX_STATE_BYTES)

    async def _release(self, slots: frozenset[int]) -> None:
        async with self._changing:
            try:
                await self._flush(slots & self._holds.taken, self._timeout_s)
            except (UpstreamError, RefusedError, FencedError, StateError) as error:
                _log.warning("what a failed write left may count", problem=str(error))
            async with self._put:  # what was asked for meanwhile
                self._holds.release(slots)
            self._forget_uncertain(slots)
            self._records.forget(slots - {self._common})

    @contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        with self._explanation.of(done):
            try:
                yield
            except NotYetError as error:
                what = f"the state in topic {self._explanation.topic} cannot be {done}: {error}"
                raise StateError(what, error.fix) from error
            except FencedError as error:
                raise UpstreamError(NOT_READY, f"the brokers say {error}") from error
