"""The admin HTTP server: opens the port and puts the paths together."""

import ipaddress
import logging
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry

from proxy.admin.api import ApiRoutes
from proxy.admin.client_documents import ClientDocuments
from proxy.admin.guard import Guard
from proxy.admin.history import History
from proxy.admin.pages import page_routes
from proxy.admin.pipeline_documents import PipelineDocuments
from proxy.admin.query_documents import QueryDocuments, Reports
from proxy.admin.replies import answer
from proxy.admin.scrape import CONTENT_TYPE, scrape
from proxy.admin.slices import Slices
from proxy.admin.status import NotReady, RelayStatus, Status
from proxy.quota.manager import QuotaManager
from proxy.quota.rule_registry import RuleRegistry

SHUTDOWN_TIMEOUT_S = 1.0
"""How long a request in progress may go on when the server stops."""


_quiet = logging.getLogger("proxy.admin.http")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False
"""For what aiohttp says of bytes that are no HTTP: the answer is 400, and the log stays ours."""


class AdminError(Exception):
    """The admin port could not be opened."""


class AdminServer:
    """Serves operators on one address: metrics, health, the API and the status page.

    Args:
        host: to bind; without a token only loopback.
        port: to bind; 0 for any free one.
        metrics: what `/metrics` shows.
        not_ready: says whether clients can be served.
        quotas: whose clients are shown.
        rules: where overrides go.
        relay: gives the state of listeners, brokers and the like.
        history: samples for the charts; whoever made it takes them.
        clock_ms: the monotonic time that `quotas` is fed with.
        reports: takes in the reports of queries, and knows their progress and the pipelines.
        token: the bearer token that a request must carry to change something, or None.

    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        metrics: CollectorRegistry,
        not_ready: NotReady,
        quotas: QuotaManager,
        rules: RuleRegistry,
        relay: Callable[[], RelayStatus],
        history: History,
        clock_ms: Callable[[], float],
        reports: Reports,
        token: str | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._metrics = metrics
        self._not_ready = not_ready
        self._token = token
        queries = QueryDocuments(reports, clock_ms)
        pipelines = PipelineDocuments(reports, clock_ms)
        self._slices = Slices()
        clients = ClientDocuments(quotas, rules, queries, self._slices, clock_ms)
        status = Status(
            relay, not_ready, clients, history, queries, pipelines, started_ms=clock_ms()
        )
        self._api = ApiRoutes(
            clients,
            rules,
            status,
            reports,
            queries,
            pipelines,
            clock_ms=clock_ms,
            slices=self._slices,
        )
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        """The port that is open, also when any free one was asked for. Only after `start`."""
        assert self._runner is not None
        return int(self._runner.addresses[0][1])

    async def start(self) -> None:
        """Open the port. Raises AdminError."""
        if self._token is None and not _is_loopback(self._host):
            raise AdminError(f"admin.bind: {self._host} can be reached by others; set a token")
        app = web.Application(middlewares=[Guard(self._token).middleware])
        app.add_routes(
            [
                web.get("/metrics", self._get_metrics),
                web.get("/healthz", self._get_healthz),
                web.get("/readyz", self._get_readyz),
                *self._api.routes(),
                *page_routes(),
            ]
        )
        # A compressed body is taken as it is, and so refused: none is long enough to need it.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_quiet,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            auto_decompress=False,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise AdminError(
                f"admin.bind: {self._host}:{self._port}: {error.strerror or error}"
            ) from None

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _get_metrics(self, _: web.Request) -> web.Response:
        body = await scrape(self._metrics, self._slices)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def _get_healthz(self, _: web.Request) -> web.Response:
        return answer({"status": "up"})

    async def _get_readyz(self, _: web.Request) -> web.Response:
        reason = self._not_ready()
        if reason is None:
            return answer({"status": "ready"})
        return answer({"status": "not ready", "reason": reason}, 503)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
