"""Passes on between the machines of a tier what clients had where they do not belong."""

import asyncio
from collections.abc import Sequence
from typing import Any

from proxy.admin.gateway.tier_routes import VisitRows
from proxy.members.member_names import machine_of
from proxy.workers.followed_map import FollowedMap
from proxy.workers.peers import Peers
from proxy.workers.post import CALL_LIMIT_S, Post
from proxy.workers.tier_rules import TierRules


class TierVisits:
    """What a machine's clients had elsewhere, and what those of others had here."""

    def __init__(
        self, posts: Sequence[Post], followed: FollowedMap, rules: TierRules, peers: Peers
    ) -> None:
        self._posts, self._map, self._rules, self._peers = posts, followed, rules, peers

    async def pass_on(self, owner: str, visits: list[Any]) -> Any:
        """See `SlotSharing.pass_visits`."""
        for post in self._posts:
            if post.name == owner:
                return await post.call("visited", CALL_LIMIT_S, visits=visits)
        return await self._peers.tell(machine_of(owner), visits)

    async def take(self, rows: VisitRows) -> VisitRows:
        """Have the workers charge what their clients had at another machine."""
        shown, by_owner = self._map.shown(), dict[str, list[Any]]()
        for row in rows:
            owner = shown.owners[self._rules.slot_of_row(row)]
            if owner is not None:
                by_owner.setdefault(owner, []).append(row)
        own = [post for post in self._posts if post.name in by_owner]
        calls = (post.call("visited", CALL_LIMIT_S, visits=by_owner[post.name]) for post in own)
        told = await asyncio.gather(*calls, return_exceptions=True)
        return [row for each in told if isinstance(each, list) for row in each]
