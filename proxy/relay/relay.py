"""The relay as a whole: its listeners, its connections, their limits, start, drain and end."""

import asyncio
import socket
import ssl
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from structlog import get_logger

from proxy.cluster.dial import set_socket_options, tls_handshake
from proxy.cluster.upstream import LOCAL, Address, UpstreamError
from proxy.relay.brokers import BrokerConnector
from proxy.relay.channel import Channel, limit_socket_buffers
from proxy.relay.connection import Connection
from proxy.relay.connection_list import ConnectionList
from proxy.relay.lifecycle import DRAINING
from proxy.relay.listener import ClientOrigin, Listener, ListenerSettings
from proxy.relay.ports import ReusePortSockets
from proxy.relay.services import Services
from proxy.relay.session import ClientSession
from proxy.relay.silent_connections import SilentConnection, SilentConnections
from proxy.relay.tls import principal_of, sni_of
from proxy.tasks import end_tasks, wait_at_most

IDLE_CHECKS_PER_TIMEOUT = 4  # an idle connection is found at most a quarter of the timeout late
MAX_IDLE_CHECK_S = 5.0  # and a request that was begun and not finished at most this late

_log = get_logger(__name__)


class Relay:
    """All listeners and connections of one proxy."""

    def __init__(
        self, listeners: tuple[ListenerSettings, ...], brokers: BrokerConnector, services: Services
    ) -> None:
        self._services = services
        self.brokers = brokers
        self.listeners = {
            settings.name: Listener(settings, services.loop, self._accepted, self._out_of_files)
            for settings in listeners
        }
        self.connections: set[Connection] = set()
        """Those of all clients, once their handshakes are done."""
        self.list = ConnectionList(self.connections)
        self.at_bootstrap: defaultdict[int, set[Connection]] = defaultdict(set)
        """Connections to a bootstrap server in place of the client's broker, by its id."""
        self.silent = SilentConnections()
        self._per_ip: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connected_through: Counter[str] = Counter()
        """How many clients are connected, by the name of their listener."""
        self.is_cut_off = False
        """Whether clients are to go to other members: new connections are refused."""
        for name in self.listeners:
            gauge = services.instruments.connections.labels(name)
            gauge.set_function(partial(self.connected_through.__getitem__, name))
        self._empty = asyncio.Event()
        self._following: set[Connection] = set()
        """The connections that have still to follow what was changed."""
        services.quotas.on_update = self.follow_changes
        if services.steering is not None:
            services.steering.on_change = self.follow_changes

    @property
    def connected(self) -> int:
        """How many clients are connected, handshakes under way included."""
        return self.connected_through.total()

    def use(
        self, sockets: Mapping[str, Mapping[int | None, socket.socket]], ports: ReusePortSockets
    ) -> None:
        """Take sockets by the names of their listeners, as `Listener.use`; `ports` opens others."""
        for name, listener in self.listeners.items():
            listener.ports = ports
            listener.use(sockets[name])

    def accept(self) -> None:
        """Begin to accept connections."""
        for listener in self.listeners.values():
            listener.accept()

    async def watch_idle(self) -> None:
        """Close idle connections, until cancelled.

        A round that comes very late is left out: what clients sent meanwhile was not read yet.
        """
        now_s = self._services.loop.time()
        while True:
            timeout_s, before_s = self._services.limits.idle_timeout_s, now_s
            interval_s = min(timeout_s / IDLE_CHECKS_PER_TIMEOUT, MAX_IDLE_CHECK_S)
            await asyncio.sleep(interval_s)
            now_s = self._services.loop.time()
            if now_s - before_s > 2 * interval_s:
                continue
            for connection in tuple(self.connections):
                connection.check_idle(now_s, timeout_s)

    def follow_changes(self) -> None:
        """Have all connections follow that quotas, or the owners of clients, were changed.

        In the next rounds of the event loop: there may be thousands.
        """
        if not self._following:
            self._services.paced_steps.queue(self._follow_next)
        self._following |= self.connections

    def _follow_next(self) -> None:
        if self._following:
            connection = self._following.pop()
            if self._following:
                self._services.paced_steps.queue(self._follow_next)
            connection.follow_changes()

    def close_draining(self) -> None:
        """Close the connections of clients that were let go, whatever they still wait for."""
        for connection in tuple(self.connections):
            if connection.life.state is DRAINING:
                connection.close("drained")

    def stop_accepting(self) -> None:
        """Close the listeners, as `Listener.close`."""
        for listener in self.listeners.values():
            listener.close()

    async def drain(self) -> None:
        """Stop accepting, let answers in flight go out, close everything within drain_timeout."""
        self.stop_accepting()
        self._services.paced_steps.run_all()
        for task in tuple(self._tasks):
            task.cancel()
        _log.info("draining", connections=len(self.connections))
        self._services.is_ending = True
        for connection in tuple(self.connections):
            connection.drain()
        self._services.reapers.release_all()
        self._empty.clear()
        if self.connected:
            await wait_at_most(self._services.limits.drain_timeout_s, self._empty.wait())
        if count := len(self.connections):
            _log.warning("closing connections that did not drain", connections=count)
        await self.close()

    async def close(self) -> None:
        """Close everything at once."""
        self.stop_accepting()
        self._services.paced_steps.run_all()
        connections = tuple(self.connections)
        for connection in connections:
            connection.close("shutdown")
        await end_tasks(self._tasks)
        await asyncio.gather(*(connection.closed() for connection in connections))
        self._services.abandoned.close()
        self._services.pipes.close()
        self._services.resets.close()

    def _out_of_files(self, listener: str, error: OSError) -> None:
        about = {"listener": listener, "error": str(error)}
        self._services.count_rejected("out_of_files", fault="can't accept", **about)

    def _accepted(self, sock: socket.socket, origin: ClientOrigin) -> None:
        about, wants_tls = origin.about, origin.listener.settings.tls is not None
        if self.is_cut_off:
            reason: str | None = "cut_off"
        elif wants_tls and self._services.handshakes.is_crowded(origin.ip):
            reason, about["detail"] = "tls_handshake", "too many addresses wait for theirs"
        else:
            reason = self._make_room(origin.ip)
        if reason is not None:
            sock.close()
            self._services.count_rejected(reason, **about)
            return
        try:
            set_socket_options(sock)
        except OSError:  # gone already
            sock.close()
            return
        self._per_ip[origin.ip] += 1
        self.connected_through[origin.name] += 1
        limit_socket_buffers(sock, self.connected)
        silent = SilentConnection(origin, sock.close, sock)
        self.silent.add(silent)
        self._services.paced_steps.add(partial(self._welcome, sock, silent), origin.ip)

    def _make_room(self, ip: str) -> str | None:
        """Close a silent connection if there are as many as may be, for one more from an address.

        It is one of that address, if this has as many as one may have; else of the address with
        most of them. Return why there is no room, if no connection is silent.
        """
        limits, services = self._services.limits, self._services
        if self._per_ip[ip] >= limits.max_connections_per_ip:
            reason, silent = "too_many_connections_per_ip", self.silent.longest(ip)
        elif self.connected >= limits.max_connections:
            reason, silent = "too_many_connections", self.silent.longest()
        else:
            return None
        # Those that wait to be welcomed are no more than may be connected.
        waiting = len(services.paced_steps) + len(services.handshakes)
        is_late = waiting > limits.max_connections
        if silent is None or silent.has_sent or is_late:
            return reason
        silent.close()
        if self.silent.discard(silent):  # it was no connection of two sides yet
            self._forget(silent.origin)
        services.count_rejected("evicted", **silent.origin.about, detail="it sent no request")
        return None

    def _welcome(self, sock: socket.socket, silent: SilentConnection) -> None:
        origin, tls = silent.origin, silent.origin.listener.settings.tls
        if silent not in self.silent:
            return
        if tls is None:
            self._begin(Channel(sock), origin, silent, user=None)
        else:
            task = self._services.loop.create_task(self._greet(sock, silent, tls))
            silent.close, silent.sock = task.cancel, None
            self._tasks.add(task)
            task.add_done_callback(partial(self._greeted, sock, silent))

    async def _greet(
        self, sock: socket.socket, silent: SilentConnection, tls: ssl.SSLContext
    ) -> None:
        """Do the TLS handshake, then begin. Raises OSError, and TimeoutError among them."""
        origin = silent.origin
        async with asyncio.timeout(self._services.limits.connect_timeout_s):
            turn = partial(self._services.handshakes.turn, origin.ip)
            secured = await tls_handshake(sock, tls, server_side=True, turn=turn)
        if origin.node_id is None:
            origin = replace(origin, node_id=origin.listener.node_of(sni_of(secured.tls)))
        self._begin(Channel(secured), origin, silent, user=principal_of(secured.tls))

    def _greeted(
        self, sock: socket.socket, silent: SilentConnection, task: asyncio.Task[None]
    ) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        sock.close()  # perhaps the task was cancelled before its first step
        silent.close = sock.close  # the task refers to both by its error: that would be a circle
        origin = silent.origin
        if not self.silent.discard(silent):  # evicted
            return
        self._forget(origin)
        if isinstance(error, OSError):
            detail = str(error) or "no handshake in time"
            self._services.count_rejected("tls_handshake", **origin.about, detail=detail)
        elif error is not None:
            about = {"fault": "unexpected error", **origin.about}
            self._services.count_rejected("internal_error", exc_info=error, **about)

    def _begin(
        self, channel: Channel, origin: ClientOrigin, silent: SilentConnection, user: str | None
    ) -> None:
        connection = Connection(
            self._services,
            channel,
            origin,
            user,
            dial=self._dial,
            advertise=self._advertise,
            on_heard=partial(self.silent.discard, silent),
            on_close=self._closed,
        )
        silent.close, silent.sock = partial(connection.close, "evicted"), channel.sock
        self.connections.add(connection)
        connection.start()

    async def _dial(self, connection: Connection, client_id: str | None) -> Channel:
        """Connect to the client's broker, or to a bootstrap server where its address is of no use.

        After a restart a client may come back straight to a broker's port, and a cluster that
        wants a login does not tell us where its brokers are, nor that one of them has moved. A
        bootstrap server lets the client log in and ask for Metadata, and turns away what is not
        for it with errors that clients take as a reason to ask. Once we are told the address, the
        connection is drained. Raises UpstreamError: where none answers, the broker's own.
        """
        self.brokers.refuse_loop(connection.channel, client_id)
        node_id = connection.origin.node_id
        channel = failure = None
        if node_id in self.brokers.addresses:
            try:
                channel = await self.brokers.connect(node_id)
            except UpstreamError as error:
                if error.reason == LOCAL:
                    raise
                failure = error
        if channel is None:
            if node_id is not None:
                self.at_bootstrap[node_id].add(connection)
            try:
                channel = await self.brokers.connect(None)
            except UpstreamError as error:
                raise failure or error from None
        if failure is not None:
            event = "broker not reached, a bootstrap server stands in"
            self._services.count_upstream_error(failure.reason, node_id, event, detail=str(failure))
        limit_socket_buffers(channel.sock, self.connected)
        return channel

    def _advertise(
        self, session: ClientSession, node_id: int, host: str, port: int
    ) -> Address | None:
        """Record a broker's real address; return the one to tell a client."""
        self.learn(node_id, host, port)
        if node_id not in self.brokers.addresses:
            return None
        return session.address_of(node_id) or session.origin.listener.address_of(node_id)

    def learn(self, node_id: int, host: str, port: int) -> None:
        """Record a broker's real address; connections elsewhere in its place are drained."""
        self.brokers.learn(node_id, host, port)
        for connection in self.at_bootstrap.pop(node_id, ()):
            # Not at once: we may be called for a response that it has to send first.
            self._services.loop.call_soon(connection.drain)

    def _closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._following.discard(connection)
        if connection.upstream is not None:
            self.brokers.disconnected(connection.upstream)
        node_id = connection.origin.node_id
        if node_id is not None and node_id in self.at_bootstrap:
            self.at_bootstrap[node_id].discard(connection)
            if not self.at_bootstrap[node_id]:
                del self.at_bootstrap[node_id]
        self._forget(connection.origin)

    def _forget(self, origin: ClientOrigin) -> None:
        self.connected_through[origin.name] -= 1
        self._per_ip[origin.ip] -= 1
        if not self._per_ip[origin.ip]:
            del self._per_ip[origin.ip]
        if not self.connected:
            self._empty.set()
