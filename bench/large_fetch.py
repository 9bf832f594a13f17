"""Figure: throughput of large Fetch responses against HAProxy in TCP mode with one thread.

HAProxy runs as installed, once copying and once with `splice-auto`; the faster of the two is the
yardstick.
"""

from bench.comparison import CPU_PER_GB, THROUGHPUT, Contest, Goal, Line, Ring, anywhere
from bench.lab import open_lab, unviolated_rules
from bench.report import Row

FIGURE = "large fetch"
CLIENT_ID = "bench-large"
PROXY = "proxy"
RESPONSE_BYTES = 1_000_000
CONNECTIONS = 2
LOAD = anywhere(connections=CONNECTIONS, max_bytes=RESPONSE_BYTES, in_session=True)
TITLE = f"1 MB, {CONNECTIONS} connections"
GOALS = (Goal(PROXY, THROUGHPUT, 2.5), Goal(PROXY, CPU_PER_GB, 1.0))


def measure(quick: bool) -> list[Row]:
    """Run all lines in turn and give the rows."""
    rounds, duration_s = (1, 1.0) if quick else (9, 1.5)
    with open_lab() as lab:
        direct = lab.start_generator([RESPONSE_BYTES])
        rivals = lab.start_haproxy(direct.address)
        proxy = lab.start_proxy(direct.address, unviolated_rules()).target()
        lines = [Line(target.name, target, CLIENT_ID) for target in (proxy, *rivals, direct)]
        ring = Ring(lab, direct, lines, [rival.name for rival in rivals], rounds, duration_s)
        return list(ring.run(FIGURE, Contest(TITLE, LOAD, GOALS)))
