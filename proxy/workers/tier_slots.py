"""The slots of a machine in a tier: it takes them, gives them back, and knows who has others."""

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from metrics import MemberInstruments
from proxy.admin.gateway.member_client import MemberEndpoint
from proxy.admin.replies import ApiError
from proxy.cluster.kafka_client import Bootstrap
from proxy.config import Config
from proxy.config.secrets import Secrets
from proxy.member import Work
from proxy.members.member_names import machine_of
from proxy.membership.subscription import Announcement
from proxy.state import Document
from proxy.workers.followed_map import FollowedMap
from proxy.workers.handed_records import MachineRoutes
from proxy.workers.machine_ports import MachinePorts
from proxy.workers.peers import Peers
from proxy.workers.post import Post
from proxy.workers.reach import Reach
from proxy.workers.tier_group import TierGroup
from proxy.workers.tier_loads import TierLoads
from proxy.workers.tier_overview import tier_overview
from proxy.workers.tier_peers import peer_access_of
from proxy.workers.tier_rules import TierRules
from proxy.workers.tier_state import TierState
from proxy.workers.tier_visits import TierVisits

PRIVATE = ("rates/", "watch/", "owed/", "tier/")
"""What begins so no worker has to read again when another machine wrote it."""


class TierSlots:
    """See SlotSharing. Make it inside an event loop."""

    def __init__(
        self,
        config: Config,
        secrets: Secrets,
        way: Bootstrap,
        posts: Sequence[Post],
        ports: MachinePorts,
        metrics: MemberInstruments,
    ) -> None:
        tier = config.tier
        assert tier is not None
        self._config, self._posts, self._ports = config, posts, ports
        self._tier, self._machine = tier.name, tier.machine
        self._admin_url = ""
        self._loop = asyncio.get_running_loop()
        self._access = access = peer_access_of(config, secrets)
        # Each of these knows only those before it.
        self._rules = rules = TierRules(config)
        self._state = state = TierState(config, way, rules, self._follow_common)
        self._peers = peers = Peers(access.token, access.tls, self._show)
        self._reach = reach = Reach(lambda: peers.silent)
        self._map = followed = FollowedMap(tier.machine, posts, state, rules, peers, metrics)
        self._loads = TierLoads(posts, followed)
        self._group = TierGroup(
            tier, way, self._announce, state, followed, peers=peers, reach=reach
        )
        self._visits = TierVisits(posts, followed, rules, peers)
        self.open_store = state.open
        self.watch_key = state.watch_key
        self.begin = followed.begin
        self.pass_visits = self._visits.pass_on
        self.take_loads = self._loads.take_loads
        self.documents = self._loads.documents
        self.tier_routes = MachineRoutes(
            self._alive, self._visits.take, self._overview, followed.keep
        )
        metrics.members_silent.set_function(self._count_silent)
        metrics.tier_generation.labels(self._tier).set_function(self._generation)
        metrics.slots_overloaded.set_function(lambda: len(self._loads.overloaded()))
        for post in posts:
            owned = metrics.slots_owned.labels(post.name)
            owned.set_function(partial(self._count_slots, post.name))

    @property
    def first(self) -> str:
        """See SlotSharing."""
        return self._map.common_owner or self._posts[0].name

    @property
    def not_ready(self) -> str | None:
        """See SlotSharing."""
        return self._group.not_ready

    @property
    def warning(self) -> str | None:
        """See SlotSharing."""
        assignment = self._group.assignment
        if assignment is None:
            return None
        warnings = []
        if len(digests := assignment.rules_digests) > 1:
            told = "; ".join(f"{digest}: {', '.join(names)}" for digest, names in digests.items())
            warnings.append(f"machines of tier {self._tier} have different rules: {told}")
        if silent := sorted(self._peers.silent):
            warnings.append(f"machines that do not answer: {', '.join(silent)}")
        if (unreached := self._reach.warning) is not None:
            warnings.append(unreached)
        return "; ".join(warnings) or None

    def works(self) -> Iterable[Work]:
        """See SlotSharing."""
        return (self._group.watch, partial(self._loads.watch, lambda: self._group.member))

    async def join(self, admin_port: int) -> None:
        """See SlotSharing."""
        self._admin_url = self._url_at(admin_port)
        await self._group.join()

    async def leave(self, *, for_successor: bool) -> None:
        """See SlotSharing."""
        await self._group.leave(for_successor=for_successor)

    def changed(self) -> None:
        """See SlotSharing."""
        self._map.look()
        self._group.request_rebalance()

    def serves_again(self) -> None:
        """See SlotSharing."""
        self._map.look()

    def use_rules(self, rules: str) -> None:
        """See SlotSharing."""
        self._rules.use_rules(rules)
        self._map.look()

    def use_config(self, config: Config) -> None:
        """See SlotSharing."""
        self._rules.use_config(config)
        self.changed()

    def owner_of_client(self, client_id: str) -> str | None:
        """See SlotSharing."""
        return self._map.applied.owners[self._rules.slot_of_query(client_id)]

    def machines(self) -> Sequence[MemberEndpoint]:
        """See SlotSharing."""
        token, tls, silent = self._access.token, self._access.tls, self._peers.silent
        return [
            MemberEndpoint(
                name, url=machine.admin_url, alive=name not in silent, token=token, tls=tls
            )
            for name, machine in self._group.others.items()
        ]

    def tier(self) -> Document | None:
        """See SlotSharing."""
        assignment, fence = self._group.assignment, self._map.fence
        if assignment is None or fence is None:
            return None
        machines = [
            {"name": name, "rules": machine.rules_digest}
            for name, machine in sorted(assignment.machines.items())
        ]
        return {"name": self._tier, "generation": fence.generation, "machines": machines}

    def _announce(self, cluster_id: str) -> Announcement:
        serving = [post for post in self._posts if not post.restarts.is_looping] or self._posts
        return Announcement(
            machine=self._machine,
            members=[self._ports.member(post.name, post.number, post.found) for post in serving],
            admin_url=self._admin_url,
            cluster_id=cluster_id,
            rules_digest=self._rules.digest,
            clock_s=time.time(),
            loads=self._loads.told,
            is_leaving=self._group.is_leaving,
        )

    def _follow_common(self, keys: frozenset[str]) -> None:
        """Follow what another machine has written that concerns all; called in a thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._common_came, keys)

    def _common_came(self, keys: Collection[str]) -> None:
        if self._state.is_open and self._rules.follow(keys, self._state.store):
            self._map.look()
        if not all(key.startswith(PRIVATE) for key in keys):
            for post in self._posts:
                post.tell("reread")

    def _show(self) -> None:
        self._map.show()

    def _alive(self) -> Mapping[str, Any]:
        newest = self._map.newest
        if newest is None:
            raise self._not_in_tier()
        return {"machine": self._machine, "generation": newest.generation}

    def _overview(self) -> Document:
        assignment = self._group.assignment
        if assignment is None or self._map.newest is None:
            raise self._not_in_tier()
        silent, unreached = self._peers.silent, self._reach.problems
        return tier_overview(self._tier, self._machine, assignment, silent, unreached)

    def _not_in_tier(self) -> ApiError:
        text = f"this machine is not in tier {self._tier} now"
        return ApiError(503, text, "ask another one; its log says why")

    def _generation(self) -> int:
        fence = self._map.fence
        return 0 if fence is None or self._map.newest is None else fence.generation

    def _count_silent(self) -> int:
        return sum(machine_of(name) in self._peers.silent for name in self._map.applied.members)

    def _count_slots(self, name: str) -> int:
        return len(self._map.applied.slots_of(name))

    def _url_at(self, port: int) -> str:
        tier, listener = self._config.tier, self._config.listeners[0]
        assert tier is not None
        host = self._config.named(tier.admin_host or listener.advertised_host)
        scheme = "http" if self._config.admin.tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
