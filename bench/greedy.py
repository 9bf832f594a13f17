"""A client of raw sockets that takes all it can get, and counts it."""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench.frames import Answers

Address = tuple[str, int]

SOCKET_TIMEOUT_S = 10.0
LOOK_EVERY_S = 0.1
"""At most between two looks whether a run is over."""
COUNT_EVERY_S = 0.25
"""Between two questions for what a broker has appended."""
PAUSE_S = 0.005
"""Before a connection that takes the place of another: without it, a client that is closed at once
would keep the machine busy."""
RECEIVE_BYTES = 1 << 18


@dataclass(slots=True)
class Run:
    """Until when a client goes on, and what it has got.

    Attributes:
        end_s: on the monotonic clock.
        most_bytes: with so many it ends early.
        appended: asks how many bytes of a producer were appended; None for a client that reads.
        got_bytes: of responses received, or appended.
        told_ms: the longest throttle time in a Fetch response.
        requests: how many were sent.

    """

    end_s: float
    most_bytes: int
    appended: Callable[[], int] | None = None
    got_bytes: int = 0
    told_ms: int = 0
    requests: int = 0
    _counted_s: float = field(default=0.0)

    @property
    def is_on(self) -> bool:
        """Whether there is time left, and less than `most_bytes` was got."""
        now_s = time.monotonic()
        if self.appended is not None and now_s - self._counted_s > COUNT_EVERY_S:
            self.got_bytes = self.appended()
            self._counted_s = now_s
        return now_s < self.end_s and self.got_bytes < self.most_bytes

    def received(self, count: int) -> None:
        """Count bytes of responses: they are what a client gets that reads."""
        if self.appended is None:
            self.got_bytes += count


@dataclass(frozen=True, slots=True)
class Seat:
    """From where, and as whom, a client connects.

    Attributes:
        address: of the proxy.
        source: where connections come from: limits by address are for this client alone.
        client_id: of its requests.
        topic: what it reads, or produces to.
        opening: what each connection begins with.
        opening_answers: how many responses that gets.

    """

    address: Address
    source: str
    client_id: str
    topic: str
    opening: bytes = b""
    opening_answers: int = 0

    def connect(self) -> socket.socket:
        """Open a connection; raises OSError."""
        return socket.create_connection(self.address, SOCKET_TIMEOUT_S, (self.source, 0))


class _Asker:
    """One connection with requests under way; it asks on for each answer, unless it `leaves`.

    Raises OSError when there is no connection.
    """

    def __init__(
        self, run: Run, seat: Seat, requests: Iterator[bytes], depth: int, *, leaves: bool
    ) -> None:
        self._run = run
        self._requests = requests
        self._depth = depth
        self._leaves = leaves
        self._answers = Answers()
        self._due = seat.opening_answers
        self.heard_s = time.monotonic()
        """When it asked first, or when something came last."""
        self.sock = seat.connect()
        try:
            self._ask(depth, seat.opening)
        except OSError:
            self.sock.close()
            raise

    def take(self, buffer: bytearray) -> bool:
        """Receive once, and ask on; return whether the connection is of further use."""
        try:
            size = self.sock.recv_into(buffer)
            self._run.received(size)
            complete = self._answers.take(memoryview(buffer)[:size])
            self.heard_s = time.monotonic()
            self._due -= complete
            if not size or (self._leaves and not self._due):
                return False
            if complete and not self._leaves and self._due < self._depth:
                self._ask(self._depth - self._due)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Leave without further ado."""
        self._run.told_ms = max(self._run.told_ms, self._answers.told_ms)
        self.sock.close()

    def _ask(self, count: int, opening: bytes = b"") -> None:
        self.sock.sendall(opening + b"".join(next(self._requests) for _ in range(count)))
        self._due += count
        self._run.requests += count


def ask(
    run: Run,
    seat: Seat,
    requests: Iterator[bytes],
    *,
    connections: int = 1,
    depth: int = 1,
    leaves: bool = False,
    patience_s: float | None = None,
) -> None:
    """Keep `depth` requests under way on each connection until the run is over.

    Args:
        run: counts.
        seat: where to connect to.
        requests: what to send, in this order.
        connections: how many there are at a time.
        depth: so many go out in one write, behind the opening.
        leaves: when those are answered, another connection takes the place of this one.
        patience_s: the same when nothing has come for so long; None: it waits.

    """
    buffer = bytearray(RECEIVE_BYTES)
    askers: dict[socket.socket, _Asker] = {}
    with selectors.DefaultSelector() as selector:

        def leave(asker: _Asker) -> None:
            selector.unregister(asker.sock)
            del askers[asker.sock]
            asker.close()

        while run.is_on:
            missing = connections - len(askers)
            if missing:
                time.sleep(PAUSE_S)
            for _ in range(missing):
                with contextlib.suppress(OSError):
                    asker = _Asker(run, seat, requests, depth, leaves=leaves)
                    askers[asker.sock] = asker
                    selector.register(asker.sock, selectors.EVENT_READ, asker)
            for key, _ in selector.select(LOOK_EVERY_S):
                if not key.data.take(buffer):
                    leave(key.data)
            if patience_s is not None:
                late_s = time.monotonic() - patience_s
                for asker in [each for each in askers.values() if each.heard_s < late_s]:
                    leave(asker)
        for asker in list(askers.values()):
            leave(asker)


def pour(run: Run, seat: Seat, request: bytes, *, connections: int = 1) -> None:
    """Write a request again and again on each connection, and read no answer."""
    rest: dict[socket.socket, memoryview] = {}
    with selectors.DefaultSelector() as selector:
        while run.is_on:
            missing = connections - len(rest)
            if missing:
                time.sleep(PAUSE_S)
            for _ in range(missing):
                with contextlib.suppress(OSError):
                    sock = seat.connect()
                    sock.setblocking(False)
                    selector.register(sock, selectors.EVENT_WRITE, sock)
                    rest[sock] = memoryview(request)
            for key, _ in selector.select(LOOK_EVERY_S):
                sock = key.data
                try:
                    rest[sock] = rest[sock][sock.send(rest[sock]) :]
                except OSError:
                    selector.unregister(sock)
                    del rest[sock]
                    sock.close()
                    continue
                if not rest[sock]:
                    run.requests += 1
                    rest[sock] = memoryview(request)
    for sock in rest:
        sock.close()


def drop(run: Run, seat: Seat, request: bytes) -> None:
    """Connect, write a request, close without reading, and again."""
    while run.is_on:
        with contextlib.suppress(OSError):  # the next one may be taken
            with seat.connect() as sock:
                sock.sendall(request)
            run.requests += 1
        time.sleep(PAUSE_S)
