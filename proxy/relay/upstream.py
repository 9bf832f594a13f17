"""Opens connections to brokers, with a time limit and errors that name their kind."""

import asyncio
import errno
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, TypeAlias

from proxy.relay.buffers import bound_send_buffer
from proxy.relay.channel import Channel
from proxy.relay.race import AllFailed, first_of
from proxy.relay.tls import handshake

LOGIN_REFUSED = "login_refused"
"""The reason when a broker does not let the proxy itself in."""

LOCAL = "local"
"""The reason when this machine could not even try; it says nothing about the broker."""

_LOCAL_ERRORS = {
    errno.EADDRNOTAVAIL,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
}
"""No local port, no descriptor, no memory left."""

Server: TypeAlias = tuple[str, int]
"""Host and port."""


class UpstreamError(Exception):
    """A broker could not be reached. `reason` is from a small set, fit for a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def tune(sock: socket.socket) -> None:
    """Set what every connection wants: no delay, dead peers noticed, little kept unsent."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    bound_send_buffer(sock)


async def reach(servers: Sequence[Server], timeout_s: float) -> tuple[Server, socket.socket]:
    """Open a connection to the server that answers first, and say which one that is.

    The servers are tried in their order in a staggered race, and so are the addresses of each.
    Every server has `timeout_s` seconds, the look-up of its name included.
    Raises UpstreamError: dns, timeout, local or refused.
    """
    attempts = [partial(_reach, server, timeout_s) for server in servers]
    try:
        return await first_of(attempts, lambda late: late[1].close(), UpstreamError)
    except AllFailed as failed:
        raise failed.errors[-1] from None


async def secure(
    sock: socket.socket,
    server: Server,
    *,
    tls: ssl.SSLContext | None,
    timeout_s: float,
    splice: bool = True,
) -> Channel:
    """Make a channel of a connection to this server, with a TLS handshake if `tls` says how.

    When that fails, or takes longer than `timeout_s` seconds, the connection is closed.
    Raises UpstreamError: timeout, tls or refused.
    """
    if tls is None:
        return Channel(sock, spliceable=splice)
    try:
        async with asyncio.timeout(timeout_s):
            return await handshake(sock, tls, server_side=False, server_hostname=server[0])
    except (OSError, UnicodeError) as error:
        sock.close()
        raise _failure(server, error, timeout_s) from None
    except BaseException:
        sock.close()
        raise


async def _reach(server: Server, timeout_s: float) -> tuple[Server, socket.socket]:
    host, port = server
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            attempts = [partial(_open, *address) for address in _by_turns(addresses)]
            return server, await first_of(attempts, socket.socket.close, OSError)
    except AllFailed as failed:
        # An address of a family that this machine has not fails here, whatever the broker does.
        error = next((each for each in failed.errors if not _is_local(each)), failed.errors[-1])
        raise _failure(server, error, timeout_s) from None
    except (OSError, UnicodeError) as error:
        raise _failure(server, error, timeout_s) from None


async def _open(
    family: int, kind: int, protocol: int, _canonical_name: str, address: Any
) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        tune(sock)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def _by_turns(addresses: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Let the address families take turns, the resolver's first one first (RFC 8305, section 4)."""
    families = list(dict.fromkeys(family for family, *_ in addresses))
    by_family = ([each for each in addresses if each[0] == family] for family in families)
    return [each for turn in zip_longest(*by_family) for each in turn if each is not None]


def _failure(server: Server, error: Exception, timeout_s: float) -> UpstreamError:
    where = f"{server[0]}:{server[1]}"
    match error:
        case TimeoutError():
            return UpstreamError("timeout", f"{where}: no connection in {timeout_s:g} s")
        case ssl.SSLError():
            reason = "tls"
        case socket.gaierror() | UnicodeError():  # UnicodeError: not a host name at all
            reason = "dns"
        case _:
            reason = LOCAL if _is_local(error) else "refused"
    return UpstreamError(reason, f"{where}: {error}")


def _is_local(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _LOCAL_ERRORS
