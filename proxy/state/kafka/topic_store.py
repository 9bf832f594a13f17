"""What stores in Kafka have in common: records in memory, each change written before it counts."""

from abc import abstractmethod
from asyncio import Lock, timeout
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from proxy.cluster.broker_connection import BrokerConnection
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.upstream import RefusedError, UpstreamError
from proxy.state.store import Record, StateError, Store

from .loop_thread import LoopThread
from .messages import Content, Place, size_of
from .producer import GenerationError, Producer
from .slot_table import SlotTable
from .state_reader import StateReader
from .state_topic import MAX_RECORD_BYTES, FencedError, NotYetError, StateTopic

MAX_STATE_BYTES = 256 * 2**20
"""Of all keys and values together; they are in memory."""

MESSAGE_TOO_LARGE = 10
FORBIDDEN = frozenset({29, 30, 31, 53})
"""Authorization failed for the topic, the group, the cluster, the transactional id."""

STORE_TIMEOUT_S = 10.0
"""For a write with all its attempts."""

LOAD_TIMEOUT_S = 60.0
"""To read the whole topic, and to become its owner."""

CLOSE_TIMEOUT_S = 2.0

END_LIMIT_S = 5.0
"""For the last writes of a store that is closed; what hangs by then is ended as in a crash."""

Value = TypeVar("Value")


class WayForLoop(Bootstrap):
    """The way of another event loop, whose certificate is shown here too, also one set later."""

    def __init__(self, way: Bootstrap) -> None:
        super().__init__(way.servers, login=way.login)
        self._way = way

    async def connect(self, *args: Any, **kwargs: Any) -> BrokerConnection:
        """Connect as the other way would."""
        self.tls = self._way.tls
        return await super().connect(*args, **kwargs)


