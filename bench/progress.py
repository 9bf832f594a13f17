"""Figure: throughput of large Fetch responses with progress followed against not followed.

One proxy has both clients; they take turns within each round. The load is that of `large_fetch`.
"""

from bench.comparison import CPU_PER_GB, THROUGHPUT, Contest, Goal, Line, Ring
from bench.lab import followed_rule, open_lab, unviolated_rules
from bench.large_fetch import CLIENT_ID, LOAD, RESPONSE_BYTES, TITLE
from bench.report import Row

FIGURE = "progress"
FOLLOWED = "bench-followed"
GOALS = (Goal("followed", THROUGHPUT, 0.95), Goal("followed", CPU_PER_GB))


def measure(quick: bool) -> list[Row]:
    """Run both lines in turn and give the rows."""
    rounds, duration_s = (1, 1.0) if quick else (9, 1.5)
    with open_lab() as lab:
        direct = lab.start_generator([RESPONSE_BYTES])
        rules = [followed_rule(FOLLOWED), *unviolated_rules()]
        queries = [{"name": FOLLOWED}]
        proxy = lab.start_proxy(direct.address, rules, queries=queries).target()
        lines = [Line("followed", proxy, FOLLOWED), Line("not followed", proxy, CLIENT_ID)]
        ring = Ring(lab, direct, lines, ["not followed"], rounds, duration_s)
        return list(ring.run(FIGURE, Contest(TITLE, LOAD, GOALS)))
