"""The ports of all members of a host: opened once, by the launcher or by a member alone."""

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from structlog import get_logger

from proxy.config import Config, ListenerSection
from proxy.config.endpoints import HostPort
from proxy.relay.listener import SNI_PORT
from proxy.relay.ports import ListenerError, ReusePortSockets, bind_each_address

ADMIN = "admin"
"""In the place of a listener's name, where a port cannot be opened."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MemberSockets:
    """The sockets of one member."""

    listeners: dict[str, dict[int | None, socket.socket]] = field(default_factory=dict)
    """By the names of listeners, and by broker, as `Listener.use` takes them."""
    own_admin: list[socket.socket] = field(default_factory=list)
    """Where the member itself is asked: one for each address of the host."""
    shared_admin: list[socket.socket] = field(default_factory=list)
    """Of the port that is asked for all members, which accept on the same sockets; none of a member
    that is alone."""

    def all(self) -> list[socket.socket]:
        """Return all of them."""
        of_listeners = [sock for each in self.listeners.values() for sock in each.values()]
        return [*of_listeners, *self.own_admin, *self.shared_admin]


class HostMemberSockets(ReusePortSockets):
    """The sockets of all members of a host.

    All members share the bootstrap ports, with a socket for each, and the admin port, with one for
    all: who hangs accepts nothing there. Each has its own part of a listener's ports for brokers,
    and an admin port of its own, where other members ask it: the Nth one behind the shared one, or
    any free one. A member that is alone has the admin port for itself.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config
        self.members: list[MemberSockets] = []

    def open_all(self) -> None:
        """Open all ports. Raises ListenerError; then none is open."""
        self.members = [MemberSockets() for _ in range(self._config.worker_count)]
        try:
            for listener in self._config.listeners:
                self._open_listener(listener)
            self._open_admin(self._config.admin.bind)
        except BaseException:
            self.close()
            raise

    def _open_listener(self, listener: ListenerSection) -> None:
        name, host, count = listener.name, listener.bind.host, len(self.members)
        shared = self.open(name, host, listener.bind.port, count)
        for number, member in enumerate(self.members):
            sockets = member.listeners[name] = {None: shared[number]}
            for node_id, port in _broker_ports(listener, count, number):
                (sockets[node_id],) = self.open(name, host, port)
        _log.info("listening", listener=name, host=host, port=shared[0].getsockname()[1])

    def _open_admin(self, bind: HostPort) -> None:
        of_host = self._bind_admin(bind)
        _log.info("admin", port=of_host[0].getsockname()[1])
        if len(self.members) == 1:
            self.members[0].own_admin.extend(of_host)
            self.unshared.extend(of_host)
            return
        self._share(of_host)
        for number, member in enumerate(self.members):
            port = bind.port + 1 + number if bind.port else 0
            member.own_admin.extend(self._bind_admin(replace(bind, port=port)))
            self._share(member.own_admin)
            member.shared_admin.extend(of_host)

    def _bind_admin(self, bind: HostPort) -> list[socket.socket]:
        """Return sockets that have an admin port, one for each address of its host."""
        try:
            return bind_each_address(bind.host, bind.port, self.sharing_with or ())
        except OSError as error:
            raise ListenerError(f"admin.bind: {bind}: {error.strerror or error}", error) from None

    def _share(self, sockets: Iterable[socket.socket]) -> None:
        """Have what connects to admin ports wait while a member is started, or replaced."""
        for sock in sockets:
            self.add(ADMIN, (sock,))
            if self.sharing_with is None:
                sock.listen()


def _broker_ports(
    listener: ListenerSection, members: int, number: int
) -> Iterator[tuple[int, int]]:
    """Yield the brokers, and their ports, of one of so many members.

    SNI_PORT stands for all brokers of a member that is not alone; else they share the bootstrap
    port.
    """
    ports = listener.broker_ports
    if listener.tls is not None and listener.tls.sni is not None:
        if members > 1:
            first = 0 if ports is None or ports.any_free else ports.first + number
            yield SNI_PORT, first
    elif ports is not None and not ports.any_free:
        share = ports.share(members, number)
        yield from enumerate(range(share.first, share.last + 1))
