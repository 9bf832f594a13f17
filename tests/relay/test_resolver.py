"""Brokers are reached by the last good addresses of their names while these do not resolve."""

import asyncio
import socket

import pytest
from relaylab.lab import LIMIT_S, turns

from proxy.cluster.resolver import MAX_HOST_CHARS, MAX_LOOKUPS, Resolver

SERVER = ("broker", 9092)


class NameServer:
    """Answers look-ups when the test says so."""

    def __init__(self, monkeypatch) -> None:
        self.asked: list[tuple[str, int]] = []
        self.waiting: list[asyncio.Future] = []
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self.getaddrinfo)

    async def getaddrinfo(self, host, port, **_):
        self.asked.append((host, port))
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append(answer)
        return await answer

    def answer(self, address: str = "", error: Exception | None = None) -> None:
        for future in self.waiting:
            if error is not None:
                future.set_exception(error)
            else:
                found = (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 9092))
                future.set_result([found])
        self.waiting.clear()


async def begin(resolver, server=SERVER):
    task = asyncio.create_task(resolver.find(server))
    await turns(5)
    return task


async def found(task) -> str:
    return (await asyncio.wait_for(task, LIMIT_S))[0][4][0]


@pytest.fixture
def hurry(monkeypatch):
    monkeypatch.setattr("proxy.cluster.resolver.MAX_LOOKUP_S", 0.01)


async def known(resolver, names) -> None:
    task = await begin(resolver)
    names.answer("10.0.0.1")
    assert await found(task) == "10.0.0.1"


@pytest.mark.parametrize("error", [socket.gaierror(-3, "again"), socket.gaierror(-2, "no name")])
async def test_the_last_good_addresses_serve_while_a_name_does_not_resolve(monkeypatch, error):
    resolver, names = Resolver(), NameServer(monkeypatch)
    await known(resolver, names)
    for _ in range(2):
        task = await begin(resolver)
        names.answer(error=error)
        assert await found(task) == "10.0.0.1"
        assert resolver.failing() == ["broker"]
    task = await begin(resolver)
    names.answer("10.0.0.2")
    assert await found(task) == "10.0.0.2"
    assert resolver.failing() == []


@pytest.mark.usefixtures("hurry")
async def test_a_slow_look_up_is_not_waited_for_and_goes_on(monkeypatch):
    resolver, names = Resolver(), NameServer(monkeypatch)
    await known(resolver, names)
    for _ in range(3):
        assert await found(await begin(resolver)) == "10.0.0.1"
    assert resolver.failing() == ["broker"]
    assert names.asked == [SERVER] * 2  # one for all who came meanwhile
    names.answer("10.0.0.2")
    await turns(5)
    assert resolver.failing() == []
    task = await begin(resolver)
    names.answer("10.0.0.2")
    assert await found(task) == "10.0.0.2"


@pytest.mark.usefixtures("hurry")
async def test_a_name_without_addresses_is_waited_for(monkeypatch):
    resolver, names = Resolver(), NameServer(monkeypatch)
    task = await begin(resolver)
    await asyncio.wait((task,), timeout=0.05)
    assert not task.done()
    names.answer(error=socket.gaierror(-2, "no name"))
    with pytest.raises(socket.gaierror):
        await task
    assert resolver.failing() == []


async def test_who_goes_leaves_the_look_up_to_others(monkeypatch):
    resolver, names = Resolver(), NameServer(monkeypatch)
    first, second = await begin(resolver), await begin(resolver)
    first.cancel()
    await turns(5)
    names.answer("10.0.0.1")
    assert await found(second) == "10.0.0.1"
    assert names.asked == [SERVER]


async def test_addresses_need_no_name_server(monkeypatch):
    resolver, names = Resolver(), NameServer(monkeypatch)
    for address in ("10.0.0.9", "::1"):
        assert await found(await begin(resolver, (address, 9092))) == address
    assert names.asked == []


@pytest.mark.parametrize("host", ["a" * (MAX_HOST_CHARS + 1), "a." * 8_000, "", None])
async def test_what_can_be_no_name_is_not_looked_up(monkeypatch, host):
    resolver, names = Resolver(), NameServer(monkeypatch)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("it is encoded"))
    with pytest.raises(socket.gaierror, match="a name of"):
        await resolver.find((host, 9092))
    assert names.asked == []


async def test_few_look_ups_at_a_time(monkeypatch):
    resolver, names = Resolver(), NameServer(monkeypatch)
    tasks = [await begin(resolver, (f"broker-{n}", 9092)) for n in range(MAX_LOOKUPS + 2)]
    assert len(names.waiting) == MAX_LOOKUPS
    names.answer("10.0.0.1")
    await turns(5)
    assert len(names.waiting) == 2
    names.answer("10.0.0.1")
    assert {await found(task) for task in tasks} == {"10.0.0.1"}


async def test_names_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr("proxy.cluster.resolver.MAX_RESOLVED_NAMES", 2)
    resolver, names = Resolver(), NameServer(monkeypatch)
    for host in ("a", "b", "c", "a"):
        task = await begin(resolver, (host, 9092))
        names.answer("10.0.0.1")
        await task
    task = await begin(resolver, ("b", 9092))
    names.answer(error=socket.gaierror(-3, "again"))
    with pytest.raises(socket.gaierror):
        await task
    task = await begin(resolver, ("c", 9092))
    names.answer(error=socket.gaierror(-3, "again"))
    assert await found(task) == "10.0.0.1"
