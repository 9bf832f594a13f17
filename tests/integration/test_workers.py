"""Several workers behind one port: they share the work, die and come back, and end together."""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from support.clients import CLIENTS, Access, Client, Librdkafka, Read
from support.machine import (
    is_gone,
    kill_worker,
    machine_config,
    told_port,
    until_replaced,
    until_settled,
    worker_pids,
)
from support.operating import quota_proxy, running
from support.proxy_process import HOST, ProxyProcess, until
from support.raw import RawClient, api_versions, fetch

from examples.devkit.broker import EmbeddedBroker

RECORDS = 400
WAIT_S = 60
CRASHES = 6
RECORD_BYTES = 500_000
SLOW_BOUND_BYTES = 50_000


@pytest.fixture(scope="module")
def machine(
    kafka: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyProcess]:
    """Three workers; in the end they must drain in order and without faults in their log."""
    folder = tmp_path_factory.mktemp("machine")
    rules = [{"client-id": "held", "consumer_byte_rate": SLOW_BOUND_BYTES}]
    state = {"kind": "sqlite", "path": str(folder / "state.db")}
    settings = machine_config(kafka.bootstrap, 3, rules=rules, state=state)
    process = ProxyProcess(settings, folder / "proxy")
    with running(process):
        until(lambda: process.get("/readyz")[0] == 200, "it is ready")
        yield process


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_all_clients_read_and_write(
    machine: ProxyProcess, topic: Callable[..., str], client: Client
) -> None:
    name = topic(partitions=2)
    values = [(n % 2, b"%08d" % n) for n in range(RECORDS)]
    client.produce(Access(machine.bootstrap, client.name), name, values)
    read = client.consume(Access(machine.bootstrap, client.name), name, RECORDS)
    assert read.count == RECORDS


def test_connections_are_spread_and_wait_for_a_worker_that_crashed(machine: ProxyProcess) -> None:
    """What connects is answered, whatever happens to one of the workers meanwhile."""
    clients = [RawClient(machine.bootstrap) for _ in range(24)]
    try:
        for client in clients:
            assert client.ask(api_versions(3)).error_code == 0
        pid = kill_worker(machine, 1)
        until(lambda: is_gone(pid), "it has ended")
        for _ in range(12):  # none is refused, and none reset
            with RawClient(machine.bootstrap) as late:
                assert late.ask(api_versions(3)).error_code == 0
        until_replaced(machine, 1, pid)
        alive = 0
        for client in clients:
            try:
                alive += client.ask(api_versions(3)).error_code == 0
            except (OSError, EOFError, AssertionError):
                continue
        assert 0 < alive < len(clients)
    finally:
        for client in clients:
            client.__exit__()


def test_readers_lose_and_double_nothing_when_workers_crash(
    machine: ProxyProcess, topic: Callable[..., str]
) -> None:
    name = topic(partitions=2)
    half = RECORDS // 2

    def write(numbers: range) -> None:
        values = [(n % 2, b"%08d" % n) for n in numbers]
        Librdkafka().produce(Access(machine.bootstrap, "writer"), name, values)

    write(range(half))
    here = threading.Barrier(len(CLIENTS) + 1)
    crashed = threading.Event()

    def read(client: Client) -> Read:
        def halfway() -> None:
            here.wait(WAIT_S)
            crashed.wait(WAIT_S)

        access = Access(machine.bootstrap, client.name)
        return client.consume(access, name, RECORDS, at=(half, halfway))

    with ThreadPoolExecutor() as pool:
        reads = [pool.submit(read, client) for client in CLIENTS]
        here.wait(WAIT_S)
        for number in range(3):
            until_replaced(machine, number, kill_worker(machine, number))
        crashed.set()
        write(range(half, RECORDS))
        for client, task in zip(CLIENTS, reads, strict=True):
            values = [value for part in task.result().values.values() for value in part]
            assert sorted(map(int, values)) == list(range(RECORDS)), client.name
    assert machine.metrics().value("worker_restarts_total") >= 3
    assert machine.metrics().value("workers") == 3


