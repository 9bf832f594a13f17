"""Figure: a client has one quota, however many processes serve it.

A raw client and a Spark query, each with connections to all bootstrap ports, are held to their
bounds by one process, by the workers of one machine and by the machines of a tier. Real broker,
real Spark, librdkafka with its defaults.
"""

import time

from bench.lab import open_lab
from bench.member_loads import CONNECTIONS, QUERY, QUERY_VALUE_BYTES, RAW, Arrivals, Members
from bench.rates import rate_between
from bench.report import Row, Verdict

FIGURE = "scale"
RAW_BOUND, QUERY_BOUND = 10_000_000, 3_000_000
TOLERANCE = 0.02
FULL_S, QUICK_S = 30.0, 15.0
QUERY_WARM_UP_S = 25.0
TAIL_S = 3.0

LAYOUTS = {"one process": (1, 1), "3 workers": (1, 3), "3 machines": (3, 1)}
"""How many machines serve the clients, and with how many workers each."""
RULES = (
    {"client-id": RAW, "consumer_byte_rate": RAW_BOUND},
    {"client-id": QUERY, "consumer_byte_rate": QUERY_BOUND},
)


def measure(quick: bool) -> list[Row]:
    """Measure rates in each layout."""
    duration_s = QUICK_S if quick else FULL_S
    # All of it is one batch, which does not end within the run: between two, Spark reads nothing.
    total_s = (QUERY_WARM_UP_S + duration_s + TAIL_S) * 2
    records = round(QUERY_BOUND * total_s) // QUERY_VALUE_BYTES
    rows = []
    for layout, (machines, workers) in LAYOUTS.items():
        with open_lab() as lab:
            members = Members.start(lab, machines, workers, RULES, records, records)
            time.sleep(QUERY_WARM_UP_S)
            start_s = time.monotonic()
            time.sleep(duration_s + TAIL_S)
            members.query.stop()
        query = members.query.arrivals
        rows += [
            _rate_row(layout, "raw client", members.raw, RAW_BOUND, start_s, duration_s),
            _rate_row(layout, "Spark query", query, QUERY_BOUND, start_s, duration_s),
        ]
    return rows


def _rate_row(
    layout: str, what: str, arrivals: Arrivals, bound: int, start_s: float, duration_s: float
) -> Row:
    found = rate_between(arrivals.at_s, arrivals.sizes, start_s, start_s + duration_s)
    error = found.interpolated / bound - 1
    return Row(
        FIGURE,
        f"{what}, {CONNECTIONS} connections, {layout}",
        f"bound ± {TOLERANCE:.0%}",
        f"{error:+.2%} over {duration_s:.0f} s",
        Verdict.of(abs(error) <= TOLERANCE),
        {"at_s": arrivals.at_s, "sizes": arrivals.sizes},
    )
