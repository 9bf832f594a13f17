"""Opens connections to brokers: a staggered race over TCP, TLS, and errors that name their kind."""

import asyncio
import errno
import os
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from .resolver import Resolver
from .tls_socket import TlsSocket
from .upstream import LOCAL, Address, UpstreamError

ATTEMPT_DELAY_S = 0.25
"""Between the starts of two attempts: the Connection Attempt Delay of RFC 8305, section 5."""

_LOCAL_ERRORS = {errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""No local port, no descriptor, no memory left."""

_ALL_FAILED = "no attempt of the race succeeded"

T = TypeVar("T")
Turn: TypeAlias = Callable[[Callable[[], T]], Awaitable[T]]


def set_socket_options(sock: socket.socket) -> None:
    """Set what every connection wants: no waiting, no delay, dead peers noticed."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def upstream_context(
    ca_file: Path | None, cert_file: Path | None, key_file: Path | None
) -> ssl.SSLContext:
    """Make the context for connections to brokers; their names are checked."""
    context = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
    if cert_file is not None:
        context.load_cert_chain(cert_file, key_file)
    return context


async def connect_to_first(
    servers: Sequence[Address], timeout_s: float, resolver: Resolver
) -> tuple[Address, socket.socket]:
    """Return the first of these servers that answers in a staggered race, and a connection to it.

    Every server has `timeout_s`, for the look-up of its name and its addresses, which race as well.
    Raises UpstreamError: dns, timeout, local or refused.
    """
    attempts = [partial(_reach, server, timeout_s, resolver) for server in servers]
    try:
        return await first_success(attempts, lambda late: late[1].close(), UpstreamError)
    except ExceptionGroup as failed:
        raise failed.exceptions[-1] from None


async def start_tls(
    sock: socket.socket, server: Address, tls: ssl.SSLContext | None, timeout_s: float
) -> socket.socket:
    """Return the connection to this server, after a TLS handshake if `tls` says how.

    Raises UpstreamError: timeout, tls or refused; the connection is closed then.
    """
    if tls is None:
        return sock
    try:
        async with asyncio.timeout(timeout_s):
            return await tls_handshake(sock, tls, server_side=False, server_hostname=server[0])
    except BaseException as error:
        sock.close()
        if isinstance(error, (OSError, UnicodeError)):
            raise _failure(server, error, timeout_s) from None
        raise


async def tls_handshake(
    sock: socket.socket,
    context: ssl.SSLContext,
    *,
    server_side: bool,
    server_hostname: str | None = None,
    turn: Turn[None] | None = None,
) -> TlsSocket:
    """Do the handshake on a connected socket, which the TLS socket owns then. Raises OSError."""
    tls = TlsSocket(sock, context, server_side=server_side, server_hostname=server_hostname)
    try:
        await run_when_ready(tls, tls.do_handshake, write=False, turn=turn)
    except BaseException:
        tls.close()
        raise
    return tls


async def run_when_ready(
    sock: socket.socket, operation: Callable[[], T], *, write: bool, turn: Turn[T] | None = None
) -> T:
    """Return what an operation on a socket returns once it does not block.

    `write`: a plain socket is waited for to be writable, or else readable. `turn` runs the
    operation, as one step of a handshake takes a millisecond or more; None: it is run at once.
    """
    while True:
        try:
            return operation() if turn is None else await turn(operation)
        except ssl.SSLWantReadError:
            await _ready(sock, write=False)
        except (ssl.SSLWantWriteError, BlockingIOError) as blocked:
            await _ready(sock, write=write or isinstance(blocked, ssl.SSLWantWriteError))


async def first_success(
    attempts: Iterable[Callable[[], Coroutine[Any, Any, T]]],
    discard: Callable[[T], object],
    expected: type[Exception],
) -> T:
    """Return what the first attempt that succeeds returns, and cancel the others.

    The next one starts when one fails, or ATTEMPT_DELAY_S after the one before. Raises an
    ExceptionGroup of one error of each, in the order in which they came; what is not `expected`
    ends the race. `discard` gets what one returns that was cancelled too late.
    """
    waiting = deque(attempts)
    if len(waiting) == 1:  # most often; it needs no task
        try:
            return await waiting[0]()
        except expected as error:
            raise ExceptionGroup(_ALL_FAILED, [error]) from error
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
            delay_s = ATTEMPT_DELAY_S if waiting else None
            done, _ = await asyncio.wait(
                running, timeout=delay_s, return_when=asyncio.FIRST_COMPLETED
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
        raise ExceptionGroup(_ALL_FAILED, errors)
    finally:
        for task in running:
            task.add_done_callback(end)
            task.cancel()
        if running and not has_won:  # a winner would be lost if we were cancelled while we wait
            await asyncio.wait(running)


async def _reach(
    server: Address, timeout_s: float, resolver: Resolver
) -> tuple[Address, socket.socket]:
    try:
        async with asyncio.timeout(timeout_s):
            addresses = await resolver.find(server)
            attempts = [partial(_open, *address) for address in interleave_families(addresses)]
            return server, await first_success(attempts, socket.socket.close, OSError)
    except ExceptionGroup as failed:
        # An address of a family that this machine has not fails here, whatever the broker does.
        errors = failed.exceptions
        error = next((each for each in errors if not _is_local(each)), errors[-1])
        raise _failure(server, error, timeout_s) from None
    except (OSError, UnicodeError) as error:
        raise _failure(server, error, timeout_s) from None


async def _open(
    family: int, kind: int, protocol: int, _canonical_name: str, address: Any
) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        set_socket_options(sock)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def _ready(sock: socket.socket, *, write: bool) -> None:
    loop, fd = asyncio.get_running_loop(), sock.fileno()
    ready = asyncio.Event()
    (loop.add_writer if write else loop.add_reader)(fd, ready.set)
    try:
        await ready.wait()
    finally:
        (loop.remove_writer if write else loop.remove_reader)(fd)


def interleave_families(addresses: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Order these so that families take turns, the resolver's first one first (RFC 8305, 4)."""
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
