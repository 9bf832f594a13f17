"""Opens the ports of all members of a host.

The launcher keeps every socket: while a member is down, what connects to it waits.
"""

import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

from proxy.cluster.upstream import Address
from proxy.config import Config, ListenerSection
from proxy.config.endpoints import HostPort
from proxy.hot_restart import bind_admin
from proxy.relay.listener import SNI_PORT
from proxy.relay.ports import SharedPorts
from proxy.relay.relay import log_listening

ADMIN = "admin"
"""In the place of a listener's name, where a port cannot be opened."""

MemberSockets = Mapping[str, Mapping[int | None, socket.socket]]
"""Sockets of one member by listener, and by broker, as `Listener.use` takes them."""


class HostPorts(SharedPorts):
    """The sockets of all members.

    All members share the bootstrap ports, with a socket for each, and the admin port, with one for
    all: who hangs accepts nothing there. Each has its own part of a listener's ports for brokers,
    and an admin port of its own, where other members ask it: the Nth one behind the shared one, or
    any free one.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config
        self._listeners: list[dict[str, dict[int | None, socket.socket]]] = []
        """Of each member."""
        self._admin: list[socket.socket] = []
        """The shared port: for each address of its host."""
        self._own_admin: list[list[socket.socket]] = []
        """Of each member, one for each address of the host."""

    def open_all(self, sharing_with: Mapping[Address, int] | None = None) -> None:
        """Open all ports, as SharedPorts. Raises ListenerError, AdminError; then none is open."""
        self.sharing_with = sharing_with
        self._listeners = [{} for _ in range(self._config.worker_count)]
        try:
            for listener in self._config.listeners:
                self._open_listener(listener)
            self._open_admin()
        except BaseException:
            self.close()
            raise

    @property
    def admin_port(self) -> int:
        """The shared one."""
        return int(self._admin[0].getsockname()[1])

    def of(self, number: int) -> tuple[MemberSockets, list[socket.socket], list[socket.socket]]:
        """Return a member's sockets: of listeners, of the shared admin port, of its own one."""
        return self._listeners[number], self._admin, self._own_admin[number]

    def _open_listener(self, listener: ListenerSection) -> None:
        name, host, members = listener.name, listener.bind.host, len(self._listeners)
        shared = self.open(name, host, listener.bind.port, members)
        log_listening(name, host, shared[0].getsockname()[1])
        for number, sock in enumerate(shared):
            sockets = self._listeners[number][name] = {None: sock}
            for node_id, port in _broker_ports(listener, members, number):
                (sockets[node_id],) = self.open(name, host, port)

    def _open_admin(self) -> None:
        shared = self._config.admin.bind
        self._admin = self._bind_admin(shared)
        self._own_admin = []
        for number in range(len(self._listeners)):
            port = shared.port + 1 + number if shared.port else 0
            self._own_admin.append(self._bind_admin(replace(shared, port=port)))
        if self.sharing_with is None:
            for sock in chain(self._admin, *self._own_admin):
                sock.listen()

    def _bind_admin(self, bind: HostPort) -> list[socket.socket]:
        sockets = bind_admin(bind, self.sharing_with or ())
        for sock in sockets:
            self.add(ADMIN, (sock,))
        return sockets


def _broker_ports(
    listener: ListenerSection, members: int, number: int
) -> Iterator[tuple[int, int]]:
    """Yield the brokers, and their ports, of one member; SNI_PORT stands for all of them."""
    ports = listener.broker_ports
    if listener.tls is not None and listener.tls.sni is not None:
        first = 0 if ports is None or ports.any_free else ports.first + number
        yield SNI_PORT, first
    elif ports is not None and not ports.any_free:
        share = ports.share(members, number)
        yield from enumerate(range(share.first, share.last + 1))
