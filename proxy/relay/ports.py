"""Opens sockets for ports, alone or beside a process that is replaced, and shares what connects."""

import socket
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from struct import Struct

from proxy.cluster.upstream import Address
from proxy.errors import ProxyError, os_error_fix

BACKLOG = 1024

_ANY = frozenset({"0.0.0.0", "::"})

_SO_ATTACH_REUSEPORT_CBPF = 51  # Linux; the socket module has no name for it
_INSTRUCTION = Struct("HBBI")  # Linux's sock_filter: code, two jumps, constant
_PROGRAM = Struct("HP")  # Linux's sock_fprog: how many instructions, and where they are

# Classic BPF; what a program returns is the index of the chosen socket.
_LOAD = 0x20  # ld [k]
_MODULO = 0x94  # mod #k
_ADD = 0x04  # add #k
_RETURN = 0x16  # ret a
_RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM


class ListenerError(ProxyError):
    """A port could not be opened: which, and why."""

    def __init__(self, what: str, error: OSError | None = None) -> None:
        what = what if error is None else f"{what}: {error.strerror or error}"
        super().__init__(what, os_error_fix(error, "choose another address, or stop what has it"))


class ReusePortSockets:
    """The sockets of one process by the ports that they share, among them and with a successor.

    `sharing_with` says how many sockets a process that is replaced has by their addresses: it
    shares its ports, and gets all connections until `take_over`. None: nobody is replaced.
    """

    def __init__(self) -> None:
        self.sharing_with: Mapping[Address, int] | None = None
        self._groups: list[tuple[str, Sequence[socket.socket]]] = []
        """Those that share a port, with the name of their listener."""
        self.unshared: list[socket.socket] = []
        """Further ones, which listen as long as they are served. Nothing waits there."""

    def open(self, listener: str, host: str, port: int, count: int = 1) -> list[socket.socket]:
        """Return `count` sockets of a listener that share one port; 0 is any free one for all.

        While nobody is replaced they listen, and the kernel spreads what connects over them.
        Raises ListenerError.
        """
        sockets: list[socket.socket] = []
        try:
            while len(sockets) < count:
                if sockets:
                    sock = _bind(host, port, v6_only=False)
                else:
                    sock = bind_port(host, port, self.sharing_with or ())
                sockets.append(sock)
                if self.sharing_with is None:
                    sock.listen(BACKLOG)
                port = int(sock.getsockname()[1])
        except OSError as error:
            close_all(sockets)
            raise _failure(listener, host, port, error) from None
        self.add(listener, sockets)
        return sockets

    def add(self, name: str, sockets: Sequence[socket.socket]) -> None:
        """Take sockets that share a port, and that somebody else has opened."""
        self._groups.append((name, sockets))

    def take_over(self) -> None:
        """Have new connections come here, where they wait. Raises ListenerError.

        If this process dies, they reach the one beside it again.
        """
        before = self.sharing_with or {}
        for listener, sockets in self._groups:
            host, port = sockets[0].getsockname()[:2]
            try:
                for sock in sockets:
                    sock.listen(BACKLOG)
                _steer(sockets[0], before.get((host, port), 0), len(sockets))
            except OSError as error:
                raise _failure(listener, host, port, error) from None
        self.sharing_with = None  # what is opened from now on is this process's own

    def take_back(self) -> None:
        """Have new connections come here again, and none to the one that took them over."""
        for _, sockets in self._groups:
            _steer(sockets[0], 0, len(sockets))

    def close(self) -> None:
        """Close all sockets, those that share a port in one go."""
        for _, sockets in self._groups:
            close_all(sockets)
        close_all(self.unshared)
        self._groups.clear()
        self.unshared.clear()

    def sockets(self) -> Iterator[socket.socket]:
        """Yield all sockets."""
        for _, sockets in self._groups:
            yield from sockets
        yield from self.unshared

    def addresses(self) -> Iterator[Address]:
        """Yield where each socket listens."""
        for sock in self.sockets():
            yield sock.getsockname()[:2]


def _steer(sock: socket.socket, first: int, count: int) -> None:
    """Spread what connects over `count` sockets of the group that shares this one's port.

    The group has them in the order in which they began to listen, `first` counts from 0. Without
    this the kernel spreads over all, and what an old process has not accepted when it closes its
    socket is reset. When either process has gone its sockets leave the group. Where an index is out
    of range then, the kernel spreads over those that are left.
    """
    program = ((_LOAD, _RANDOM), (_MODULO, count), (_ADD, first), (_RETURN, 0))
    packed = b"".join(_INSTRUCTION.pack(code, 0, 0, value) for code, value in program)
    instructions = array("Q", packed)
    address, length = instructions.buffer_info()
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, _PROGRAM.pack(length, address))


def bind_each_address(
    host: str, port: int, sharing_with: Collection[Address]
) -> list[socket.socket]:
    """Return a socket for each address of a host, for one that serves no Kafka clients.

    They do not listen yet. Raises OSError, as `bind_port`.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for address in dict.fromkeys(str(each[4][0]) for each in found):
            sockets.append(bind_port(address, port, sharing_with, v6_only=True))
    except OSError:
        close_all(sockets)
        raise
    return sockets


def bind_port(
    host: str, port: int, sharing_with: Collection[Address], *, v6_only: bool = False
) -> socket.socket:
    """Return a socket that has a port and does not listen yet. Raises OSError.

    A port that somebody has is an error, unless it is one of `sharing_with`, the addresses of a
    process that is replaced. All are bound so that a later process of the same user can share them.
    """
    family = _family(host)
    if port and not covers_address(sharing_with, _resolved(host, port, family)):
        with _new_socket(family, v6_only=v6_only) as probe:
            probe.bind((host, port))
    return _bind(host, port, v6_only=v6_only)


def close_all(sockets: Iterable[socket.socket]) -> None:
    """Close these sockets."""
    for sock in sockets:
        sock.close()


def refuse_all(sockets: Iterable[socket.socket]) -> None:
    """Have what connects to these refused, whose ports stay taken, until they listen again."""
    for sock in sockets:
        with suppress(OSError):  # it does not listen
            sock.shutdown(socket.SHUT_RD)


def _bind(host: str, port: int, *, v6_only: bool) -> socket.socket:
    sock = _new_socket(_family(host), v6_only=v6_only)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _new_socket(family: socket.AddressFamily, *, v6_only: bool) -> socket.socket:
    sock = socket.socket(family)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if v6_only and family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return sock


def covers_address(addresses: Collection[Address], wanted: Address) -> bool:
    """Return whether a port that is wanted is that of one of these addresses."""
    host, port = wanted
    return any(
        port == other_port and (host == other or not _ANY.isdisjoint((host, other)))
        for other, other_port in addresses
    )


def _resolved(host: str, port: int, family: socket.AddressFamily) -> Address:
    """Return an address as the kernel names it."""
    found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return str(found[0][4][0]), port


def _failure(listener: str, host: str, port: int, error: OSError) -> ListenerError:
    return ListenerError(f"listener {listener!r}: {host}:{port}", error)
