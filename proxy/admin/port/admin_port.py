"""Accepts the connections to the admin port and bounds them: how many, from whom, for how long.

aiohttp bounds neither, and gives a request's head all the time it takes. Whoever holds connections
open must not keep operators out, nor take the descriptors and the memory that the relay needs.
"""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from structlog import get_logger

from proxy.cluster.dial import tls_handshake
from proxy.cluster.tls_socket import TlsSocket
from proxy.config.models import AdminSection
from proxy.relay.channel import BLOCKED, Channel, ChannelLost
from proxy.relay.paced_steps import PacedStepScheduler

ADMIN_ACCEPTS_PER_TURN = 4
"""Connections taken before others run: each costs as much as some requests of clients."""

ADMIN_ACCEPT_PAUSE_S = 0.5  # pause of accepting when the process has no descriptor left

ADMIN_BACKLOG = 128
ADMIN_RECEIVE_BYTES = 16 << 10  # of a connection, which are parsed in one go: each may be a chunk
MOST_PILED_BYTES = 64 << 10  # beyond it the server of HTTP is to pause
MOST_UNREAD = 16  # connections that do not read; for each, a whole answer may wait in memory
LOG_INTERVAL_S = 60.0  # between two log lines about connections that were closed for others

_log = get_logger(__name__)

_scratch = memoryview(bytearray(ADMIN_RECEIVE_BYTES))


class AdminTransport(asyncio.Transport):
    """One connection: the transport of a protocol of HTTP's, and what it may take.

    Its time is counted from one complete head of a request to the next, to the first one with the
    handshake of TLS. So one rule ends a connection that is idle, sends its head or its body slowly,
    or does not read its answers.

    It is read from by paced steps, in which addresses take turns. By uvloop's transports each
    connection would be read from in each round of the loop, and with TLS all that has come, as a
    thousand key updates.
    """

    def __init__(
        self, port: "AdminPort", sock: socket.socket, address: str, http: asyncio.Protocol
    ) -> None:
        self._about: dict[str, Any] = {}
        """What the protocol may ask for."""
        super().__init__(self._about)
        self.address, self.http = address, http
        self.is_busy = False
        """Whether a request is being answered."""
        self.is_read = asyncio.Event()
        """Whether the client reads what was sent, or the connection is over."""
        self.is_read.set()
        self._port, self._sock = port, sock
        self._channel = Channel(sock)
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._is_closing = self._is_over = False
        self._wants_more = True
        """Whether the protocol wants to read."""
        self._deadline = self._close_after(port.limits.head_timeout)
        self.opening: asyncio.Task[None] | None = self._loop.create_task(self._open())
        """What begins to speak HTTP; with TLS that takes the handshake."""

    def request_came(self) -> None:
        """Record that the head of a request is complete."""
        self.is_busy = True
        self._deadline.cancel()
        self._deadline = self._close_after(self._port.limits.idle_timeout)

    def drop(self) -> None:
        """Close at once, whatever is still to be sent, or in the handshake."""
        self._forget()
        if self.opening is not None:
            self.opening.cancel()
        else:
            self.abort()

    def write(self, data: Any) -> None:  # noqa: D102
        is_blocked = bool(self._unsent)
        if not self._is_closing:
            self._unsent += data
            if not is_blocked:
                self._send()
            if self.is_read.is_set() and len(self._unsent) > MOST_PILED_BYTES:
                self.is_read.clear()
                self._port.wait_for_reader(self)
                self.http.pause_writing()

    def is_closing(self) -> bool:  # noqa: D102
        return self._is_closing

    def pause_reading(self) -> None:  # noqa: D102
        self._wants_more = False

    def resume_reading(self) -> None:  # noqa: D102
        if not self._wants_more:
            self._wants_more = True
            self._wait_to_read()

    def close(self) -> None:
        """Close once everything is sent."""
        if not self._is_closing:
            self._is_closing = True
            self._loop.remove_reader(self._channel.fd)
            if not self._unsent:
                self.abort()

    def abort(self, error: Exception | None = None) -> None:
        """Close at once, but for the protocol in the next round of the loop, as asyncio does."""
        self._is_closing, self._unsent = True, bytearray()
        self._loop.call_soon(self._end, error)

    async def _open(self) -> None:
        is_open = False
        try:
            if (tls := self._port.tls) is not None:
                turn = partial(self._port.steps.turn, self.address)
                self._sock = await tls_handshake(self._sock, tls, server_side=True, turn=turn)
                self._channel = Channel(self._sock)
                self._about["sslcontext"] = tls
            self._about |= {"peername": self._sock.getpeername(), "socket": self._sock}
            self.http.connection_made(self)
            # What came with the end of the handshake is read as well.
            self._port.steps.queue(self._read, self.address)
            is_open = True
        except OSError:  # what TLS does not like is one, and who is gone
            pass
        finally:
            self.opening = None
            if not is_open:
                self._sock.close()
                self._forget()

    def _close_after(self, delay_s: float) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_s, self.drop)

    def _wait_to_read(self) -> None:
        if self._wants_more and not self._is_closing:
            if self._channel.buffered_bytes():
                self._port.steps.queue(self._read, self.address)
            else:
                self._loop.add_reader(self._channel.fd, self._readable)

    def _readable(self) -> None:
        self._loop.remove_reader(self._channel.fd)
        self._port.steps.add(self._read, self.address)

    def _read(self) -> None:
        if not self._wants_more or self._is_closing:
            return
        try:
            count = self._channel.recv_into(_scratch)
        except ChannelLost as error:
            self.abort(error)
            return
        if count == BLOCKED:
            self._loop.add_reader(self._channel.fd, self._readable)
        elif count:
            try:
                self.http.data_received(bytes(_scratch[:count]))
            except Exception as error:  # a step must not raise
                self._loop.call_exception_handler({"message": "no HTTP", "exception": error})
                self.abort(error)
            self._wait_to_read()
        elif not self.http.eof_received():
            self.close()

    def _send(self) -> None:
        try:
            sent = self._channel.send(self._unsent)
        except ChannelLost as error:
            self.abort(error)
            return
        del self._unsent[: max(sent, 0)]
        if self._unsent:
            self._loop.add_writer(self._channel.fd, self._send)
            return
        self._loop.remove_writer(self._channel.fd)
        if not self.is_read.is_set():
            self.is_read.set()
            self._port.unread.pop(self, None)
            self.http.resume_writing()
        if self._is_closing:
            self.abort()

    def _end(self, error: Exception | None) -> None:
        if self._is_over:
            return
        self._is_closing = self._is_over = True
        self._loop.remove_reader(self._channel.fd)
        self._loop.remove_writer(self._channel.fd)
        if isinstance(self._sock, TlsSocket):
            with suppress(OSError):  # gone already
                self._sock.say_end()
        self._sock.close()
        self._forget()
        self.http.connection_lost(error)

    def _forget(self) -> None:
        """Have the port count the connection no more; a second time does nothing."""
        self.is_read.set()
        self._deadline.cancel()
        self._port.forget(self)


