"""A process that takes the place of another: which one, who may, and what if it dies on the way."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest
from relaylab.lab import until
from structlog.testing import capture_logs

from proxy.cluster.upstream import Address
from proxy.relay.listener import Listener, ListenerSettings
from proxy.relay.ports import ListenerError, ReusePortSockets, covers_address
from proxy.relay.take_over import TAKE_OVER_SCHEMA, Predecessor, TakeOverError, TakeOverServer

HOST = "127.0.0.1"
TIMES = 20

SUCCESSOR = """
import sys
from proxy.relay.ports import ReusePortSockets

host, port = sys.argv[1], int(sys.argv[2])
ports = ReusePortSockets()
ports.sharing_with = {(host, port): 1}
ports.open("main", host, port)
print("open", flush=True)
sys.stdin.readline()
ports.take_over()
print("taken over", flush=True)
sys.stdin.readline()
"""


def open_listener(accepted: list) -> Listener:
    settings = ListenerSettings("main", HOST, "proxy.example", takes_free_ports=False)
    loop = asyncio.get_running_loop()
    listener = Listener(settings, loop, lambda sock, _: accepted.append(sock), print)
    listener.use({None: ReusePortSockets().open("main", HOST, 0)[0]})
    return listener


def ports_beside(addresses: Iterable[Address] | None) -> ReusePortSockets:
    ports = ReusePortSockets()
    ports.sharing_with = None if addresses is None else dict.fromkeys(addresses, 1)
    return ports


def python(script: str, *arguments: str) -> "subprocess.Popen[bytes]":
    """Start a script in another process."""
    command = [sys.executable, "-c", script, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, **pipes)


async def test_what_connects_reaches_the_old_one_again_when_the_successor_is_killed():
    accepted = []
    old = open_listener(accepted)
    old.accept()

    async def reaches_the_old_one(times: int = TIMES) -> None:
        for _ in range(times):
            count = len(accepted)
            with socket.create_connection((HOST, old.bootstrap_port)):
                await until(lambda count=count: len(accepted) > count)

    try:
        for _ in range(2):  # what the first one has left behind does no harm to the second
            with python(SUCCESSOR, HOST, str(old.bootstrap_port)) as successor:
                assert successor.stdout.readline() == b"open\n"
                await reaches_the_old_one()
                successor.stdin.write(b"\n")
                successor.stdin.flush()
                assert successor.stdout.readline() == b"taken over\n"
                count = len(accepted)
                waiting = socket.create_connection((HOST, old.bootstrap_port))
                successor.send_signal(signal.SIGKILL)
            with waiting, pytest.raises(ConnectionResetError):
                waiting.recv(1)
            assert len(accepted) == count
            await reaches_the_old_one()
    finally:
        old.close()
        for sock in accepted:
            sock.close()


async def test_only_the_ports_of_the_predecessor_are_shared():
    old = open_listener([])
    port = old.bootstrap_port
    try:
        for beside in (None, (), {(HOST, port + 1)}, {("127.0.0.2", port)}):
            with pytest.raises(ListenerError, match="in use"):
                ports_beside(beside).open("main", HOST, port)
        for beside in ({(HOST, port)}, {("0.0.0.0", port)}):
            ports = ports_beside(beside)
            ports.open("main", HOST, port)
            ports.take_over()
            ports.close()
    finally:
        old.close()


@pytest.mark.parametrize(
    ("host", "other", "shared"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("0.0.0.0", "127.0.0.2", True),
        ("::1", "::", True),
    ],
)
def test_a_port_is_shared_where_addresses_meet(host, other, shared):
    assert covers_address({(other, 9092)}, (host, 9092)) is shared
    assert covers_address({(other, 9092)}, (host, 9093)) is False


class ProxyInSteps:
    """What a proxy is asked to do while it is replaced; itself in the place of its ports."""

    def __init__(self, addresses: Iterable[Address] = ()) -> None:
        self._addresses = addresses
        self.ports = self
        self.done: list[str] = []
        self.may_release = asyncio.Event()
        self.may_release.set()

    def addresses(self) -> Iterable[Address]:
        return self._addresses

    async def release(self) -> None:
        self.done.append("release")
        await self.may_release.wait()

    def take_back(self) -> None:
        self.done.append("take back")

    async def resume(self) -> None:
        self.done.append("resume")


@asynccontextmanager
async def replaceable(
    addresses: Iterable[Address] = (), stop: asyncio.Event | None = None
) -> AsyncIterator[tuple[TakeOverServer, list[str], list[dict]]]:
    proxy = ProxyInSteps(addresses)
    made = TakeOverServer(proxy, stop or asyncio.Event())
    await made.open()
    with capture_logs() as logs:
        yield made, proxy.done, logs
        await made.close()
        hung = [log for log in logs if log["event"].startswith("the successor hangs")]
        assert [log for log in logs if log["log_level"] == "error"] == hung


async def find(pid: int) -> Predecessor:
    return await asyncio.to_thread(Predecessor, pid)


async def is_given_up(logs: list[dict]) -> None:
    await until(lambda: any(log["event"].startswith("not replaced") for log in logs))


async def test_a_successor_has_it_release_its_state_and_then_stop():
    addresses = [(HOST, port) for port in range(1, 40_000)]
    stop = asyncio.Event()
    async with replaceable(addresses, stop) as (_, done, _):
        predecessor = await find(os.getpid())
        assert predecessor.sockets.keys() == set(addresses)
        assert done == []
        assert await asyncio.to_thread(predecessor.release)
        assert done == ["release"]
        assert not stop.is_set()
        await asyncio.to_thread(predecessor.stop)
        await until(stop.is_set)
    assert done == ["release"]
    with pytest.raises(TakeOverError, match="serves now"):
        await find(os.getpid())


@asynccontextmanager
async def releasing():
    """Give a proxy that is told to release, and has begun; what it is; and what tells it so."""
    proxy = ProxyInSteps()
    proxy.may_release.clear()
    old = TakeOverServer(proxy, asyncio.Event())
    await old.open()
    predecessor = await find(os.getpid())
    telling = asyncio.create_task(asyncio.to_thread(predecessor.release))
    await until(lambda: proxy.done == ["release"])
    yield proxy, old, telling
    predecessor.close()
    await old.close()


async def test_what_is_being_released_is_waited_for():
    async with releasing() as (proxy, _, telling):
        assert not telling.done()
        proxy.may_release.set()
        assert await telling


async def test_one_that_ends_while_it_releases():
    async with releasing() as (_, old, telling):
        await old.close()
        assert not await telling


async def test_one_successor_at_a_time_and_the_next_when_it_is_gone():
    stop = asyncio.Event()
    async with replaceable(stop=stop) as (_, done, logs):
        first = await find(os.getpid())
        with pytest.raises(TakeOverError, match=rf"is being replaced by process {os.getpid()} now"):
            await find(os.getpid())
        first.close()
        await is_given_up(logs)
        assert not stop.is_set()
        second = await find(os.getpid())
        assert await asyncio.to_thread(second.release)
        await asyncio.to_thread(second.stop)
        await until(stop.is_set)
    assert done == ["release"]


async def test_one_that_gives_up_when_it_has_the_state_gives_it_back():
    async with replaceable() as (_, done, logs):
        predecessor = await find(os.getpid())
        assert await asyncio.to_thread(predecessor.release)
        assert done == ["release"]
        predecessor.close()
        await is_given_up(logs)
        assert done == ["release", "resume"]


async def test_one_that_hangs_is_too_late():
    """It has the state as long as it lives, and nobody else can take over meanwhile."""
    async with replaceable() as (_, done, logs):
        predecessor = await find(os.getpid())
        assert await asyncio.to_thread(predecessor.release, limit_s=1)
        await until(lambda: done == ["release", "take back"])
        with pytest.raises(TakeOverError, match="is being replaced by process"):
            await find(os.getpid())
        assert done == ["release", "take back"]
        with pytest.raises(TakeOverError, match="took too long to begin\n    fix: "):
            await asyncio.to_thread(predecessor.stop)
        await is_given_up(logs)
        assert done == ["release", "take back", "resume"]


@pytest.mark.parametrize("said", ["release", "release soon", "stop", "x" * 1000])
async def test_one_that_says_something_else_gets_nothing(said):
    async with replaceable() as (_, done, logs):
        with socket.socket(socket.AF_UNIX) as successor:
            successor.connect(f"\0quota-proxy/{os.getpid()}")
            successor.sendall(f"{said}\n".encode())
            await is_given_up(logs)
        assert done == []


async def test_the_word_of_one_that_has_died_since_does_not_count():
    async with replaceable() as (_, done, logs):
        with socket.socket(socket.AF_UNIX) as successor:
            successor.connect(f"\0quota-proxy/{os.getpid()}")
            successor.sendall(b"release 120\n")  # and the event loop has not seen the word
        await is_given_up(logs)
        assert done == []


async def test_a_predecessor_that_has_ended_by_itself():
    async with replaceable() as (old, _, _):
        predecessor = await find(os.getpid())
        await old.close()
        assert not predecessor.release()
        await asyncio.to_thread(predecessor.stop)


async def test_what_is_no_proxy():
    """Neither by its command line, nor by a socket that somebody else has in its name."""
    with python("input()", "-m", "proxy", "run") as process:
        with pytest.raises(TakeOverError, match="is no `quota-proxy run`"):
            await find(process.pid)
        with socket.socket(socket.AF_UNIX) as impostor:
            impostor.bind(f"\0quota-proxy/{process.pid}")
            impostor.listen()
            with pytest.raises(TakeOverError, match="is no `quota-proxy run`"):
                await find(process.pid)
        process.communicate(b"\n")


OTHER_FORM = {"form": TAKE_OVER_SCHEMA + 1, "replaced_by": None, "addresses": []}


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (b"", "does not answer: .*\n    fix: if it does not"),
        (b"hello\n", "does not answer: .*\n    fix: if it does not"),
        (b"[]\n", "does not answer: .*\n    fix: if it does not"),
        (
            json.dumps({"form": TAKE_OVER_SCHEMA}).encode(),
            "does not answer: .*\n    fix: if it does not",
        ),
        (json.dumps(OTHER_FORM).encode() + b"\n", "of a version .*\n    fix: stop it"),
    ],
)
async def test_what_does_not_answer_as_a_proxy_does(said, problem):
    def answer(sock: socket.socket) -> None:
        with sock.accept()[0] as client:
            client.sendall(said)

    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"\0quota-proxy/{os.getpid()}")
        sock.listen()
        answering = asyncio.create_task(asyncio.to_thread(answer, sock))
        with pytest.raises(TakeOverError, match=problem):
            await find(os.getpid())
        await answering


async def test_a_name_that_is_taken_only_costs_the_take_over():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"\0quota-proxy/{os.getpid()}")
        with capture_logs() as logs:
            old = TakeOverServer(ProxyInSteps(), asyncio.Event())
            await old.open()
            await old.close()
    assert [log["log_level"] for log in logs] == ["warning"]
