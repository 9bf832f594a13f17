"""Figure: memory of the proxy for 10,000 idle connections, and while 1,000 wait for 1 MB each.

An idle connection has been used once, so that its upstream side is open too. There are fewer than
10,000 where the system allows the proxy fewer open files than two for each.

Those that wait are of one client. Its bound lets a few of them have their response, which is held;
the requests of the others wait. The criterion is the growth of resident memory from the moment
before the requests, when the same connections are open and idle, to its peak while all wait. The
growth from before connecting is reported beside it: it contains what the connections themselves
cost. Kernel socket buffers, where the waiting responses are, belong to neither.
"""

import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from bench import traffic
from bench.lab import Proxy, open_lab, rule
from bench.processes import BenchError, raise_file_limit
from bench.report import Row, Verdict

FIGURE = "memory"
KIBIBYTE, MEBIBYTE = 1 << 10, 1 << 20
IDLE_TARGET_BYTES = 20 * KIBIBYTE
FULL_IDLE, QUICK_IDLE = 10_000, 500
# Two for each connection, and these for all else.
OTHER_FILES = 200
TARGET_BYTES = 20 * MEBIBYTE
CLIENT_ID = "bench-memory"
VERSION = 12
RESPONSE_BYTES = 1_000_000
# So low that the first response is held already, and for longer than we look.
BOUND = "10kB"
MAX_DELAY = "120s"
SETTLE_S = 1.0
SAMPLE_EVERY_S = 0.1
CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Observed:
    """Resident memory of the proxy, and what proves that the connections waited.

    Attributes:
        unconnected_bytes: memory before connecting.
        idle_bytes: memory with all connections open and nothing asked.
        held_bytes: samples from the moment of asking on.
        connections_answered: connections on which anything has arrived; 0 when all wait.

    """

    connections: int
    unconnected_bytes: int
    idle_bytes: int
    held_bytes: list[int]
    connections_answered: int


def measure(quick: bool) -> list[Row]:
    """Open the connections and watch the proxy's memory; then again, asking on all of them."""
    return [*_measure_idle(quick), *_measure_held(quick)]


def _measure_idle(quick: bool) -> list[Row]:
    count = min(QUICK_IDLE if quick else FULL_IDLE, (raise_file_limit() - OTHER_FILES) // 2)
    with open_lab() as lab:
        generator = lab.start_generator()
        proxy = lab.start_proxy(generator.address, [rule(CLIENT_ID, BOUND)])
        address = proxy.target().address
        time.sleep(SETTLE_S)
        before = proxy.child.usage().rss_bytes
        clients = lab.enter(ExitStack())
        for _ in range(count):
            clients.enter_context(_connect(address))
        time.sleep(SETTLE_S)
        open_connections = int(proxy.metric("connections"))
        growth = proxy.child.usage().rss_bytes - before
        clients.close()
    each = growth / count
    return [
        Row(
            FIGURE,
            f"{count:,} idle connections, for each of them",
            f"at most {IDLE_TARGET_BYTES / KIBIBYTE:.0f} KiB",
            f"{each / KIBIBYTE:.1f} KiB ({open_connections:,} open)",
            Verdict.of(each <= IDLE_TARGET_BYTES and open_connections >= count),
            {"connections": count, "before_bytes": before, "growth_bytes": growth},
        )
    ]


def _measure_held(quick: bool) -> list[Row]:
    count, watch_s = (100, 1.0) if quick else (1000, 10.0)
    with open_lab() as lab:
        generator = lab.start_generator([RESPONSE_BYTES])
        rules = [rule(CLIENT_ID, BOUND)]
        proxy = lab.start_proxy(generator.address, rules, max_delay=MAX_DELAY)
        address = proxy.target().address
        time.sleep(SETTLE_S)
        unconnected = proxy.child.usage().rss_bytes
        # Entered last, so the clients are gone before the proxy is told to drain.
        clients = lab.enter(ExitStack())
        connections = [clients.enter_context(_connect(address)) for _ in range(count)]
        time.sleep(SETTLE_S)
        idle = proxy.child.usage().rss_bytes
        request = traffic.fetch_request(VERSION, CLIENT_ID, RESPONSE_BYTES, RESPONSE_BYTES)
        for connection in connections:
            connection.sendall(request)
        samples = _watch(proxy, watch_s)
        answered = _readable(connections)
        clients.close()
    if not samples:
        raise BenchError("no memory sample was taken")
    return _rows(Observed(count, unconnected, idle, samples, answered))


def _connect(address: traffic.Address) -> socket.socket:
    """Open a connection and use it once, so that its upstream side is open too."""
    connection = socket.create_connection(address, CONNECT_TIMEOUT_S)
    connection.sendall(traffic.api_versions_request(CLIENT_ID))
    traffic.receive_frame(connection)
    return connection


def _watch(proxy: Proxy, duration_s: float) -> list[int]:
    samples = []
    deadline = time.monotonic() + duration_s
    while time.monotonic() < deadline:
        samples.append(proxy.child.usage().rss_bytes)
        time.sleep(SAMPLE_EVERY_S)
    return samples


def _readable(connections: Sequence[socket.socket]) -> int:
    """Count the connections on which something has arrived."""
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        return len(selector.select(0))


def _rows(seen: Observed) -> list[Row]:
    peak = max(seen.held_bytes)
    growth = peak - seen.idle_bytes
    all_wait = not seen.connections_answered
    return [
        Row(
            FIGURE,
            f"{seen.connections} connections, 1 MB each, all waiting: growth against idle",
            f"at most {TARGET_BYTES / MEBIBYTE:.0f} MiB",
            f"{growth / MEBIBYTE:.1f} MiB ({seen.connections_answered} answered)",
            Verdict.of(growth <= TARGET_BYTES and all_wait),
            asdict(seen),
        ),
        Row(
            FIGURE,
            f"{seen.connections} connections: growth against before connecting",
            "",
            f"{(peak - seen.unconnected_bytes) / MEBIBYTE:.1f} MiB, of which idle connections"
            f" {(seen.idle_bytes - seen.unconnected_bytes) / MEBIBYTE:.1f} MiB",
            Verdict.INFO,
        ),
    ]
