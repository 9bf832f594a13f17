"""The status page of several members, in a real Chromium; and what the terminal shows of them."""

import io

from admin_world import MIB
from chromium import PHONE, WIDE, Page, text
from connected import PLAIN, Connected
from rich.console import Console
from status_page import CLIENTS
from tier_world import TierWorld

from proxy.admin.commands.top_tables import draw_view

MEMBERS = "[...document.querySelectorAll('#members tr')].map(row => row.innerText)"


async def test_each_member_has_a_row_with_its_machine_and_one_that_is_silent_is_said(page: Page):
    tier = TierWorld()
    tier.worlds["a/0"].connect("etl-orders")(200 * MIB)
    tier.worlds["a/1"].connect("etl-orders")(MIB)  # a visitor there
    tier.worlds["b/1"].connect("dashboards")(MIB)
    tier.worlds["c/0"].connect("mirror")(MIB)
    for each in tier.tiers.values():
        each.warning = "members of tier prod have different rules: digest-1: a/0; digest-2: b/0"
    servers = {name: {"connections": Connected([PLAIN])} for name in ("a/0", "b/1")}
    async with tier.running(servers=servers) as urls:
        await page.open(f"{urls['b/0']}/", f"{CLIENTS} === 3")
        rows = await page.run(MEMBERS)
        assert len(rows) == 6
        assert ("b/1" in rows[3], "machine b" in rows[3]) == (True, True)
        assert all("✓ Ready" in row for row in rows)
        assert await page.run(text("#members-shown")) == "tier prod, generation 7"
        assert (await page.run(text("#state"))).startswith("■ Ready, but members of tier prod have")
        assert await page.run(text("#connections")) == "102"
        assert "different rules" in await page.run("document.body.innerText")
        assert "at a/0, a/1" in await page.run(text("#clients tr"))
        await page.run("document.querySelector('#clients summary').click()")
        await page.until("document.querySelector('details[open] li.chosen')")
        await page.run("document.querySelector('#connections-more').click()")
        await page.until("document.querySelectorAll('#connections-rows tr').length === 2")
        assert "id b/7" in await page.run("document.querySelector('#connections-rows').innerText")
        await tier.kill("c/0")
        await page.until(f"{CLIENTS} === 2")
        rows = await page.run(MEMBERS)
        assert "✕ Silent: it can't be connected to" in rows[4]
        assert "1 of 6 silent" in await page.run(text("#members-shown"))
        tier.mark_silent("c/0")
        await page.until(f"{MEMBERS}[4].includes('✕ Down: it is silent')")
        for size in (PHONE, WIDE):
            await page.look(**size)
            width = await page.run("document.documentElement.clientWidth")
            assert await page.run("document.documentElement.scrollWidth") <= width
        assert page.complaints == []


async def test_a_slot_that_fills_a_member_alone_is_named_with_its_clients(page: Page):
    tier = TierWorld()
    overloaded = [{"slot": 17, "bytes_per_s": 9, "cpu_share": 0.9, "clients": ["client-id=etl"]}]
    tier.tiers["a/1"].own_slots = {
        **{"owned": 85, "bytes_per_s": 9, "cpu_share": 0.9},
        "overloaded": overloaded,
    }
    async with tier.running() as urls:
        await page.open(f"{urls['c/1']}/", "document.querySelectorAll('#members tr').length === 6")
        said = await page.run(text("#members-shown"))
        assert "■ slot 17 fills member a/1 alone: client-id=etl" in said
        assert page.complaints == []


async def test_the_terminal_says_how_many_there_are_and_who_is_silent():
    tier = TierWorld()
    async with tier.asked() as of:
        tier.mark_silent("c/0")
        status = (await of("a/0")("GET", "/v1/status?by=client")).json
    console = Console(file=io.StringIO(), width=200)
    console.print(draw_view(status, "held", 200))
    assert "tier prod  machines 3  members 6 (c/0 silent)" in console.file.getvalue()
