"""The admin HTTP server of a member: its address, who may ask what there, all paths, the page."""

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from importlib.resources import files

from aiohttp import web

from proxy.admin.admin_parts import AdminParts
from proxy.admin.api import ApiRoutes
from proxy.admin.client_documents import CONNECTION
from proxy.admin.peers.fan_out_middleware import FanOutMiddleware
from proxy.admin.peers.merged_documents import MEMBER_ROW
from proxy.admin.peers.peer_routes import PeerRoutes
from proxy.admin.port.admin_port import AdminPort
from proxy.admin.port.guard import AccessRules, Guard, JsonErrorProtocol
from proxy.admin.query_documents import PARTITION
from proxy.config.models import AdminSection
from proxy.relay.ports import ListenerError

SHUTDOWN_TIMEOUT_S = 1.0  # for requests in progress when the server stops

_quiet = logging.getLogger("proxy.admin.http")
_quiet.disabled = True
"""For requests, and bytes that are none: the answer is 400, and the log stays ours."""

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_TYPES = {"css": "text/css", "svg": "image/svg+xml", "js": "text/javascript"}
_FOLDER = files("proxy.admin") / "page"

PAGE_FILES = {"/": ("index.html", "text/html")} | {
    f"/page/{file.name}": (file.name, _TYPES[suffix])
    for file in _FOLDER.iterdir()
    if (suffix := file.name.rpartition(".")[2]) in _TYPES
}
"""File and content type by path. A closed list: no path of a request reaches the file system."""

COLUMNS = {
    "connection": CONNECTION.columns,
    "member": MEMBER_ROW.columns,
    "partition": PARTITION.columns,
}
"""Of tables of the page, by the names that it has for them."""


def status_page_routes() -> list[web.RouteDef]:
    """Read the files of the status page once and return their routes, with a module of COLUMNS."""
    texts = {
        path: ((_FOLDER / name).read_text("utf-8"), content_type)
        for path, (name, content_type) in PAGE_FILES.items()
    }
    shown = {
        name: [(each.page, each.value, each.form, each.none) for each in columns if each.page]
        for name, columns in COLUMNS.items()
    }
    texts["/page/columns.js"] = f"export const COLUMNS = {json.dumps(shown)};\n", _TYPES["js"]
    return [web.get(path, partial(_give, *text)) for path, text in texts.items()]


async def _give(text: str, content_type: str, _: web.Request) -> web.Response:
    return web.Response(text=text, content_type=content_type, charset="utf-8", headers=PAGE_HEADERS)


class AdminServer:
    """Serves operators on one address: metrics, health, the API and the status page.

    Its address is loopback unless the access has tokens.

    With a tier it answers for all members, but for a request of one of them, which is for this
    one alone.
    """

    def __init__(
        self,
        section: AdminSection,
        parts: AdminParts,
        *,
        access: AccessRules,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._bind, self._parts = section.bind, parts
        self.guard = Guard(access, in_tier=parts.tier is not None)
        self.listening = AdminPort(section, tls)
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        """The first port. Only after `start`."""
        return self.listening.addresses[0][1]

    def application(self) -> web.Application:
        """Return a new application with all paths that this server answers."""
        app = web.Application(middlewares=[self.listening.watch, self.guard.answer])
        app.add_routes([*ApiRoutes(self._parts).routes(), *status_page_routes()])
        if (tier := self._parts.tier) is not None:
            peer_routes = PeerRoutes(tier, self._parts)
            app.add_routes(peer_routes.routes())
            app.middlewares.append(FanOutMiddleware(tier, self._parts).answer)
            app.on_shutdown.append(peer_routes.end)
            app.on_cleanup.append(lambda _: tier.client.close())
        return app

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Accept on bound sockets. Raises ListenerError."""
        if not self.guard.access.tokens and not self._bind.is_loopback:
            raise ListenerError(
                f"admin.bind: {self._bind.host} can be reached by others; set a token"
            )
        runner = web.AppRunner(self.application(), shutdown_timeout=SHUTDOWN_TIMEOUT_S)
        await runner.setup()
        assert runner.server is not None
        # A compressed body is taken as it is, and so refused: none is long enough to need it.
        self.listening.make_http = partial(
            JsonErrorProtocol,
            runner.server,
            loop=asyncio.get_running_loop(),
            access_log=_quiet,
            logger=_quiet,
            auto_decompress=False,
        )
        self.listening.addresses.clear()  # of an earlier start
        try:
            self.listening.serve(sockets)
        except OSError as error:
            await runner.cleanup()
            raise ListenerError(f"admin.bind: {self._bind.host}:{self.port}", error) from None
        self._runner = runner

    async def stop(self) -> None:
        """Close the port and every connection, those to other members too."""
        self.listening.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
