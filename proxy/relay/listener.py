"""Listening sockets: the bootstrap port of a listener and one port for each broker."""

import asyncio
import re
import socket
import ssl
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from struct import Struct

from structlog import get_logger

from proxy.cluster.upstream import Address
from proxy.relay.take_over import share
from proxy.relay.tls import sni_pattern

ACCEPTS_PER_TURN = 16
"""Connections taken from one socket before others run."""

OUT_OF_FILES_PAUSE_S = 0.5
"""Pause of accepting when the process has no descriptor left."""

BACKLOG = 1024

_SO_ATTACH_REUSEPORT_CBPF = 51  # Linux; the socket module has no name for it
_BPF_RETURN = 0x06  # classic BPF's `ret #k`; here it returns the chosen socket's index
_FIRST, _NEWCOMER = 0, 1  # index of the socket of the process that was there, and of the second
_INSTRUCTION = Struct("HBBI")  # Linux's sock_filter: code, two jumps, constant
_PROGRAM = Struct("HP")  # Linux's sock_fprog: how many instructions, and where they are

_log = get_logger(__name__)


class ListenerError(Exception):
    """A port could not be opened."""


@dataclass(frozen=True, slots=True)
class ListenerSettings:
    """Where one listener is and what it tells its clients."""

    name: str
    host: str
    port: int
    """Bootstrap port; 0: any free one."""
    advertised_host: str
    broker_ports: tuple[int, int] | None
    """First and last port for brokers; (0, 0): any free ones; None with `sni`."""
    tls: ssl.SSLContext | None = None
    sni: str | None = None
    """Host name of a broker with `{node_id}` in it; all brokers share the bootstrap port."""


@dataclass(frozen=True, slots=True)
class Origin:
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
    accepted: Callable[[socket.socket, Origin], None]
    out_of_files: Callable[[], None]
    bootstrap_port: int = 0
    _sockets: dict[int | None, socket.socket] = field(default_factory=dict)
    _ports: dict[int | None, int] = field(default_factory=dict)
    """Of all sockets, also when they are closed: answers that go out during a drain name them."""
    _pattern: re.Pattern[str] | None = None
    _no_port_for: set[int] = field(default_factory=set)
    _accepting: bool = False

    def open(self, beside: Collection[Address] | None = None) -> None:
        """Open the bootstrap port and all broker ports. Raises ListenerError.

        Connections wait until `accept`. `beside` are the addresses of a process that is replaced:
        it shares its ports, and gets all connections until `take_over`.
        """
        settings = self.settings
        self.bootstrap_port = self._listen(None, settings.port, beside)
        if settings.sni is not None:
            self._pattern = sni_pattern(settings.sni)
        elif settings.broker_ports is not None and settings.broker_ports != (0, 0):
            first, last = settings.broker_ports
            for port in range(first, last + 1):
                self._listen(port - first, port, beside)

    def take_over(self) -> None:
        """Have new connections come here, where they wait until `accept`. Raises ListenerError.

        If this process dies, they reach the one beside it again.
        """
        for node_id, sock in self._sockets.items():
            try:
                sock.listen(BACKLOG)
                _steer(sock, _NEWCOMER)
            except OSError as error:
                raise self._failure(self._ports[node_id], error) from None

    def take_back(self) -> None:
        """Have new connections come here again, and none to the one that took them over."""
        for sock in self._sockets.values():
            _steer(sock, _FIRST)

    def accept(self) -> None:
        """Begin to accept."""
        self._accepting = True
        for node_id in self._sockets:
            self._watch(node_id)

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

    def addresses(self) -> list[Address]:
        """Return where its sockets are."""
        return [sock.getsockname()[:2] for sock in self._sockets.values()]

    def address_of(self, node_id: int) -> tuple[str, int] | None:
        """Return what clients are told for a broker; None if it has no port here."""
        settings = self.settings
        if settings.sni is not None:
            return settings.sni.replace("{node_id}", str(node_id)), self.bootstrap_port
        if node_id not in self._ports and settings.broker_ports == (0, 0) and self._sockets:
            try:
                self._listen(node_id, 0)
            except ListenerError as error:
                self._leave_out(node_id, error=str(error), fix="raise the limit of open files")
                return None
            self._no_port_for.discard(node_id)
        port = self._ports.get(node_id)
        if port is not None:
            return settings.advertised_host, port
        if self._sockets:
            self._leave_out(node_id, fix=f"make broker_ports reach first port + {node_id}")
        return None

    def _leave_out(self, node_id: int, **about: str) -> None:
        """Record that a broker has no port; the log says so once."""
        if node_id not in self._no_port_for:
            self._no_port_for.add(node_id)
            listener, text = self.settings.name, "broker left out: it has no port"
            _log.error(text, node_id=node_id, listener=listener, **about)

    def count_left_out(self) -> int:
        """Return how many brokers had no port here when clients asked for them."""
        return len(self._no_port_for)

    def node_of(self, server_name: str | None) -> int | None:
        """Return the broker that a TLS server name stands for; None: bootstrap."""
        match = self._pattern and self._pattern.fullmatch(server_name or "")
        return int(match["node_id"]) if match else None

    def _listen(
        self, node_id: int | None, port: int, beside: Collection[Address] | None = None
    ) -> int:
        try:
            self._sockets[node_id] = sock = _bind_port(self.settings.host, port, beside or ())
            if beside is None:
                sock.listen(BACKLOG)
        except OSError as error:
            raise self._failure(port, error) from None
        self._ports[node_id] = bound = int(sock.getsockname()[1])
        if self._accepting:
            self._watch(node_id)
        return bound

    def _failure(self, port: int, error: OSError) -> ListenerError:
        place = f"listener {self.settings.name!r}: {self.settings.host}:{port}"
        return ListenerError(f"{place}: {error.strerror or error}")

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
                _log.error("can't accept", error=str(error), listener=self.settings.name)
                self.out_of_files()
                self.loop.remove_reader(sock.fileno())
                self.loop.call_later(OUT_OF_FILES_PAUSE_S, self._watch, node_id)
                return
            self.accepted(client, Origin(self, address[0], node_id, address[1]))


