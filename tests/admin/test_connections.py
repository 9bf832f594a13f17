"""Who is connected, as the API, the command `connections` and the status page show it."""

import asyncio
import io
from dataclasses import replace

import pytest
from admin_world import HOSTILE, AdminWorld, Answer, running, serve
from chromium import Page, text
from connected import HELD, PLAIN, Connected
from rich.console import Console
from status_page import visited

from proxy.admin.commands.asking_commands import run_connections
from proxy.admin.commands.operator_commands import AdminClientError, AdminPortClient
from proxy.quota.entities import ClientIdentity

LEAST_ROUNDS = 5
"""Of the event loop, which others have while so many are listed."""


@pytest.fixture
def connected(world: AdminWorld) -> Connected:
    world.now_ms = 60_000.0
    return Connected([HELD, PLAIN])


async def asked(world: AdminWorld, connected: Connected, method: str, path: str, **how) -> Answer:
    async with serve(world.server(connections=connected, **how)) as ask:
        return await ask(method, path)


async def test_each_says_who_it_is_and_what_holds_it(world: AdminWorld, connected: Connected):
    answer = (await asked(world, connected, "GET", "/v1/connections")).json
    assert (answer["total"], answer["matching"], answer["held"]) == (2, 2, 1)
    busy, held = answer["connections"]
    since, until = busy.pop("since"), held["held"].pop("until")
    assert busy == {
        "id": 7,
        "address": "10.0.0.7",
        "port": 50312,
        "listener": "default",
        "user": None,
        "client_id": "etl-orders",
        "node_id": 2,
        "broker": "10.1.0.2:9092",
        "age_s": 60.0,
        "state": "open",
        "received_rate": 10.0,
        "sent_rate": 2000.0,
        "in_flight": 3,
        "held": None,
    }
    assert (held["node_id"], held["user"], held["sent_rate"]) == (None, "Anna", None)
    rule = held["held"].pop("rule")
    assert (rule["title"], rule["source"]) == ("rule 0 (quota-proxy.yaml:12)", "file")
    assert held["held"] == {
        "where": "delay_queue",
        "why": "response held: consumer_byte_rate of client-id=etl-orders, quota-proxy.yaml:12",
        "quota": "consumer_byte_rate",
        "entity": "client-id=etl-orders",
        "ends_in_s": 1.5,
    }
    assert since < until
    assert until.endswith("+00:00")


async def test_they_are_filtered_limited_and_paged(world: AdminWorld, connected: Connected):
    connected.listed = [replace(PLAIN, number=number, port=number) for number in range(1, 8)]
    connected.listed += [HELD, replace(PLAIN, number=10, sent_rate=1e6)]
    async with serve(world.server(connections=connected)) as ask:

        async def numbers(query: str) -> list[int]:
            answer = (await ask("GET", f"/v1/connections?{query}")).json
            return [each["id"] for each in answer["connections"]]

        assert await numbers("limit=2") == [10, 1]
        assert await numbers("filter=ANNA") == [9]
        assert await numbers("filter=10.0.0.9") == [9]
        assert await numbers("filter=nobody") == []
        assert await numbers("limit=3&after=0") == [1, 2, 3]
        assert await numbers("limit=3&after=3") == [4, 5, 6]
        assert await numbers("limit=9&after=6") == [7, 9, 10]
        for bad in ("limit=x", "after=-1", "after=x", "limit=1001"):
            assert (await ask("GET", f"/v1/connections?{bad}")).status == 400


async def test_one_is_closed_once_and_only_with_the_token(world: AdminWorld, connected: Connected):
    async with serve(world.server(connections=connected, token="secret")) as ask:
        path = "/v1/connections/9"
        assert (await ask("DELETE", path)).status == 401
        assert len(connected.listed) == 2
        headers = {"Authorization": "Bearer secret"}
        closed = await ask("DELETE", path, headers=headers)
        assert (closed.status, closed.json) == (200, {"closed": 9})
        assert connected.listed == [PLAIN]
        connected.listed.append(late := replace(PLAIN, number=123_456_789))
        for number in ("9", "x", "-7", "7.0", "9" * 50, "1234567890"):
            answer = await ask("DELETE", f"/v1/connections/{number}", headers=headers)
            assert (answer.status, set(answer.json)) == (404, {"error", "fix"}), number
        assert connected.listed == [PLAIN, late]


