"""The map that a machine's workers follow in a tier: slots are let go, taken, and taken up.

The group's map says what is wanted; in the one that is followed this machine owns only what it
has taken.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from structlog import get_logger

from metrics import MemberInstruments
from proxy.members.member_names import machine_of
from proxy.members.slot_map import SlotMap
from proxy.members.slots import SLOTS
from proxy.state import GroupFence, Record, SlotStore, StateError
from proxy.workers.handing_over import let_go, take_up
from proxy.workers.owed_records import OwedRecords
from proxy.workers.peers import Peers
from proxy.workers.post import Post
from proxy.workers.shown_owners import shown_owners
from proxy.workers.stray_records import StrayRecords
from proxy.workers.tier_rules import TierRules
from proxy.workers.tier_state import TierState
from proxy.workers.tier_store import COMMON_SLOT

TAKE_RETRY_S = 0.5
"""After slots could not be taken, or given."""

_log = get_logger(__name__)


class FollowedMap:
    """Has the workers of `machine` follow what the group decides. Make it inside an event loop."""

    def __init__(
        self,
        machine: str,
        posts: Sequence[Post],
        state: TierState,
        rules: TierRules,
        peers: Peers,
        metrics: MemberInstruments,
    ) -> None:
        self._machine, self._posts, self._metrics = machine, posts, metrics
        self._state, self._rules, self._peers = state, rules, peers
        self._strays = StrayRecords(machine, state, rules, peers)
        self._may_have_strays = False
        self._loop = asyncio.get_running_loop()
        self.newest: SlotMap | None = None
        """What the group has decided last; None while this machine is not in it."""
        self.fence: GroupFence | None = None
        self.applied = SlotMap(0, {}, [None] * SLOTS)
        """What the workers follow; in it this machine owns only what it has taken."""
        self._owners_before: list[str | None] = [None] * SLOTS
        """The latest owner of each slot."""
        self.has_left = False
        """Whether clients are to go to other machines: this one has handed over, and ends."""
        self.in_force = asyncio.Event()
        """Set when workers follow the group; to be cleared before it is joined."""
        self._handing_over = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._followed = asyncio.Event()
        """Set when workers follow another map than before."""

    @property
    def common_owner(self) -> str | None:
        """Who has what concerns all; nobody has it for a moment, then the one before."""
        return self.applied.owners[COMMON_SLOT] or self._owners_before[COMMON_SLOT]

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Mapping[str, Any]]:
        """See SlotSharing; one worker after the other."""
        async with self._handing_over:
            yield {
                "slot_map": self.applied.document(),
                "keys": self._rules.in_force.text(),
                "shown": self.shown().document(),
            }

    def look(self) -> None:
        """Follow the group and the rules again: something is another one, or has failed."""
        self._wanted.set()

    def use(self, slot_map: SlotMap, fence: GroupFence) -> None:
        """Follow what the group has decided."""
        self.fence = fence
        self._store.fence(fence)
        if self.newest is None:
            self._tell_cut_off(is_so=False)
        self.newest = slot_map
        self._wanted.set()

    def lose(self) -> None:
        """Own nothing: this machine is not in the group any more."""
        self._store.lost()
        self.newest = None
        self.show()
        self._tell_cut_off(is_so=not self.has_left)
        self._wanted.set()

    def _tell_cut_off(self, *, is_so: bool) -> None:
        for post in self._posts:
            post.tell("cut_off", is_cut_off=is_so)

    async def release(self, slots: frozenset[int]) -> None:
        """Release slots, with all that their clients owe."""
        async with self._handing_over:
            owners = list(self.applied.owners)
            for slot in slots:
                owners[slot] = None
            await self._apply(SlotMap(self.applied.generation, self.applied.members, owners))
            await asyncio.to_thread(self._store.release, slots)

    async def follow(self) -> None:
        """Have workers follow what the group decides, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                async with self._handing_over:
                    await self._step()
            except StateError as error:
                _log.error("slots are not taken yet, trying again", error=str(error))
                self._loop.call_later(TAKE_RETRY_S, self._wanted.set)

    async def until_handed_over(self) -> None:
        """Return when others own all slots that this machine owned, or nobody takes them."""
        while (newest := self.newest) is not None:
            owners = set(newest.owners)
            is_given = None not in owners or owners == {None}
            if is_given and not self._own_slots([*newest.owners, *self.applied.owners]):
                return
            self._followed.clear()
            await self._followed.wait()

    async def keep(self, records: Sequence[Record], owed: Sequence[list[Any]]) -> None:
        """Keep records that are ours by now, and have workers take them up. Raises StateError."""
        async with self._handing_over:
            applied, taken = self.applied, self._store.taken
            slots = {self._rules.records(record.key) for record in records}
            slots |= {self._rules.slot_of_row(row) for row in owed}
            if self.newest is None or not slots <= taken:
                what = f"machine {self._machine} has not all of these slots by its rules now"
                raise StateError(what, "send it again in a second")
            owners = [None if slot in slots else each for slot, each in enumerate(applied.owners)]
            await self._apply(SlotMap(applied.generation, applied.members, owners))
            # What was written here since is newer than what another machine had.
            new = [record for record in records if self._store.get(record.key) is None]
            if new:
                await asyncio.to_thread(self._store.put_many, new)
            own = await asyncio.to_thread(OwedRecords(self._store).take, slots)
            await self._apply(applied, [*own, *owed])

    def shown(self) -> SlotMap:
        """Return the map by which clients are sent on."""
        silent = set(self._peers.silent)
        if self.has_left or (self.newest is None and self.in_force.is_set()):
            silent.add(self._machine)
        applied = self.applied
        owners = shown_owners(applied.owners, self._owners_before, applied.members, silent)
        return SlotMap(applied.generation, applied.members, owners)

    def show(self) -> None:
        """Send clients on by other machines: some have fallen silent, or answer again."""
        shown = self.shown().document()
        for post in self._posts:
            post.tell("show", shown=shown)

    def own_slots(self) -> Collection[int]:
        """Return the slots that this machine's workers have."""
        return self._own_slots(self.applied.owners)

    async def _step(self) -> None:
        newest = self.newest
        if newest is None:
            lost = [self._unless_own(owner) for owner in self.applied.owners]
            await self._apply(SlotMap(self.applied.generation, self.applied.members, lost))
            return
        own = self._own_slots(newest.owners)
        owed: list[list[Any]] = []
        if gained := own - self._store.taken:
            self._may_have_strays = True
            assert self.fence is not None
            await asyncio.to_thread(self._store.take, gained, self.fence)
            owed = await asyncio.to_thread(OwedRecords(self._store).take, gained)
        held = self._store.taken
        owners = [
            owner if slot in held else self._unless_own(owner)
            for slot, owner in enumerate(newest.owners)
        ]
        before = self._own_slots(self.applied.owners)
        await self._apply(SlotMap(newest.generation, newest.members, owners), owed)
        self._metrics.slot_moves_total.inc(len(self._own_slots(owners) - before))
        self.in_force.set()
        common = self.applied.owners[COMMON_SLOT]
        leads = common is not None and machine_of(common) == self._machine
        if leads and await self._rules.propose(self._store):
            self._wanted.set()
        if self._may_have_strays:
            self._may_have_strays = False
            if await self._strays.give(self.applied):
                self._may_have_strays = True
                self._loop.call_later(TAKE_RETRY_S, self._wanted.set)

    async def _apply(self, slot_map: SlotMap, owed: Sequence[list[Any]] = ()) -> None:
        """Have workers let go what they do not own in a map any more, and take up the rest."""
        rules, keys = self._rules.wanted, self._rules.records.keys
        rekeyed = rules != self._rules.in_force
        if rekeyed:
            keys = await asyncio.to_thread(rules.keys)
        debts = await let_go(self._posts, slot_map, rules)
        gone = self._own_slots(self.applied.owners) - self._own_slots(slot_map.owners)
        slot_of = self._rules.slot_of_row
        staying = [row for row in debts if slot_of(row) not in gone]
        if gone and self.newest is not None:
            leaving = [(slot_of(row), row) for row in debts if slot_of(row) in gone]
            with suppress(StateError):
                await asyncio.to_thread(OwedRecords(self._store).write, leaving)
        if rekeyed:
            self._rules.put_in_force(rules, keys)
            self._may_have_strays = True
            await self._strays.rekey(staying, slot_map)
        self.applied = slot_map
        for slot, owner in enumerate(slot_map.owners):
            if owner is not None:
                self._owners_before[slot] = owner
        await take_up(self._posts, [*staying, *owed], self.shown())
        self._followed.set()

    @property
    def _store(self) -> SlotStore:
        return self._state.store

    def _own_slots(self, owners: Sequence[str | None]) -> frozenset[int]:
        return frozenset(
            slot
            for slot, owner in enumerate(owners)
            if owner is not None and machine_of(owner) == self._machine
        )

    def _unless_own(self, owner: str | None) -> str | None:
        return None if owner is not None and machine_of(owner) == self._machine else owner
