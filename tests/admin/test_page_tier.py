"""The status page of a tier, in a real Chromium; and what the terminal shows of it."""

import io

import pytest
from admin_world import MIB
from chromium import PHONE, WIDE, Page, text
from connected import PLAIN, Connected
from rich.console import Console
from status_page import CLIENTS
from tier_world import TierWorld

from proxy.admin.commands.top_tables import screen

MEMBERS = "[...document.querySelectorAll('#members tr')].map(row => row.innerText)"

pytestmark = pytest.mark.timeout(120)


async def test_members_are_shown_with_their_machines_and_silent_machines_as_such(page: Page):
    tier = TierWorld()
    tier.world("a/0").connect("etl-orders")(200 * MIB)
    tier.world("b/1").connect("dashboards")(MIB)
    tier.world("c/0").connect("mirror")(MIB)
    tier.rules = {"a": "digest-1", "b": "digest-2", "c": None}
    servers = {name: {"connections": Connected([PLAIN])} for name in ("a/0", "b/1")}
    async with tier.running(servers=servers) as urls:
        await page.open(f"{urls['b']}/", f"{CLIENTS} === 3")
        rows = await page.run(MEMBERS)
        assert len(rows) == 6
        assert "b/1" in rows[3]
        assert "machine b" in rows[3]
        assert all("✓ Ready" in row for row in rows)
        assert await page.run(text("#members-shown")) == "tier prod, generation 7"
        assert "different rules" in await page.run("document.body.innerText")
        await page.run("document.querySelector('#connections-more').click()")
        await page.until("document.querySelectorAll('#connections-rows tr').length === 2")
        assert "id b/7" in await page.run("document.querySelector('#connections-rows').innerText")
        tier.mark_silent("c")
        await page.until(f"{CLIENTS} === 2")
        rows = await page.run(MEMBERS)
        assert "✕ Silent: the machine is silent" in rows[4]
        assert "1 of 5 silent" in await page.run(text("#members-shown"))
        for size in (PHONE, WIDE):
            await page.look(**size)
            width = await page.run("document.documentElement.clientWidth")
            assert await page.run("document.documentElement.scrollWidth") <= width
        assert page.complaints == []


async def test_the_terminal_says_how_many_machines_there_are_and_who_is_silent():
    tier = TierWorld()
    async with tier.asked() as of:
        tier.mark_silent("c")
        status = (await of("a")("GET", "/v1/status?by=client")).json
    console = Console(file=io.StringIO(), width=200)
    console.print(screen(status, "held", 200))
    assert "tier prod  machines 3  members 5 (c silent)" in console.file.getvalue()
