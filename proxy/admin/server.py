"""The admin HTTP server of one process: puts the paths together."""

import ssl
from collections.abc import Callable, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry

from proxy.admin.api import ApiRoutes
from proxy.admin.audit import AuditLog
from proxy.admin.changes import RefusedReports
from proxy.admin.client_documents import ClientDocuments
from proxy.admin.connection_documents import ConnectionDocuments, ConnectionSource
from proxy.admin.history import History
from proxy.admin.left_changes import LeftChangeRoutes
from proxy.admin.page_files import PAGE_FILES, page_routes
from proxy.admin.port.access import Access
from proxy.admin.port.admin_port import DEFAULT_LIMITS, PortLimits
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
from proxy.slices import Slices
from proxy.state import Document

__all__ = ["PAGE_FILES", "AdminError", "AdminServer"]


class AdminServer(AdminSite):
    """Serves operators on one address: metrics, health, the API and the status page.

    Each sample of `metrics` is shown with the name of the `member`. Whoever made `history` takes
    its samples, whoever made `audit` closes it, and `clock_ms` is the monotonic time that `quotas`
    is fed with.
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
    ) -> None:
        super().__init__(host, port, access, limits, tls)
        self._metrics, self._member = metrics, member
        self._not_ready = not_ready
        self._warning = warning
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
        self._left_changes = LeftChangeRoutes(audit)

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        return [
            web.get("/metrics", self._get_metrics),
            web.get("/healthz", self._get_healthz),
            web.get("/readyz", self._get_readyz),
            *self._api.routes(),
            *self._suggestions.routes(),
            *page_routes(),
        ]

    def member_routes(self) -> list[web.RouteDef]:
        """Return the handlers that only a gateway may ask."""
        return [*self._left_changes.routes(), *self._suggestions.member_routes()]

    async def _get_metrics(self, _: web.Request) -> web.Response:
        body = await scrape(self._metrics, self._member, self._slices)
        return answer_in_pieces(body, {"Content-Type": CONTENT_TYPE})

    async def _get_healthz(self, _: web.Request) -> web.Response:
        return answer({"status": "up"})

    async def _get_readyz(self, _: web.Request) -> web.Response:
        return readiness_answer(self._not_ready(), self._warning())
