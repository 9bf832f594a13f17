"""What every admin server has: an address that it is asked at, and who may ask what there."""

import ipaddress
import logging
import socket
import ssl
from collections.abc import Sequence

from aiohttp import web

from proxy.admin.port.access import Access
from proxy.admin.port.admin_port import AdminPort, PortLimits, bind
from proxy.admin.port.guard import Guard

SHUTDOWN_TIMEOUT_S = 1.0  # for requests in progress when the server stops

_quiet = logging.getLogger("proxy.admin.http")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False
"""For what aiohttp says of bytes that are no HTTP: the answer is 400, and the log stays ours."""


class AdminError(Exception):
    """The admin port could not be opened."""


class AdminSite:
    """Serves the routes of a subclass on a TCP port.

    `host` is loopback unless the access has tokens; `port` 0 is any free one.
    """

    def __init__(
        self, host: str, port: int, guard: Guard, limits: PortLimits, tls: ssl.SSLContext | None
    ) -> None:
        self._host = host
        self._port = port
        self._guard = guard
        self._limits = limits
        self._tls = tls
        self._runner: web.AppRunner | None = None
        self._opened: AdminPort | None = None

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        raise NotImplementedError

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
        app.add_routes(self.routes())
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

    def accept_at(self, sockets: Sequence[socket.socket]) -> None:
        """Accept on further sockets, which others may accept on, too. Only after `start`."""
        assert self._opened is not None
        assert self._runner is not None
        assert self._runner.server is not None
        self._opened.serve(sockets, self._runner.server)

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._opened is not None:
            self._opened.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
