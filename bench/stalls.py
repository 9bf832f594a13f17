"""Figure: longest time for which 10,000 clients' sensors keep the event loop from its traffic.

The parts of one proxy stand in this process, without clients' connections; a child asks the admin
server. A task that does nothing but let the loop go round sees how long each round takes. Time that
the machine gives to other processes counts, so the computing time of the round is shown beside it.

A whole proxy, with as many rules and partitions, is measured in `app_stalls`.
"""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry

from bench import app_stalls
from bench.loop_rounds import FIGURE, Stall, only_the_proxys_garbage, stall_row, watch
from bench.processes import BenchError
from bench.report import Row, Verdict
from metrics import Instruments, SensorCollector
from metrics.clock import MS_PER_SECOND, clock_ms
from metrics.member_names import ONLY_MEMBER
from proxy.admin.admin_parts import AdminParts
from proxy.admin.audit import AuditLog
from proxy.admin.history import History
from proxy.admin.port.guard import Access
from proxy.admin.rates.observed_rates import ObservedRates
from proxy.admin.server import AdminServer
from proxy.quota.client_quotas import ClientQuotas
from proxy.quota.entities import DEFAULT, ClientIdentity, QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.rule_registry import RuleRegistry
from proxy.quota.rules import QuotaSettings, Rule
from proxy.relay.clients import ClientRegistry
from proxy.relay.connection_list import ConnectionList
from proxy.relay.ports import bind_ports
from proxy.relay.services import ThrottleMode
from proxy.slices import Slices
from proxy.state import MemoryStore
from proxy.wire.apis import FETCH

TARGET_CHURN_MS = 0.5
CLIENTS = 10_000
BOUND = 1e5
RESPONSE_BYTES = 2e6
HOUR_MS = 3_600_000.0
PATHS = ("/metrics", "/v1/clients?limit=1000", "/v1/status?limit=1000", "/v1/quotas")

_ASK = """
import http.client, sys
port = int(sys.argv[1])
for line in sys.stdin:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", line.strip())
    answer = connection.getresponse()
    answer.read()
    connection.close()
    print(answer.status, flush=True)
"""


class _NoQueries:
    async def accept(self, raw: bytes) -> Mapping[str, object]:
        raise NotImplementedError

    def progress(self) -> Sequence[Mapping[str, object]]:
        return ()

    def pressure(self) -> Mapping[str, Mapping[str, object]]:
        return {}

    def pipelines(self) -> Sequence[Mapping[str, object]]:
        return ()


_RELAY = {
    "listeners": [],
    "brokers": [],
    "cluster_answers": True,
    "delay_queues": {},
    "config_loads": [],
    "throttle_mode": ThrottleMode.DELAY.value,
    "certificates": [],
}


class _Proxy:
    """The parts of a proxy that know its clients; make it in a running event loop."""

    def __init__(self) -> None:
        metrics = CollectorRegistry()
        instruments = Instruments(metrics, max_label_sets=CLIENTS)
        bounds = {QuotaKind.CONSUMER_BYTE_RATE: BOUND}
        settings = QuotaSettings(rules=(Rule(client_id=DEFAULT, bounds=bounds),))
        self.quotas = QuotaManager(settings, instruments)
        metrics.register(SensorCollector(self.quotas.registry, clock_ms))
        self.clients = ClientRegistry(instruments.bytes_total)
        self.history = History(self.quotas.measured_rates)
        self.slices = Slices()
        parts = AdminParts(
            metrics=metrics,
            member=ONLY_MEMBER,
            readiness=lambda: (None, None),
            quotas=self.quotas,
            rules=RuleRegistry(self.quotas, MemoryStore(), settings),
            relay=lambda: _RELAY,
            history=self.history,
            clock_ms=clock_ms,
            reports=_NoQueries(),
            rates=ObservedRates(instruments.bytes_total.children, CLIENTS),
            audit=AuditLog(MemoryStore()),
            connections=ConnectionList(()),
        )
        self.admin = AdminServer("127.0.0.1", parts, access=Access())

    def use(self, number: int) -> ClientQuotas:
        """Let a client come and read more than its bound."""
        identity = ClientIdentity("bench", "alice", f"spark-kafka-source-{number}-driver-0")
        client = self.quotas.client(identity)
        self.clients.connected(identity)
        self.clients.byte_counter(identity, FETCH).inc(RESPONSE_BYTES)
        client.charge(QuotaKind.CONSUMER_BYTE_RATE, RESPONSE_BYTES, clock_ms())
        return client

    def leave(self, client: ClientQuotas) -> None:
        """Let it go."""
        client.close()
        self.clients.disconnected(client.identity)


def measure(quick: bool) -> list[Row]:
    """Let the clients come, look at them in every way, let them go; then measure a whole proxy."""
    with only_the_proxys_garbage():
        of_parts = asyncio.run(_measure(1 if quick else 5))
    return [*of_parts, *app_stalls.measure(quick)]


async def _measure(rounds: int) -> list[Row]:
    proxy = _Proxy()
    clients = [proxy.use(number) for number in range(CLIENTS)]
    await proxy.admin.start(bind_ports("127.0.0.1", 0, ()))
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _ASK, str(proxy.admin.port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    found: dict[str, list[Stall]] = {}
    try:
        for _ in range(rounds):
            for path in PATHS:
                found.setdefault(f"GET {path}", []).append(await watch(_ask(child, path)))
            sampling = proxy.slices.collect(proxy.history.sample(clock_ms))
            found.setdefault("a sample for the charts", []).append(await watch(sampling))
    finally:
        child.kill()
        await child.wait()
        await proxy.admin.stop()
    for client in clients:
        proxy.leave(client)
    started_s = time.perf_counter()
    for number in range(CLIENTS, 2 * CLIENTS):
        proxy.leave(proxy.use(number))
    churn_ms = (time.perf_counter() - started_s) * MS_PER_SECOND / CLIENTS
    later_ms = clock_ms() + 2 * HOUR_MS
    forgetting = proxy.slices.collect(proxy.clients.forgetting(later_ms))
    found["forget all clients"] = [await watch(forgetting)]
    expiring = proxy.slices.collect(proxy.quotas.expiring(later_ms))
    found["expire all sensors"] = [await watch(expiring)]
    return [
        *(stall_row(f"{CLIENTS} clients, {what}", stalls) for what, stalls in found.items()),
        Row(
            FIGURE,
            f"a client comes and leaves after {CLIENTS} others: mean",
            f"at most {TARGET_CHURN_MS} ms",
            f"{churn_ms:.3f} ms",
            Verdict.of(churn_ms <= TARGET_CHURN_MS),
        ),
    ]


async def _ask(child: asyncio.subprocess.Process, path: str) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{path}\n".encode())
    status = await child.stdout.readline()
    if status.strip() != b"200":
        raise BenchError(f"GET {path}: {status.decode().strip() or 'no answer'}")
