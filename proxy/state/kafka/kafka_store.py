"""The store over a compacted topic of one partition, which one proxy at a time has."""

import asyncio
from collections.abc import Callable

from metrics.clock import MS_PER_SECOND
from proxy.cluster.kafka_client import Bootstrap
from proxy.state.store import StateError, Store
from proxy.wire.list_offsets import EARLIEST

from .messages import OWNER_KEY, Content, Place, StateOwner
from .producer import GenerationError, Producer
from .slot_table import Refusal
from .state_reader import StateReader
from .state_topic import FencedError
from .topic_store import LOAD_TIMEOUT_S, STORE_TIMEOUT_S, TopicStore

ONLY_SLOT = 0
OWNER_PLACE = ONLY_SLOT, OWNER_KEY
"""Where it stands who has the state."""

OWNER_POLL_S = 0.1
"""Between looks at whether a proxy that is about to stop has let the state go."""


class KafkaStore(TopicStore):
    """Records in a topic of one partition, which is made when it does not exist.

    The newest proxy that opens the state has it: Kafka refuses the writes of the one before, which
    then says that another has taken over, for good.

    Raises StateError: no broker answers, the topic is not made for state, holds what this version
    cannot read, or more than MAX_STATE_BYTES; or another proxy came at the same time. No other
    proxy has lost the state, except in the last case.

    `topic` is the transactional id too: each proxy needs its own. A proxy that has the state and is
    about to stop gets `wait_ms`; then it is taken from it. `before_wait` is called with what it
    has, when that was read; what it raises is raised, and the other keeps the state.
    """

    _rights = "use it as transactional id"
    _instead = "keep state in SQLite (state.kind: sqlite)"
    _make_room = f"name another topic as state.topic, or {_instead}"

    def __init__(
        self,
        way: Bootstrap,
        topic: str,
        *,
        timeout_s: float = STORE_TIMEOUT_S,
        wait_ms: float = 0.0,
        before_wait: Callable[[Store], None] | None = None,
    ) -> None:
        super().__init__(way, topic, 1, lambda _key: ONLY_SLOT, timeout_s)
        self._producer = Producer(self._topic, topic)
        self._positions[ONLY_SLOT] = EARLIEST
        self._owner: Content = None
        self._slots.took((ONLY_SLOT,), losses=0)
        self._begin(self._open(before_wait, wait_ms))

    def _last_changes(self) -> dict[Place, Content]:
        return {**super()._last_changes(), OWNER_PLACE: None} if self.taken else {}

    async def _open(self, before_wait: Callable[[Store], None] | None, wait_ms: float) -> None:
        await self._topic.ensure(self._timeout_s)
        await self._load()  # before it is taken from anybody: it may be of no use to us
        if before_wait is not None:
            await asyncio.to_thread(before_wait, self)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + wait_ms / MS_PER_SECOND
        while self._owner is not None and (left_s := end_s - loop.time()) > 0:
            await asyncio.sleep(min(OWNER_POLL_S, left_s))
            await self._load()
        async with self._topic.client.within(LOAD_TIMEOUT_S):
            while not await self._own():
                pass

    async def _own(self) -> bool:
        """Begin to write; return whether nobody else began since."""
        await self._producer.take_over()
        await self._load()  # what the one before had still written; it writes no more
        before = self._owner
        try:
            await self._producer.write({OWNER_PLACE: StateOwner()})
        except FencedError:
            await self._load()
            if self._owner != before:
                raise StateError(*self._taken_by(self._owner)) from None
            return False
        self._positions |= self._producer.positions
        return True

    async def _load(self) -> None:
        """Read what was not read yet."""
        reader = StateReader(self._topic, self._positions)
        async with self._topic.client.within(LOAD_TIMEOUT_S, "not read to its end"):
            found = await self._read(reader)
        self._owner = found.pop(OWNER_PLACE, self._owner)
        self._slots.change(found)
        self._check_size(self._slots.size_bytes)
        self._positions = reader.positions

    async def _begin_anew(self, _error: FencedError | GenerationError) -> None:
        # It may be that the brokers only gave up a transaction of ours that took too long.
        await self._check_owner()
        await self._producer.take_over()
        # Only now what the other had committed a moment ago is sure to be seen. It takes
        # the state back at its next write, as it finds nobody in its place.
        await self._check_owner()

    async def _check_owner(self) -> None:
        """Raise, now and from now on, when another proxy has written since we last did."""
        async for place, content in StateReader(self._topic, self._positions).read():
            if place == OWNER_PLACE:
                self._slots.lose(self._taken_by(content))
        self._slots.check((ONLY_SLOT,))

    def _taken_by(self, owner: Content) -> Refusal:
        name = f" ({owner})" if isinstance(owner, StateOwner) else ""
        return (
            f"another proxy{name} has taken the state in topic {self._topic.name}",
            "stop one of them, or give each proxy a state.topic of its own",
        )