class TopicStore(Store):
    """Records of a topic's slots, its partitions, of which those that are `taken` may change.

    `put_many` is a transaction, and when it returned the brokers have it (acks=all). While no
    broker answers writes fail, after `timeout_s` with all attempts, and a later one works again.
    Where the answer to a commit was lost and the write is reported as failed, the next write that
    works, or `close`, undoes it; a crash before that may leave it.

    `way`, to at least one server, leads to Kafka 2.5 or later. `slot_of_record` returns the slot of
    a record's key.
    """

    _producer: Producer
    """Writes to `_topic`."""
    _rights: str
    """For people: what the proxy needs besides the rights on the topic."""
    _instead: str
    """The same: what else can be done when the state cannot be kept in the topic."""
    _make_room: str
    """The same: when it is too large."""

    def __init__(
        self,
        way: Bootstrap,
        topic: str,
        slots: int,
        slot_of_record: Callable[[str], int],
        timeout_s: float,
    ) -> None:
        self._name, self._number, self._timeout_s = topic, slots, timeout_s
        # Callers may be in an event loop of their own, so the clients' is in a thread of its own.
        self._way = WayForLoop(way)
        self._clients: list[KafkaClient] = []
        self._topic = self._new_topic()
        self._slots = SlotTable(slot_of_record)
        self._positions: dict[int, int] = {}
        """Offset behind what the records hold, by slot."""
        self._uncertain: set[Place] = set()
        """Of writes that failed; the topic may have there what is not in memory."""
        self._put = Lock()
        """For whoever uses the producer."""
        self._loop = LoopThread("kafka-state", f"the state in topic {topic}")

    @property
    def taken(self) -> frozenset[int]:
        """The slots that may be written."""
        return self._slots.taken

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._loop.closed

    def get(self, key: str) -> Record | None:
        """Return the record of that key, or None, also when its slot is not read here."""
        self._loop.check_open()
        return self._slots.at(self._slots.place(key))

    def items(self, prefix: str) -> list[Record]:
        """Return the records read here whose key begins with `prefix`, sorted by key."""
        self._loop.check_open()
        return self._slots.items(prefix)

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> None:
        """Delete keys and write records, all or nothing."""
        new = {record.key: record for record in records}
        self._run(self._change(new, tuple(delete)), "written")

    def close(self) -> None:
        """Wait for writes under way, undo failed ones, close; a second time does nothing."""
        if self.is_closed:
            return
        # Who comes next takes the state also when it cannot be told so.
        with suppress(StateError):
            self._run(self._end(), "closed")
        self._shut_down()

    @abstractmethod
    async def _begin_anew(self, error: FencedError | GenerationError) -> None:
        """Return when a write that was refused may be tried again, else raise StateError."""

    def _last_changes(self) -> dict[Place, Content]:
        """Return what is to be written when the store is closed."""
        return self._undoing(self.taken)

    def _new_topic(self) -> StateTopic:
        """Return the topic as a client of its own sees it."""
        self._clients.append(client := KafkaClient(self._way))
        return StateTopic(client, self._name, self._number)

    def _run(self, work: Coroutine[Any, Any, Value], done: str) -> Value:
        """Run this in the store's own event loop, to its end.

        Raises StateError, that the state cannot be `done`, for what the brokers say.
        """
        try:
            return self._loop.run(work)
        except (UpstreamError, FencedError, RefusedError) as error:
            what = f"the state in topic {self._name} cannot be {done}: {error}"
            raise StateError(what, self._fix_of(error)) from error

    def _fix_of(self, error: UpstreamError | FencedError | RefusedError) -> str:
        if isinstance(error, NotYetError):
            return error.fix
        if not isinstance(error, RefusedError):
            return "check that the brokers are up, and cluster.bootstrap_servers, tls and sasl"
        if error.error_code in FORBIDDEN:
            return (
                f"let quota-proxy create, describe, read and write topic {self._name} and "
                f"{self._rights} (kafka-acls.sh), or {self._instead}"
            )
        if error.error_code == MESSAGE_TOO_LARGE:
            return (
                f"raise max.message.bytes of topic {self._name} to {MAX_RECORD_BYTES} and a "
                "little more"
            )
        return (
            f"see the brokers' log, or make the topic yourself: kafka-topics.sh --create --topic "
            f"{self._name} --partitions {self._number} --config cleanup.policy=compact"
        )

    def _check_changes(self, changes: Mapping[Place, Content]) -> None:
        """Raise StateError when one of these changes, or all records with them, are too large."""
        size_bytes = self._slots.size_bytes
        for place, content in changes.items():
            record_bytes = size_of(content)
            if record_bytes > MAX_RECORD_BYTES:
                what = f"the record {place[1]!r} has {record_bytes} bytes, and topic {self._name} "
                raise StateError(f"{what}takes {MAX_RECORD_BYTES}", self._instead)
            size_bytes += record_bytes - size_of(self._slots.at(place))
        self._check_size(size_bytes)

    def _check_size(self, size_bytes: int) -> None:
        """Raise StateError when the state is larger than it may be."""
        if size_bytes > MAX_STATE_BYTES:
            what = f"the state in topic {self._name} has more than {MAX_STATE_BYTES} bytes"
            raise StateError(what, self._make_room)

    def _begin(self, opening: Coroutine[Any, Any, None]) -> None:
        try:
            self._run(opening, "opened")
        except BaseException:
            self._shut_down()
            raise

    def _shut_down(self) -> None:
        self._loop.close()
        for client in self._clients:
            client.close()

    async def _read(self, reader: StateReader) -> dict[Place, Content]:
        """Return what is committed and was not read yet. Raises StateError: it is too large."""
        found: dict[Place, Content] = {}
        size_bytes = 0
        async for place, content in reader.read():
            size_bytes += size_of(content) - size_of(found.get(place))
            self._check_size(size_bytes)
            found[place] = content
        return found

    async def _change(self, new: Mapping[str, Record], gone: Collection[str]) -> None:
        place, at = self._slots.place, self._slots.at
        async with self._put:
            self._slots.check({place(key)[0] for key in (*gone, *new)})
            changes = self._undoing(self.taken)
            gone_places = map(place, gone)
            changes |= {each: None for each in gone_places if at(each) or each in changes}
            changes |= {place(key): record for key, record in new.items()}
            if changes:
                self._check_changes(changes)
                await self._write(changes, self._timeout_s)

    async def _end(self) -> None:
        """Write what is to be written last, unless what has the producer is not done in time."""
        with suppress(TimeoutError):
            async with timeout(END_LIMIT_S):
                await self._write_all(self._last_changes, CLOSE_TIMEOUT_S)

    async def _write_all(
        self, changes_now: Callable[[], Mapping[Place, Content]], limit_s: float
    ) -> None:
        """Write what there is to be written, if there is something, after writes under way."""
        async with self._put:
            if changes := changes_now():
                await self._write(changes, limit_s)

    def _undoing(self, slots: Collection[int]) -> dict[Place, Content]:
        """Return what undoes failed writes to these slots."""
        return {place: self._slots.at(place) for place in self._uncertain if place[0] in slots}

    async def _write(self, changes: Mapping[Place, Content], limit_s: float) -> None:
        slots = {slot for slot, _ in changes}
        self._uncertain |= changes.keys()
        async with self._topic.client.within(limit_s):
            while True:
                try:
                    await self._producer.write(changes)
                    break
                except (FencedError, GenerationError) as error:
                    await self._begin_anew(error)
                    self._slots.check(slots)
        self._uncertain -= changes.keys()
        self._slots.change(changes)
        self._positions |= {slot: self._producer.positions[slot] for slot in slots}
