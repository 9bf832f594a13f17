"""What a member that is late to follow does with slots that others may have by then."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from parts.member_world import Tier
from prometheus_client import CollectorRegistry, Counter

from proxy.config import load_config
from proxy.relay.steering import MemberAddresses
from proxy.slices import TimeSlicer
from proxy.state import GroupFence, MemoryStore, StateError
from proxy.state.kafka.slot_table import SlotTable
from proxy.tasks import end_tasks
from proxy.tier.group.group_documents import Assignment
from proxy.tier.key_rules import TierKeyRules
from proxy.tier.ownership import SlotOwnership
from proxy.tier.peer_client import PeerClient
from proxy.tier.peers import Peers
from proxy.tier.slot_map import SLOTS, SlotMap, SlotSteering

NAME, OTHER = "a/0", "b/0"
LIMIT_S = 20.0
MOVED, NEXT = 5, 9


async def nothing() -> None:
    """Nothing happens."""


class SlotsInMemory(MemoryStore):
    """A store of slots that says which it has read, and lets things happen while it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotTable(lambda _: 0)
        self.read: list[frozenset[int]] = []
        self.meanwhile: Callable[[], Awaitable[None]] = nothing
        self._loop = asyncio.get_running_loop()

    def take(self, slots: Collection[int], fence: GroupFence) -> None:
        losses = self.slots.renew(fence)
        self.read.append(frozenset(slots) - self.slots.taken)
        meanwhile, self.meanwhile = self.meanwhile, nothing

        async def happen() -> None:
            await meanwhile()

        asyncio.run_coroutine_threadsafe(happen(), self._loop).result(LIMIT_S)
        assert self.slots.took(slots, losses)


def ownership_over(store: SlotsInMemory, folder: Path) -> SlotOwnership:
    document = {
        "cluster": {"bootstrap_servers": ["broker-1:9092"]},
        "listeners": [
            {"name": "main", "bind": "127.0.0.1:0", "advertised_host": "proxy", "broker_ports": 0}
        ],
        "admin": {"bind": "127.0.0.1:0"},
    }
    file = folder / "proxy.yaml"
    file.write_text(yaml.safe_dump(document))
    (world,) = Tier(members=1).members

    async def lead(_: bool) -> None:
        """Lead no more and no less."""

    ownership = SlotOwnership(
        *(NAME, world.queries, world.quotas),
        SimpleNamespace(is_cut_off=False),  # type: ignore[arg-type]
        *(TimeSlicer(), lead),
        steering=SlotSteering(NAME),
        rules=TierKeyRules(load_config(file)),
        peers=Peers(PeerClient()),
        moves=Counter("moves", "", registry=CollectorRegistry()),
    )
    ownership.store = store  # type: ignore[assignment]
    return ownership


class Rounds:
    """Decides who has which slots; all that are not ours are another member's."""

    def __init__(self, ownership: SlotOwnership) -> None:
        self._ownership, self._states = ownership, ownership.begin()
        self._generation = 0

    def give(self, *slots: int, releasing: Collection[int] = ()) -> frozenset[int]:
        """Follow a round; return what is to be released."""
        self._generation += 1
        owners = [NAME if slot in slots else OTHER for slot in range(SLOTS)]
        members = {name: MemberAddresses(name, {}) for name in (NAME, OTHER)}
        for slot in releasing:
            owners[slot] = None
        assignment = Assignment(
            self._generation, SlotMap(members, owners), dict.fromkeys(releasing, NAME)
        )
        revoked, _ = self._states.assign(assignment, NAME)
        self._ownership.use(GroupFence("tier", self._generation, "id", NAME))
        return revoked

    def give_up(self, slots: Collection[int]) -> None:
        """Take these for released, as they are when that takes too long."""
        self._states.released(slots)


@asynccontextmanager
async def followed(folder: Path) -> AsyncIterator[tuple[SlotsInMemory, SlotOwnership, Rounds]]:
    store = SlotsInMemory()
    ownership = ownership_over(store, folder)
    rounds = Rounds(ownership)
    following = asyncio.create_task(ownership.follow())
    try:
        rounds.give(MOVED)
        assert await slots_then(ownership) == {MOVED}
        yield store, ownership, rounds
    finally:
        await end_tasks([following])


async def slots_then(ownership: SlotOwnership) -> frozenset[int]:
    """Return what the member has when it has followed the group once more."""
    async with asyncio.timeout(LIMIT_S):
        await ownership.in_force.wait()
    ownership.in_force.clear()
    return ownership.owns.slots


async def test_what_another_member_had_meanwhile_is_read_anew(tmp_path: Path) -> None:
    async with followed(tmp_path) as (store, ownership, rounds):

        async def come_and_go() -> None:
            """Give away what is not released in time, as another slot is being read, and back."""
            assert rounds.give(NEXT, releasing=[MOVED]) == {MOVED}
            rounds.give_up({MOVED})
            rounds.give(NEXT)
            rounds.give(MOVED, NEXT)

        store.meanwhile = come_and_go
        rounds.give(MOVED, NEXT)
        assert await slots_then(ownership) == {NEXT}
        assert store.slots.taken == {NEXT}
        assert await slots_then(ownership) == {MOVED, NEXT}
        assert store.read == [{MOVED}, {NEXT}, {MOVED}]


async def test_what_is_not_released_in_time_is_not_written_any_more(tmp_path: Path) -> None:
    async with followed(tmp_path) as (store, ownership, rounds):

        async def run_out_of_time() -> None:
            revoked = rounds.give(NEXT, releasing=[MOVED])
            releasing = asyncio.create_task(ownership.release(revoked))
            await asyncio.sleep(0)  # it waits for the end of the reading
            assert store.slots.check({MOVED}) is not None
            await end_tasks([releasing])
            with pytest.raises(StateError, match=f"has not the slot {MOVED}"):
                store.slots.check({MOVED})

        store.meanwhile = run_out_of_time
        rounds.give(MOVED, NEXT)
        assert await slots_then(ownership) == {NEXT}
        assert store.meanwhile is nothing


async def test_what_goes_while_it_is_read_is_not_written(tmp_path: Path) -> None:
    async with followed(tmp_path) as (store, ownership, rounds):

        async def go() -> None:
            assert rounds.give(MOVED, releasing=[NEXT]) == {NEXT}
            rounds.give_up({NEXT})

        store.meanwhile = go
        rounds.give(MOVED, NEXT)
        assert await slots_then(ownership) == {MOVED}
        assert store.slots.taken == {MOVED}


async def test_in_a_handover_the_one_before_serves(tmp_path: Path) -> None:
    async with followed(tmp_path) as (_, ownership, rounds):
        rounds.give(MOVED, releasing=[NEXT])
        assert await slots_then(ownership) == {MOVED}
        assert ownership.owns.slot_map.owners[NEXT] is None
        assert ownership.routes().owners[NEXT] == OTHER
        assert ownership.routes().owners[MOVED] == NAME