def test_a_signal_reloads_all_workers(machine: ProxyProcess) -> None:
    settings = yaml.safe_load(machine.config_file.read_text())
    settings["throttle"] = {"mode": "mute"}
    machine.config_file.write_text(yaml.safe_dump(settings))
    os.kill(machine.pid, signal.SIGHUP)
    machine.logged("configuration reloaded", 3)
    status = json.loads(machine.get("/v1/status")[1])
    assert status["throttle_mode"] == "mute"
    assert status["config_loads"][0]["result"] == "ok"
    assert machine.metrics().value("config_reloads_total", result="ok") == 3
    settings["throttle"] = {"mode": "loud"}
    machine.config_file.write_text(yaml.safe_dump(settings))
    os.kill(machine.pid, signal.SIGHUP)
    machine.logged("configuration not reloaded, the old one stays", 3)
    assert machine.metrics().value("config_reloads_total", result="failed") == 3
    assert json.loads(machine.get("/v1/status")[1])["config_loads"][0]["result"] == "failed"


def test_answers_in_flight_go_out_when_it_stops(
    kafka: EmbeddedBroker, topic: Callable[..., str], fill: Callable[..., None], tmp_path: Path
) -> None:
    rules = [{"client-id": "held", "consumer_byte_rate": SLOW_BOUND_BYTES}]
    running = ProxyProcess(machine_config(kafka.bootstrap, 2, rules=rules), tmp_path).start()
    try:
        name = topic()
        fill(name, 1, RECORD_BYTES)
        until_settled(running, 2)
        owner = f"{HOST}:{told_port(running, 'held')}"  # it alone answers whom a rule bounds
        with RawClient(owner, "held") as client, RawClient(running.bootstrap) as idle:
            idle.ask(api_versions(3))
            client.send(fetch(12, name))
            until(lambda: running.metrics().value("delay_queue_size", api="fetch") == 1, "held")
            running.terminate()
            (answer,) = client.receive().responses
            assert len(answer.partitions[0].records) > RECORD_BYTES
            assert client.is_closed_by_peer()
            assert idle.is_closed_by_peer()
            assert running.wait() == 0
            with pytest.raises(ConnectionRefusedError):
                RawClient(running.bootstrap)
        assert running.log("closing connections that did not drain") == []
    finally:
        running.kill()


def test_all_end_with_the_launcher(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    running = ProxyProcess(machine_config(kafka.bootstrap, 2), tmp_path).start()
    pids = worker_pids(running)
    bind = (HOST, running.port)
    running.kill()
    for pid in pids.values():
        until(lambda pid=pid: is_gone(pid), "the workers have ended")
    until(lambda: is_free(bind), "the port is free")


def is_free(address: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


@pytest.mark.slow
def test_a_crash_loop_is_seen_and_others_serve(
    kafka: EmbeddedBroker, topic: Callable[..., str], fill: Callable[..., None], tmp_path: Path
) -> None:
    running = ProxyProcess(machine_config(kafka.bootstrap, 2), tmp_path).start()
    try:
        for _ in range(CRASHES - 1):
            until_replaced(running, 1, kill_worker(running, 1))
        hanging = worker_pids(running)[1]
        os.kill(hanging, signal.SIGSTOP)  # which is noticed, and ends it
        until_replaced(running, 1, hanging)
        running.logged("a worker hangs and is killed")
        assert running.metrics().value("workers_crash_looping") == 1
        (line,) = running.logged(
            "a worker crashes again and again: others have its clients meanwhile"
        )
        assert (line["worker"], line["level"]) == (1, "error")
        until(lambda: running.get("/readyz")[0] == 200, "ready")
        assert "1" in json.loads(running.get("/readyz")[1])["warning"]
        name = topic()
        fill(name, RECORDS, 100)
        read = Librdkafka().consume(Access(running.bootstrap), name, RECORDS)
        assert read.count == RECORDS
        running.stop()
    finally:
        running.kill()


def test_too_few_ports(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    settings = machine_config(kafka.bootstrap, 2)
    settings["workers"] = 9
    file = tmp_path / "proxy.yaml"
    file.write_text(yaml.safe_dump(settings))
    code, _, errors = quota_proxy("run", "-c", file)
    assert code == 2
    assert "too few for 9 workers" in errors
