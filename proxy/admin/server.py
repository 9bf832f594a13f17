"""The admin HTTP server: opens the port and puts the paths together."""

import ipaddress
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files

from aiohttp import web
from prometheus_client import CollectorRegistry

from proxy.admin.api import ApiRoutes
from proxy.admin.audit import AuditLog
from proxy.admin.client_documents import ClientDocuments
from proxy.admin.connection_documents import ConnectionDocuments, ConnectionSource, NoConnections
from proxy.admin.history import History
from proxy.admin.port.access import Access
from proxy.admin.port.admin_port import AdminPort, PortLimits, bind
from proxy.admin.port.guard import Guard
from proxy.admin.query_documents import Cached, Document, QueryDocuments, Reports
from proxy.admin.rates.observed_rates import ObservedRates
from proxy.admin.rates.suggestion_routes import SuggestionRoutes
from proxy.admin.replies import CONTENT_TYPE, answer, answer_in_pieces, scrape
from proxy.admin.slices import Slices
from proxy.admin.status import NotReady, RelayStatus, Status
from proxy.quota.manager import QuotaManager
from proxy.quota.rule_registry import RuleRegistry

DEFAULT_LIMITS = PortLimits()
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
    *("page", "clients", "unbounded", "queries", "partitions", "pipelines", "batches", "times"),
    *("ask", "rows", "section", "chart", "format", "changes", "connections"),
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

    `host` is loopback unless `access` has tokens; `port` 0 is any free one. Whoever made `history`
    takes its samples, whoever made `audit` closes it, and `clock_ms` is the monotonic time that
    `quotas` is fed with.
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
        rates: ObservedRates,
        audit: AuditLog,
        access: Access,
        limits: PortLimits = DEFAULT_LIMITS,
        tls: ssl.SSLContext | None = None,
        warning: NotReady = lambda: None,
        request_times: Callable[[], Sequence[Document]] = tuple,
        connections: ConnectionSource | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._metrics = metrics
        self._not_ready = not_ready
        self._warning = warning
        self._guard = Guard(access)
        self._limits = limits
        self._tls = tls
        self._slices = Slices()
        queries = QueryDocuments(reports, self._slices, clock_ms)
        source = connections or NoConnections()
        clients = ClientDocuments(
            quotas, rules, queries, self._slices, clock_ms, lambda: source.client_rates
        )
        pipelines = Cached(reports.pipelines, clock_ms).get
        status = Status(
            relay,
            not_ready,
            clients,
            history,
            queries,
            pipelines,
            audit,
            clock_ms(),
            warning,
            request_times,
        )
        listed = ConnectionDocuments(source, rules, self._slices)
        self._api = ApiRoutes(
            clients, rules, status, reports, queries, clock_ms, self._slices, audit, listed
        )
        self._suggestions = SuggestionRoutes(rates, quotas, self._slices)
        self._runner: web.AppRunner | None = None
        self._opened: AdminPort | None = None

    @property
    def port(self) -> int:
        """The port that is open, also when any free one was asked for. Only after `start`."""
        assert self._opened is not None
        return self._opened.addresses[0][1]

    def use_access(self, access: Access) -> None:
        """Replace who may do what, from the next request on."""
        self._guard.access = access

    def use_tls(self, tls: ssl.SSLContext | None) -> None:
        """Replace what new connections are shown; None stays None."""
        self._tls = tls
        if self._opened is not None:
            self._opened.tls = tls

    def addresses(self) -> list[tuple[str, int]]:
        """Return where its sockets are. Only after `start`."""
        return self._opened.addresses if self._opened else []

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Open the port, or accept on sockets that have it already. Raises AdminError."""
        if not self._guard.access.tokens and not _is_loopback(self._host):
            raise AdminError(f"admin.bind: {self._host} can be reached by others; set a token")
        opened = AdminPort(self._limits, self._tls)
        app = web.Application(middlewares=[opened.watch, self._guard.answer])
        app.add_routes(
            [
                web.get("/metrics", self._get_metrics),
                web.get("/healthz", self._get_healthz),
                web.get("/readyz", self._get_readyz),
                *self._api.routes(),
                *self._suggestions.routes(),
                *_page_routes(),
            ]
        )
        # A compressed body is taken as it is, and so refused: none is long enough to need it.
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_quiet,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            auto_decompress=False,
        )
        await runner.setup()
        assert runner.server is not None
        try:
            opened.serve(sockets or await bind(self._host, self._port), runner.server)
        except OSError as error:
            await runner.cleanup()
            address = f"{self._host}:{self._port}"
            raise AdminError(f"admin.bind: {address}: {error.strerror or error}") from None
        self._runner, self._opened = runner, opened

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._opened is not None:
            self._opened.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _get_metrics(self, _: web.Request) -> web.Response:
        body = await scrape(self._metrics, self._slices)
        return answer_in_pieces(body, {"Content-Type": CONTENT_TYPE})

    async def _get_healthz(self, _: web.Request) -> web.Response:
        return answer({"status": "up"})

    async def _get_readyz(self, _: web.Request) -> web.Response:
        reason, warning = self._not_ready(), self._warning()
        if reason is None:
            return answer({"status": "ready"} | ({"warning": warning} if warning else {}))
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
