"""The status page of several members, in a real Chromium; and what the terminal shows of them."""

import io

import pytest
from admin_world import MIB
from chromium import PHONE, WIDE, Page, text
from gateway_world import GatewayWorld
from rich.console import Console
from status_page import CLIENTS

from proxy.admin.commands.top_tables import screen

MEMBERS = "[...document.querySelectorAll('#members tr')].map(row => row.innerText)"

pytestmark = pytest.mark.timeout(120)


async def test_each_member_has_a_row_and_one_that_is_silent_is_said(page: Page):
    tier = GatewayWorld()
    tier.worlds["0"].connect("etl-orders")(200 * MIB)
    tier.worlds["1"].connect("etl-orders")(MIB)  # a visitor there
    tier.worlds["2"].connect("dashboards")(MIB)
    async with tier.running(timeout_s=1.0) as address:
        await page.open(f"{address}/", f"{CLIENTS} === 2")
        assert await page.run("document.querySelectorAll('#members tr').length") == 3
        assert await page.run(text("#state")) == "✓ Ready"
        assert await page.run(text("#connections")) == "51"
        rows = await page.run(MEMBERS)
        assert all("✓ Ready" in row for row in rows)
        assert "at 0, 1" in await page.run(text("#clients tr"))
        await page.run("document.querySelector('#clients summary').click()")
        await page.until("document.querySelector('details[open] li.chosen')")
        await tier.kill("2")
        await page.until(f"{CLIENTS} === 1")
        rows = await page.run(MEMBERS)
        assert "✕ Silent: it can't be connected to" in rows[2]
        assert "1 of 3 silent" in await page.run(text("#members-shown"))
        for size in (PHONE, WIDE):
            await page.look(**size)
            width = await page.run("document.documentElement.clientWidth")
            assert await page.run("document.documentElement.scrollWidth") <= width
        assert page.complaints == []


async def test_a_slot_that_fills_a_member_alone_is_named_with_its_clients(page: Page):
    tier = GatewayWorld()
    overloaded = [{"slot": 17, "bytes_per_s": 9, "cpu_share": 0.9, "clients": ["client-id=etl"]}]
    slots = {"owned": 85, "bytes_per_s": 9, "cpu_share": 0.9, "overloaded": overloaded}
    async with tier.running(slots=lambda: {"1": slots}) as address:
        await page.open(f"{address}/", "document.querySelectorAll('#members tr').length === 3")
        said = await page.run(text("#members-shown"))
        assert said == "■ slot 17 fills member 1 alone: client-id=etl"
        assert page.complaints == []


async def test_the_terminal_says_how_many_members_there_are_and_who_is_silent():
    tier = GatewayWorld()
    async with tier.asked(timeout_s=1.0) as ask:
        await tier.kill("1")
        status = (await ask("GET", "/v1/status?by=client")).json
    console = Console(file=io.StringIO(), width=200)
    console.print(screen(status, "held", 200))
    assert "members 3 (1 silent)" in console.file.getvalue()
