"""What this member owns: slots are left, taken from the state, and served, as the group decides.

The group's map says what is wanted, and each slot's state how far that is done. In the map that is
followed this member owns only what it serves: whose records it has read, and nobody else writes.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from prometheus_client import Counter
from structlog import get_logger

from metrics.clock import clock_ms
from proxy.queries.queries import Queries
from proxy.queries.record_owner import OwnedDifference
from proxy.quota.entities import ClientIdentity
from proxy.quota.manager import QuotaManager, SensorDebt
from proxy.relay.relay import Relay
from proxy.slices import TimeSlicer
from proxy.state import GroupFence, Record, SlotStore, StateError
from proxy.tier.group.group_documents import Assignment
from proxy.tier.group.slot_states import GIVEN, RELEASING, SERVED, SlotStates
from proxy.tier.key_rules import TierKeyRules
from proxy.tier.peer_client import PeerError
from proxy.tier.peers import Peers
from proxy.tier.quota_keys import QuotaKeys
from proxy.tier.slot_balance import Owners, stand_in_of
from proxy.tier.slot_map import SLOTS, SlotMap, SlotSteering
from proxy.tier.tier_store import COMMON_SLOT, take_debts, write_debts

TAKE_RETRY_S = 0.5
"""After slots could not be taken, or given."""

GIVEN_AT_ONCE = 500
"""Records in one message to another member."""

CUT_OFF_LIMIT_S = 2.0
"""For answers in flight at a member that has lost its place."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OwnedSlots:
    """What the member `name` owns; see `proxy.progress.query_registry.Ownership`."""

    name: str
    slot_map: SlotMap
    keys: QuotaKeys

    @property
    def slots(self) -> frozenset[int]:
        """The slots that are this member's."""
        return self.slot_map.slots_of(self.name)

    def client(self, client_id: str) -> bool:
        """Return whether a client is this member's, with its query and its adaptive bound."""
        return self._has(self.keys.slot_of_query(client_id))

    def pipeline(self, name: str) -> bool:
        """Return whether a pipeline is this member's, with its ledger."""
        return self._has(self.keys.slot_of_pipeline(name))

    def has(self, identity: ClientIdentity) -> bool:
        """Return whether a client is this member's."""
        return self._has(self.keys.slot_of(identity))

    def _has(self, slot: int) -> bool:
        return self.slot_map.owners[slot] == self.name


