"""What the slots of a machine in a tier carry: what the others are told, and the status shows."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proxy.members.slot_balance import SlotLoad, overloaded_slots
from proxy.membership.announced_loads import AnnouncedLoads, complete
from proxy.membership.group_member import GroupMember
from proxy.workers.followed_map import FollowedMap
from proxy.workers.post import Post
from proxy.workers.slot_loads import MachineLoads
from proxy.workers.slot_placement import BALANCE_INTERVAL_S, slot_documents


class TierLoads:
    """Adds up what a machine's workers measure of their slots."""

    def __init__(self, posts: Sequence[Post], followed: FollowedMap) -> None:
        self._posts, self._map = posts, followed
        self._loads = MachineLoads()
        self._announced = AnnouncedLoads()

    @property
    def told(self) -> Mapping[int, SlotLoad]:
        """What the others are told of the loads of this machine's slots."""
        return self._announced.loads

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
            in_group = member()
            newest = None if in_group is None else in_group.assignment
            measured = complete(self._loads.of_slots(), self._map.own_slots())
            known = {} if newest is None else newest.loads
            measured_s = self._loads.measured_s(serving)
            is_news = self._announced.take(measured, known, time.monotonic(), measured_s)
            if is_news and in_group is not None:
                in_group.request_rebalance()
