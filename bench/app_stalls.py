"""Part of the figure `stalls`: a whole proxy with 10,000 clients, rules and followed partitions.

The proxy stands in this process, as `quota-proxy run` makes it, before a stand-in broker. All
clients are charged, one query's batches of 10,000 partitions are reported, and the file with the
10,000 rules is loaded again, each time with other bounds. Connections of clients are not made:
what each costs by itself is not the matter here.
"""

import asyncio
import json
import logging
import sys
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import uvloop

from bench.loop_rounds import Stall, only_the_proxys_garbage, stall_row, watch
from bench.partitioned_broker import LOG_END, TOPIC
from bench.processes import BenchError, listening_socket, python, start
from bench.report import Row
from bench.traffic import Address
from examples.devkit.loopback import free_ports
from metrics.clock import clock_ms
from proxy.config import load_config
from proxy.member import Member
from proxy.quota.client_quotas import ClientQuotas
from proxy.quota.entities import ClientIdentity, QuotaKind

FULL_COUNT, QUICK_COUNT = 10_000, 1_000
FULL_ROUNDS, QUICK_ROUNDS = 3, 1
BROKER_PORTS = 10
QUERY = "bench"
CLIENT = "client-{}"
FIRST_BOUND = 100_000
CHARGED_BYTES = 1e6
STEP_RECORDS = 10
READY_TIMEOUT_S = 30.0
RELOAD_TIMEOUT_S = 120.0
POLL_S = 0.05
# The ticks that follow a reload, and the questions about partitions, come within so long.
FOLLOWING_S = 12.0
QUICK_FOLLOWING_S = 2.0
PATHS = ("/metrics", f"/v1/progress?limit={FULL_COUNT}", "/v1/status?limit=1000", "/v1/quotas")

# Sends what a line says, with the file's content as the body if it names one.
_ASK = """
import http.client, sys
port = int(sys.argv[1])
for line in sys.stdin:
    method, path, *file = line.split()
    body = open(file[0], "rb").read() if file else None
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    print(answer.status, flush=True)
"""


@dataclass(slots=True)
class _Driver:
    """The driver of the query: one batch after another over all partitions."""

    partitions: int
    sender: str = field(default_factory=lambda: str(uuid.uuid4()))
    query_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    batches: int = 0

    def report(self) -> bytes:
        """Return the report of the next batch."""
        self.batches += 1
        start, end, latest = (
            {TOPIC: dict.fromkeys(map(str, range(self.partitions)), offset)}
            for offset in ((self.batches - 1) * STEP_RECORDS, self.batches * STEP_RECORDS, LOG_END)
        )
        rows = self.partitions * STEP_RECORDS
        source = {
            **{"description": f"KafkaV2[Subscribe[{TOPIC}]]", "rows": rows},
            **{"start": start, "end": end, "latest": latest},
        }
        batch = {
            "batch_id": self.batches,
            "timestamp": "2026-01-02T03:04:05.678Z",
            "rows": rows,
            "durations_ms": {"triggerExecution": 1000},
            "sources": [source],
        }
        about = {"sender": self.sender, "query_id": self.query_id, "run_id": self.run_id}
        event = {"number": self.batches, "event": "progress", "name": QUERY, "age_ms": 1}
        return json.dumps({**about, **event, "batch": batch}).encode()


def measure(quick: bool) -> list[Row]:
    """Start a broker and a proxy, and give a row for each kind of work."""
    count = QUICK_COUNT if quick else FULL_COUNT
    with (
        tempfile.TemporaryDirectory(prefix="quota-proxy-bench-") as work,
        listening_socket() as listener,
    ):
        work_dir = Path(work)
        command = python(
            "bench.partitioned_broker", f"--fd={listener.fileno()}", f"--partitions={count}"
        )
        with start("broker", command, work_dir, pass_fds=[listener.fileno()]) as broker:
            broker.wait_line(lambda line: line == "ready", READY_TIMEOUT_S)
            config = _Config(work_dir / "quota-proxy.yaml", listener.getsockname(), count)
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
            with only_the_proxys_garbage():
                stalls = uvloop.run(_measure(config, quick))
    about = f"whole proxy, {count:,} clients, rules and partitions"
    return [stall_row(f"{about}: {what}", found) for what, found in stalls.items()]


