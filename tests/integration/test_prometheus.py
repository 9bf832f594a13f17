"""A real Prometheus scrapes the proxy while a client is held, and tells what the client saw."""

import json
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import confluent_kafka
import pytest
from parts.instrument_rows import rows_of
from parts.reports import ReportingDriver, batch_document
from prometheus_client import CollectorRegistry
from support.clients import Access, Librdkafka
from support.operating import running
from support.prometheus import JOB, Prometheus, program, watching
from support.proxy_process import HOST, PREFIX, ProxyProcess, config, until
from support.raw import RawClient, message

from examples.devkit.broker import EmbeddedBroker
from metrics import MemberInstruments
from proxy.wire.apis import METADATA

# Helper modules are no test modules: under import mode importlib they are found by path only.
sys.path.append(str(Path(__file__).parents[1] / "helm"))

from dashboard_queries import dashboard_queries

ALERTS = Path(__file__).parents[2] / "helm" / "rules" / "alerts.yaml"

OF_MEMBERS = (
    *(row.name for row in rows_of(MemberInstruments(CollectorRegistry()))),
    "rules_digest",
)
OF_ONE_PROCESS = [
    panel
    for panel, query in dashboard_queries().items()
    if not any(name in query for name in OF_MEMBERS)
]
"""What the dashboards show of a proxy without workers and tier."""

BOUND_BYTES = 500_000
RECORD_BYTES = 10_000
COUNT = 2_000
FETCH_BYTES = 50_000
"""Small, so that the bytes come steadily."""

READ_S = 14.0
STEADY_S = 8.0
"""The last part of it, long after the burst that a fresh sensor lets pass."""

TOLERANCE = 0.15
"""Between the client's figure and Prometheus': scrapes are a second apart."""

UNKNOWN_REQUEST = struct.pack(">ihhih", 10, 9999, 0, 1, -1)
"""Passes the proxy, which need not know every API; the broker closes its connection."""

STAGE, OUTPUT = "stage", "stage-output"
"""A query and a stage of a pipeline, in which a batch is done, one never, and one waits."""

PIPELINE = {
    "name": "watched",
    "timeout": "2s",
    "sources": [{"client-id": "writer", "produces": ["written"], "normal_rate": 1000, "step": 100}],
    "stages": [
        {
            "name": name,
            "consumes": [consumes],
            "produces": [produces],
            "band": [0, 1000],
            "normal_rate": 1000,
            "step": 100,
        }
        for name, consumes, produces in ((STAGE, "written", OUTPUT), ("after", OUTPUT, "end"))
    ],
}

CLIENT = "held"
TOPIC = "watched"
FETCHED = f'{PREFIX}bytes_total{{client_id="{CLIENT}",api="Fetch"}}'
RATE = f'{PREFIX}rate_bytes{{quota_entity="client-id={CLIENT}",quota="consumer_byte_rate"}}'
BOUND = RATE.replace("rate_bytes", "bound_bytes")


@dataclass(frozen=True, slots=True)
class Scene:
    """What happened, and who watched."""

    process: ProxyProcess
    prometheus: Prometheus
    ended_s: float
    """When the client stopped, since the epoch."""
    total_bytes: int
    """What it got in all."""
    steady_rate: float
    """What it got in the last STEADY_S, per second."""


@pytest.fixture(scope="module")
def scene(kafka: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A consumer, a producer and one who asks for metadata, each held to its quota; and faults."""
    folder = tmp_path_factory.mktemp("prometheus")
    rules = [
        {"client-id": CLIENT, "consumer_byte_rate": BOUND_BYTES},
        {"client-id": "writer", "producer_byte_rate": BOUND_BYTES},
        {"client-id": "busy", "request_percentage": 0.001},
        {"client-id": "shares", "budget": "all"},
        {
            "client-id": STAGE,
            "consumer_byte_rate": "100MiB",
            "adaptive": {"batch_interval": "1s"},
        },
    ]
    made = config(
        kafka.bootstrap,
        rules=rules,
        quotas={"budgets": [{"name": "all", "producer_byte_rate": BOUND_BYTES}]},
        throttle={"max_delay": "2s"},
        queries=[{"name": STAGE}],
    )
    usage = {"topic": "usage-that-is-watched", "interval": "1s"}
    process = ProxyProcess({**made, "pipelines": [PIPELINE], "usage": usage}, folder)
    Librdkafka().produce(Access(kafka.bootstrap), TOPIC, [(0, bytes(RECORD_BYTES))] * COUNT)
    with running(process):
        target = f"{HOST}:{process.log('admin')[0]['port']}"
        with watching(target, folder / "prometheus", ALERTS) as prometheus:
            make_trouble(process.bootstrap)
            prometheus.until_scraped(0)
            with RawClient(process.bootstrap, "busy") as busy:
                for _ in range(2):
                    busy.ask(message(METADATA, 1, topics=None))
            for name, records in (("writer", 100), ("shares", 1)):
                access = Access(process.bootstrap, name)
                Librdkafka().produce(access, "written", [(0, bytes(RECORD_BYTES))] * records)
            run_stage(process)
            got = read(process.bootstrap)
            ended_s = time.time()
            prometheus.until_scraped(ended_s)
            steady = sum(count for at_s, count in got if at_s > ended_s - STEADY_S)
            total = sum(count for _, count in got)
            yield Scene(process, prometheus, ended_s, total, steady / STEADY_S)


def make_trouble(bootstrap: str) -> None:
    """Be turned away by the proxy, and make the broker hang up, once each."""
    for frame in (b"GET / HTTP/1.1\r\n\r\n", UNKNOWN_REQUEST):
        with RawClient(bootstrap) as client:
            client.sock.sendall(frame)
            assert client.is_closed_by_peer()


def run_stage(process: ProxyProcess) -> None:
    """Read as a query would, and report as its driver would; one report is no report."""
    access = Access(process.bootstrap, STAGE)
    driver = ReportingDriver(STAGE, STAGE, *(str(uuid4()) for _ in range(3)))

    def batch(number: int) -> dict[str, Any]:
        start = 20 * number
        times = {"took_ms": 1000, "timestamp": f"2026-01-01T00:00:0{number}.000Z"}
        batch = batch_document(number, start, start + 20, "written", rows=20, **times)
        return driver.document("progress", batch=batch)

    trigger = {"kind": "processing_time", "interval_ms": 1000}
    Librdkafka().consume(access, "written", 100)
    assert post(process, driver.document("started", trigger=trigger)) == 200
    for number in range(3):
        if number == 2:
            Librdkafka().produce(access, OUTPUT, [(0, b"never read")])
        assert post(process, batch(number)) == 200
    assert post(process, {}) == 400


def post(process: ProxyProcess, report: dict[str, Any]) -> int:
    request = urllib.request.Request(
        f"{process.admin_url}/v1/spark/batches",
        json.dumps(report).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10.0) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def read(bootstrap: str) -> list[tuple[float, int]]:
    """Consume for READ_S; return when how many bytes came."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "client.id": CLIENT,
            "group.id": "watched",
            "fetch.message.max.bytes": FETCH_BYTES,
            "fetch.max.bytes": FETCH_BYTES,
            "message.max.bytes": FETCH_BYTES,
        }
    )
    got: list[tuple[float, int]] = []
    try:
        consumer.assign([confluent_kafka.TopicPartition(TOPIC, 0, 0)])
        end_s = time.monotonic() + READ_S
        while time.monotonic() < end_s:
            for record in consumer.consume(100, timeout=0.1):
                assert record.error() is None
                got.append((time.time(), len(record.value())))
    finally:
        consumer.close()
    return got


