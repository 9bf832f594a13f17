"""What a throttled client has asked for waits in the broker; what was freed is given back."""

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from struct import Struct

import psutil
import pytest
from support.machine import machine_config, worker_pids
from support.operating import running
from support.proxy_process import HOST, ProxyProcess, until
from support.raw import RawClient, api_versions, fetch

from examples.devkit.broker import EmbeddedBroker

CONNECTIONS = 100
RESPONSE_BYTES = 1 << 20
BOUND_BYTES = 1 << 20
GROWTH_BYTES = 10 << 20

HEAD = Struct(">ihhihc")  # of a request: length, API key, version, correlation id, client id
SASL_AUTHENTICATE = 36
LOGINS, LOGIN_BYTES = 600, 100_000
STAYS = 10
"""One in so many clients stays, with memory between that of those that go."""
WORKERS, MOST_OF_ITS_OWN = 2, 0.45


@pytest.mark.slow
def test_throttled_responses_are_not_held_in_memory(
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    fill: Callable[..., None],
    data_path: tuple[str, ...],
) -> None:
    """A hundred megabytes are asked for; all but the first few seconds' worth wait."""
    rules = [{"client-id": "many", "scope": "shared", "consumer_byte_rate": BOUND_BYTES}]
    process = proxy(*data_path, anew=True, rules=rules)
    name = topic(config={"max.message.bytes": str(2 * RESPONSE_BYTES)})
    fill(name, 2, RESPONSE_BYTES - 1000)
    with ExitStack() as stack:
        clients = [
            stack.enter_context(RawClient(process.bootstrap, "many")) for _ in range(CONNECTIONS)
        ]
        for client in clients:
            client.ask(api_versions(3))
        measured = psutil.Process(process.pid)
        before = measured.memory_info().rss
        for client in clients:
            client.send(fetch(12, name, max_bytes=RESPONSE_BYTES))
        until(lambda: process.metrics().value("delay_queue_size", api="fetch"), "they are held")
        assert measured.memory_info().rss - before < GROWTH_BYTES


def test_the_memory_of_a_peak_is_given_back(proxy: Callable[..., ProxyProcess]) -> None:
    """Clients send logins, all but the end, so that the proxy has them in memory."""
    listening = proxy(anew=True)
    process = psutil.Process(listening.pid)
    before = process.memory_info().rss
    login = HEAD.pack(LOGIN_BYTES, SASL_AUTHENTICATE, 1, 1, 1, b"x")
    login += bytes(LOGIN_BYTES - len(login))
    with ExitStack() as staying, ExitStack() as going:
        for number in range(LOGINS):
            stack = going if number % STAYS else staying
            client = stack.enter_context(socket.create_connection((HOST, listening.port)))
            client.sendall(login)
        peak = until(
            lambda: (rss := process.memory_info().rss) - before >= LOGINS * LOGIN_BYTES and rss,
            "all that was sent is in memory",
        )
        going.close()
        until(lambda: process.memory_info().rss - before < (peak - before) / 2, "it is given back")


def test_workers_share_what_they_began_with(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    """What a worker changes or walks that was there at its fork it has a copy of: 2/3, not 1/3."""
    process = ProxyProcess(machine_config(kafka.bootstrap, WORKERS), tmp_path, anew=True)
    with running(process):
        until(lambda: process.get("/readyz")[0] == 200, "it is ready")
        for pid in worker_pids(process).values():
            memory = psutil.Process(pid).memory_full_info()
            assert memory.uss < MOST_OF_ITS_OWN * memory.rss
