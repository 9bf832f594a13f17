"""Figure: a client has one quota, however many processes serve it, and what more of them cost.

A raw client and a Spark query, each with connections to all bootstrap ports, are held to their
bounds by one process, by the workers of one machine and by the machines of a tier. Real broker,
real Spark, librdkafka with its defaults.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench import traffic
from bench.client import Load
from bench.lab import Lab, open_lab, unviolated_rules
from bench.machines import Machine, RefusedError, cpu_s, machines_of, unique_bytes
from bench.member_loads import (
    CONNECTIONS,
    QUERY,
    QUERY_VALUE_BYTES,
    RAW,
    Arrivals,
    QueryTraffic,
    fill_topics,
    start_driver,
    start_query,
    start_raw,
)
from bench.processes import BenchError
from bench.rates import quantile, rate_between
from bench.report import Row, Verdict
from bench.topics import create, fill
from examples.devkit.broker import EmbeddedBroker
from examples.devkit.loopback import HOST

FIGURE = "scale"
RAW_BOUND, QUERY_BOUND = 10_000_000, 3_000_000
TOLERANCE = 0.02
FULL_S, QUICK_S = 30.0, 15.0
WARM_UP_S, QUERY_WARM_UP_S = 15.0, 25.0
TAIL_S = 3.0
SETTLED_S = 15.0
"""For the workers to share the slots, in some rounds of the group."""

SMALL_BYTES, LARGE_BYTES = 100, 50_000
"""Of the values of records."""

LAST_WITH_NAMES = 12
"""Later versions of Fetch have ids in place of topics' names."""

MOST_TRIED = 100
CPU_GOAL, LATENCY_GOAL = 0.9, 1.05
"""Two workers do at least 1.8 times the work of one where there are cores for both: so a byte may
cost no more than 1 / 0.9 of the CPU time."""


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
    """Measure rates in each layout, then what workers cost."""
    duration_s = QUICK_S if quick else FULL_S
    rows = []
    for layout in LAYOUTS:
        with open_lab() as lab:
            try:
                rows += _rates(lab, layout, duration_s)
            except RefusedError as error:
                rows.append(_refused_row(layout, error))
    with open_lab() as lab:
        rows += _costs(lab, rounds=2 if quick else 9)
    return rows


def _refused_row(layout: Layout, error: RefusedError) -> Row:
    """Say that this proxy cannot be laid out so."""
    return Row(FIGURE, layout.title, "", str(error), Verdict.NOT_MEASURED)


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
    driver = start_driver(lab)
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
    tier: str = "bench",
) -> list[Machine]:
    """Start machines of one layout, all at once; the lab ends them. Several members are a tier."""
    machines = [*machines_of(lab.work_dir, count, cluster, rules, workers, tier)]
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


def _costs(lab: Lab, rounds: int) -> list[Row]:
    """Measure CPU per byte and round trips of one worker and of two, in turn."""
    small, large = traffic.small_batch_bytes(), 1 << 20
    broker = lab.enter(EmbeddedBroker(lab.work_dir / "broker"))
    for size, value_bytes, records in ((small, SMALL_BYTES, 1), (large, LARGE_BYTES, 32)):
        topic = traffic.topic_name(size)
        create(broker.bootstrap, topic, 1)
        fill(broker.bootstrap, topic, 1, b"." * value_bytes, records, {})
    machines = {
        count: start_machines(
            lab, broker.bootstrap, unviolated_rules(), 1, count, tier=f"costs-{count}"
        )[0]
        for count in (1, 2)
    }
    time.sleep(SETTLED_S)
    client_ids = _client_of_each(machines[2], 2)
    cpu: dict[int, list[float]] = {count: [] for count in machines}
    waits: dict[int, list[float]] = {count: [] for count in machines}
    for _ in range(rounds):
        for count, machine in machines.items():
            # The same clients for both, as they and the broker take their parts of the cores.
            loads = [_load(machine, client_id, large) for client_id in client_ids]
            before_s = cpu_s(machine)
            outcome = lab.run_client(loads, 2.0)
            carried = sum(sum(served.frame_bytes) for served in outcome.served)
            cpu[count].append((cpu_s(machine) - before_s) / carried)
            load = _load(machine, "cost-small", small)
            outcome = lab.run_client([load], 1.0, latency=True)
            waits[count].append(quantile(outcome.served[0].waited_s, 0.5))
    cpu_ratio = statistics.median(one / two for one, two in zip(cpu[1], cpu[2], strict=True))
    wait_ratio = statistics.median(two / one for one, two in zip(waits[1], waits[2], strict=True))
    rows = [
        Row(
            FIGURE,
            "CPU per byte of one worker against each of two",
            f">= {CPU_GOAL:g}",
            f"{cpu_ratio:.2f}",
            Verdict.of(cpu_ratio >= CPU_GOAL),
            {"cpu_s_per_byte": cpu},
        ),
        Row(
            FIGURE,
            "small Fetch p50 of one connection, two workers against one",
            f"<= {LATENCY_GOAL:g}",
            f"{wait_ratio:.2f}",
            Verdict.of(wait_ratio <= LATENCY_GOAL),
            {"p50_s": waits},
        ),
    ]
    return rows + [_start_row(count, machine) for count, machine in machines.items()]


def _client_of_each(machine: Machine, workers: int) -> list[str]:
    """Return a client id for each worker, which owns it."""
    found: dict[int, str] = {}
    for client_id in map("cost-{}".format, range(MOST_TRIED)):
        _, port = traffic.advertised_address((HOST, machine.port), client_id)
        found.setdefault(port, client_id)
        if len(found) == workers:
            return list(found.values())
    raise BenchError(f"only {len(found)} of {workers} workers own clients")


def _load(machine: Machine, client_id: str, max_bytes: int) -> Load:
    """Return a load at the address that this client is told."""
    host, port = machine.bootstrap.split(":")
    host, port_number = traffic.advertised_address((host, int(port)), client_id)
    load = Load(client_id, host, port_number, 1, max_bytes, batch_bytes=max_bytes)
    return replace(load, version=LAST_WITH_NAMES)


def _start_row(workers: int, machine: Machine) -> Row:
    sizes = ", ".join(f"{size / 2**20:.0f}" for size in unique_bytes(machine))
    what = f"workers: {workers}, time until ready and memory of each process"
    return Row(FIGURE, what, "", f"{machine.started_s:.1f} s; {sizes} MiB", Verdict.INFO)