pytestmark = pytest.mark.slow


def test_the_bound_is_the_rules(scene: Scene) -> None:
    assert scene.prometheus.value(BOUND, scene.ended_s) == BOUND_BYTES


def test_client_counter_and_sensor_see_a_rate_within_the_bound(scene: Scene) -> None:
    window = f"[{STEADY_S:.0f}s]"
    counted = scene.prometheus.value(f"rate({FETCHED}{window})", scene.ended_s)
    sensed = scene.prometheus.value(f"avg_over_time({RATE}{window})", scene.ended_s)
    figures = {"client": scene.steady_rate, "counter": counted, "sensor": sensed}
    for name, rate in figures.items():
        # On a slow machine it may be less than the bound.
        assert 0 < rate <= BOUND_BYTES * (1 + TOLERANCE), f"{name}: {figures}"


def test_the_bytes_are_the_clients(scene: Scene) -> None:
    """And besides them only the frames around the records, and what was under way at the end."""
    counted = scene.prometheus.value(f"max_over_time({FETCHED}[1m])")
    assert scene.total_bytes <= counted <= scene.total_bytes * 1.05 + 10 * FETCH_BYTES


@pytest.mark.parametrize(
    ("entity", "quota"),
    [
        ("client-id=held", "consumer_byte_rate"),
        ("client-id=writer", "producer_byte_rate"),
        ("client-id=busy", "request_percentage"),
    ],
)
def test_holds_are_counted_by_client_and_quota(scene: Scene, entity: str, quota: str) -> None:
    labels = f'quota_entity="{entity}",quota="{quota}"'
    for name in ("violations_total", "throttled_responses_total"):
        assert scene.prometheus.value(f"{PREFIX}{name}{{{labels}}}") > 0, name
    held = f'histogram_quantile(0.5, {PREFIX}throttle_seconds_bucket{{quota="{quota}"}})'
    assert 0 < scene.prometheus.value(held) <= 2


@pytest.mark.parametrize("panel", OF_ONE_PROCESS)
def test_the_dashboards_show_it(scene: Scene, panel: str) -> None:
    found = scene.prometheus.query(dashboard_queries()[panel], scene.ended_s)
    assert found, dashboard_queries()[panel]


OF_A_BUSY_MACHINE = {"KafkaQuotaProxyEventLoopLate", "KafkaQuotaProxyReaperLate"}


def test_the_alert_rules_are_evaluated(scene: Scene) -> None:
    def rules() -> list[dict[str, str]]:
        groups = scene.prometheus.get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    loaded = until(lambda: all(r["health"] != "unknown" for r in rules()) and rules(), "evaluated")
    assert "KafkaQuotaProxyClientThrottled" in {rule["name"] for rule in loaded}
    assert {
        rule["name"]: rule.get("lastError", "") for rule in loaded if rule["health"] != "ok"
    } == {}
    states = {rule["name"]: rule["state"] for rule in loaded}
    assert states.pop("KafkaQuotaProxyClientThrottled") == "pending", "for less than an hour"
    assert states.pop("KafkaQuotaProxyBatchesUnfinished") == "firing", "one root timed out"
    assert states.keys() >= OF_A_BUSY_MACHINE
    raised = {name for name, state in states.items() if state != "inactive"}
    assert raised <= OF_A_BUSY_MACHINE


def test_the_target_is_up(scene: Scene) -> None:
    (target,) = scene.prometheus.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    assert target["labels"]["job"] == JOB


def test_promtool_finds_nothing_to_say_about_the_metrics(scene: Scene) -> None:
    done = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=scene.process.get("/metrics")[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
