"""Machines ask each other over HTTP, and see who is silent."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import SensorDebt
from proxy.state import Record
from proxy.tier import peers as peers_module
from proxy.tier.peer_client import (
    ALIVE_PATH,
    RECORDS_PATH,
    VISITS_PATH,
    PeerClient,
    PeerError,
)
from proxy.tier.peers import Peers
from proxy.tier.visits import MAX_VISITS

HOST = "127.0.0.1"
ROW = ["main", None, "etl", "10.0.0.9", "consumer_byte_rate", 1024.0]
ETL = ClientIdentity("main", None, "etl")
DEBT = SensorDebt(ETL, "client-id=etl", QuotaKind.CONSUMER_BYTE_RATE, 5.0)
LIMIT_S = 20.0


class Machine:
    """Answers at a real port; `status` and `owed` are what it says."""

    def __init__(self) -> None:
        self.status = 200
        self.hangs = asyncio.Event()
        self.hangs.set()
        self.ends = asyncio.Event()
        """Answers the long questions."""
        self.followed, self.answered = asyncio.Event(), asyncio.Event()
        self.runner: web.AppRunner | None = None
        self.owed: object = []
        self.raw: bytes | None = None
        """In place of an answer."""
        self.asked: list[tuple[str, str | None, object]] = []

    async def _answer(self, request: web.Request) -> web.Response:
        if "until" in request.query:
            self.followed.set()
            await self.ends.wait()
        await self.hangs.wait()
        body = await request.json() if request.can_read_body else None
        self.answered.set()
        self.asked.append((request.path, request.headers.get("Authorization"), body))
        if self.raw is not None:
            return web.Response(body=self.raw)
        return web.json_response({"owed": self.owed}, status=self.status)

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get(ALIVE_PATH, self._answer)
        app.router.add_post(VISITS_PATH, self._answer)
        app.router.add_post(RECORDS_PATH, self._answer)
        self.runner = runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, port).start()
            yield f"http://{HOST}:{runner.addresses[0][1]}"
        finally:
            self.hangs.set()
            self.ends.set()
            await runner.cleanup()

    async def die(self) -> None:
        """Close the port, and break all connections, as the system does for a dead process."""
        assert self.runner is not None
        for site in tuple(self.runner.sites):
            await site.stop()
        self.break_connections()

    def break_connections(self) -> None:
        assert self.runner is not None
        assert self.runner.server is not None
        for connection in self.runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()


@asynccontextmanager
async def asking(token: str | None = None) -> AsyncIterator[Peers]:
    client = PeerClient(token)
    yield Peers(client)
    await client.close()


@asynccontextmanager
async def watching(peers: Peers) -> AsyncIterator[None]:
    task = asyncio.create_task(peers.watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Looks:
    """Wakes who waits for a change of those that are silent."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def __call__(self) -> None:
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "ALIVE_INTERVAL_S", 0.02)
    monkeypatch.setattr(peers_module, "SILENT_AFTER_S", 0.3)
    monkeypatch.setattr(peers_module, "PEER_TIMEOUT_S", 0.2)


async def test_visits_are_told_with_the_token_and_what_is_owed_comes_back() -> None:
    machine = Machine()
    machine.owed = [[*ROW[:-1], 250.0]]
    async with machine.running() as url, asking("secret") as peers:
        peers.use({"b": url})
        assert await peers.rows("b", VISITS_PATH, {"visits": [ROW]}, "owed") == machine.owed
    assert machine.asked == [(VISITS_PATH, "Bearer secret", {"visits": [ROW]})]


async def test_without_a_token_none_is_shown() -> None:
    machine = Machine()
    async with machine.running() as url, asking() as peers:
        peers.use({"b": url})
        await peers.give("b", [Record("k/1", "{}", 2)], [DEBT])
    body = {"records": [["k/1", "{}", 2]], "owed": [DEBT.document()]}
    assert machine.asked == [(RECORDS_PATH, None, body)]


@pytest.mark.parametrize("owed", [None, {}, "much"])
async def test_another_answer_is_an_error(owed: object) -> None:
    machine = Machine()
    machine.owed = owed
    async with machine.running() as url, asking() as peers:
        peers.use({"b": url})
        with pytest.raises(PeerError, match="was not understood"):
            await peers.rows("b", VISITS_PATH, {"visits": [ROW]}, "owed")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"[" * 50_000, "recursion"),
        (b"9" * 50_000, "digits"),
        (b"\xff" * 50_000, "decode"),
        (b"[" + b"0," * 200_000 + b"0]", "its answer is above"),
    ],
)
async def test_what_is_no_answer_is_an_error_and_not_read(answer: bytes, problem: str) -> None:
    machine = Machine()
    machine.raw = answer
    async with machine.running() as url, asking() as peers:
        peers.use({"b": url})
        with pytest.raises(PeerError, match=problem):
            await peers.rows("b", VISITS_PATH, {"visits": [ROW]}, "owed")


