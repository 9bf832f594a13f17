"""Answers for all members of a tier, whichever of them is asked."""

import asyncio
from collections.abc import Callable

from aiohttp import web

from proxy.admin.peers.machine_answers import MachineAnswers
from proxy.admin.peers.member_client import MemberClient
from proxy.admin.peers.member_requests import MemberRequests
from proxy.admin.peers.merged_answers import MergedAnswers
from proxy.admin.peers.routed_requests import RoutedRequests
from proxy.admin.peers.tier_protocol import Tier
from proxy.admin.peers.tier_routes import TierRoutes
from proxy.slices import LONG_ANSWERS


class PeerAnswers:
    """The handlers of one member; `timeout_s` is for the answer of another one.

    `client_of` gives the client id that a query's name stands for.
    """

    def __init__(self, tier: Tier, client_of: Callable[[str], str], timeout_s: float) -> None:
        self._tier = tier
        self._client = MemberClient(timeout_s)
        members, long_answers = MemberRequests(tier, self._client), asyncio.Semaphore(LONG_ANSWERS)
        self._parts = (
            MergedAnswers(members, long_answers),
            RoutedRequests(members, client_of),
            MachineAnswers(members, long_answers),
        )
        self.tier_routes = TierRoutes(tier)
        """What members ask each other."""

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers of paths that a member has by itself, for all members instead."""
        return [route for part in self._parts for route in part.routes()]

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody else, nor a tier that is known as such."""
        return len(self._tier.members()) < 2 and self._tier.document() is None  # noqa: PLR2004

    async def close(self) -> None:
        """Close the connections to the others."""
        await self._client.close()
