"""The admin HTTP server of a member: its address, who may ask what there, and all paths."""

import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

from aiohttp import web

from proxy.admin.admin_parts import AdminParts
from proxy.admin.api import ApiRoutes
from proxy.admin.page_files import page_routes
from proxy.admin.peers.members import MEMBER_TIMEOUT_S, Members
from proxy.admin.peers.tier_answers import TierAnswers
from proxy.admin.peers.tier_routes import TierRoutes
from proxy.admin.port.access import Access
from proxy.admin.port.admin_port import DEFAULT_LIMITS, AdminPort, PortLimits, bind
from proxy.admin.port.guard import Guard

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
        app.add_routes([*ApiRoutes(self._parts).routes(), *page_routes()])
        if (tier := self._parts.tier) is not None:
            members = self._members = Members(tier, self._timeout_s)
            tier_routes = self._tier_routes = TierRoutes(tier, self._parts)
            app.add_routes(tier_routes.routes())
            app.middlewares.append(TierAnswers(members, self._parts, self._client_of).answer)
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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
