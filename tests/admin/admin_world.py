"""A real admin server over a real quota manager, rule book and store, on virtual time."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import aiohttp
from parts.quota_world import QuotaWorld
from yarl import URL

from metrics.member_names import ONLY_MEMBER
from proxy.admin.admin_parts import AdminParts
from proxy.admin.audit import AuditLog
from proxy.admin.history import RateHistory
from proxy.admin.port.guard import AccessRules, AdminToken
from proxy.admin.server import AdminServer
from proxy.config.endpoints import HostPort
from proxy.config.models import AdminSection
from proxy.pipeline.running_pipeline import RunningPipeline
from proxy.progress.query import FollowedQuery
from proxy.progress.report import ReportableQueries
from proxy.quota.entities import QuotaKind
from proxy.quota.rule_registry import RuleRegistry
from proxy.quota.rules import QuotaManagerSettings, Rule
from proxy.relay.connection_list import ConnectionList
from proxy.relay.ports import bind_each_address
from proxy.state import MemoryStore, Record, StateError
from proxy.usage.observed_usage import ObservedUsage
from proxy.usage.usage_meter import UsageMeter
from proxy.usage.usage_record import UsageRecord

MIB = 2.0**20
CONSUMER, PRODUCER, REQUEST, *_ = QuotaKind
HOSTILE = "<img src=x onerror=alert(1)>"
"""A name that would do something if it were not shown as text."""

RULES = (
    Rule(client_id="etl-orders", bounds={CONSUMER: 10 * MIB}, place="quota-proxy.yaml:12"),
    Rule(
        client_id_prefix="consumer-reports-",
        scope="shared",
        bounds={CONSUMER: 20 * MIB},
        place="quota-proxy.yaml:13",
        number=1,
    ),
    Rule(
        user="alice",
        client_id="<default>",
        bounds={PRODUCER: 2 * MIB},
        place="quota-proxy.yaml:14",
        number=2,
    ),
    Rule(
        client_id="<default>",
        bounds={CONSUMER: 50 * MIB, REQUEST: 50.0},
        place="quota-proxy.yaml:15",
        number=3,
    ),
)


RELAY: Mapping[str, Any] = {
    "listeners": [
        {"name": "default", "host": "0.0.0.0", "port": 19092, "tls": False, "connections": 14},
        {"name": "tenants", "host": "::1", "port": 19093, "tls": True, "connections": 3},
    ],
    "brokers": [
        {"node_id": 1, "host": "broker-1.kafka.example", "port": 9092},
        {"node_id": 2, "host": "broker-2.kafka.example", "port": 9092},
    ],
    "cluster_answers": True,
    "delay_queues": {"fetch": 4, "produce": 1, "request": 0},
    "config_loads": [
        {
            "result": "failed",
            "message": "quota-proxy.yaml:12: quotas.rules[0].consumer_byte_rate: 10mb is not a "
            "size\n    fix: write 10MB (10,000,000 bytes) or 10MiB (10,485,760 bytes)",
            "at": "2026-09-21T14:18:20+00:00",
        },
        {
            "result": "ok",
            "message": "quota-proxy.yaml: 4 rules, 2 listeners",
            "at": "2026-09-21T14:13:20+00:00",
        },
    ],
    "throttle_mode": "delay",
    "certificates": [],
}
"""The rest of the program, as tests want it."""


class NoQueries:
    """A proxy that follows no queries."""

    registry = SimpleNamespace(clients={})

    async def accept(self, raw: bytes, scope: ReportableQueries) -> Mapping[str, object]:
        raise AssertionError(f"nobody reports here: {raw!r} of {scope}")

    def progress(self) -> Sequence[FollowedQuery]:
        return ()

    def pressure(self) -> Mapping[str, Mapping[str, object]]:
        return {}

    def pipelines(self) -> Sequence[RunningPipeline]:
        return ()


class Disk(MemoryStore):
    """A store whose disk may fill up."""

    is_full = False

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> int:
        if self.is_full:
            raise StateError("the disk is full", "make room")
        return super().put_many(records, delete=delete)


class AdminWorld(QuotaWorld):
    """Everything behind the server."""

    def __init__(self, rules: tuple[Rule, ...] = RULES) -> None:
        settings = QuotaManagerSettings(rules=rules)
        self.open_quotas(settings)
        self.store = Disk()
        self.audit = AuditLog(self.store)
        self.rules = RuleRegistry(self.quotas, self.store, settings)
        self.history = RateHistory(self.quotas.measured_rates)
        self.meter = UsageMeter(self.instruments.bytes_total, {}, lambda: self.quotas.table)
        self.records: list[UsageRecord] = []
        self.max_clients = 100
        self.relay = RELAY
        self.not_ready: str | None = None
        self.warning: str | None = None
        self.request_times: list[Mapping[str, object]] = []

    def server(
        self,
        host: str = "127.0.0.1",
        *,
        token: str | None = None,
        access: AccessRules | None = None,
        **changes: Any,
    ) -> AdminServer:
        """Make a server; `token` is the text of one with all rights."""
        tokens = () if token is None else (AdminToken("admin", token),)
        arguments: dict[str, Any] = {
            "metrics": self.prometheus,
            "member": ONLY_MEMBER,
            "readiness": lambda: (self.not_ready, self.warning),
            "request_times": lambda: self.request_times,
            "quotas": self.quotas,
            "rules": self.rules,
            "relay": lambda: self.relay,
            "history": self.history,
            **dict.fromkeys(("clock_ms", "cpu_ms"), lambda: self.now_ms),
            "reports": NoQueries(),
            "audit": self.audit,
            "access": access or AccessRules(tokens),
            "section": AdminSection.model_construct(bind=HostPort(host, 0)),
            "connections": ConnectionList(()),
            "observe": self.observe,
        } | changes
        of_parts = {each.name for each in fields(AdminParts) if each.init}
        parts = {key: arguments.pop(key) for key in of_parts & arguments.keys()}
        return AdminServer(parts=AdminParts(**parts), **arguments)

    def sample(self) -> None:
        """Take a rate of the last ten seconds."""
        for _ in (*self.meter.reading(), *self.meter.rating(10.0)):
            pass

    async def observe(self, since_s: float) -> ObservedUsage:
        """Return what the records say that were made since `since_s` ago, up to now."""
        end_ms = round(time.time() * 1000)
        make = partial(UsageRecord, member="h/0", epoch=1, sequence=0, start_ms=0, end_ms=end_ms)
        observed = ObservedUsage(self.max_clients)
        for _ in self.meter.recording(make, self.records.append):
            pass
        for record in self.records:
            if record.end_ms >= end_ms - since_s * 1000:
                observed.add(record)
        for _ in observed.finishing():
            pass
        return observed

    def connect(
        self, client_id: str | None, user: str | None = None, listener: str = "default"
    ) -> Callable[..., None]:
        """Give a function `send(value, kind=CONSUMER)` that charges traffic and holds for it."""
        quotas = self.client_quotas(client_id, user, listener)

        def send(value: float, kind: QuotaKind = CONSUMER) -> None:
            charge = quotas.charge(kind, value, self.now_ms)
            if charge is not None:
                self.quotas.held(charge, charge.delay_ms, self.now_ms)

        return send


def tick(history: RateHistory, now_ms: float) -> bool:
    """Take a sample if one is due; return whether it was."""
    return len(list(history.sample(lambda: now_ms))) > 0


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that was read."""

    status: int
    headers: Mapping[str, str]
    text: str
    json: Any


Ask = Callable[..., Awaitable[Answer]]


async def start(server: AdminServer, host: str = "127.0.0.1", port: int = 0) -> None:
    """Start a server at a port, by default any free one."""
    await server.start(bind_each_address(host, port, ()))


@asynccontextmanager
async def running(server: AdminServer, port: int = 0) -> AsyncIterator[str]:
    """Run a server; gives its address, `http://HOST:PORT`."""
    await start(server, port=port)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.stop()


@asynccontextmanager
async def serve(server: AdminServer) -> AsyncIterator[Ask]:
    """`await ask(method, path, **what aiohttp takes)`; the path is sent as it is."""
    async with running(server) as address, aiohttp.ClientSession() as session:

        async def ask(method: str, path: str, **how: Any) -> Answer:
            url = URL(f"{address}{path}", encoded=True)
            async with session.request(method, url, **how) as response:
                text = await response.text()
                is_json = response.content_type == "application/json" and text
                body = await response.json() if is_json else None
                return Answer(response.status, response.headers, text, body)

        yield ask
