"""What a worker that dies must not take with it: debts, ports, changes that operators make."""

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from support.machine import (
    MACHINE,
    broker_ports,
    is_gone,
    kill_worker,
    machine_config,
    told_port,
    until_replaced,
    worker_pids,
)
from support.operating import call, running
from support.proxy_process import HOST, ProxyProcess, until
from support.raw import RawClient, api_versions, fetch

from examples.devkit.broker import EmbeddedBroker

WORKERS = 3
FETCH_VERSION = 12
RECORD_BYTES = 100_000
BOUND_BYTES = 10_000
DEBT_S = RECORD_BYTES / BOUND_BYTES
TOLD_S = 1.5
"""By then a member has told its peers of a debt."""
SLACK_S = 2.0
"""A debt is told each second; and what sensors look back on passes at once."""
CRASHES = 6
CONNECTS = 40
PATIENT = {
    f"proxy.admin.peers.fan_out_middleware.{name}": 20.0
    for name in ("AWAY_LIMIT_S", "UNDONE_LIMIT_S")
}
"""For a machine on which a worker takes long to start."""
ENDED = "a worker has ended, starting it again"


@pytest.fixture(scope="module")
def machine(
    kafka: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyProcess]:
    folder = tmp_path_factory.mktemp("crashes")
    rules = [{"client-id": f"owes-{n}", "consumer_byte_rate": BOUND_BYTES} for n in range(9)]
    state = {"kind": "sqlite", "path": str(folder / "state.db")}
    settings = machine_config(kafka.bootstrap, WORKERS, rules=rules, state=state)
    process = ProxyProcess(settings, folder / "proxy", constants=PATIENT)
    with running(process):
        until(lambda: process.get("/readyz")[0] == 200, "it is ready")
        yield process


@pytest.fixture
def large(topic: Callable[..., str], fill: Callable[..., None]) -> str:
    """A topic of records that take DEBT_S each."""
    name = topic()
    fill(name, 1, RECORD_BYTES)
    return name


def read_once(machine: ProxyProcess, client_id: str, topic: str) -> None:
    """Have a client ask for a record at its owner, and leave with what it owes."""
    port = told_port(machine, client_id)
    with RawClient(f"{HOST}:{port}", client_id) as client:
        client.send(fetch(FETCH_VERSION, topic))
        until(lambda: rate(machine, client_id) > RECORD_BYTES / 2, "it is charged")


def rate(machine: ProxyProcess, client_id: str) -> float:
    """Return what is measured of a client, in bytes per second."""
    labels = {"quota_entity": f"client-id={client_id}", "quota": "consumer_byte_rate"}
    return machine.metrics().value("rate_bytes", **labels)


def waits_s(machine: ProxyProcess, client_id: str, topic: str) -> float:
    """Return for how long the next answer takes."""
    began_s = time.monotonic()
    with RawClient(f"{HOST}:{told_port(machine, client_id)}", client_id) as client:
        client.ask(fetch(FETCH_VERSION, topic, max_bytes=1))
    return time.monotonic() - began_s


def put(machine: ProxyProcess, client_id: str, bound: int) -> None:
    """Bound a client, which waits for the worker that writes."""
    change = {"consumer_byte_rate": bound}
    answer = call(machine, "PUT", f"/v1/quotas/client-id={client_id}", change)
    assert answer.status == 200, answer


def test_a_change_waits_for_the_worker_that_writes(machine: ProxyProcess) -> None:
    for bound in range(3):
        pid = kill_worker(machine, 0)
        until(lambda pid=pid: is_gone(pid), "it has ended")
        put(machine, "put", 1_000_000 + bound)
        until_replaced(machine, 0, pid)
    for number in range(WORKERS):

        def has_it(number: int = number) -> bool:
            told = machine.get(f"/v1/quotas?member={MACHINE}/{number}")[1]
            return "1000002" in told

        until(has_it, f"worker {number} has it")


def test_what_is_paused_while_a_worker_is_away_holds_there_too(machine: ProxyProcess) -> None:
    pid = kill_worker(machine, 1)
    put(machine, "late", 2_000_000)
    until_replaced(machine, 1, pid)
    until(lambda: "2000000" in machine.get(f"/v1/quotas?member={MACHINE}/1")[1], "it has it")


def test_any_connection_can_be_closed_by_its_number(machine: ProxyProcess) -> None:
    clients = [RawClient(each, "closed") for each in broker_ports(machine, WORKERS)]
    try:
        for client in clients:
            client.ask(api_versions(3))

        def numbers_shown() -> list[int]:
            listed = json.loads(machine.get("/v1/connections")[1])["connections"]
            return [row["id"] for row in listed if row["client_id"] == "closed"]

        until(lambda: len(numbers_shown()) == WORKERS, "each worker shows its own")
        numbers = numbers_shown()
        assert len(set(numbers)) == WORKERS
        for number in numbers:
            assert call(machine, "DELETE", f"/v1/connections/{number}").status == 200
        assert all(client.is_closed_by_peer() for client in clients)
        assert call(machine, "DELETE", f"/v1/connections/{numbers[0]}").status == 404
    finally:
        for client in clients:
            client.__exit__()


def test_the_log_level_is_that_of_all(machine: ProxyProcess) -> None:
    assert call(machine, "PUT", "/v1/log_level", {"level": "debug"}).status == 200
    for address in broker_ports(machine, WORKERS):
        with RawClient(address) as client:
            client.ask(api_versions(3))
    until(
        lambda: {x["worker"] for x in machine.log("connection closed")} == set(range(WORKERS)),
        "all say more",
    )
    assert call(machine, "PUT", "/v1/log_level", {"level": "info"}).status == 200


def test_a_launcher_that_cannot_fork_for_a_moment_tries_again(machine: ProxyProcess) -> None:
    limit = resource.RLIMIT_NOFILE
    before = resource.prlimit(machine.pid, limit)
    resource.prlimit(machine.pid, limit, (0, before[1]))
    try:
        pid = kill_worker(machine, 1)
        failed = "a worker could not begin"
        until(lambda: len(machine.log(failed)) > 1, "no file is left for it")
    finally:
        resource.prlimit(machine.pid, limit, before)
    until_replaced(machine, 1, pid)
    assert "cannot be forked: Too many open files" in machine.log(failed)[0]["error"]
    until(lambda: machine.get("/readyz")[0] == 200, "it is ready again")


def test_who_is_down_is_named(machine: ProxyProcess) -> None:
    """A worker that stands still answers nothing: the machine is not ready, and says who."""
    pid = worker_pids(machine)[2]
    os.kill(pid, signal.SIGSTOP)
    try:
        status, text = machine.get("/readyz")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert status == 503
    assert f"'{MACHINE}/2'" in text
    until(lambda: machine.get("/readyz")[0] == 200, "it is ready again")
