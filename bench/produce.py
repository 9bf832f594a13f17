"""Figure: Produce requests against HAProxy, by size and acks.

With acks=0 there is no response: timed is the way to the broker, with a pause after each request.
"""

from collections.abc import Iterator

from bench import traffic
from bench.comparison import (
    CPU_EACH,
    CPU_PER_GB,
    P50,
    THROUGHPUT,
    Contest,
    Goal,
    Line,
    Ring,
    anywhere,
)
from bench.lab import open_lab, unviolated_rules
from bench.report import Row

FIGURE = "produce"
CLIENT_ID = "bench-produce"
PROXY = "proxy"
LARGE_BYTES = 1_000_000
MEDIUM_BYTES = 20_000
ACKS = {"0": 0, "1": 1, "all": -1}
CONNECTIONS, MANY = 2, 16
# max.in.flight.requests.per.connection of Kafka's Java client.
DEPTH = 5
ROUND_TRIP_GOALS = (Goal(PROXY, P50, 1.0), Goal(PROXY, CPU_EACH, 1.0))
THROUGHPUT_GOALS = (Goal(PROXY, THROUGHPUT, 1.5), Goal(PROXY, CPU_PER_GB, 1.0))


def measure(quick: bool) -> list[Row]:
    """Run all lines in turn and give the rows."""
    rounds, duration_s = (1, 0.5) if quick else (9, 0.8)
    with open_lab() as lab:
        direct = lab.start_generator()
        rivals = lab.start_haproxy(direct.address)
        proxy = lab.start_proxy(direct.address, unviolated_rules()).target()
        lines = [Line(target.name, target, CLIENT_ID) for target in (proxy, *rivals, direct)]
        ring = Ring(lab, direct, lines, [rival.name for rival in rivals], rounds, duration_s)
        return [row for contest in _contests() for row in ring.run(FIGURE, contest)]


def _contests() -> Iterator[Contest]:
    sizes = {
        "100 B": traffic.small_batch_bytes(),
        "20 kB": MEDIUM_BYTES,
        "1 MB": LARGE_BYTES,
    }
    for size, max_bytes in sizes.items():
        for name, acks in ACKS.items():
            load = anywhere(connections=1, max_bytes=max_bytes, acks=acks)
            yield Contest(f"{size}, acks={name}", load, ROUND_TRIP_GOALS, latency=True)
    for connections in (1, MANY):
        load = anywhere(
            connections=connections, max_bytes=traffic.small_batch_bytes(), depth=DEPTH, acks=1
        )
        title = f"100 B, acks=1, {connections} x {DEPTH} in flight"
        yield Contest(title, load, ROUND_TRIP_GOALS)
    for name, acks in ACKS.items():
        load = anywhere(connections=CONNECTIONS, max_bytes=LARGE_BYTES, depth=DEPTH, acks=acks)
        title = f"1 MB, acks={name}, {CONNECTIONS} connections"
        yield Contest(title, load, THROUGHPUT_GOALS)
