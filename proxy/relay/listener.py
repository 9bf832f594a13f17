"""Listening sockets: the bootstrap port of a listener and one port for each broker."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from structlog import get_logger

from proxy.relay.ports import BACKLOG, ListenerError, ReusePortSockets
from proxy.relay.tls import sni_pattern

ACCEPTS_PER_TURN = 16
"""Connections taken from one socket before others run."""

OUT_OF_FILES_PAUSE_S = 0.5
"""Pause of accepting when the process has no descriptor left."""

NODE_ID: Final = "{node_id}"
"""Stands for a broker's number in a server name pattern."""

SNI_PORT: Final = -1
"""Stands in the place of a broker for a port of one's own that all brokers share by their names."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ListenerSettings:
    """Where one listener is and what it tells its clients."""

    name: str
    host: str
    advertised_host: str
    takes_free_ports: bool
    """Whether a broker gets any free port when a client asks for it first."""
    tls: ssl.SSLContext | None = None
    sni: str | None = None
    """Host name of a broker with `{node_id}` in it; all brokers share the bootstrap port, or the
    one that was handed over as SNI_PORT."""


@dataclass(frozen=True, slots=True)
class ClientOrigin:
    """Where a client came in."""

    listener: "Listener"
    ip: str
    """Of the client."""
    node_id: int | None
    """The broker whose port it came to, or whose name it asked for; None: bootstrap."""
    port: int = 0
    """Of the client; 0: not known."""

    @property
    def name(self) -> str:
        """The listener's name."""
        return self.listener.settings.name

    @property
    def about(self) -> dict[str, str]:
        """For log lines."""
        return {"peer": self.ip, "listener": self.name}


@dataclass(slots=True)
class Listener:
    """The open sockets of one listener."""

    settings: ListenerSettings
    loop: asyncio.AbstractEventLoop
    accepted: Callable[[socket.socket, ClientOrigin], None]
    out_of_files: Callable[[str, OSError], None]
    """Called with the listener's name when accepting pauses."""
    _sockets: dict[int | None, socket.socket] = field(default_factory=dict)
    open_ports: dict[int | None, int] = field(default_factory=dict)
    """Of all sockets by their brokers, None for the bootstrap port. Also of those that are closed:
    answers that go out during a drain name them."""
    without_port: set[int] = field(default_factory=set)
    """The brokers that had no port here when clients asked for them."""
    _accepting: bool = False
    ports: ReusePortSockets = field(default_factory=ReusePortSockets)
    """Opens those of brokers that clients ask for."""

    def use(self, sockets: Mapping[int | None, socket.socket]) -> None:
        """Take sockets by their brokers, None for the bootstrap port, and SNI_PORT.

        What connects to them waits until `accept`.
        """
        for node_id, sock in sockets.items():
            self._sockets[node_id] = sock
            self.open_ports[node_id] = int(sock.getsockname()[1])
            if self._accepting:
                self._watch(node_id)

    def accept(self) -> None:
        """Begin to accept."""
        self._accepting = True
        for node_id in self._sockets:
            self._watch(node_id)

    @property
    def bootstrap_port(self) -> int:
        """Where clients come in; 0 before `use`."""
        return self.open_ports.get(None, 0)

    def close(self) -> None:
        """Stop accepting. Who is connected already is taken: closing would reset the connection."""
        while self._sockets:
            node_id, sock = self._sockets.popitem()
            self.loop.remove_reader(sock.fileno())
            if self._accepting:
                self._accept(node_id, sock, at_most=BACKLOG)
            sock.close()

    def use_tls(self, context: ssl.SSLContext) -> None:
        """Do the handshakes of connections that come from now on with another certificate."""
        self.settings = replace(self.settings, tls=context)

    def address_of(self, node_id: int) -> tuple[str, int] | None:
        """Return what clients are told for a broker; None if it has no port here."""
        settings = self.settings
        if settings.sni is not None:
            of_all = self.open_ports.get(SNI_PORT, self.bootstrap_port)
            return settings.sni.replace(NODE_ID, str(node_id)), of_all
        if node_id not in self.open_ports and settings.takes_free_ports and self._sockets:
            try:
                (sock,) = self.ports.open(settings.name, settings.host, 0)
            except ListenerError as error:
                self._leave_out(node_id, error=error.what, fix="raise the limit of open files")
                return None
            self.use({node_id: sock})
            self.without_port.discard(node_id)
        if (port := self.open_ports.get(node_id)) is not None:
            return settings.advertised_host, port
        if self._sockets:
            change = f"reach first port + {node_id}" if node_id >= 0 else "be 0, for any free ports"
            self._leave_out(node_id, fix=f"make broker_ports {change}")
        return None

    def _leave_out(self, node_id: int, **about: str) -> None:
        """Record that a broker has no port; the log says so once."""
        if node_id not in self.without_port:
            self.without_port.add(node_id)
            listener, text = self.settings.name, "broker left out: it has no port"
            _log.error(text, node_id=node_id, listener=listener, **about)

    def node_of(self, server_name: str | None) -> int | None:
        """Return the broker that a TLS server name stands for; None: bootstrap."""
        sni = self.settings.sni
        match = sni and sni_pattern(sni).fullmatch(server_name or "")
        return int(match["node_id"]) if match else None

    def _watch(self, node_id: int | None) -> None:
        """Accept connections of a socket that is still open."""
        sock = self._sockets.get(node_id)
        if sock is not None:
            self.loop.add_reader(sock.fileno(), self._accept, node_id, sock)

    def _accept(
        self, node_id: int | None, sock: socket.socket, at_most: int = ACCEPTS_PER_TURN
    ) -> None:
        for _ in range(at_most):
            try:
                client, address = sock.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                self.out_of_files(self.settings.name, error)
                self.loop.remove_reader(sock.fileno())
                self.loop.call_later(OUT_OF_FILES_PAUSE_S, self._watch, node_id)
                return
            came_to = None if node_id == SNI_PORT else node_id
            self.accepted(client, ClientOrigin(self, address[0], came_to, address[1]))
