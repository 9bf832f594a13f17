"""A new version takes over the ports of a running one while clients come and go."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.callers import CALLERS, Callers
from support.clients import Access, Librdkafka
from support.machine import admin_ports, machine_config
from support.operating import quota_proxy
from support.proxy_process import HOST, LISTENER, ProxyProcess, config

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.loopback import free_ports

TAKE_OVERS = 3
RECORDS = 2_000
RECORD_BYTES = 1_000
BOUND = 200_000
LEAST_SHARE = 0.5
MOST_WORKERS = 3


@pytest.mark.slow
def test_no_connection_is_refused(
    kafka: EmbeddedBroker,
    topic: Callable[..., str],
    fill: Callable[..., None],
    tmp_path: Path,
) -> None:
    bind_port, first, last, admin_port = free_ports(4)
    settings = config(
        kafka.bootstrap,
        listeners=[
            {
                **LISTENER,
                "bind": f"{HOST}:{bind_port}",
                "broker_ports": f"{first}-{last}",
            }
        ],
    )
    settings["admin"] = {"bind": f"{HOST}:{admin_port}"}
    settings["state"] = {"kind": "sqlite", "path": str(tmp_path / "state.db")}
    name = topic(partitions=2)
    fill(name, RECORDS, 1_000, partitions=2)
    running = ProxyProcess(settings, tmp_path / "first", anew=True).start()
    try:
        with Callers(bind_port) as callers:
            for number in range(TAKE_OVERS):
                successor = ProxyProcess(
                    settings,
                    tmp_path / f"next-{number}",
                    ["--take-over", str(running.pid)],
                    anew=True,
                ).start()
                assert running.wait() == 0
                running.check_log()
                running = successor
                read = Librdkafka().consume(Access(f"{HOST}:{bind_port}"), name, RECORDS)
                assert read.count == RECORDS
        assert callers.outcomes["answered"] > TAKE_OVERS * CALLERS
        assert set(callers.outcomes) <= {"answered", "closed"}, callers.outcomes
        running.stop()
    finally:
        running.kill()


@pytest.mark.slow
def test_a_client_at_its_bound_gets_no_new_credit(
    kafka: EmbeddedBroker, topic: Callable[..., str], fill: Callable[..., None], tmp_path: Path
) -> None:
    """Ten seconds' worth may come at once at first, and never again where it was just had."""
    port, first, last, admin_port = free_ports(4)
    access = Access(f"{HOST}:{port}")
    ports = {"bind": access.bootstrap, "broker_ports": f"{first}-{last}"}
    rule = {"client-id": access.client_id, "consumer_byte_rate": BOUND}
    settings = config(kafka.bootstrap, rules=[rule], listeners=[{**LISTENER, **ports}])
    settings["admin"] = {"bind": f"{HOST}:{admin_port}"}
    name = topic()
    fill(name, RECORDS, RECORD_BYTES)
    running = ProxyProcess(settings, tmp_path / "first", anew=True).start()
    try:
        Librdkafka().consume(access, name, RECORDS // 2)
        arguments = ["--take-over", str(running.pid)]
        running = ProxyProcess(settings, tmp_path / "next", arguments, anew=True).start()
        began_s = time.monotonic()
        read = Librdkafka().consume(access, name, RECORDS // 2)
        assert read.count >= RECORDS // 2
        least_s = RECORDS // 2 * RECORD_BYTES / BOUND
        assert time.monotonic() - began_s > LEAST_SHARE * least_s
        running.stop()
    finally:
        running.kill()


def test_second_proxy_on_the_same_ports_is_an_error(
    proxy: Callable[..., ProxyProcess],
) -> None:
    first = proxy(listeners=[{"bind": f"{HOST}:{free_ports(1)[0]}"}])
    second = run_beside(first)
    assert second.returncode == 1
    assert "Address already in use" in second.stderr
    assert "Traceback" not in second.stderr


def test_nobody_to_replace(proxy: Callable[..., ProxyProcess]) -> None:
    first = proxy()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.send_signal(signal.SIGKILL)
    ended.wait()
    second = run_beside(first, "--take-over", str(ended.pid))
    assert second.returncode == 2
    assert f"no process '{ended.pid}' to replace" in second.stderr


def run_beside(first: ProxyProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(
        arguments, *quota_proxy("run", "-c", first.config_file, *arguments)
    )


@pytest.mark.parametrize("pid", ["0", "-1", "1x", "99999999999"])
def test_what_is_no_process(proxy: Callable[..., ProxyProcess], pid: str) -> None:
    """0 and below would signal many processes."""
    second = run_beside(proxy(), f"--take-over={pid}")
    assert second.returncode == 2
    assert "Traceback" not in second.stderr


@pytest.mark.slow
def test_machines_and_single_processes_replace_each_other(
    kafka: EmbeddedBroker,
    topic: Callable[..., str],
    fill: Callable[..., None],
    tmp_path: Path,
) -> None:
    """No connection is refused or reset, whatever number of workers comes after which."""
    name = topic(partitions=2)
    fill(name, RECORDS, 100, partitions=2)
    settings = machine_config(kafka.bootstrap, MOST_WORKERS)
    settings["admin"] = admin_ports(MOST_WORKERS)
    running = None
    port = int(settings["listeners"][0]["bind"].rpartition(":")[2])
    try:
        running = ProxyProcess({**settings, "workers": 2}, tmp_path / "first").start()
        with Callers(port) as callers:
            for number, workers in enumerate((MOST_WORKERS, 1, 2)):
                before, running = (
                    running,
                    ProxyProcess(
                        {**settings, "workers": workers},
                        tmp_path / f"next-{number}",
                        ["--take-over", str(running.pid)],
                    ),
                )
                running.start()
                assert before.wait() == 0
                before.check_log()
                # Slots still go to new members, and connections with them.
                access = Access(f"{HOST}:{port}")
                read = Librdkafka().consume(access, name, RECORDS, is_disturbed=True)
                assert read.count == RECORDS
        assert callers.outcomes["answered"] > TAKE_OVERS * CALLERS
        assert set(callers.outcomes) <= {"answered", "closed"}, callers.outcomes
        running.stop()
    finally:
        if running is not None:
            running.kill()