async def test_clients_without_a_bound_come_by_their_rate(unruled: AdminWorld):
    names = ("slow", "fast", "new")
    for name in names:
        unruled.connect(name)
    rates = {
        ClientIdentity("default", None, name): rate
        for name, rate in zip(names, (10, 2000.04), strict=False)
    }
    async with serve(unruled.server(connections=Connected([], rates))) as ask:
        for path in ("/v1/clients", "/v1/status"):
            found = (await ask("GET", path)).json["unbounded_clients"]
            shown = [(each["client_id"], each["rate"]) for each in found]
            assert shown == [("fast", 2000.0), ("slow", 10), ("new", None)]
        found = (await ask("GET", "/v1/clients?limit=1")).json["unbounded_clients"]
        assert [each["client_id"] for each in found] == ["fast"]


async def test_10_000_of_them_do_not_stall_the_proxy(world: AdminWorld, connected: Connected):
    connected.listed = [replace(PLAIN, number=number) for number in range(10_000)]
    server, rounds = world.server(connections=connected), 0

    async def watch() -> None:
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1

    async with serve(server) as ask:
        watching = asyncio.create_task(watch())
        answer = await ask("GET", "/v1/connections?limit=100")
        watching.cancel()
    assert answer.json["total"] == 10_000
    assert rounds >= LEAST_ROUNDS


async def test_the_command_prints_a_table(world: AdminWorld, connected: Connected):
    connected.listed.append(replace(PLAIN, number=11, client_id="\x1b[31m[bold]x", ip="::1"))
    out = Console(file=io.StringIO(), width=160)
    async with running(world.server(connections=connected)) as url:
        await asyncio.to_thread(run_connections, AdminPortClient(url), "", 100, console=out)
        printed = out.file.getvalue()
        one = Console(file=io.StringIO(), width=160)
        await asyncio.to_thread(run_connections, AdminPortClient(url), "anna", 100, console=one)
    for part in (
        "10.0.0.7:50312",
        "[::1]:50312",
        r"\x1b[31m[bold]x",
        "1.953 KiB/s",
        "response held: consumer_byte_rate",
        "1.5 s",
        "3 of 3 connections; 1 held",
    ):
        assert part in printed, part
    assert "1 of 1 connections that fit, 3 in all; 1 held" in one.file.getvalue()


def test_a_proxy_that_is_not_there_is_said():
    with pytest.raises(AdminClientError, match="fix: start the proxy"):
        run_connections(AdminPortClient("http://127.0.0.1:1"), "", 1)


async def test_the_page_shows_them_when_asked(world: AdminWorld, connected: Connected, page: Page):
    connected.listed.append(replace(PLAIN, number=11, client_id=HOSTILE))
    async with visited(world.server(connections=connected), page) as url:
        await page.open(url, f"{text('#state')} === '✓ Ready'")
        assert not any("v1/connections" in each for each in page.urls)
        await page.run("document.getElementById('connections-more').click()")
        lines = "document.querySelectorAll('#connections-rows tr').length"
        await page.until(f"{lines} === 3")
        shown = await page.run(text("#connections-rows"))
        for part in ("10.0.0.7:50312 · id 7", "etl-orders, Anna", "1.95 KiB/s", "1.5 s"):
            assert part in shown
        assert (
            "response held: consumer_byte_rate of client-id=etl-orders, quota-proxy.yaml:12"
            in shown
        )
        assert HOSTILE in shown
        assert await page.run("document.querySelectorAll('main img').length") == 0
        connected.listed.remove(HELD)
        await page.until(f"{lines} === 2")
