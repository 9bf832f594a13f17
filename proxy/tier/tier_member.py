"""Be a member of a tier: join, follow the group, answer peers, leave."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

from structlog import get_logger

from metrics import MemberInstruments
from metrics.member_names import machine_of
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.upstream import UpstreamError, misread_is_bad_response
from proxy.config import Config
from proxy.config.endpoints import HostPort
from proxy.config.secrets import ALL_RIGHTS, Secrets
from proxy.queries.queries import Queries
from proxy.quota.entities import ClientIdentity
from proxy.quota.manager import QuotaManager
from proxy.quota.rules import Rule
from proxy.relay.relay import Relay
from proxy.relay.steering import AdvertisedListener, MemberAddresses
from proxy.slices import TimeSlicer
from proxy.state import Document, StateError, Store
from proxy.tasks import end_tasks, wait_at_most
from proxy.tier.budget_exchanges import BudgetLeasing
from proxy.tier.group.group_documents import Assignment, Subscription
from proxy.tier.group.group_member import GroupMember, find_group_sharing_topic
from proxy.tier.key_rules import TierKeyRules
from proxy.tier.ownership import OwnedSlots, SlotOwnership
from proxy.tier.peer_client import PeerClient, Target
from proxy.tier.peers import Peers
from proxy.tier.reachability import ReachabilityProbe
from proxy.tier.slot_loads import SlotLoadMonitor
from proxy.tier.slot_map import SlotSteering
from proxy.tier.tier_store import WATCH, TierStore, slot_key
from proxy.tier.visits import VisitReporting

JOIN_LIMIT_S = 60.0
"""For a new member; a dead one may be waited for meanwhile, which takes its session."""

GIVE_AWAY_LIMIT_S = 5.0
"""For others to get all slots of a member that is to end, which serves meanwhile: two rounds."""

LEAVE_LIMIT_S = 10.0
"""For all slots to be released, and the group to hear of it. Who is in it for longer is taken for
dead when its session is over."""

PRIVATE = ("watch/", "owed/", "tier/")
"""What begins so nobody has to read again when another member wrote it."""

_log = get_logger(__name__)


def open_tier_store(config: Config, way: Bootstrap, member: str, rules: TierKeyRules) -> TierStore:
    """Open a tier's state, and go by the rules in it. Blocks. Raises StateError."""
    store = TierStore(config, way, member, rules.slot_of_record)
    try:
        rules.read(store)
    except BaseException:
        store.close()
        raise
    return store


