"""Clients that want more than their share: they read at all members at once, without a pause."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from support.raw import RawClient, fetch

CHEATS_S = 8.0
BOUND_BYTES = 100_000
ANSWER_BYTES = 20_000
SPAN_S = 1.1
"""What the sensors of these proxies look back on: as much may pass at once."""
TOLD_S = 1.5
"""Until an owner has been told of a visit, and the visitor's member what it owes; on a machine
that has much else to do, and far from what each member would give for itself."""
AT_MOST_OVER = 3
"""Answers by which all that is had may be above that."""
FETCH_VERSION = 12
RETRY_S = 0.02
FIRST_S = 2.0
"""Until it has its first answer, on such a machine."""

Open = Callable[[str], RawClient]


@dataclass
class Got:
    """What one client had."""

    bytes: int = 0
    connections: int = 0
    began_s: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    """How long it read: a busy machine ends nothing in time."""
    by_second: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Bytes by second and address: what a failure is explained by."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, count: int, address: str) -> None:
        with self.lock:
            self.bytes += count
            self.by_second[int(time.monotonic() - self.began_s), address] += count


def read(
    connect: Open,
    address: str,
    topic: str,
    until_s: float,
    got: Got,
    *,
    at_most: int,
    partition: int,
) -> None:
    """Fetch from one port without a pause, over connection after connection."""
    asked = fetch(FETCH_VERSION, topic, partition=partition, max_bytes=2 * ANSWER_BYTES)
    while time.monotonic() < until_s:
        try:
            with connect(address) as client:
                with got.lock:
                    got.connections += 1
                for _ in range(at_most):
                    client.sock.settimeout(max(until_s - time.monotonic(), RETRY_S))
                    client.send(asked)
                    got.add(len(client.receive_frame()), address)
                    client.forget()
        except (OSError, EOFError):
            time.sleep(RETRY_S)


def cheat(
    connect: Open,
    addresses: list[str],
    topic: str,
    *,
    threads: int = 1,
    at_most: int = 1_000_000,
    seconds: float = CHEATS_S,
    partition: int = 0,
) -> Got:
    """Read from all these ports at the same time."""
    got = Got()
    until_s = time.monotonic() + seconds
    with ThreadPoolExecutor(len(addresses) * threads) as pool:
        for address in addresses * threads:
            more = {"at_most": at_most, "partition": partition}
            pool.submit(read, connect, address, topic, until_s, got, **more)
    got.seconds = time.monotonic() - got.began_s
    return got


def check_bound(got: Got) -> None:
    """Require that all of it together is within the bound, and not far below."""
    allowed = BOUND_BYTES * (got.seconds + SPAN_S + TOLD_S) + AT_MOST_OVER * ANSWER_BYTES
    assert got.bytes <= allowed, got
    least = BOUND_BYTES * (got.seconds - FIRST_S) / 2
    assert got.bytes > least, f"it is held far below its bound: {got}"


def plain(client_id: str) -> Open:
    """Return how a client of this id connects."""
    return lambda address: RawClient(address, client_id)
