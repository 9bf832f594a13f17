"""Figure: a client has one quota, however many processes serve it.

A raw client and a Spark query, each with connections to all bootstrap ports, are held to their
bounds by one process, by the workers of one machine and by the machines of a tier. Real broker,
real Spark, librdkafka with its defaults.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.lab import Lab, open_lab
from bench.machines import Machine, RefusedError, machines_of
from bench.member_loads import (
    CONNECTIONS,
    QUERY,
    QUERY_VALUE_BYTES,
    RAW,
    SPARK_TASKS,
    Arrivals,
    QueryTraffic,
    fill_topics,
    start_query,
    start_raw,
)
from bench.outage_parts import Driver
from bench.rates import rate_between
from bench.report import Row, Verdict
from examples.devkit.broker import EmbeddedBroker

FIGURE = "scale"
RAW_BOUND, QUERY_BOUND = 10_000_000, 3_000_000
TOLERANCE = 0.02
FULL_S, QUICK_S = 30.0, 15.0
WARM_UP_S, QUERY_WARM_UP_S = 15.0, 25.0
TAIL_S = 3.0


@dataclass(frozen=True, slots=True)
class Layout:
    """How many processes serve the clients."""

    title: str
    machines: int
    workers: int


LAYOUTS = (
    Layout("one process", 1, 1),
    Layout("3 workers", 1, 3),
    Layout("3 machines", 3, 1),
)


def measure(quick: bool) -> list[Row]:
    """Measure rates in each layout."""
    duration_s = QUICK_S if quick else FULL_S
    rows = []
    for layout in LAYOUTS:
        with open_lab() as lab:
            try:
                rows += _rates(lab, layout, duration_s)
            except RefusedError as error:
                rows.append(Row(FIGURE, layout.title, "", str(error), Verdict.NOT_MEASURED))
    return rows


def _rates(lab: Lab, layout: Layout, duration_s: float) -> list[Row]:
    broker = lab.enter(EmbeddedBroker(lab.work_dir / "broker"))
    # All of it is one batch, which does not end within the run: between two, Spark reads nothing.
    total_s = (QUERY_WARM_UP_S + duration_s + TAIL_S) * 2
    records = round(QUERY_BOUND * total_s) // QUERY_VALUE_BYTES
    fill_topics(broker, records)
    rules = [
        {"client-id": RAW, "consumer_byte_rate": RAW_BOUND},
        {"client-id": QUERY, "consumer_byte_rate": QUERY_BOUND},
    ]
    machines = start_machines(lab, broker.bootstrap, rules, layout.machines, layout.workers)
    raw = start_raw(lab, machines)
    driver = Driver.begin(lab, SPARK_TASKS)
    seen = QueryTraffic(machines, QUERY)
    start_query(lab, driver, machines, records)
    time.sleep(QUERY_WARM_UP_S)
    start_s = time.monotonic()
    time.sleep(duration_s + TAIL_S)
    seen.stop()
    return [
        _rate_row(layout, "raw client", raw.arrivals, RAW_BOUND, start_s, duration_s),
        _rate_row(layout, "Spark query", seen.arrivals, QUERY_BOUND, start_s, duration_s),
    ]


def start_machines(
    lab: Lab,
    cluster: str,
    rules: Sequence[Mapping[str, object]],
    count: int,
    workers: int,
) -> list[Machine]:
    """Start machines of one layout, all at once; the lab ends them. Several members are a tier."""
    machines = [*machines_of(lab.work_dir, count, cluster, rules, workers)]
    for machine in machines:
        machine.begin()
        lab.at_end(machine.kill)
    for machine in machines:
        machine.await_ready()
    return machines


def _rate_row(
    layout: Layout, what: str, arrivals: Arrivals, bound: int, start_s: float, duration_s: float
) -> Row:
    found = rate_between(arrivals.at_s, arrivals.sizes, start_s, start_s + duration_s)
    error = found.interpolated / bound - 1
    return Row(
        FIGURE,
        f"{what}, {CONNECTIONS} connections, {layout.title}",
        f"bound ± {TOLERANCE:.0%}",
        f"{error:+.2%} over {duration_s:.0f} s",
        Verdict.of(abs(error) <= TOLERANCE),
        {"at_s": arrivals.at_s, "sizes": arrivals.sizes},
    )
