"""What members are measured with: a raw client and a Spark query that always want more."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.lab import Lab
from bench.machines import BROKER_PORTS, Machine
from bench.processes import python
from bench.query_reads import QueryReads
from bench.topics import create, fill
from examples.devkit.broker import EmbeddedBroker
from examples.devkit.jars import connector_jars
from examples.devkit.loopback import HOST, free_ports

RAW, QUERY = "bench-raw", "bench-query"
"""Client ids, and the topics that they read."""

TIER = "bench"
CONNECTIONS = 8
RAW_VALUE_BYTES, RAW_RECORDS = 50_000, 800
QUERY_VALUE_BYTES = 5_000
FILL_SETTINGS = {"linger.ms": 20, "queue.buffering.max.kbytes": 262_144, "log_level": 0}
SAMPLE_S = 0.2


@dataclass(slots=True)
class Arrivals:
    """When bytes came, on the monotonic clock, in order."""

    at_s: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, at_s: float, size: int) -> None:
        """Add what has come by then."""
        self.at_s.append(at_s)
        self.sizes.append(size)


class QueryTraffic:
    """What the members have sent to a client id, read off their metrics until `stop`."""

    def __init__(self, machines: Sequence[Machine], client_id: str) -> None:
        self.arrivals = Arrivals()
        self._machines, self._client_id = machines, client_id
        self._seen: dict[tuple[str, str], float] = {}
        """By machine and member."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the sampling."""
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            grown = 0.0
            for machine in self._machines:
                if not machine.is_up:
                    continue
                try:
                    carried = machine.carried(self._client_id)
                except OSError:
                    continue
                for member, now in carried.items():
                    before = self._seen.get((machine.name, member), 0.0)
                    # One that was started again begins at zero.
                    grown += now - before if now >= before else now
                    self._seen[machine.name, member] = now
            self.arrivals.add(time.monotonic(), round(grown))


@dataclass(frozen=True, slots=True)
class Members:
    """Machines at work for both clients."""

    machines: Sequence[Machine]
    raw: Arrivals
    query: QueryTraffic
    reads: QueryReads

    @classmethod
    def start(
        cls,
        lab: Lab,
        count: int,
        workers: int,
        rules: Sequence[Mapping[str, object]],
        records: int,
        records_each_trigger: int,
    ) -> "Members":
        """Start a broker with so many records for the query, the machines, then both clients."""
        broker = lab.enter(EmbeddedBroker(lab.work_dir / "broker"))
        _fill_topics(broker, records)
        machines = _start_machines(lab, broker.bootstrap, rules, count, workers)
        raw = _start_raw(lab, machines)
        traffic = QueryTraffic(machines, QUERY)
        return cls(machines, raw, traffic, _start_query(lab, machines, records_each_trigger))


def _fill_topics(broker: EmbeddedBroker, query_records: int) -> None:
    """Make both topics, with a partition for each connection."""
    for topic, value_bytes, records in (
        (RAW, RAW_VALUE_BYTES, RAW_RECORDS),
        (QUERY, QUERY_VALUE_BYTES, query_records),
    ):
        create(broker.bootstrap, topic, CONNECTIONS)
        fill(broker.bootstrap, topic, CONNECTIONS, b"." * value_bytes, records, dict(FILL_SETTINGS))


def _start_machines(
    lab: Lab, cluster: str, rules: Sequence[Mapping[str, object]], count: int, workers: int
) -> list[Machine]:
    """Start all at once; the lab ends them. Several members are one tier."""
    each = 2 + (1 + BROKER_PORTS) * workers
    first, *_ = free_ports(count * each)
    machines = []
    for number in range(count):
        name = f"{TIER}-{number}"
        own: dict[str, object] = {"workers": workers, "state": {"kind": "memory"}}
        if count * workers > 1:
            own["tier"] = {"name": TIER, "machine": name, "admin_host": HOST}
            own["state"] = {"kind": "kafka", "topic": f"{TIER}-state"}
        ports = range(first + number * each, first + (number + 1) * each)
        machine = Machine(lab.work_dir, name, cluster, rules, ports, own)
        machine.begin()
        lab.at_end(machine.kill)
        machines.append(machine)
    for machine in machines:
        machine.await_ready()
    return machines


def _start_raw(lab: Lab, machines: Sequence[Machine]) -> Arrivals:
    """Start the raw client; return what it reads as it comes."""
    child = lab.start(
        "consumers",
        python(
            "bench.eager_consumers",
            f"--bootstraps={_bootstraps(machines)}",
            f"--client-id={RAW}",
            f"--topic={RAW}",
            f"--connections={CONNECTIONS}",
        ),
    )
    arrivals = Arrivals()

    def listen() -> None:
        assert child.process.stdout is not None
        for line in child.process.stdout:
            at_s, size = line.split()
            arrivals.add(float(at_s), int(size))

    threading.Thread(target=listen, daemon=True).start()
    return arrivals


def _start_query(lab: Lab, machines: Sequence[Machine], records_each_trigger: int) -> QueryReads:
    command = python(
        "bench.query_driver",
        f"--jars={','.join(map(str, connector_jars()))}",
        f"--name={QUERY}",
        f"--bootstrap={_bootstraps(machines)}",
        f"--admin={machines[0].admin_url}",
        f"--checkpoint={lab.work_dir / 'checkpoint'}",
        f"--records-per-trigger={records_each_trigger}",
    )
    return QueryReads(lab.start("driver", command))


def _bootstraps(machines: Sequence[Machine]) -> str:
    return ",".join(machine.bootstrap for machine in machines)
