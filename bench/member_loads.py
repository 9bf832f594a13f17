"""What members are measured with: a raw client and a Spark query that always want more."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.lab import Lab
from bench.machines import Machine
from bench.outage_driver import Start
from bench.outage_parts import Driver
from bench.processes import Child, python
from bench.topics import create, fill
from examples.devkit.broker import EmbeddedBroker

RAW, QUERY = "bench-raw", "bench-query"
"""Client ids, and the topics that they read."""

CONNECTIONS = 8
RAW_VALUE_BYTES, RAW_RECORDS = 50_000, 800
QUERY_VALUE_BYTES = 5_000
FILL_SETTINGS = {"linger.ms": 20, "queue.buffering.max.kbytes": 262_144, "log_level": 0}
SPARK_TASKS = 8
SAMPLE_S = 0.2
RETRIES = "20"
"""Of a look-up of offsets: a driver by default gives up after three."""


@dataclass(slots=True)
class Arrivals:
    """When bytes came, on the monotonic clock, in order."""

    at_s: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, at_s: float, size: int) -> None:
        """Add what has come by then."""
        self.at_s.append(at_s)
        self.sizes.append(size)


class RawClient:
    """A running `eager_consumers`, and what it has read."""

    def __init__(self, child: Child) -> None:
        self.arrivals = Arrivals()
        self._child = child
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._child.process.stdout is not None
        for line in self._child.process.stdout:
            at_s, size = line.split()
            self.arrivals.add(float(at_s), int(size))


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


def start_raw(lab: Lab, machines: Sequence[Machine]) -> RawClient:
    """Start the raw client at these machines."""
    child = lab.start_helper(
        "consumers",
        python(
            "bench.eager_consumers",
            f"--bootstraps={','.join(each.bootstrap for each in machines)}",
            f"--client-id={RAW}",
            f"--topic={RAW}",
            f"--connections={CONNECTIONS}",
        ),
    )
    return RawClient(child)


def start_query(
    lab: Lab, driver: Driver, machines: Sequence[Machine], records_each_trigger: int
) -> None:
    """Start the query; it reports to the first machine."""
    driver.start(
        Start(
            QUERY,
            ",".join(each.bootstrap for each in machines),
            machines[0].admin_url,
            QUERY,
            str(lab.work_dir / "checkpoint"),
            "0 seconds",
            0.0,
            {"maxOffsetsPerTrigger": str(records_each_trigger), "fetchOffset.numRetries": RETRIES},
        )
    )


def fill_topics(broker: EmbeddedBroker, query_records: int) -> None:
    """Make both topics, with a partition for each connection."""
    for topic, value_bytes, records in (
        (RAW, RAW_VALUE_BYTES, RAW_RECORDS),
        (QUERY, QUERY_VALUE_BYTES, query_records),
    ):
        create(broker.bootstrap, topic, CONNECTIONS)
        fill(broker.bootstrap, topic, CONNECTIONS, b"." * value_bytes, records, dict(FILL_SETTINGS))
