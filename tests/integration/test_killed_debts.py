"""A proxy that is killed forgives nothing of what clients owe."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.machine import free_ports, free_range, told_port
from support.operating import running
from support.proxy_process import HOST, ProxyProcess, config, until
from support.raw import RawClient, fetch, produce

from examples.devkit.broker import EmbeddedBroker
from proxy.debt_records import KEPT_INTERVAL_S

FETCH_VERSION, PRODUCE_VERSION = 12, 8
BOUND_BYTES = 10_000
RECORD_BYTES = 80_000
DEBT_S = RECORD_BYTES / BOUND_BYTES
SLACK_S = 2.0
"""What sensors look back on passes at once, and a Fetch is let through a second early."""
KEPT_S = 2 * KEPT_INTERVAL_S + 0.5
RULE = {
    "client-id": "owes",
    "consumer_byte_rate": BOUND_BYTES,
    "producer_byte_rate": BOUND_BYTES,
}
HOURS_LATER = "import time; wall = time.time; time.time = lambda: wall() + 7200\n"
HOURS_BEFORE = "import time; wall = time.time; time.time = lambda: wall() - 7200\n"


def settings_of(kafka: EmbeddedBroker, folder: Path) -> dict[str, Any]:
    listener = {"bind": f"{HOST}:{free_ports(1)[0]}", "broker_ports": free_range(4)}
    state = {"kind": "sqlite", "path": str(folder / "state.db")}
    return config(kafka.bootstrap, listeners=[listener], rules=[RULE], state=state)


def measured(process: ProxyProcess, quota: str) -> float:
    labels = {"quota_entity": "client-id=owes", "quota": quota}
    return process.metrics().value("rate_bytes", **labels)


def put_into_debt(process: ProxyProcess, topic: str, how: str) -> None:
    """Have a client ask for a record, or send one, and leave with what it owes."""
    with RawClient(f"{HOST}:{told_port(process, 'owes')}", "owes") as client:
        if how == "fetch":
            client.send(fetch(FETCH_VERSION, topic))
        else:
            client.send(produce(PRODUCE_VERSION, topic, bytes(RECORD_BYTES)))
        quota = "consumer_byte_rate" if how == "fetch" else "producer_byte_rate"
        until(lambda: measured(process, quota) > RECORD_BYTES / 2, "it is charged")


def small(topic: str, how: str) -> Any:
    if how == "fetch":
        return fetch(FETCH_VERSION, topic, max_bytes=1)
    return produce(PRODUCE_VERSION, topic, b"x")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("produce", ""), id="produce"),
        pytest.param(("fetch", ""), id="fetch"),
        pytest.param(("produce", HOURS_LATER), id="the clock was put forward"),
        pytest.param(("produce", HOURS_BEFORE), id="the clock was put back"),
    ],
)
def test_who_owes_goes_on_owing_when_the_proxy_is_killed(
    kafka: EmbeddedBroker,
    topic: Callable[..., str],
    fill: Callable[..., None],
    tmp_path: Path,
    case: tuple[str, str],
) -> None:
    how, changes = case
    name = topic()
    fill(name, 1, RECORD_BYTES)
    settings = settings_of(kafka, tmp_path)
    first = ProxyProcess(settings, tmp_path / "first")
    try:
        first.start()
        began_s = time.monotonic()
        put_into_debt(first, name, how)
        time.sleep(KEPT_S)
    finally:
        first.kill()
    with running(ProxyProcess(settings, tmp_path / "second", changes=changes)) as second:
        with RawClient(f"{HOST}:{told_port(second, 'owes')}", "owes") as client:
            client.sock.settimeout(5 * DEBT_S)
            client.ask(small(name, how))
        waited_s = time.monotonic() - began_s
        assert waited_s >= DEBT_S - SLACK_S
        with RawClient(f"{HOST}:{told_port(second, 'another')}", "another") as client:
            began_s = time.monotonic()
            client.ask(small(name, how))
            assert time.monotonic() - began_s < waited_s, "others owe nothing"