def bind_ports(host: str, port: int, beside: Collection[Address]) -> list[socket.socket]:
    """Return a socket for each address of a host, for one that serves no Kafka clients.

    They do not listen yet. Raises OSError, as `_bind_port`.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for address in dict.fromkeys(str(each[4][0]) for each in found):
            sockets.append(_bind_port(address, port, beside, v6_only=True))
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _bind_port(
    host: str, port: int, beside: Collection[Address], *, v6_only: bool = False
) -> socket.socket:
    """Return a socket that has a port and does not listen yet. Raises OSError.

    A port that somebody has is an error, unless it is one of `beside`, the addresses of a process
    that is replaced. All are bound so that a later process of the same user can share them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if port and not share(beside, _resolved(host, port, family)):
        with _new_socket(family, v6_only=v6_only) as probe:
            probe.bind((host, port))
    sock = _new_socket(family, v6_only=v6_only)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def _new_socket(family: socket.AddressFamily, *, v6_only: bool) -> socket.socket:
    sock = socket.socket(family)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if v6_only and family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return sock


def _resolved(host: str, port: int, family: socket.AddressFamily) -> Address:
    """Return an address as the kernel names it."""
    found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return str(found[0][4][0]), port


def _steer(sock: socket.socket, index: int) -> None:
    """Send new connections to one socket of the group that shares this one's port.

    Without this the kernel spreads them, and those that the old process has not accepted when it
    closes its socket are reset. When either has gone, there is one socket left and it gets them,
    also where the index is out of range: the kernel falls back to spreading.
    """
    instructions = array("Q", _INSTRUCTION.pack(_BPF_RETURN, 0, 0, index))
    address, count = instructions.buffer_info()
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, _PROGRAM.pack(count, address))
