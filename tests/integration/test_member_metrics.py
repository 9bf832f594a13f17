"""Real members in one scrape: each with its own samples and its name, also while one hangs."""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.clients import Access, Librdkafka
from support.machine import MACHINE, kill_worker, machine_config, until_replaced, worker_pids
from support.operating import running
from support.prometheus import watching
from support.proxy_process import HOST, PREFIX, Metrics, ProxyProcess, until
from support.raw import RawClient, api_versions

from examples.devkit.broker import EmbeddedBroker

# Helper modules are no test modules: under import mode importlib they are found by path only.
sys.path.append(str(Path(__file__).parents[1] / "helm"))

from dashboard_queries import dashboard_queries

ALERTS = Path(__file__).parents[2] / "helm" / "rules" / "alerts.yaml"
WORKERS = 3
MEMBERS = {f"{MACHINE}/{number}" for number in range(WORKERS)}
HUNG = 1
CONNECTIONS = 24
RECORDS = 100

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machine(
    kafka: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyProcess]:
    """Workers that share clients, one of which has a quota."""
    rules = [{"client-id": "held", "consumer_byte_rate": "1MiB", "producer_byte_rate": "1MiB"}]
    settings = machine_config(kafka.bootstrap, WORKERS, rules=rules)
    process = ProxyProcess(settings, tmp_path_factory.mktemp("members"))
    with running(process):
        until(lambda: process.get("/readyz")[0] == 200, "it is ready")
        yield process


def series_of(seen: Metrics) -> Counter[tuple[str, frozenset[tuple[str, str]]]]:
    return Counter((each.name, frozenset(each.labels.items())) for each in seen.samples)


def call_all(machine: ProxyProcess) -> None:
    """Have as many clients connect as find each worker."""
    with ExitStack() as stack:
        for number in range(CONNECTIONS):
            client = stack.enter_context(RawClient(machine.bootstrap, f"client-{number}"))
            assert client.ask(api_versions(3)).error_code == 0


def test_each_sample_of_a_worker_has_its_name(machine: ProxyProcess) -> None:
    call_all(machine)
    seen = machine.metrics()
    assert set(series_of(seen).values()) == {1}
    assert {sample.labels.get("member") for sample in seen.samples} == MEMBERS
    of_all = ("build_info", "ready", "requests_total", "event_loop_lag_seconds_bucket")
    for name in (*of_all, "workers", "slots_owned", "log_lines_dropped_total"):
        assert seen.labels(name, "member") == MEMBERS, name


def test_what_is_shown_of_a_worker_is_what_it_shows(machine: ProxyProcess) -> None:
    for name in MEMBERS:
        one = Metrics(machine.get(f"/metrics?member={name}")[1])
        assert {each.labels["member"] for each in one.samples} == {name}
        assert set(series_of(one)) <= set(series_of(machine.metrics()))


def test_a_worker_that_hangs_is_named_and_the_others_are_shown(machine: ProxyProcess) -> None:
    pid = worker_pids(machine)[HUNG]
    os.kill(pid, signal.SIGSTOP)
    seen = machine.metrics()
    assert worker_pids(machine)[HUNG] == pid, "it has answered before the worker was replaced"
    for name in MEMBERS:
        assert seen.value("member_up", member=name) == (name != f"{MACHINE}/{HUNG}")
    assert seen.labels("ready", "member") == MEMBERS - {f"{MACHINE}/{HUNG}"}
    until_replaced(machine, HUNG, pid)
    until(lambda: machine.metrics().value("member_up") == len(MEMBERS), "it is shown again")


def test_dashboards_and_alerts_take_several_members(
    machine: ProxyProcess, topic: Callable[..., str], tmp_path: Path
) -> None:
    """No query meets several series where it takes one, nor tells members apart unawares."""
    name = topic()
    access = Access(machine.bootstrap, "held")
    target = f"{HOST}:{machine.log('admin')[0]['port']}"
    with watching(target, tmp_path, ALERTS) as prometheus:
        prometheus.until_scraped(0)
        for _ in range(2):
            call_all(machine)
            Librdkafka().produce(access, name, [(0, b"%08d" % n) for n in range(RECORDS)])
            prometheus.until_scraped(time.time())
            pid = kill_worker(machine, HUNG)
            until_replaced(machine, HUNG, pid)
        prometheus.until_scraped(time.time())
        assert prometheus.value(f"count(count by (member) ({PREFIX}build_info))") == len(MEMBERS)
        for query in dashboard_queries().values():
            is_of_each = "by (instance, member)" in query
            for labels, _ in prometheus.query(query):
                assert is_of_each or "member" not in labels, query
        groups = prometheus.get("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert [rule.get("lastError") for rule in rules if rule["health"] == "err"] == []
