"""The admin HTTP server of a member: puts the paths together."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry

from proxy.admin.api import ApiRoutes
from proxy.admin.audit import AuditLog
from proxy.admin.changes import RefusedReports
from proxy.admin.client_documents import ClientDocuments
from proxy.admin.connection_documents import ConnectionDocuments, ConnectionSource
from proxy.admin.history import History
from proxy.admin.page_files import PAGE_FILES, page_routes
from proxy.admin.peers.machine_answers import MachineAnswers
from proxy.admin.peers.member_client import MEMBER_TIMEOUT_S, MemberClient
from proxy.admin.peers.member_requests import MemberRequests
from proxy.admin.peers.merged_answers import MergedAnswers
from proxy.admin.peers.routed_requests import RoutedRequests
from proxy.admin.peers.tier_protocol import Tier
from proxy.admin.peers.tier_routes import TierRoutes
from proxy.admin.port.access import Access
from proxy.admin.port.admin_port import DEFAULT_LIMITS, PortLimits
from proxy.admin.port.guard import Guard
from proxy.admin.query_documents import QueryDocuments, Reports
from proxy.admin.rates.observed_rates import ObservedRates
from proxy.admin.rates.suggestion_routes import SuggestionRoutes
from proxy.admin.replies import (
    CONTENT_TYPE,
    answer,
    answer_in_pieces,
    readiness_answer,
    scrape,
)
from proxy.admin.site import AdminError, AdminSite
from proxy.admin.status import NotReady, RelayStatus, Status
from proxy.quota.manager import QuotaManager
from proxy.quota.rule_registry import RuleRegistry
from proxy.slices import LONG_ANSWERS, Slices
from proxy.state import Document

__all__ = ["PAGE_FILES", "AdminError", "AdminServer"]


class AdminServer(AdminSite):
    """Serves operators on one address: metrics, health, the API and the status page.

    Each sample of `metrics` is shown with the name of the `member`. Whoever made `history` takes
    its samples, whoever made `audit` closes it, and `clock_ms` is the monotonic time that `quotas`
    is fed with.

    With a `tier` it answers for all members, but for a request of one of them, which is for this
    one alone. `client_of` gives the client id that a query's name stands for, and `timeout_s` is
    for the answer of another member.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        metrics: CollectorRegistry,
        member: str,
        not_ready: NotReady,
        quotas: QuotaManager,
        rules: RuleRegistry,
        relay: Callable[[], RelayStatus],
        history: History,
        clock_ms: Callable[[], float],
        reports: Reports,
        rates: ObservedRates,
        audit: AuditLog,
        access: Access,
        connections: ConnectionSource,
        limits: PortLimits = DEFAULT_LIMITS,
        tls: ssl.SSLContext | None = None,
        warning: NotReady = lambda: None,
        request_times: Callable[[], Sequence[Document]] = tuple,
        tier: Tier | None = None,
        client_of: Callable[[str], str] = lambda name: name,
        timeout_s: float = MEMBER_TIMEOUT_S,
    ) -> None:
        super().__init__(host, port, Guard(access, in_tier=tier is not None), limits, tls)
        self._metrics, self._member = metrics, member
        self._client, self._client_of = MemberClient(timeout_s), client_of
        self._tier, self._tier_routes = tier, None if tier is None else TierRoutes(tier, audit)
        if tier is not None:
            not_ready = _joined(lambda: tier.not_ready, not_ready)
            warning = _joined(lambda: tier.warning, warning)
        self._not_ready, self._warning = not_ready, warning
        self._slices = Slices()
        queries = QueryDocuments(reports, self._slices, clock_ms)
        clients = ClientDocuments(
            quotas, rules, queries, self._slices, clock_ms, lambda: connections.client_rates
        )
        status = Status(
            relay,
            not_ready,
            clients,
            history,
            queries,
            audit,
            clock_ms(),
            warning,
            request_times,
            dict if tier is None else tier.slots,
        )
        listed = ConnectionDocuments(connections, rules, self._slices)
        self._api = ApiRoutes(
            clients,
            rules,
            status,
            reports,
            queries,
            clock_ms,
            self._slices,
            audit,
            listed,
            RefusedReports(audit),
        )
        self._suggestions = SuggestionRoutes(rates, quotas, self._slices)

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        own = [
            web.get("/metrics", self._get_metrics),
            web.get("/healthz", self._get_healthz),
            web.get("/readyz", self._get_readyz),
            *self._api.routes(),
            *self._suggestions.routes(),
            *page_routes(),
        ]
        if self._tier is None or self._tier_routes is None:
            return own
        members, is_scoped = MemberRequests(self._tier, self._client), self._guard.is_scoped
        long_answers = asyncio.Semaphore(LONG_ANSWERS)
        for_all = {
            (route.method, route.path): route.handler
            for routes in (
                MergedAnswers(members, long_answers),
                RoutedRequests(members, self._client_of),
                MachineAnswers(members, long_answers),
            )
            for route in routes.routes()
        }
        scoped = [*self._tier_routes.scoped_routes(), *self._suggestions.member_routes()]

        def is_own(request: web.Request) -> bool:
            return is_scoped(request) or members.is_alone

        return [
            *(
                _when(is_own, route, for_all.get((route.method, route.path), route.handler))
                for route in own
            ),
            *(_when(is_scoped, route, _not_found) for route in scoped),
            *self._tier_routes.routes(),
        ]

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Open the port, or accept on sockets that have it already. Raises AdminError."""
        if self._tier_routes is not None:
            self._tier_routes.begin()
        await super().start(sockets)

    async def stop(self) -> None:
        """Close the port and every connection, those to other members too."""
        if self._tier_routes is not None:
            self._tier_routes.end()
        await super().stop()
        await self._client.close()

    async def _get_metrics(self, _: web.Request) -> web.Response:
        body = await scrape(self._metrics, self._member, self._slices)
        return answer_in_pieces(body, {"Content-Type": CONTENT_TYPE})

    async def _get_healthz(self, _: web.Request) -> web.Response:
        return answer({"status": "up"})

    async def _get_readyz(self, _: web.Request) -> web.Response:
        return readiness_answer(self._not_ready(), self._warning())


def _when(
    is_for: Callable[[web.Request], bool], route: web.RouteDef, other: Handler
) -> web.RouteDef:
    """Return a route for the requests that it is for; `other` answers the rest."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await (route.handler if is_for(request) else other)(request)

    return web.route(route.method, route.path, handle, **route.kwargs)


async def _not_found(_: web.Request) -> web.StreamResponse:
    raise web.HTTPNotFound


def _joined(*problems: NotReady) -> NotReady:
    """Return what gives all problems that there are as one text."""
    return lambda: "; ".join(text for each in problems if (text := each())) or None
