"""The slots of one machine by itself, which its workers share."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from metrics import MemberInstruments
from proxy.admin.gateway.member_client import MemberEndpoint
from proxy.admin.gateway.tier_routes import TierRoutes
from proxy.cluster.kafka_client import Bootstrap
from proxy.config import Config
from proxy.config.stores import StateHolder, open_store
from proxy.member import Work
from proxy.members.slot_map import MemberAddresses
from proxy.state import Document, Store
from proxy.state.watched import WATCH_KEY
from proxy.workers.key_rules import KeyRules, client_sets
from proxy.workers.machine_ports import MachinePorts
from proxy.workers.post import CALL_LIMIT_S, Post, looping
from proxy.workers.shared_map import SharedMap
from proxy.workers.slot_placement import SlotPlacement


class MachineSlots:
    """See SlotSharing. Make it inside an event loop."""

    not_ready: str | None = None
    warning: str | None = None
    tier_routes: TierRoutes | None = None

    def __init__(
        self,
        config: Config,
        way: Bootstrap,
        posts: Sequence[Post],
        ports: MachinePorts,
        metrics: MemberInstruments,
    ) -> None:
        self._config = config
        self._way = way
        self._posts = posts
        self._ports = ports
        self._placement = placement = SlotPlacement(posts, partial(looping, posts), metrics)
        self._shared = SharedMap(
            posts, KeyRules.of(config), self._addresses, placement.owners, placement.handed_over
        )
        self.take_loads = placement.take_loads
        self.documents = placement.documents
        self.owner_of_client = self._shared.owner_of_query
        self.changed = self._shared.share

    @property
    def first(self) -> str:
        """See SlotSharing."""
        return self._posts[0].name

    def open_store(self, holder: StateHolder | None) -> Store:
        """See SlotSharing."""
        return open_store(self._config, self._way, holder)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Mapping[str, Any]]:
        """See SlotSharing."""
        async with self._shared.begin() as shares:
            yield {
                "slot_map": shares.slot_map.document(),
                "keys": shares.key_rules.text(),
                "shown": None,
            }

    def machines(self) -> Sequence[MemberEndpoint]:
        """See SlotSharing."""
        return ()

    def tier(self) -> Document | None:
        """See SlotSharing."""
        return None

    def works(self) -> Iterable[Work]:
        """See SlotSharing."""
        return (partial(self._placement.watch, self._shared.share),)

    async def join(self, admin_port: int) -> None:
        """See SlotSharing."""

    async def leave(self, *, for_successor: bool) -> None:
        """See SlotSharing."""
        if not for_successor:
            await self._shared.stop()

    def watch_key(self) -> str | None:
        """See SlotSharing."""
        return WATCH_KEY

    def serves_again(self) -> None:
        """See SlotSharing."""

    def use_rules(self, rules: str) -> None:
        """See SlotSharing."""
        self._shared.use_keys(KeyRules(rules, self._shared.key_rules.together))

    def use_config(self, config: Config) -> None:
        """See SlotSharing."""
        # The first worker says by itself which rules are in force then.
        self._shared.use_keys(KeyRules(self._shared.key_rules.rules, client_sets(config)))

    async def pass_visits(self, owner: str, visits: list[Any]) -> Any:
        """See SlotSharing."""
        return await self._posts[int(owner)].call("visited", CALL_LIMIT_S, visits=visits)

    def _addresses(self, post: Post) -> MemberAddresses:
        return self._ports.member(post.name, post.number, post.found)
