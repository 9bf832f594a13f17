"""Has a machine be in the Kafka group of its tier: it joins, follows what is said, and leaves."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from structlog import get_logger

from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.upstream import UpstreamError
from proxy.config.models import TierSection
from proxy.config.stores import RELEASE_TIMEOUT_S
from proxy.members.member_names import machine_of
from proxy.members.slot_balance import placed_slots
from proxy.members.slot_map import SlotMap
from proxy.membership.assignment import Assignment, Machine
from proxy.membership.group_member import GroupMember, MembershipError
from proxy.membership.subscription import Announcement
from proxy.membership.vacancy import until_vacant
from proxy.state import GroupFence, StateError
from proxy.workers.followed_map import FollowedMap
from proxy.workers.peers import Peers
from proxy.workers.reach import Reach
from proxy.workers.tier_state import TierState

JOIN_LIMIT_S = 60.0
"""For a new machine; a dead one may be waited for meanwhile, which takes its session."""

GIVE_AWAY_LIMIT_S = 5.0
"""For others to get all slots of a machine that is to end, which serves meanwhile: two rounds."""

LEAVE_LIMIT_S = 10.0
"""For all slots to be released, and the group to hear of it. Who is in it for longer is taken for
dead when its session is over."""

_log = get_logger(__name__)


class TierError(StateError):
    """A machine cannot be in its tier: what is wrong, where, how to mend it."""


TIER_ERRORS = (TierError, MembershipError)
"""What `TierGroup.join` raises, and what a machine ends with that may not stay."""


class TierGroup:
    """The machine in the group of its tier. Make it inside an event loop.

    `announce` makes of the cluster's id what the group is told of this machine.
    """

    def __init__(
        self,
        tier: TierSection,
        way: Bootstrap,
        announce: Callable[[str], Announcement],
        state: TierState,
        followed: FollowedMap,
        *,
        peers: Peers,
        reach: Reach,
    ) -> None:
        self._way, self._announce_at = way, announce
        self._state, self._map, self._peers, self._reach = state, followed, peers, reach
        self._tier, self._machine = tier.name, tier.machine
        self._group_id = f"quota-proxy-tier-{tier.name}"
        self.member: GroupMember | None = None
        """None while this machine is not to be in the group."""
        self.is_leaving = False
        """Whether this machine is to own nothing any more, as it ends."""
        self._cluster_id = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def assignment(self) -> Assignment | None:
        """The newest decision of the group, with all machines."""
        return None if self.member is None else self.member.assignment

    @property
    def others(self) -> Mapping[str, Machine]:
        """The other machines of the tier, by name."""
        assignment = self.assignment
        machines = {} if assignment is None else dict(assignment.machines)
        machines.pop(self._machine, None)
        return machines

    @property
    def not_ready(self) -> str | None:
        """Why clients should go elsewhere; None: they can be served."""
        if self._map.newest is not None or self._map.has_left:
            return None
        problem = None if self.member is None else self.member.problem
        return f"this machine is out of tier {self._tier}: {problem or 'it joins'}"

    async def join(self) -> None:
        """See SlotSharing."""
        client = KafkaClient(self._way)
        try:
            self._cluster_id = (await client.metadata()).cluster_id
            if self._state.is_successor:
                self._state.is_successor = False
                left = await until_vacant(client, self._group_id, self._machine, RELEASE_TIMEOUT_S)
                if not left:
                    _log.warning("the proxy to be replaced is still in the tier")
        except UpstreamError as error:
            fix = "check that the brokers are up, and cluster.bootstrap_servers, tls and sasl"
            raise TierError(f"tier {self._tier} cannot be joined: {error}", fix) from error
        finally:
            client.close()
        self.is_leaving = self._map.has_left = False
        self._map.in_force.clear()
        self.member = GroupMember(
            self._way,
            self._group_id,
            self._announce,
            on_assigned=self._assigned,
            on_revoked=self._map.release,
            on_lost=self._map.lose,
            place=placed_slots,
        )
        works = (self.member.run, self._map.follow, self._ask_peers, self._reach.watch)
        self._tasks = [asyncio.create_task(work(), name=work.__name__) for work in works]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        in_force = asyncio.create_task(self._map.in_force.wait())
        try:
            await asyncio.wait(
                (in_force, self._failed),
                timeout=JOIN_LIMIT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._failed.done():
                self._failed.result()
            if not in_force.done():
                problem = self.member.problem or "nobody gives it a map of slots"
                fix = "see the log; give the machine a name of its own, and look at the brokers"
                raise TierError(f"tier {self._tier} is not joined: {problem}", fix)
        finally:
            in_force.cancel()

    async def leave(self, *, for_successor: bool) -> None:
        """See SlotSharing."""
        member = self.member
        if member is None:
            return
        if not for_successor and not self._failed.done():
            self.is_leaving = True
            member.request_rebalance(at_once=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(GIVE_AWAY_LIMIT_S):
                    await self._map.until_handed_over()
        self._map.has_left = not for_successor
        member.stop()
        if not self._failed.done():
            await asyncio.wait((self._tasks[0],), timeout=LEAVE_LIMIT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.member, self._map.newest = None, None

    def request_rebalance(self) -> None:
        """Have the group look at this machine again, which is another one now."""
        if self.member is not None:
            self.member.request_rebalance()

    async def watch(self) -> None:
        """Raise what the work in the tier has ended by."""
        while True:
            await asyncio.wait((self._failed,))
            self._failed.result()

    def _announce(self) -> Announcement:
        return self._announce_at(self._cluster_id)

    def _assigned(self, slot_map: SlotMap, generation: int, member_id: str) -> None:
        assert self.member is not None
        if self.member.refusal is not None:
            if not self._map.in_force.is_set() and not self._failed.done():
                what, _, fix = self.member.refusal.reason.partition(": ")
                text = f"tier {self._tier} refuses machine {self._machine}: {what}"
                self._failed.set_exception(TierError(text, fix or "see the tier's log"))
            return
        instance = self.member.instance_id
        self._map.use(slot_map, GroupFence(self._group_id, generation, member_id, instance))
        self._peers.use({name: each.admin_url for name, each in self.others.items()})
        members = slot_map.members.values()
        self._reach.use(each for each in members if machine_of(each.name) != self._machine)

    async def _ask_peers(self) -> None:
        async with self._peers:
            await self._peers.watch()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Have the machine end with work that has ended by a fault."""
        if not task.cancelled() and (error := task.exception()) and not self._failed.done():
            self._failed.set_exception(error)