class TierMember:
    """The tier as the member `name` has it. Make it inside an event loop.

    `lead` has this member write what concerns all, or leave that; `on_shared_state` is called
    when another one has written that.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        secrets: Secrets,
        way: Bootstrap,
        metrics: MemberInstruments,
        *,
        steering: SlotSteering,
        queries: Queries,
        quotas: QuotaManager,
        slices: TimeSlicer,
        relay: Relay,
        lead: Callable[[bool], Awaitable[None]],
        on_shared_state: Callable[[], None],
    ) -> None:
        tier = config.tier
        assert tier is not None
        self.name, self._tier = name, tier.name
        self._config, self._way = config, way
        self._relay, self._on_shared_state = relay, on_shared_state
        self._loop = asyncio.get_running_loop()
        self._group_id = f"quota-proxy-tier-{tier.name}"
        self._admin_url = self._cluster_id = ""
        self.is_settling = self._is_leaving = False
        """Whether this member is to own nothing: after crashes in a row, or as it ends."""
        # Each of these knows only those before it.
        self._rules = rules = TierKeyRules(config)
        self.client = PeerClient(secrets.tokens.get(ALL_RIGHTS), secrets.peers)
        self._peers = peers = Peers(self.client)
        # A newcomer may wait for its slots until it is reached.
        is_reached = partial(self.request_rebalance, at_once=True)
        self._probe = ReachabilityProbe(lambda: peers.silent, is_reached)
        self._ownership = ownership = SlotOwnership(
            *(name, queries, quotas, relay, slices, lead),
            steering=steering,
            rules=rules,
            peers=peers,
            moves=metrics.slot_moves_total,
        )
        peers.on_silent = ownership.reroute
        self._loads = SlotLoadMonitor(ownership, slices, relay.list, self.request_rebalance)
        self.watch_loads, self.slots = self._loads.watch, self._loads.document
        self.keep = ownership.keep
        self._steering = steering
        relay.brokers.on_learned = self._learned
        self._exchanges = VisitReporting(quotas, steering, peers)
        self.visited = self._exchanges.charge
        self._budgets = BudgetLeasing(name, quotas, peers, ownership.serving, lambda: rules.keys)
        self.lease = self._budgets.lease
        self._member: GroupMember | None = None
        """None while this process is not to be in the group."""
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] = self._loop.create_future()
        metrics.workers_crash_looping.set_function(lambda: self.is_settling)
        metrics.members_silent.set_function(lambda: len(peers.silent))
        metrics.tier_generation.labels(tier.name).set_function(self._generation)
        metrics.slots_overloaded.set_function(lambda: len(self._loads.overloaded()))
        metrics.slots_owned.set_function(lambda: len(ownership.owns.slots))

    @property
    def leader(self) -> str:
        """The name of the member that writes what concerns all."""
        return self._ownership.leader

    @property
    def owns(self) -> OwnedSlots:
        """What this member owns now."""
        return self._ownership.owns

    @property
    def not_ready(self) -> str | None:
        """Why clients should go elsewhere; None: they can be served."""
        if self._ownership.newest is not None or self._ownership.has_left:
            return None
        problem = None if self._member is None else self._member.problem
        return f"this member is out of tier {self._tier}: {problem or 'it joins'}"

    @property
    def warning(self) -> str | None:
        """What is wrong although clients can be served."""
        if (assignment := self._assignment) is None:
            return None
        warnings = []
        if len(digests := assignment.rules_digests) > 1:
            told = "; ".join(f"{digest}: {', '.join(names)}" for digest, names in digests.items())
            warnings.append(f"members of tier {self._tier} have different rules: {told}")
        if silent := sorted(self._peers.silent):
            warnings.append(f"members that do not answer: {', '.join(silent)}")
        if (unreached := self._probe.warning) is not None:
            warnings.append(unreached)
        if self.is_settling:
            warnings.append(f"member {self.name} crashes again and again; the log says why")
        return "; ".join(warnings) or None

    def open_store(self) -> Store:
        """Open the state. Blocks. Raises StateError."""
        store = open_tier_store(self._config, self._way, self.name, self._rules)
        self._ownership.store = store
        store.follow_common(partial(self._follow_common, store))
        return store

    def watch_key(self) -> str | None:
        """Return the key of a record that may always be written; None: there is none now."""
        taken = self._ownership.store.slots.taken
        return slot_key(WATCH, min(taken)) if taken else None

    async def join(self, admin_port: int) -> None:
        """Return when clients can be served. Other members ask at `admin_port`.

        Raises MembershipError, StateError.
        """
        self._admin_url = self._url_at(admin_port)
        client = KafkaClient(self._way)
        try:
            topic = self._config.state.topic
            with misread_is_bad_response():
                metadata = await client.metadata()
                for broker in metadata.brokers:
                    self._relay.learn(broker.node_id, broker.host, broker.port)
                self._cluster_id = metadata.cluster_id
                brokers = [(broker.host, broker.port) for broker in metadata.brokers]
                other = await find_group_sharing_topic(client, self._group_id, topic, brokers)
            if other is not None:
                text = f"topic {topic} holds the state of another tier, with members in {other}"
                raise StateError(text, "name another topic as state.topic, or stop that tier")
        except UpstreamError as error:
            fix = "check that the brokers are up, and cluster.bootstrap_servers, tls and sasl"
            raise StateError(f"tier {self._tier} cannot be joined: {error}", fix) from error
        finally:
            client.close()
        self._is_leaving = False
        member = self._member = GroupMember(
            self._way,
            self._group_id,
            self._ownership.begin(),
            self._announce,
            on_assigned=self._assigned,
            on_revoked=self._ownership.release,
            on_lost=self._ownership.lose,
            may_hold=self._may_hold,
        )
        works = (
            *(member.run, self._ownership.follow, self._peers.watch, self._probe.watch),
            *(self._exchanges.run, self._budgets.run),
        )
        self._tasks = [asyncio.create_task(work(), name=work.__name__) for work in works]
        for task in self._tasks:
            task.add_done_callback(self.ended)
        in_force = asyncio.create_task(self._ownership.in_force.wait())
        try:
            await asyncio.wait(
                (in_force, self._failed), timeout=JOIN_LIMIT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if self._failed.done():
                self._failed.result()
            if not in_force.done():
                problem = member.problem or "nobody gives it a map of slots"
                fix = "see the log; give the machine a name of its own, and look at the brokers"
                raise StateError(f"tier {self._tier} is not joined: {problem}", fix)
        finally:
            in_force.cancel()

    async def leave(self, *, for_successor: bool) -> None:
        """Give back what others are to have, while clients are still served."""
        member = self._member
        if member is None:
            return
        if not for_successor and not self._failed.done():
            self._is_leaving = True
            member.request_rebalance(at_once=True)
            await wait_at_most(GIVE_AWAY_LIMIT_S, self._ownership.until_handed_over())
        self._ownership.has_left = not for_successor
        member.stop()
        if not self._failed.done():
            await asyncio.wait((self._tasks[0],), timeout=LEAVE_LIMIT_S)
        await end_tasks(self._tasks)
        self._member = self._ownership.fence = None
        self._peers.use({})

    async def watch(self) -> None:
        """Raise what the work in the tier has ended by."""
        await asyncio.shield(self._failed)

    def ended(self, task: asyncio.Task[None]) -> None:
        """Have the member end with work that has ended by a fault."""
        if not task.cancelled() and (error := task.exception()) and not self._failed.done():
            self._failed.set_exception(error)

    def request_rebalance(self, *, at_once: bool = False) -> None:
        """Have the group look at this member again, which is another one now."""
        if self._member is not None:
            self._member.request_rebalance(at_once=at_once)

    async def use_rules(self, rules: Iterable[Rule]) -> None:
        """Follow that this member has these rules in force."""
        await self._rules.use_rules(rules)
        self._ownership.look()

    def use_config(self, config: Config) -> None:
        """Follow another configuration."""
        self._rules.use_config(config)
        self._ownership.look()
        self.request_rebalance()

    def settled(self) -> None:
        """Own slots again, after crashes in a row."""
        _log.info("this member has settled: its clients come back")
        self.is_settling = False
        self.request_rebalance()

    def members(self) -> Sequence[Target]:
        """Return how all members of the tier are asked, this one included."""
        own = Target(self.name, self._admin_url)
        return sorted((own, *self._peers.targets()), key=attrgetter("name"))

    def owner_of(self, client_id: str) -> str | None:
        """Return the member that has the query of a client id; None: nobody has."""
        return self._ownership.owns.slot_map.owners[self._rules.keys.slot_of_query(client_id)]

    def is_visitor(self, client: ClientIdentity) -> bool:
        """Return whether another member owns a client."""
        return self._steering.owner_of(client) is not None

    def document(self) -> Document | None:
        """Return what the status shows of the tier."""
        assignment = self._assignment
        if assignment is None:
            return None
        members = sorted(assignment.members.items())
        machines = [{"name": name, "rules": each.rules_digest} for name, each in members]
        return {"name": self._tier, "generation": assignment.generation, "machines": machines}

    def alive(self) -> Document:
        """Return what this member says of itself. Raises StateError while it is in no tier."""
        if self._ownership.fence is None:
            raise self._not_in_tier()
        return {"member": self.name, "group": self._generation()}

    def overview(self) -> Document:
        """Return who owns what, what that carries, and who is reached. Raises StateError."""
        assignment = self._ownership.newest
        if assignment is None:
            raise self._not_in_tier()
        silent, unreached = self._peers.silent, self._probe.problems
        return tier_overview(self._tier, self.name, assignment, silent, unreached)

    @property
    def _assignment(self) -> Assignment | None:
        """The newest decision of the group, with all members."""
        return None if self._member is None else self._ownership.states.assignment

    def _learned(self, node_id: int) -> None:
        """Open ports for a broker where any free ones do, and announce these."""
        for listener in self._relay.listeners.values():
            listener.address_of(node_id)
        self.request_rebalance()

    def _announce(self) -> Subscription:
        newest = self._ownership.newest
        owners = () if newest is None else newest.slot_map.owners
        listeners = {
            name: AdvertisedListener.of(each) for name, each in self._relay.listeners.items()
        }
        return Subscription(
            addresses=MemberAddresses(self.name, listeners),
            admin_url=self._admin_url,
            cluster_id=self._cluster_id,
            rules_digest=self._rules.digest,
            clock_s=time.time(),
            state_topic=self._config.state.topic,
            loads=self._loads.meter.announced,
            is_leaving=self._is_leaving,
            reached=self._probe.reached.difference(owners),
            unreached=frozenset(self._probe.problems),
            is_settling=self.is_settling,
        )

    def _assigned(self) -> None:
        member, assignment = self._member, self._assignment
        assert member is not None
        assert assignment is not None
        if member.refusal is not None:
            if not self._ownership.in_force.is_set() and not self._failed.done():
                what, _, fix = member.refusal.reason.partition(": ")
                text = f"tier {self._tier} refuses member {self.name}: {what}"
                self._failed.set_exception(StateError(text, fix or "see the tier's log"))
            return
        self._ownership.use(member.fence)
        others = assignment.members.keys() - {self.name}
        self._peers.use({name: assignment.members[name].admin_url for name in others})
        machine, members = machine_of(self.name), assignment.slot_map.members.values()
        self._probe.use(each for each in members if machine_of(each.name) != machine)

    async def _may_hold(self, generation: int) -> bool:
        """Return whether nobody can have got slots since a generation of the group.

        So it is while most members of the last map answer, and none of them knows a newer one. Who
        is alone cannot tell.
        """
        newest = self._ownership.newest
        if newest is None:
            return False
        others = newest.slot_map.members.keys() - {self.name}
        known = await self._peers.generations(others)
        is_newest = all(each <= generation for each in known)
        return bool(known) and is_newest and 2 * (1 + len(known)) > 1 + len(others)

    def _follow_common(self, store: TierStore, keys: frozenset[str]) -> None:
        """Follow what another member has written that concerns all; called in a thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._common_came, store, keys)

    def _common_came(self, store: TierStore, keys: Collection[str]) -> None:
        if store.is_closed:  # meanwhile: a successor has it
            return
        if self._rules.follow(keys, store):
            self._ownership.look()
        if not all(key.startswith(PRIVATE) for key in keys):
            self._on_shared_state()

    def _generation(self) -> int:
        fence = self._ownership.fence
        return 0 if fence is None else fence.generation

    def _not_in_tier(self) -> StateError:
        text = f"this member is not in tier {self._tier} now"
        return StateError(text, "ask another one; its log says why")

    def _url_at(self, port: int) -> str:
        tier, listener = self._config.tier, self._config.listeners[0]
        assert tier is not None
        host = self._config.named(tier.admin_host or listener.advertised_host)
        return f"{'http' if self._config.admin.tls is None else 'https'}://{HostPort(host, port)}"


