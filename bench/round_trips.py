"""Figure: round trips of consumers against HAProxy's: one at a time, and of many connections.

A client that is followed has an adaptive rule and a query, as the README tells users to write.
"""

from bench import traffic
from bench.client import Load
from bench.comparison import CPU_EACH, P50, P99, Contest, Goal, Line, Ring, anywhere
from bench.lab import Lab, followed_rule, open_lab, unviolated_rules
from bench.report import Row

FIGURE = "small fetch"
CLIENT_ID = "bench-small"
FOLLOWED = "bench-followed"
PROXY, PROXY_FOLLOWING = "proxy", "followed"
MEDIUM_BYTES = 20_000
PARTITIONS = 50
CONNECTIONS = 16
DEPTHS = (1, 5)
"""Requests that each of them has under way."""
GOALS = (
    *(Goal(PROXY, metric, 1.0) for metric in (P50, P99, CPU_EACH)),
    *(Goal(PROXY_FOLLOWING, metric, 1.1) for metric in (P50, P99)),
    Goal(PROXY_FOLLOWING, CPU_EACH),
)


def measure(quick: bool) -> list[Row]:
    """Run all lines in turn and give the rows."""
    rounds, duration_s = (1, 0.5) if quick else (9, 1.0)
    with open_lab() as lab:
        ring = _ring(lab, rounds, duration_s)
        return [row for contest in _contests() for row in ring.run(FIGURE, contest)]


def _ring(lab: Lab, rounds: int, duration_s: float) -> Ring:
    direct = lab.start_generator([traffic.small_batch_bytes(), MEDIUM_BYTES])
    rivals = lab.start_haproxy(direct.address)
    rules = [followed_rule(FOLLOWED), *unviolated_rules()]
    proxy = lab.start_proxy(direct.address, rules, queries=[{"name": FOLLOWED}]).target()
    lines = [
        Line(PROXY, proxy, CLIENT_ID),
        Line(PROXY_FOLLOWING, proxy, FOLLOWED),
        *(Line(target.name, target, CLIENT_ID) for target in (*rivals, direct)),
    ]
    return Ring(lab, direct, lines, [rival.name for rival in rivals], rounds, duration_s)


def _contests() -> list[Contest]:
    small = traffic.small_batch_bytes()
    asked = {
        "100 B record": (small, 1),
        "20 kB": (MEDIUM_BYTES, 1),
        f"{PARTITIONS} x 20 kB": (MEDIUM_BYTES, PARTITIONS),
    }
    single = [
        Contest(title, _load(batch_bytes, partitions), GOALS, latency=True)
        for title, (batch_bytes, partitions) in asked.items()
    ]
    many = [
        Contest(f"100 B record, {CONNECTIONS} x {depth}", _many(small, depth), GOALS)
        for depth in DEPTHS
    ]
    return single + many


def _many(batch_bytes: int, depth: int) -> Load:
    return anywhere(
        connections=CONNECTIONS, max_bytes=batch_bytes, batch_bytes=batch_bytes, depth=depth
    )


def _load(batch_bytes: int, partitions: int) -> Load:
    return anywhere(
        connections=1,
        max_bytes=batch_bytes * partitions,
        batch_bytes=batch_bytes,
        partitions=partitions,
        in_session=True,
    )
