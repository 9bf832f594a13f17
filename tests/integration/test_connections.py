"""Real clients of a real broker are listed, closed, counted and paced by what an operator says."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from support.operating import call, quota_proxy
from support.proxy_process import ProxyProcess, until
from support.raw import RawClient, api_versions

TIMEOUT_S = 30
IDLE_S = 4
ETL = "client-id=etl"
TOO_MANY = "too_many_connections_of_client"


def listed(process: ProxyProcess, client_id: str) -> list[dict[str, Any]]:
    document = json.loads(process.get(f"/v1/connections?filter={client_id}")[1])
    connections: list[dict[str, Any]] = document["connections"]
    return connections


def admin(process: ProxyProcess, client_id: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": process.bootstrap, "client.id": client_id})


def test_a_real_client_is_listed_and_comes_back_when_it_is_closed(
    proxy: Callable[..., ProxyProcess],
) -> None:
    process = proxy(rules=[{"client-id": "etl", "consumer_byte_rate": "1MiB"}])
    client = admin(process, "etl")
    assert client.list_topics(timeout=TIMEOUT_S).brokers
    until(lambda: any(each["sent_rate"] for each in listed(process, "etl")), "a rate")
    before = listed(process, "etl")
    assert {each["address"] for each in before} == {"127.0.0.1"}
    assert all(each["broker"] and each["state"] == "open" for each in before)
    code, out, _ = quota_proxy("connections", "--url", process.admin_url, "--filter", "etl")
    assert (code, f"{len(before)} of {len(before)} connections" in out) == (0, True)
    for each in before:
        assert call(process, "DELETE", f"/v1/connections/{each['id']}").status == 200
        assert call(process, "DELETE", f"/v1/connections/{each['id']}").status == 404
    assert client.list_topics(timeout=TIMEOUT_S).brokers
    last = max(each["id"] for each in before)
    assert all(each["id"] > last for each in listed(process, "etl"))


def test_a_client_has_as_many_connections_as_its_rule_says_now(
    proxy: Callable[..., ProxyProcess],
) -> None:
    process = proxy(rules=[{"client-id": "etl", "max_connections": 2}])
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(RawClient(process.bootstrap, "etl")).ask(api_versions(3))
        with RawClient(process.bootstrap, "etl") as third, pytest.raises(ConnectionError):
            third.ask(api_versions(3))
        process.until_counts("connections_rejected_total", 1, reason=TOO_MANY)
        (line,) = process.logged("client rejected")
        assert "client-id=etl has 2 connections" in line["detail"]
        assert admin(process, "other").list_topics(timeout=TIMEOUT_S).brokers
        assert call(process, "PUT", f"/v1/quotas/{ETL}", {"max_connections": 10}).status == 200
        assert admin(process, "etl").list_topics(timeout=TIMEOUT_S).brokers


def test_a_client_that_connects_too_fast_waits_and_is_served(
    proxy: Callable[..., ProxyProcess],
) -> None:
    process = proxy(rules=[{"client-id": "etl", "connection_rate": 1}])
    began_s = time.monotonic()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(RawClient(process.bootstrap, "etl")).ask(api_versions(3))
    assert time.monotonic() - began_s > 2.0
    assert admin(process, "etl").list_topics(timeout=TIMEOUT_S).brokers
    assert process.metrics().value("connections_rejected_total", reason="connection_rate") == 0


def test_who_asked_while_the_process_was_stopped_is_answered(
    proxy: Callable[..., ProxyProcess],
) -> None:
    process = proxy(limits={"idle_timeout": f"{IDLE_S}s"})
    with ExitStack() as stack:
        clients = [
            stack.enter_context(RawClient(process.bootstrap, f"of-{number}")) for number in range(8)
        ]
        for client in clients[::2]:
            client.ask(api_versions(3))
        until(lambda: process.metrics().value("connections") == len(clients), "all are accepted")
        os.kill(process.pid, signal.SIGSTOP)
        for client in clients:
            client.send(api_versions(3))
        time.sleep(IDLE_S * 1.5)
        os.kill(process.pid, signal.SIGCONT)
        for client in clients:
            assert client.receive().error_code == 0
