"""What the slots of a machine in a tier carry: what the others are told, and the status shows."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proxy.members.slot_balance import SlotLoad, overloaded_slots
from proxy.membership.group_member import GroupMember
from proxy.workers.followed_map import FollowedMap
from proxy.workers.post import Post
from proxy.workers.slot_loads import MachineLoads
from proxy.workers.slot_placement import BALANCE_INTERVAL_S, LEAST_MEASURED_S, slot_documents
from proxy.workers.tier_placement import are_news


class TierLoads:
    """Adds up what a machine's workers measure of their slots."""

    def __init__(self, posts: Sequence[Post], followed: FollowedMap) -> None:
        self._posts, self._map = posts, followed
        self._loads = MachineLoads()
        self.told: Mapping[int, SlotLoad] = {}
        """What the others know of the loads of this machine's slots."""

    def take_loads(self, member: str, measured_s: float, rows: Sequence[Sequence[Any]]) -> None:
        """See SlotSharing."""
        self._loads.told(member, rows, measured_s)

    def documents(self) -> Mapping[str, Mapping[str, Any]]:
        """See SlotSharing."""
        names = [post.name for post in self._posts]
        return slot_documents(names, self._map.applied.owners, self._loads, self.overloaded())

    def overloaded(self) -> Mapping[int, SlotLoad]:
        """Return those of our slots that fill a worker alone, with their loads."""
        loads = self._loads.of_slots()
        names = [post.name for post in self._posts if post.serves]
        return {slot: loads[slot] for slot in overloaded_slots(loads, names)}

    async def watch(self, member: Callable[[], GroupMember | None]) -> None:
        """Have the group look at the loads again when ours have changed, until cancelled."""
        while True:
            await asyncio.sleep(BALANCE_INTERVAL_S)
            serving = [post.name for post in self._posts if post.serves]
            own = self._map.own_slots()
            loads = {slot: load for slot, load in self._loads.of_slots().items() if slot in own}
            is_known = self._loads.measured_s(serving) >= LEAST_MEASURED_S
            in_group = member()
            if is_known and in_group is not None and are_news(self.told, loads):
                self.told = loads
                in_group.request_rebalance()
