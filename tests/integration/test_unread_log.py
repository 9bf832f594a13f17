"""A log that cannot be written stops nothing: a pipe that nobody drains, a disk that is full."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.clients import Access, Aiokafka
from support.machine import PORTS_FOR_EACH, free_range, in_tier
from support.operating import call, hang_up, running, until_reloads, write
from support.proxy_process import HOST, WAIT_S, ProxyProcess, config, until
from support.raw import RawClient, api_versions

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.loopback import free_ports

BAD_FRAME = b"\xff\xff\xff\xff"
LOUD_CLIENTS = 100
"""Each has a line in the log, of level debug."""

RECORDS = 20
NOBODY = f"{HOST}:1"
FILLING = b"a line of somebody else\n"


class Unheard(ProxyProcess):
    """A proxy whose log nobody reads; its ports are those of its configuration."""

    @property
    def settings(self) -> dict[str, Any]:
        loaded: dict[str, Any] = yaml.safe_load(self.config_file.read_text())
        return loaded

    def bootstrap_of(self, listener: str | None = None) -> str:
        assert listener is None
        return str(self.settings["listeners"][0]["bind"])

    @property
    def admin_url(self) -> str:
        return f"http://{self.settings['admin']['bind']}"


def settings_of(bootstrap: str, workers: int) -> dict[str, Any]:
    port, admin_port, *_ = free_ports(2 + workers)  # those of the members follow
    ports = free_range(workers * PORTS_FOR_EACH)
    listener = {"bind": f"{HOST}:{port}", "broker_ports": ports}
    made = config(bootstrap, listeners=[listener], admin_port=admin_port)
    made |= {"log_level": "debug", "workers": workers}
    return in_tier(made) if workers > 1 else made


def fill(pipe: int) -> None:
    """Write to a pipe until it takes no more."""
    os.set_blocking(pipe, False)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, FILLING)
    os.set_blocking(pipe, True)


@contextmanager
def stuck_pipe() -> Iterator[int]:
    """Give the end to be written to of a pipe that nobody drains; it has room for nothing."""
    unread, pipe = os.pipe()
    try:
        fill(pipe)
        yield pipe
    finally:
        os.close(unread)
        os.close(pipe)


@contextmanager
def full_disk() -> Iterator[int]:
    with Path("/dev/full").open("wb", buffering=0) as disk:
        yield disk.fileno()


def check_serves(process: ProxyProcess, kafka: EmbeddedBroker, topic: str) -> None:
    """Require that clients and operators notice nothing, while there is much to be logged."""

    def misbehave(number: int) -> None:
        with RawClient(process.bootstrap, f"loud-{number}") as client:
            client.ask(api_versions(3))
            client.sock.sendall(BAD_FRAME)
            assert client.is_closed_by_peer()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(misbehave, range(LOUD_CLIENTS)))
    access = Access(process.bootstrap, "quiet")
    Aiokafka().produce(access, topic, [(0, b"%d" % number) for number in range(RECORDS)])
    assert Aiokafka().consume(access, topic, RECORDS).count == RECORDS
    assert process.get("/healthz")[0] == 200


def check_changes(process: Unheard, workers: int = 1) -> None:
    """Require that operators can change what is in force, by a request and by a reload."""
    path = "/v1/quotas/client-id=quiet"
    assert call(process, "PUT", path, {"consumer_byte_rate": 10_000_000}).status == 200
    assert call(process, "DELETE", path).status == 200
    assert call(process, "PUT", "/v1/log_level", {"level": "info"}).status == 200
    write(process, {**process.settings, "throttle": {"mode": "mute"}})
    hang_up(process)
    until_reloads(process, ok=workers, failed=0)
    write(process, {**process.settings, "throttle": {"mode": "loud"}})
    hang_up(process)
    until_reloads(process, ok=workers, failed=workers)
    assert call(process, "GET", "/v1/status").document["throttle_mode"] == "mute"
    assert process.get("/healthz")[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("log", [stuck_pipe, full_disk])
def test_a_log_that_cannot_be_written(
    kafka: EmbeddedBroker,
    topic: Callable[..., str],
    tmp_path: Path,
    log: Callable[[], Any],
    workers: int,
) -> None:
    with log() as errors:
        made = settings_of(kafka.bootstrap, workers)
        with running(Unheard(made, tmp_path, errors=errors)) as process:
            check_serves(process, kafka, topic())
            check_changes(process, workers)
            dropped = process.metrics().value("log_lines_dropped_total")
            assert (dropped > LOUD_CLIENTS) == (log is full_disk), "a pipe may be drained later"


@pytest.mark.slow
def test_a_pipe_that_gets_stuck_and_is_drained_later(
    kafka: EmbeddedBroker, topic: Callable[..., str], tmp_path: Path
) -> None:
    """Not a line is lost that there is room for."""
    unread, pipe = os.pipe()
    with open(unread, "rb") as reader, open(pipe, "wb") as writer:  # noqa: PTH123
        process = Unheard(settings_of(kafka.bootstrap, 1), tmp_path, errors=pipe)
        with running(process):
            fill(pipe)
            check_serves(process, kafka, topic())
            check_changes(process)
            writer.close()
            with ThreadPoolExecutor(1) as pool:
                read = pool.submit(reader.read)
                process.terminate()
                assert process.wait() == 0
                lines = [line for line in read.result().splitlines(True) if line != FILLING]
    assert sum(b"connection closed" in line for line in lines) > LOUD_CLIENTS
    assert b"draining" in lines[-1]


@pytest.mark.parametrize("output", [stuck_pipe, full_disk])
def test_an_output_that_nobody_reads(tmp_path: Path, output: Callable[[], Any]) -> None:
    """It serves, although it cannot say `ready`."""
    process = Unheard(settings_of(NOBODY, 1), tmp_path)
    command = [sys.executable, "-m", "proxy", "run", "-c", str(process.config_file)]
    with (
        output() as sink,
        process.log_file.open("w") as log,
        subprocess.Popen(command, stdout=sink, stderr=log) as started,
    ):
        try:
            until(lambda: is_healthy(process), "it serves")
            started.terminate()
            assert started.wait(WAIT_S) == 0
        finally:
            started.kill()
    process.check_log()


def is_healthy(process: Unheard) -> bool:
    try:
        return process.get("/healthz")[0] == 200
    except OSError:
        return False
