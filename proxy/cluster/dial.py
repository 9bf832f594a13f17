"""Opens connections to brokers: a staggered race over TCP, TLS, and errors that name their kind."""

import asyncio
import errno
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from .upstream import LOCAL, Address, UpstreamError

ATTEMPT_DELAY_S = 0.25
"""Between the starts of two attempts: the Connection Attempt Delay of RFC 8305, section 5."""

MAX_UNSENT_BYTES = 64 * 1024
"""Kept in the kernel for a receiver that does not read, beyond what is on its way to it."""

_LOCAL_ERRORS = {
    errno.EADDRNOTAVAIL,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
}
"""No local port, no descriptor, no memory left."""

T = TypeVar("T")


class AllFailed(Exception):  # noqa: N818 - named for what happened, as in the logs
    """No attempt of a race succeeded."""

    def __init__(self, errors: list[Exception]) -> None:
        super().__init__(errors)
        self.errors = errors
        """One of each attempt, in the order in which they came."""


def tune(sock: socket.socket) -> None:
    """Set what every connection wants: no delay, dead peers noticed, little kept unsent."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)


def upstream_context(
    ca_file: Path | None, cert_file: Path | None, key_file: Path | None
) -> ssl.SSLContext:
    """Make the context for connections to brokers; their names are checked."""
    context = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
    if cert_file is not None:
        context.load_cert_chain(cert_file, key_file)
    return context


async def reach(servers: Sequence[Address], timeout_s: float) -> tuple[Address, socket.socket]:
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
    sock: socket.socket, server: Address, tls: ssl.SSLContext | None, timeout_s: float
) -> socket.socket:
    """Return the connection to this server, after a TLS handshake if `tls` says how.

    When that fails, or takes longer than `timeout_s` seconds, the connection is closed.
    Raises UpstreamError: timeout, tls or refused.
    """
    if tls is None:
        return sock
    try:
        async with asyncio.timeout(timeout_s):
            return await handshake(sock, tls, server_side=False, server_hostname=server[0])
    except (OSError, UnicodeError) as error:
        sock.close()
        raise _failure(server, error, timeout_s) from None
    except BaseException:
        sock.close()
        raise


async def handshake(
    sock: socket.socket,
    context: ssl.SSLContext,
    *,
    server_side: bool,
    server_hostname: str | None = None,
) -> ssl.SSLSocket:
    """Do the handshake on a connected non-blocking socket. The caller sets the time limit.

    Raises ssl.SSLError or OSError. The plain socket is closed by the TLS socket from here on.
    """
    tls = context.wrap_socket(
        sock,
        server_side=server_side,
        server_hostname=server_hostname,
        do_handshake_on_connect=False,
        suppress_ragged_eofs=True,
    )
    try:
        await when_ready(tls, tls.do_handshake, write=False)
    except BaseException:
        tls.close()
        raise
    return tls


async def when_ready(sock: socket.socket, operation: Callable[[], T], *, write: bool) -> T:
    """Return what an operation on a non-blocking socket returns; wait as long as it would block.

    `write`: whether it waits for a plain socket to be writable, or else readable.
    """
    while True:
        try:
            return operation()
        except ssl.SSLWantReadError:
            await _ready(sock, write=False)
        except ssl.SSLWantWriteError:
            await _ready(sock, write=True)
        except BlockingIOError:
            await _ready(sock, write=write)


async def first_of(
    attempts: Iterable[Callable[[], Coroutine[Any, Any, T]]],
    discard: Callable[[T], object],
    expected: type[Exception],
) -> T:
    """Return what the first attempt that succeeds returns, and cancel the others.

    The next attempt starts when one fails, or ATTEMPT_DELAY_S after the one before.

    Args:
        attempts: at least one.
        discard: gets what an attempt returns that could not be cancelled in time.
        expected: what attempts raise when they fail. Anything else ends the race.

    Raises AllFailed.
    """
    waiting = deque(attempts)
    if len(waiting) == 1:  # most often; it needs no task
        try:
            return await waiting[0]()
        except expected as error:
            raise AllFailed([error]) from error
    running: set[asyncio.Task[T]] = set()
    errors: list[Exception] = []

    def end(late: asyncio.Task[T]) -> None:
        if not late.cancelled() and late.exception() is None:
            discard(late.result())

    has_won = False
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.create_task(waiting.popleft()()))
            done, _ = await asyncio.wait(
                running,
                timeout=ATTEMPT_DELAY_S if waiting else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                running.discard(task)
                try:
                    result = task.result()
                except expected as error:
                    errors.append(error)
                else:
                    has_won = True
                    return result
        raise AllFailed(errors)
    finally:
        for task in running:
            task.add_done_callback(end)
            task.cancel()
        if running and not has_won:  # a winner would be lost if we were cancelled while we wait
            await asyncio.wait(running)


async def _reach(server: Address, timeout_s: float) -> tuple[Address, socket.socket]:
    host, port = server
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            attempts = [partial(_open, *address) for address in by_turns(addresses)]
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


async def _ready(sock: socket.socket, *, write: bool) -> None:
    loop, fd = asyncio.get_running_loop(), sock.fileno()
    waiter = loop.create_future()
    add, remove = (
        (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
    )

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    add(fd, wake)
    try:
        await waiter
    finally:
        remove(fd)


def by_turns(addresses: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return them so that families take turns, the resolver's first one first (RFC 8305, 4)."""
    families = list(dict.fromkeys(family for family, *_ in addresses))
    by_family = ([each for each in addresses if each[0] == family] for family in families)
    return [each for turn in zip_longest(*by_family) for each in turn if each is not None]


def _failure(server: Address, error: Exception, timeout_s: float) -> UpstreamError:
    where = f"{server[0]}:{server[1]}"
    match error:
        case TimeoutError():
            return UpstreamError("timeout", f"{where}: no connection in {timeout_s:g} s")
        case ssl.SSLError():
            return UpstreamError("tls", f"{where}: {error}")
        case socket.gaierror() | UnicodeError():  # UnicodeError: not a host name at all
            return UpstreamError("dns", f"{where}: {error}")
    # The event loop's own words would only repeat the address.
    number = error.errno if isinstance(error, OSError) else None
    text = os.strerror(number) if number else str(error)
    return UpstreamError(LOCAL if _is_local(error) else "refused", f"{where}: {text}")


def _is_local(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _LOCAL_ERRORS