@pytest.mark.parametrize("url", ["http://[", "file:///etc/passwd", "http://"])
async def test_an_address_that_is_none_is_an_error(url: str) -> None:
    async with asking() as peers:
        peers.use({"b": url})
        with pytest.raises(PeerError, match="b: it broke off"):
            await peers.rows("b", VISITS_PATH, {"visits": [ROW]}, "owed")


async def test_an_answer_with_all_that_was_asked_for_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "PEER_TIMEOUT_S", LIMIT_S)
    machine = Machine()
    machine.owed = [[*ROW[:-1], 1 / 3 + number] for number in range(MAX_VISITS)]
    async with machine.running() as url, asking() as peers:
        peers.use({"b": url})
        asked = {"visits": [ROW] * MAX_VISITS}
        assert len(await peers.rows("b", VISITS_PATH, asked, "owed")) == MAX_VISITS


async def test_who_refuses_hangs_is_gone_or_unknown_is_an_error(soon: None) -> None:
    machine = Machine()
    async with asking() as peers:
        async with machine.running() as url:
            peers.use({"b": url})
            with pytest.raises(PeerError, match="c: it is not in the tier"):
                await peers.rows("c", VISITS_PATH, {"visits": [ROW]}, "owed")
            machine.status = 503
            with pytest.raises(PeerError, match=f"{VISITS_PATH} answers 503"):
                await peers.rows("b", VISITS_PATH, {"visits": [ROW]}, "owed")
            machine.hangs.clear()
            with pytest.raises(PeerError, match="b: it did not answer within"):
                await peers.rows("b", VISITS_PATH, {"visits": [ROW]}, "owed")
        with pytest.raises(PeerError, match="b: "):
            await peers.rows("b", VISITS_PATH, {"visits": [ROW]}, "owed")


async def test_a_machine_is_silent_while_it_does_not_answer(soon: None) -> None:
    machine, other, looks = Machine(), Machine(), Looks()
    async with (
        machine.running() as url,
        other.running() as other_url,
        asking() as peers,
    ):
        peers.on_silent = looks
        peers.use({"b": url, "c": other_url})
        async with watching(peers):
            machine.hangs.clear()
            await looks.until(lambda: peers.silent == {"b"})
            assert peers.failing == {"b"}
            machine.hangs.set()
            await looks.until(lambda: not peers.silent)
            assert peers.failing == set()
            machine.status = 503  # it lives, and is not in the tier
            await looks.until(lambda: peers.silent == {"b"})


async def test_for_how_long_this_one_stood_still_nobody_was_silent(
    soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "SILENT_AFTER_S", 1.0)
    machine = Machine()
    async with machine.running() as url, asking() as peers:
        peers.on_silent = lambda: pytest.fail(f"{peers.silent} are silent")
        peers.use({"b": url})
        async with watching(peers):
            await machine.followed.wait()
            time.sleep(1.2)  # noqa: ASYNC251 - the loop stands still
            for _ in range(3):
                machine.answered.clear()
                await machine.answered.wait()


async def test_a_machine_that_dies_is_silent_at_once(
    soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "SILENT_AFTER_S", 1000.0)
    machine, other, looks = Machine(), Machine(), Looks()
    async with (
        machine.running() as url,
        other.running() as other_url,
        asking() as peers,
    ):
        peers.on_silent = looks
        peers.use({"b": url, "c": other_url})
        async with watching(peers):
            await machine.followed.wait()
            await machine.die()
            await looks.until(lambda: peers.silent == {"b"})
            port = int(url.rpartition(":")[2])
            async with Machine().running(port):
                await looks.until(lambda: not peers.silent)


async def test_one_broken_connection_is_no_death(soon: None) -> None:
    machine, looks = Machine(), Looks()
    async with machine.running() as url, asking() as peers:
        peers.on_silent = looks
        peers.use({"b": url})
        async with watching(peers):
            for _ in range(3):
                machine.followed.clear()
                machine.break_connections()
                await machine.followed.wait()
            assert peers.silent == frozenset()


async def test_who_is_in_the_tier_no_more_is_not_silent(soon: None) -> None:
    machine, looks = Machine(), Looks()
    async with machine.running() as url, asking() as peers:
        peers.on_silent = looks
        machine.status = 503
        peers.use({"b": url})
        async with watching(peers):
            await looks.until(lambda: peers.silent == {"b"})
            peers.use({})
            assert peers.silent == frozenset()
            peers.use({"b": url})
            assert peers.silent == frozenset(), "it has the whole time again"