class _Config:
    """The configuration's file, whose rules change."""

    def __init__(self, path: Path, upstream: Address, count: int) -> None:
        self.path, self.count = path, count
        self._bound = FIRST_BOUND
        port, first, *_, last = free_ports(1 + BROKER_PORTS)
        listener = {
            "name": "bench",
            "bind": f"127.0.0.1:{port}",
            "advertised_host": "127.0.0.1",
            "broker_ports": f"{first}-{last}",
        }
        self._rest: dict[str, Any] = {
            "cluster": {"bootstrap_servers": [f"{upstream[0]}:{upstream[1]}"]},
            "listeners": [listener],
            "queries": [{"name": QUERY}],
            "limits": {"max_client_entities": count + 1},
            "state": {"kind": "memory"},
            "admin": {"bind": "127.0.0.1:0"},
        }
        self.write()

    def write(self) -> None:
        """Write the file, each time with other bounds."""
        self._bound += 1
        rules = [
            {"client-id": CLIENT.format(number), "consumer_byte_rate": self._bound}
            for number in range(self.count)
        ]
        document = {**self._rest, "quotas": {"rules": rules}}
        # Much faster than YAML's own writer, and YAML all the same.
        self.path.write_text(json.dumps(document, indent=1))


async def _measure(config: _Config, quick: bool) -> dict[str, list[Stall]]:
    rounds, following_s = (QUICK_ROUNDS, QUICK_FOLLOWING_S) if quick else (FULL_ROUNDS, FOLLOWING_S)
    member = Member(load_config(config.path), config.path)
    await member.start()
    member.accept()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _ASK, str(member.admin.port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    found: dict[str, list[Stall]] = {}

    async def record(what: str, work: Callable[[], Awaitable[object]]) -> None:
        found.setdefault(what, []).append(await watch(work()))

    driver, report = _Driver(config.count), config.path.with_name("report.json")
    try:
        clients = [await _come(member, number) for number in range(config.count)]
        for _ in range(rounds):
            report.write_bytes(driver.report())
            await record("report a batch", lambda: _ask(child, f"POST /v1/spark/batches {report}"))
            await record("follow", lambda: asyncio.sleep(following_s))
            for path in PATHS:
                await record(f"GET {path}", lambda path=path: _ask(child, f"GET {path}"))  # type: ignore[misc]
            await asyncio.to_thread(config.write)
            await record("load the rules again", lambda: _reload(member, clients))
            for client in clients:
                client.charge(QuotaKind.CONSUMER_BYTE_RATE, CHARGED_BYTES, clock_ms())
                await asyncio.sleep(0)
    finally:
        child.kill()
        await child.wait()
        await member.stop()
    return found


async def _come(member: Member, number: int) -> ClientQuotas:
    client = member.quotas.client(ClientIdentity("bench", None, CLIENT.format(number)))
    client.charge(QuotaKind.CONSUMER_BYTE_RATE, CHARGED_BYTES, clock_ms())
    await asyncio.sleep(0)
    return client


async def _reload(member: Member, clients: Sequence[ClientQuotas]) -> None:
    """Load the file, and wait until the rules of all clients are looked up."""
    before = len(member.health.loads)
    member.reloader.request()
    async with asyncio.timeout(RELOAD_TIMEOUT_S):
        while len(member.health.loads) == before:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(POLL_S)
        if (load := member.health.loads[0]).result != "ok":
            raise BenchError(f"not reloaded: {load.message}")
        while any(client.generation != member.quotas.generation for client in clients):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


async def _ask(child: asyncio.subprocess.Process, line: str) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{line}\n".encode())
    status = await child.stdout.readline()
    if status.strip() != b"200":
        raise BenchError(f"{line}: {status.decode().strip() or 'no answer'}")
