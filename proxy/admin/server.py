"""The admin HTTP server: opens the port and puts the paths together."""

import ipaddress
import logging
from collections.abc import Awaitable, Callable
from importlib.resources import files

from aiohttp import web
from prometheus_client import CollectorRegistry

from proxy.admin.api import ApiRoutes
from proxy.admin.client_documents import ClientDocuments
from proxy.admin.connection_documents import ConnectionDocuments, ConnectionSource, NoConnections
from proxy.admin.guard import guard
from proxy.admin.history import History
from proxy.admin.query_documents import Cached, QueryDocuments, Reports
from proxy.admin.replies import CONTENT_TYPE, answer, scrape
from proxy.admin.slices import Slices
from proxy.admin.status import NotReady, RelayStatus, Status
from proxy.quota.manager import QuotaManager
from proxy.quota.rule_registry import RuleRegistry

SHUTDOWN_TIMEOUT_S = 1.0  # for requests in progress when the server stops

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_SCRIPTS = (
    *("page", "clients", "unbounded", "queries", "partitions", "pipelines", "batches"),
    "connections",
    *("ask", "rows", "section", "chart", "format"),
)

PAGE_FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/page/{name}.js": (f"{name}.js", "text/javascript") for name in _SCRIPTS},
}
"""File and content type by path. A closed list: no path of a request reaches the file system."""

_quiet = logging.getLogger("proxy.admin.http")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False
"""For what aiohttp says of bytes that are no HTTP: the answer is 400, and the log stays ours."""


class AdminError(Exception):
    """The admin port could not be opened."""


class AdminServer:
    """Serves operators on one address: metrics, health, the API and the status page.

    `host` is loopback unless there is a `token`, which a request must carry to change something;
    `port` 0 is any free one. Whoever made `history` takes its samples, and `clock_ms` is the
    monotonic time that `quotas` is fed with.
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
        connections: ConnectionSource | None = None,
        token: str | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._metrics = metrics
        self._not_ready = not_ready
        self._token = token
        self._slices = Slices()
        queries = QueryDocuments(reports, self._slices, clock_ms)
        source = connections or NoConnections()
        clients = ClientDocuments(
            quotas, rules, queries, self._slices, clock_ms, lambda: source.client_rates
        )
        pipelines = Cached(reports.pipelines, clock_ms).get
        status = Status(relay, not_ready, clients, history, queries, pipelines, clock_ms())
        listed = ConnectionDocuments(source, rules, self._slices)
        parts = (status, reports, queries, clock_ms, self._slices, listed)
        self._api = ApiRoutes(clients, rules, *parts)
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
        app = web.Application(middlewares=[guard(self._token)])
        app.add_routes(
            [
                web.get("/metrics", self._get_metrics),
                web.get("/healthz", self._get_healthz),
                web.get("/readyz", self._get_readyz),
                *self._api.routes(),
                *_page_routes(),
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
            address = f"{self._host}:{self._port}"
            raise AdminError(f"admin.bind: {address}: {error.strerror or error}") from None

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


def _page_routes() -> list[web.RouteDef]:
    """Read the files of the status page once and return their routes."""
    folder = files("proxy.admin") / "page"
    return [
        web.get(path, _file((folder / name).read_text("utf-8"), content_type))
        for path, (name, content_type) in PAGE_FILES.items()
    ]


def _file(text: str, content_type: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def give(_: web.Request) -> web.Response:
        return web.Response(
            text=text, content_type=content_type, charset="utf-8", headers=PAGE_HEADERS
        )

    return give
