"""The store over a compacted topic: all records in memory, each change written before it counts."""

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

from metrics.clock import MS_PER_SECOND
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.login import Login
from proxy.cluster.upstream import Address
from proxy.state.store import MemoryStore, Record, StateError, Store

from .limits import MAX_STATE_BYTES, Explanation, size_of
from .loop_thread import LoopThread
from .messages import OWNER_KEY, Content, StateOwner, read_message, to_message
from .producer import Producer
from .state_reader import StateReader
from .state_topic import FencedError, StateTopic

STORE_TIMEOUT_S = 10.0
"""For a write with all its attempts."""

LOAD_TIMEOUT_S = 60.0
"""To read the whole topic, and to become its owner."""

CLOSE_TIMEOUT_S = 2.0

IN_SQLITE = "keep state in SQLite (state.kind: sqlite)"

OWNER_POLL_S = 0.1
"""Between looks at whether a proxy that is about to stop has let the state go."""


class KafkaStore(MemoryStore):
    """Records in memory and in a topic of one partition, which is made when it does not exist.

    `put_many` is a transaction, and when it returned the brokers have it (acks=all). The newest
    proxy that opens the state has it: Kafka refuses the writes of the one before, which then says
    that another has taken over, for good. While no broker answers writes fail, after `timeout_s`,
    and a later one works again. Where the answer to a commit was lost and the write is reported as
    failed, the next write that works, or `close`, undoes it; a crash before that may leave it.

    Raises StateError: no broker answers, the topic is not made for state, holds what this version
    cannot read, or more than MAX_STATE_BYTES; or another proxy came at the same time. No other
    proxy has lost the state, except in the last case.

    `servers`, at least one, have Kafka 2.5 or later. `topic` is the transactional id too: each
    proxy needs its own. `timeout_s` is for each write with all its attempts. A proxy that has the
    state and is about to stop gets `wait_ms`; then it is taken from it. `before_wait` is called
    with what it has, when that was read; what it raises is raised, and the other keeps the state.
    """

    def __init__(
        self,
        servers: Sequence[Address],
        topic: str,
        *,
        tls: ssl.SSLContext | None = None,
        login: Login | None = None,
        timeout_s: float = STORE_TIMEOUT_S,
        wait_ms: float = 0.0,
        before_wait: Callable[[Store], None] | None = None,
    ) -> None:
        super().__init__()
        self._name = topic
        self._timeout_s = timeout_s
        self._bootstrap = Bootstrap(servers, tls, login=login)
        self._client = KafkaClient(self._bootstrap)
        self._topic = StateTopic(self._client, topic)
        self._producer = Producer(self._topic)
        # Callers may be in an event loop of their own, so the client's is in a thread of its own.
        self._loop = LoopThread("kafka-state")
        self._explanation = Explanation(
            topic,
            partitions=1,
            rights="use it as transactional id",
            instead=IN_SQLITE,
            make_room=f"name another topic as state.topic, or {IN_SQLITE}",
        )
        self._writing = Lock()
        """For all but the records, which may be read while a write waits for the brokers."""
        self._size_bytes = 0
        self._owner: Content = None
        self._uncertain: set[str] = set()
        """Keys of writes that failed; the topic may have under them what is not in memory."""
        self._taken: StateError | None = None
        self._closed = False
        try:
            with self._explained("opened"):
                self._run(self._look(reader := StateReader(self._topic, {0: None})))
            if before_wait is not None:
                before_wait(self)
            with self._explained("opened"):
                self._run(self._take(reader, wait_ms))
        except BaseException:
            self._shut_down()
            raise

    def use_tls(self, tls: ssl.SSLContext | None) -> None:
        """Connect with another certificate from now on."""
        self._bootstrap.tls = tls

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> int:
        """Delete keys and write records, all or nothing; return how many were deleted."""
        new = {record.key: record for record in records}
        gone = tuple(delete)
        with self._writing:
            if self._closed:
                raise RuntimeError(f"the state in topic {self._name} is closed")
            changes = self._changes(new, gone)
            if changes:
                size_bytes = self._explanation.size_with(
                    changes, self.get, self._size_bytes, MAX_STATE_BYTES
                )
                self._uncertain |= changes.keys()
                with self._explained("written"):
                    self._run(self._write(changes, self._timeout_s))
                self._uncertain.clear()
                self._size_bytes = size_bytes
            return super().put_many(new.values(), delete=gone)

    def close(self) -> None:
        """Release the state to a successor, undoing failed writes; a second time does nothing."""
        with self._writing:
            if self._closed:
                return
            self._closed = True
            # Who comes next takes the state also when it cannot be told so.
            with suppress(StateError), self._explained("closed"):
                if self._taken is None:
                    changes: dict[str, Content] = {OWNER_KEY: None}
                    self._run(self._write(changes | self._changes({}, ()), CLOSE_TIMEOUT_S))
            self._shut_down()
            super().close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this in the store's own event loop, to its end."""
        self._loop.run(work)

    def _shut_down(self) -> None:
        self._loop.close(self._client.close)

    async def _look(self, reader: StateReader) -> None:
        """Read all once before it is taken from anybody: it may be that we cannot use it."""
        await self._topic.ensure(self._timeout_s)
        async with self._client.within(LOAD_TIMEOUT_S, "not read to its end"):
            await self._load(reader)

    async def _take(self, reader: StateReader, wait_ms: float) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + wait_ms / MS_PER_SECOND
        while self._owner is not None and (left_s := end_s - loop.time()) > 0:
            await asyncio.sleep(min(OWNER_POLL_S, left_s))
            async with self._client.within(LOAD_TIMEOUT_S, "not read to its end"):
                await self._load(reader)
        async with self._client.within(LOAD_TIMEOUT_S):
            await self._own(reader)

    async def _own(self, reader: StateReader) -> None:
        while True:
            await self._producer.take_over()
            await self._load(reader)  # what the one before had still written; it writes no more
            before = self._owner
            try:
                await self._producer.write([to_message(OWNER_KEY, StateOwner())])
            except FencedError:
                await self._load(reader)
                if self._owner != before:
                    raise self._lost(self._owner) from None
            else:
                return

    async def _load(self, reader: StateReader) -> None:
        async for message in reader.read():
            key, content = read_message(self._name, message)
            if key == OWNER_KEY:
                self._owner = content
                continue
            self._size_bytes += size_of(content) - size_of(self.get(key))
            super().put_many((content,) if isinstance(content, Record) else (), delete=(key,))
            self._explanation.check_size(self._size_bytes, MAX_STATE_BYTES)

    def _changes(self, new: dict[str, Record], gone: Iterable[str]) -> dict[str, Content]:
        """Return what is to be written: what is asked for, and what undoes failed writes."""
        changes: dict[str, Content] = {key: self.get(key) for key in self._uncertain}
        changes |= {key: None for key in gone if key in changes or self.get(key)}
        return changes | new

    async def _write(self, changes: dict[str, Content], limit_s: float) -> None:
        if self._taken is not None:
            raise self._taken
        messages = [to_message(key, content) for key, content in changes.items()]
        async with self._client.within(limit_s):
            try:
                await self._producer.write(messages)
            except FencedError:
                # Or else the brokers only gave up a transaction of ours that took too long.
                await self._check_owner()
                await self._producer.take_over()
                # Only now what the other had committed a moment ago is sure to be seen. It takes
                # the state back at its next write, as it finds nobody in its place.
                await self._check_owner()
                await self._producer.write(messages)

    async def _check_owner(self) -> None:
        """Raise, now and from now on, when another proxy has written since we last did."""
        async for message in StateReader(self._topic, self._producer.positions).read():
            key, content = read_message(self._name, message)
            if key == OWNER_KEY:
                self._taken = self._lost(content)
        if self._taken is not None:
            raise self._taken

    def _lost(self, owner: Content) -> StateError:
        name = f" ({owner})" if isinstance(owner, StateOwner) else ""
        return StateError(
            f"another proxy{name} has taken the state in topic {self._name}",
            "stop one of them, or give each proxy a state.topic of its own",
        )

    @contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        try:
            with self._explanation.of(done):
                yield
        except FencedError as error:
            raise self._lost(None) from error
