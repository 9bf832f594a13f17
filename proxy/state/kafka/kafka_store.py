"""The store of a proxy without a tier: a topic of one slot, which the newest proxy takes."""

import asyncio

from .messages import OWNER_KEY, StateOwner
from .slot_store import GRACE_S, LOAD_TIMEOUT_S, SlotStore

ONLY_SLOT = 0
OWNER_PLACE = ONLY_SLOT, OWNER_KEY
"""Where it stands who has the state."""


class KafkaStore(SlotStore):
    """Records in a topic of one slot, of which the topic says who has it: there is no group.

    The newest proxy that opens the state has it: Kafka refuses the writes of the one before, which
    then says that another has taken over, for good. Raises StateError also when another proxy came
    at the same time.
    """

    _rights = "use it as transactional id"
    _instead = "keep state in SQLite (state.kind: sqlite)"
    _make_room = f"name another topic as state.topic, or {_instead}"

    async def _open(self) -> None:
        await super()._open()
        if not self._looks:
            self._own = StateOwner()
            self._producer.begin_anew = self._begin_anew
            await self._read_new()  # what the one before had still written; it writes no more
            self.slots.took((ONLY_SLOT,), losses=0)
            await self._write({OWNER_PLACE: self._own}, LOAD_TIMEOUT_S)

    async def _begin_anew(self) -> None:
        # It may be that the brokers only gave up a transaction of ours that took too long. Another
        # proxy needs time to write its name; who takes the state from it before has it no longer.
        await asyncio.sleep(min(GRACE_S, self._timeout_s / 2))
        await self._read_new()
        await self._producer.take_over()
        # Only now what the other had committed a moment ago is sure to be seen. It takes
        # the state back at its next write, as it finds nobody in its place.
        await self._read_new()

    async def _read_new(self) -> None:
        """Read what was not read yet; raise, then and later, when another has the state."""
        async with self._reading.within(LOAD_TIMEOUT_S, "not read to its end"):
            found = await self._read(self._positions)
        owner = found.pop(OWNER_PLACE, self._own)
        if self.slots.taken and owner != self._own:
            name = f" ({owner})" if isinstance(owner, StateOwner) else ""
            taken = f"another proxy{name} has taken the state in topic {self._topic.name}"
            fix = "stop one of them, or give each proxy a state.topic of its own"
            self.slots.lose((taken, fix))
            self.slots.check((ONLY_SLOT,))
        # What failed to be written, and is there all the same, is undone by the next write.
        self.slots.change({at: each for at, each in found.items() if at not in self._uncertain})
        self._check_size(self.slots.size_bytes)
