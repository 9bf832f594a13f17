"""A new version takes over the ports of a running one while clients come and go."""

import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.clients import Access, Librdkafka
from support.operating import quota_proxy
from support.proxy_process import HOST, LISTENER, ProxyProcess, config
from support.raw import api_versions

from proxy.devkit.broker import EmbeddedBroker
from proxy.devkit.loopback import free_ports

CALLERS = 3
CALL_TIMEOUT_S = 30
TAKE_OVERS = 3
RECORDS = 2_000


class Callers:
    """Threads that connect, ask and leave, over and over, and count how that went."""

    def __init__(self, port: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._port = port
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(CALLERS)]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(CALL_TIMEOUT_S)

    def _run(self) -> None:
        request = api_versions(0)
        request.with_header(correlation_id=1, client_id="caller")
        frame = bytes(request.encode(framed=True, header=True))
        while not self._stop.is_set():
            self.outcomes[self._call(frame)] += 1

    def _call(self, frame: bytes) -> str:
        try:
            with socket.create_connection((HOST, self._port), CALL_TIMEOUT_S) as sock:
                sock.sendall(frame)
                return "answered" if sock.recv(4) else "closed"
        except OSError as error:
            return type(error).__name__


@pytest.mark.slow
def test_no_connection_is_refused(
    kafka: EmbeddedBroker,
    topic: Callable[..., str],
    fill: Callable[..., None],
    tmp_path: Path,
) -> None:
    bind_port, broker_port, admin_port = free_ports(3)
    settings = config(
        kafka.bootstrap,
        listeners=[
            {
                **LISTENER,
                "bind": f"{HOST}:{bind_port}",
                "broker_ports": f"{broker_port - 1}-{broker_port}",
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
