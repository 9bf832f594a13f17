"""Opens the ports of all members of a host.

The launcher keeps every socket: while a member is down, what connects to it waits.
"""

import socket
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from proxy.cluster.upstream import Address
from proxy.config import Config, ListenerSection
from proxy.config.endpoints import HostPort
from proxy.hot_restart import bind_admin
from proxy.relay.listener import SNI_PORT
from proxy.relay.ports import close_all, open_ports, steer, take_over_port
from proxy.relay.relay import log_listening

ADMIN = "admin"
"""In the place of a listener's name, where a port cannot be opened."""

MemberSockets = Mapping[str, Mapping[int | None, socket.socket]]
"""Sockets of one member by listener, and by broker, as `Listener.use` takes them."""


class HostPorts:
    """The sockets of all members.

    All members share the bootstrap ports, with a socket for each, and the admin port, with one for
    all: who hangs accepts nothing there. Each has its own part of a listener's ports for brokers,
    and an admin port of its own, where other members ask it: the Nth one behind the shared one, or
    any free one.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._listeners: list[dict[str, dict[int | None, socket.socket]]] = []
        """Of each member."""
        self._admin: list[socket.socket] = []
        """The shared port: for each address of its host."""
        self._own_admin: list[list[socket.socket]] = []
        """Of each member, one for each address of the host."""
        self._groups: list[tuple[str, Sequence[socket.socket]]] = []
        """All sockets: those that share a port, with the name of their listener."""
        self._sharing_with: Collection[Address] | None = None

    def open(self, sharing_with: Collection[Address] | None = None) -> None:
        """Open all ports. Raises ListenerError, AdminError; then none is open.

        `sharing_with` are the addresses of a process that is replaced: it shares its ports, and
        gets all connections until `take_over`.
        """
        self._sharing_with = sharing_with
        self._listeners = [{} for _ in range(self._config.worker_count)]
        try:
            for listener in self._config.listeners:
                self._open_listener(listener)
            self._open_admin()
        except BaseException:
            self.close()
            raise

    def take_over(self) -> None:
        """Have new connections come here. Raises ListenerError."""
        before = Counter(self._sharing_with)
        for name, group in self._groups:
            take_over_port(name, group, before)

    def take_back(self) -> None:
        """Have new connections come here again, and none to the one that took them over."""
        for _, group in self._groups:
            steer(group[0], 0, len(group))

    def close(self) -> None:
        """Close the launcher's copies; those that share a port in one go."""
        for _, group in self._groups:
            close_all(group)
        self._groups.clear()

    def addresses(self) -> Iterator[Address]:
        """Yield where each socket listens."""
        for sock in self.sockets():
            yield sock.getsockname()[:2]

    def sockets(self) -> Iterator[socket.socket]:
        """Yield all sockets."""
        for _, group in self._groups:
            yield from group

    @property
    def admin_port(self) -> int:
        """The shared one."""
        return int(self._admin[0].getsockname()[1])

    def of(self, number: int) -> tuple[MemberSockets, list[socket.socket], list[socket.socket]]:
        """Return a member's sockets: of listeners, of the shared admin port, of its own one."""
        return self._listeners[number], self._admin, self._own_admin[number]

    def _open_listener(self, listener: ListenerSection) -> None:
        name, host, members = listener.name, listener.bind.host, len(self._listeners)
        shared = open_ports(name, host, listener.bind.port, self._sharing_with, count=members)
        self._groups.append((name, shared))
        log_listening(name, host, shared[0].getsockname()[1])
        for number, sock in enumerate(shared):
            sockets = self._listeners[number][name] = {None: sock}
            for node_id, port in _broker_ports(listener, members, number):
                group = open_ports(name, host, port, self._sharing_with)
                (sockets[node_id],) = group
                self._groups.append((name, group))

    def _open_admin(self) -> None:
        shared = self._config.admin.bind
        self._admin = self._bind_admin(shared)
        self._own_admin = []
        for number in range(len(self._listeners)):
            port = shared.port + 1 + number if shared.port else 0
            self._own_admin.append(self._bind_admin(replace(shared, port=port)))
        if self._sharing_with is None:
            for sock in chain(self._admin, *self._own_admin):
                sock.listen()

    def _bind_admin(self, bind: HostPort) -> list[socket.socket]:
        sockets = bind_admin(bind, self._sharing_with or ())
        self._groups += ((ADMIN, (sock,)) for sock in sockets)
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