class AdminPort:
    """The sockets of one address, and the connections that came through them.

    All requests must pass `watch`, a middleware.
    """

    make_http: Callable[[], asyncio.Protocol]
    """Makes the protocol of a connection; to be set before `serve`."""

    def __init__(self, limits: AdminSection, tls: ssl.SSLContext | None = None) -> None:
        self.limits = limits
        self.tls = tls
        """What new connections are shown."""
        self._loop = asyncio.get_running_loop()
        self.steps = PacedStepScheduler(self._loop)
        self._sockets: list[socket.socket] = []
        self._connections: dict[object, AdminTransport] = {}
        """By their protocols of HTTP; those first that asked for nothing for longest."""
        self.unread: dict[AdminTransport, None] = {}
        """Those that do not read, for longest first."""
        self._closed = 0
        """How many were closed for others."""
        self._next_log_s = 0.0
        self.addresses: list[tuple[str, int]] = []
        """Where its sockets are, or were; empty before `serve`."""

    def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections of bound sockets."""
        self._sockets += sockets
        self.addresses += [sock.getsockname()[:2] for sock in sockets]
        for sock in sockets:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ADMIN_RECEIVE_BYTES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # of those accepted, too
            sock.listen(ADMIN_BACKLOG)
            self._watch_socket(sock)

    def close(self) -> None:
        """Accept no more, and end handshakes; connections are left to the server of HTTP."""
        while self._sockets:
            sock = self._sockets.pop()
            self._loop.remove_reader(sock.fileno())
            sock.close()
        for connection in tuple(self._connections.values()):
            if connection.opening is not None:
                connection.drop()

    @web.middleware
    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Record when a request came and was answered."""
        if (connection := self._connections.get(request.protocol)) is not None:
            await connection.is_read.wait()  # else unread answers pile up, and each gets more time
        if connection is None or self._connections.pop(request.protocol, None) is None:  # lost
            return await handler(request)
        self._connections[request.protocol] = connection
        connection.request_came()
        try:
            return await handler(request)
        finally:
            connection.is_busy = False

    def wait_for_reader(self, connection: AdminTransport) -> None:
        """Record that a client does not read; of too many, close the one that has not for longest.

        Who reads slowly does so now and then, and is not the first of them.
        """
        self.unread[connection] = None
        if len(self.unread) > MOST_UNREAD:
            next(iter(self.unread)).drop()

    def forget(self, connection: AdminTransport) -> None:
        """Drop a connection that is no more."""
        self.unread.pop(connection, None)
        self._connections.pop(connection.http, None)

    def _watch_socket(self, sock: socket.socket) -> None:
        if sock in self._sockets:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(ADMIN_ACCEPTS_PER_TURN):
            try:
                client, address = sock.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                _log.error("can't accept", error=str(error), listener="admin")
                self._loop.remove_reader(sock.fileno())
                self._loop.call_later(ADMIN_ACCEPT_PAUSE_S, self._watch_socket, sock)
                return
            self._make_room(address[0])
            client.setblocking(False)
            connection = AdminTransport(self, client, address[0], self.make_http())
            self._connections[connection.http] = connection

    def _make_room(self, address: str) -> None:
        """Close a connection, if there are as many as may be, for one more from an address.

        It is one of that address, if this has as many as one may have; else of the address with
        most of them. There it is the one that asked for nothing for longest, and is not waiting for
        an answer if another is not. So who floods the port with idle connections keeps no one out.
        """
        addresses = Counter(each.address for each in self._connections.values())
        crowded = address
        if addresses[address] < self.limits.max_connections_per_ip:
            if addresses.total() < self.limits.max_connections:
                return
            ((crowded, _),) = addresses.most_common(1)
        crowd = [each for each in self._connections.values() if each.address == crowded]
        next((each for each in crowd if not each.is_busy), crowd[0]).drop()
        self._closed += 1
        if self._loop.time() >= self._next_log_s:
            self._next_log_s = self._loop.time() + LOG_INTERVAL_S
            text = "too many connections to the admin port: those idle for longest are closed"
            _log.warning(text, closed=self._closed, crowded_by=crowded)
