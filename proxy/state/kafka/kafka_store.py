"""The store of a proxy without a tier: a topic of one slot, which the newest proxy takes."""

from proxy.cluster.kafka_client import Bootstrap
from proxy.wire.list_offsets import EARLIEST

from .messages import OWNER_KEY, Content, StateOwner
from .slot_store import LOAD_TIMEOUT_S, STORE_TIMEOUT_S, SlotStore

ONLY_SLOT = 0
OWNER_PLACE = ONLY_SLOT, OWNER_KEY
"""Where it stands who has the state."""


class KafkaStore(SlotStore):
    """Records in a topic of one partition, which is made when it does not exist.

    The newest proxy that opens the state has it: Kafka refuses the writes of the one before, which
    then says that another has taken over, for good.

    Raises StateError: no broker answers, the topic is not made for state, holds what this version
    cannot read, or more than MAX_STATE_BYTES; or another proxy came at the same time. No other
    proxy has lost the state, except in the last case.

    `topic` is the transactional id too: each proxy needs its own. One that does not take the state
    only reads what another proxy has, and keeps.
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
        takes: bool = True,
    ) -> None:
        self._takes = takes
        self._own = StateOwner()
        self._owner: Content = None
        """Who had the state before this proxy."""
        super().__init__(way, topic, timeout_s=timeout_s)

    async def _open(self) -> None:
        self._producer.begin_anew = self._begin_anew
        await self._reading.ensure(self._timeout_s)
        self._positions[ONLY_SLOT] = EARLIEST
        await self._load()  # before it is taken from anybody: it may be of no use to us
        if not self._takes:
            return
        async with self._topic.within(LOAD_TIMEOUT_S):
            await self._producer.take_over()
        await self._load()  # what the one before had still written; it writes no more
        self.slots.took((ONLY_SLOT,), losses=0)
        await self._write({OWNER_PLACE: self._own}, LOAD_TIMEOUT_S)

    async def _begin_anew(self) -> None:
        # It may be that the brokers only gave up a transaction of ours that took too long.
        await self._load()
        await self._producer.take_over()
        # Only now what the other had committed a moment ago is sure to be seen. It takes
        # the state back at its next write, as it finds nobody in its place.
        await self._load()

    async def _load(self) -> None:
        """Read what was not read yet; raise, then and later, when another has the state."""
        async with self._reading.within(LOAD_TIMEOUT_S, "not read to its end"):
            found = await self._read(self._positions)
        owner = found.pop(OWNER_PLACE, self._owner)
        if self.slots.taken and owner not in (self._owner, self._own):
            name = f" ({owner})" if isinstance(owner, StateOwner) else ""
            taken = f"another proxy{name} has taken the state in topic {self._topic.name}"
            fix = "stop one of them, or give each proxy a state.topic of its own"
            self.slots.lose((taken, fix))
            self.slots.check((ONLY_SLOT,))
        self._owner = owner
        # What failed to be written, and is there all the same, is undone by the next write.
        self.slots.change({at: each for at, each in found.items() if at not in self._uncertain})
        self._check_size(self.slots.size_bytes)