def tier_overview(
    tier: str,
    member: str,
    assignment: Assignment,
    silent: Collection[str],
    unreached: Mapping[str, str],
) -> Document:
    """Return what `GET /v1/tier` answers at a member, of the group's newest decision.

    `silent` are members that do not answer this one, `unreached` says of members why clients may
    not reach them.
    """
    owners, loads = assignment.slot_map.owners, assignment.loads
    releasing, awaiting = (
        Counter(each.values()) for each in (assignment.releasing, assignment.targets)
    )
    members: list[dict[str, Any]] = []
    machines: list[dict[str, Any]] = []
    for name, each in sorted(assignment.members.items()):
        own = assignment.slot_map.slots_of(name)
        carried = [loads[slot].share for slot in sorted(own) if slot in loads]
        members.append(
            {
                "name": name,
                "machine": machine_of(name),
                "owned": len(own),
                "releasing": releasing[name],
                "awaiting": awaiting[name],
                "load": round(sum(carried), 3) if carried else None,
                "slots": sorted(own),
            }
        )
        machines.append(
            {
                "name": name,
                "rules": each.rules_digest,
                "admin_url": each.admin_url,
                "answers": None if name == member else name not in silent,
                "problem": unreached.get(name),
            }
        )
    return {
        "name": tier,
        "machine": machine_of(member),
        "member": member,
        "generation": assignment.generation,
        "settled": assignment.is_settled,
        "slots": len(owners),
        "members": members,
        "machines": machines,
    }
