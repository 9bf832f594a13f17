"""The admin HTTP server of a member: its address, who may ask what there, and all paths."""

import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler

from proxy.admin.admin_parts import AdminParts
from proxy.admin.api import ApiRoutes
from proxy.admin.page_files import page_routes
from proxy.admin.peers.members import MEMBER_TIMEOUT_S, Members
from proxy.admin.peers.tier_answers import TierAnswers
from proxy.admin.peers.tier_routes import TierRoutes
from proxy.admin.port.access import Access
from proxy.admin.port.admin_port import DEFAULT_LIMITS, AdminPort, PortLimits, bind
from proxy.admin.port.guard import Guard
from proxy.admin.rates.suggestions import SuggestionRoutes

OF_MEMBERS = "/member/"  # begins what members alone may ask each other
SHUTDOWN_TIMEOUT_S = 1.0  # for requests in progress when the server stops

_quiet = logging.getLogger("proxy.admin.http")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False
"""For what aiohttp says of bytes that are no HTTP: the answer is 400, and the log stays ours."""


class AdminError(Exception):
    """The admin port could not be opened."""


class AdminServer:
    """Serves operators on one address: metrics, health, the API and the status page.

    `host` is loopback unless the access has tokens; `port` 0 is any free one.

    With a tier it answers for all members, but for a request of one of them, which is for this
    one alone. `client_of` gives the client id that a query's name stands for, and `timeout_s` is
    for the answer of another member.
    """

    def __init__(
        self,
        host: str,
        port: int,
        parts: AdminParts,
        *,
        access: Access,
        limits: PortLimits = DEFAULT_LIMITS,
        tls: ssl.SSLContext | None = None,
        client_of: Callable[[str], str] = lambda name: name,
        timeout_s: float = MEMBER_TIMEOUT_S,
    ) -> None:
        self._host, self._port, self._limits, self._tls = host, port, limits, tls
        self._parts, self._client_of, self._timeout_s = parts, client_of, timeout_s
        self._guard = Guard(access, in_tier=parts.tier is not None)
        self._api = ApiRoutes(parts)
        self._members: Members | None = None
        self._tier_routes: TierRoutes | None = None
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
        app.add_routes(self._routes())
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
        opened.make_http = runner.server
        try:
            opened.serve(sockets or await bind(self._host, self._port))
        except OSError as error:
            await runner.cleanup()
            address = f"{self._host}:{self._port}"
            raise AdminError(f"admin.bind: {address}: {error.strerror or error}") from None
        self._runner, self._opened = runner, opened

    def accept_at(self, sockets: Sequence[socket.socket]) -> None:
        """Accept on further sockets, which others may accept on, too. Only after `start`."""
        assert self._opened is not None
        self._opened.serve(sockets)

    async def stop(self) -> None:
        """Close the port and every connection, those to other members too."""
        if self._tier_routes is not None:
            self._tier_routes.end()
        if self._opened is not None:
            self._opened.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        if self._members is not None:
            await self._members.close()

    def _routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        parts, is_scoped = self._parts, self._guard.is_scoped
        suggestions = SuggestionRoutes(parts.rates, parts.quotas, parts.slices)
        own = [*self._api.routes(), *suggestions.routes(), *page_routes()]
        if parts.tier is None:
            return [route for route in own if not route.path.startswith(OF_MEMBERS)]
        members = self._members = Members(parts.tier, self._timeout_s)
        tier_routes = self._tier_routes = TierRoutes(parts.tier, parts.audit)
        answers = TierAnswers(members, suggestions, self._client_of).routes()
        for_all = {(route.method, route.path): route.handler for route in answers}

        def is_own(request: web.Request) -> bool:
            return is_scoped(request) or members.is_alone

        def of_tier(route: web.RouteDef) -> web.RouteDef:
            if route.path.startswith(OF_MEMBERS):
                return _when(is_scoped, route, _not_found)
            other = for_all.get((route.method, route.path))
            return route if other is None else _when(is_own, route, other)

        return [of_tier(route) for route in (*own, *tier_routes.routes())]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _when(
    is_for: Callable[[web.Request], bool], route: web.RouteDef, other: Handler
) -> web.RouteDef:
    """Return a route for the requests that it is for; `other` answers the rest."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await (route.handler if is_for(request) else other)(request)

    return web.route(route.method, route.path, handle, **route.kwargs)


async def _not_found(_: web.Request) -> web.StreamResponse:
    raise web.HTTPNotFound