class SlotOwnership:
    """Follows what the group decides, for the member `name`. Make it inside an event loop.

    What goes with slots is what `queries` follow, and what clients owe by `quotas`. `lead`
    has the member write what concerns all, or leave that.
    """

    store: SlotStore
    """The records of the slots; to be set before the group is followed."""

    def __init__(
        self,
        name: str,
        queries: Queries,
        quotas: QuotaManager,
        relay: Relay,
        slices: TimeSlicer,
        lead: Callable[[bool], Awaitable[None]],
        *,
        steering: SlotSteering,
        rules: TierKeyRules,
        peers: Peers,
        moves: Counter,
    ) -> None:
        self._name, self._steering = name, steering
        self._queries, self._quotas, self._relay, self._slices = queries, quotas, relay, slices
        self._lead = lead
        self._rules, self._peers, self._moves = rules, peers, moves
        self._may_have_misplaced = False
        """Whether there may be records here that belong to other slots by other keys."""
        self._owed_away: list[SensorDebt] = []
        """What clients owe that other members may have since the keys are other ones."""
        self._closing: asyncio.TimerHandle | None = None
        """Closes what still waits for a cluster that cannot be reached."""
        self._loop = asyncio.get_running_loop()
        self.states = SlotStates()
        self.fence: GroupFence | None = None
        """Of the newest assignment; None while this member is not in the group."""
        self.owns = OwnedSlots(name, SlotMap({}, [None] * SLOTS), rules.keys)
        """What this member has taken, and who has the rest."""
        self._latest_owners: list[str | None] = [None] * SLOTS
        """The owner of each slot, or in a handover the one before; None: nobody has had it."""
        self.has_left = False
        """Whether clients are to go to other members: this one has handed over, and ends."""
        self.in_force = asyncio.Event()
        """Set when the group is followed; to be cleared before it is joined."""
        self._changing = asyncio.Lock()
        self._wanted = asyncio.Event()
        self.look = self._wanted.set
        """Has the group and the rules be followed again: something changed, or has failed."""
        self._steering_tasks: set[asyncio.Task[None]] = set()
        self._followed = asyncio.Event()
        """Set when another map is followed than before."""

    @property
    def newest(self) -> Assignment | None:
        """What the group has decided last; None while this member is not in it."""
        return None if self.fence is None else self.states.assignment

    @property
    def leader(self) -> str:
        """Who has what concerns all; nobody has it for a moment, then the one before."""
        return self._latest_owners[COMMON_SLOT] or self._name

    @property
    def is_leader(self) -> bool:
        """Whether this member writes what concerns all."""
        return self.owns.slot_map.owners[COMMON_SLOT] == self._name

    def serving(self) -> tuple[Sequence[str | None], frozenset[str]]:
        """Return who serves each slot now, also for one that is silent, and all members.

        Nobody while this member is in no group.
        """
        if self.newest is None:
            return [None] * SLOTS, frozenset()
        return self.routes().owners, frozenset(self.newest.slot_map.members)

    def begin(self) -> SlotStates:
        """Own nothing yet, of which the states are returned: the group is about to be joined."""
        self.has_left = False
        self.in_force.clear()
        self.states = SlotStates()
        return self.states

    def use(self, fence: GroupFence) -> None:
        """Follow what the group has decided."""
        self.store.slots.renew(fence)
        if self.fence is None:
            self._cut_off(is_cut_off=False)
        self.fence = fence
        self._wanted.set()

    def lose(self) -> None:
        """Own nothing: this member is not in the group any more."""
        self.store.slots.lose()
        self.fence = None
        self.reroute()
        has_others = len(self.owns.slot_map.members) > 1
        self._cut_off(is_cut_off=has_others and not self.has_left)
        self._wanted.set()

    async def release(self, slots: frozenset[int]) -> None:
        """Release slots, with all that their clients owe; they are not written after that."""
        try:
            async with self._changing:
                await self._apply()
                await asyncio.to_thread(self.store.release, slots)
        finally:  # also those that are not released in time
            self.store.slots.release(slots)

    async def follow(self) -> None:
        """Follow what the group decides, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                async with self._changing:
                    await self._step()
            except StateError as error:
                _log.error("slots are not taken yet, trying again", error=str(error))
                self._loop.call_later(TAKE_RETRY_S, self._wanted.set)

    async def until_handed_over(self) -> None:
        """Return when others own all slots that this member owned, or nobody takes them."""
        while (newest := self.newest) is not None:
            owners = set(newest.slot_map.owners)
            is_given = None not in owners or owners == {None}
            if is_given and self._name not in owners and not self.owns.slots:
                return
            self._followed.clear()
            await self._followed.wait()

    async def keep(self, records: Sequence[Record], debts: Sequence[SensorDebt]) -> None:
        """Keep records that are ours by now, and take them up. Raises StateError."""
        async with self._changing:
            store = self.store
            slots = {self._rules.slot_of_record(record.key) for record in records}
            slots |= {self._rules.keys.slot_of(debt.identity) for debt in debts}
            if not slots <= self.owns.slots:
                what = f"member {self._name} has not all of these slots by its rules now"
                raise StateError(what, "send it again in a second")
            await self._apply(besides=slots)
            # What was written here since is newer than what another member had.
            new = [record for record in records if store.get(record.key) is None]
            if new:
                await asyncio.to_thread(store.put_many, new)
            own = await asyncio.to_thread(take_debts, store, slots)
            await self._apply([*own, *debts])

    def routes(self) -> SlotMap:
        """Return the map by which clients are sent on."""
        silent = set(self._peers.silent)
        if self.has_left or (self.newest is None and self.in_force.is_set()):
            silent.add(self._name)
        applied = self.owns.slot_map
        owners = owners_or_stand_ins(self._latest_owners, applied.members, silent)
        return replace(applied, owners=owners)

    def reroute(self) -> None:
        """Send clients on by other members: some have fallen silent, or answer again."""
        task = self._loop.create_task(self._steer())
        self._steering_tasks.add(task)
        task.add_done_callback(self._steering_tasks.discard)

    async def _steer(self) -> None:
        """Send clients on by the routes now; who comes here with that gets no more than one."""
        slot_of = self.owns.keys.slot_of
        if gained := self._steering.use(self.routes(), slot_of):
            walk = self._quotas.pace_immediately(lambda client: slot_of(client) in gained, clock_ms)
            await self._slices.collect(walk)

    def _cut_off(self, *, is_cut_off: bool) -> None:
        """Follow whether this member has lost its place in the tier.

        Its clients are let go then, and new ones refused: they go to other members. Those that wait
        for the cluster, which may be out of reach, do so for CUT_OFF_LIMIT_S.
        """
        self._relay.is_cut_off = is_cut_off
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        if is_cut_off:
            self._closing = self._loop.call_later(CUT_OFF_LIMIT_S, self._close_waiting)

    def _close_waiting(self) -> None:
        self._relay.close_draining()
        self._cut_off(is_cut_off=True)  # others may come meanwhile

    async def _step(self) -> None:
        if self.fence is None:
            await self._apply()
            return
        store, debts, before = self.store, list[SensorDebt](), self.owns.slots
        self._drop_given_away()
        if given := self.states.of(GIVEN) | (self.states.of(SERVED) - store.slots.taken):
            self._may_have_misplaced = True
            await asyncio.to_thread(store.take, given, self.fence)
            debts = await asyncio.to_thread(take_debts, store, given)
            self.states.serve(given & store.slots.taken)
        await self._apply(debts)
        self._moves.inc(len(self.owns.slots - before))
        self.in_force.set()
        if self.is_leader and await self._rules.propose(store):
            self._wanted.set()
        if self._may_have_misplaced:
            self._may_have_misplaced = await self._give_misplaced()
            if self._may_have_misplaced:
                self._loop.call_later(TAKE_RETRY_S, self._wanted.set)

    def _drop_given_away(self) -> None:
        """Write nothing more to slots that others could get before all of them was released here.

        Such a slot is read anew when it comes back.
        """
        slots = self.store.slots
        slots.release(slots.taken - self.states.of(SERVED, RELEASING))

    async def _apply(
        self, debts: Iterable[SensorDebt] = (), *, besides: Collection[int] = ()
    ) -> None:
        """Leave what is not served any more, then take what is, with what its clients owe.

        What is `besides` is left in any case.
        """
        self._drop_given_away()
        newest, served = self.states.assignment, self.states.of(SERVED) & self.store.slots.taken
        served = served.difference(besides)
        slot_map = self.owns.slot_map if newest is None else newest.slot_map
        slot_map = slot_map.without(slot_map.slots_of(self._name) - served)
        rules, keys = self._rules.wanted, self._rules.keys
        is_rekeyed = rules != self._rules.in_force
        if is_rekeyed:
            keys = await asyncio.to_thread(rules.keys)
        before, after = self.owns, OwnedSlots(self._name, slot_map, keys)
        if slot_map.owners[COMMON_SLOT] != self._name:
            await self._lead(False)
        await self._queries.revoke(owns=OwnedDifference(before, after, is_others=True))
        left = self._quotas.debts(
            lambda client: before.has(client) and not after.has(client), clock_ms()
        )
        gone = before.slots - after.slots
        slot_of = before.keys.slot_of
        leaving = [(slot, debt) for debt in left if (slot := slot_of(debt.identity)) in gone]
        if leaving and self.newest is not None:
            with suppress(StateError):
                await asyncio.to_thread(write_debts, self.store, leaving)
        if is_rekeyed:
            self._rules.in_force, self._rules.keys = rules, keys
            self._may_have_misplaced = True
            self._owed_away = [debt for debt in left if slot_of(debt.identity) not in gone]
            await asyncio.to_thread(self._move_misplaced)
        self.owns = after
        owners = zip(slot_map.owners, self._latest_owners, strict=True)
        self._latest_owners = [owner or before for owner, before in owners]
        try:
            owed = [debt for debt in debts if after.has(debt.identity)]
            self._quotas.take_debts(owed, clock_ms())
            await self._queries.assign(self.store, owns=after)
        finally:
            await self._steer()
            await self._lead(self.is_leader)
        self._followed.set()

    async def _give_misplaced(self) -> bool:
        """Hand records to the members that have their slots by now; return whether some stay.

        Raises StateError.
        """
        store, owners = self.store, self.owns.slot_map.owners
        await asyncio.to_thread(self._move_misplaced)
        misplaced = list((await asyncio.to_thread(store.slots.misplaced)).values())
        records: defaultdict[str | None, list[Record]] = defaultdict(list)
        for record in misplaced:
            records[owners[self._rules.slot_of_record(record.key)]].append(record)
        owed: defaultdict[str | None, list[SensorDebt]] = defaultdict(list)
        for debt in self._owed_away:
            owed[owners[self.owns.keys.slot_of(debt.identity)]].append(debt)
        self._owed_away = []
        for owner in {*records, *owed} - {self._name, None}:
            assert owner is not None
            given = records[owner][:GIVEN_AT_ONCE]
            try:
                await self._peers.give(owner, given, owed[owner])
            except PeerError as error:
                _log.debug("records are not handed over yet", member=owner, error=str(error))
            else:
                keys = {record.key for record in given}
                await asyncio.to_thread(store.drop_misplaced, keys)
                misplaced = [record for record in misplaced if record.key not in keys]
        return bool(misplaced)

    def _move_misplaced(self) -> None:
        """Write records, whose slots are other ones by other keys, to those that are here."""
        slot_of, store = self._rules.slot_of_record, self.store
        misplaced, taken = store.slots.misplaced().values(), store.slots.taken
        here = [each for each in misplaced if slot_of(each.key) in taken]
        if here:
            store.put_many(here)
            store.drop_misplaced({each.key for each in here})


def owners_or_stand_ins(
    latest: Owners, members: Collection[str], silent: Collection[str]
) -> list[str | None]:
    """Return whom clients of each slot are sent to; None for all when nobody serves.

    That is the latest owner. For who is `silent`, or is gone, a member stands in, the same by the
    reckoning of every member that knows the same.
    """
    serving = sorted(name for name in members if name not in silent)
    if not serving:
        return [None] * len(latest)
    return [
        name if name in serving else stand_in_of(slot, serving) for slot, name in enumerate(latest)
    ]
