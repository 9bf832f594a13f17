"""The section of pipelines on the status page, in a real Chromium."""

from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from admin_world import HOSTILE
from chromium import PHONE, WIDE, Page, text
from pipeline_world import LATER, PipelineWorld, chain, scene
from status_page import PIPELINES, pipeline_item, visited

SHOWN = f"{PIPELINES} === 3"


def boxes(name: str) -> str:
    """Return an expression for the texts of its boxes."""
    return f"[...{pipeline_item(name)}.querySelectorAll('.flow > li')].map(each => each.innerText)"


@pytest.fixture
def shown() -> PipelineWorld:
    return scene()


@pytest.fixture
async def url(shown: PipelineWorld, page: Page) -> AsyncIterator[str]:
    async with visited(shown.server(), page) as address:
        yield address


async def test_nodes_stand_in_order_and_held_ones_say_why(page: Page, url: str):
    await page.open(url, SHOWN)
    feed, enrich, store = await page.run(boxes("orders"))
    assert feed.splitlines()[:2] == ["feed-orders", "source"]
    assert enrich.splitlines()[:2] == ["enrich", "stage after feed-orders"]
    assert enrich.splitlines()[2] == "■ Held to 286 of 2,000/s"
    assert "store asks for less" in enrich
    assert "it processes 400" in enrich
    assert "✓ Free, normal 2,000/s" in store
    assert "processes 410/s" in store
    assert "lag 9,000" in store
    assert await page.run(f"{pipeline_item('orders')}.querySelectorAll('.held').length") == 2
    assert await page.run(f"{pipeline_item('clicks')}.querySelectorAll('.held').length") == 0
    assert await page.run(text("#pipelines-count")) == "3"
    assert "held" in await page.run(text("#pipelines-note"))


async def test_the_ledger_is_shown(page: Page, url: str):
    await page.open(url, SHOWN)
    ledger = await page.run(f"{pipeline_item('orders')}.querySelector('dl').innerText")
    lines = [line for line in ledger.splitlines() if line]
    facts = dict(pairwise(lines))
    assert facts["In flight"] == "5 of 5"
    assert facts["Completed"] == "7"
    assert facts["Failed"] == "0"
    assert facts["Timed out"] == "✕ 1"
    assert "batch 8 of enrich waits at store, since" in ledger
    assert "■ Full" in await page.run(f"{pipeline_item('orders')}.innerText")
    assert "■ Full" not in await page.run(f"{pipeline_item('clicks')}.innerText")


async def test_without_pipelines_there_is_no_section(page: Page):
    world = PipelineWorld()
    async with visited(world.server(), page) as url:
        await page.open(url, "document.querySelector('#loads li')")
        for each in ("pipelines-card", "pipelines-tile"):
            assert not await page.run(f"document.getElementById('{each}').checkVisibility()")
        world.begin(chain("late", "only"))
        await page.until("document.getElementById('pipelines-card').checkVisibility()")


async def test_figures_follow_the_pipeline(page: Page, shown: PipelineWorld, url: str):
    await page.open(url, SHOWN)
    line = shown.lines["orders"]
    for _ in range(5):
        line.batch(line.settings.stages[1], 500, shown.now_ms)
    shown.run(300, {**LATER, "store": (1.0, 5000.0, 0), "enrich": (1.0, 5000.0, 0)})
    await page.until(f"{pipeline_item('orders')}.querySelectorAll('.held').length === 0")
    assert "■ Full" not in await page.run(f"{pipeline_item('orders')}.innerText")
    del shown.lines["clicks"]
    await page.until(f"{PIPELINES} === 2")


async def test_batches_and_events_open_by_keyboard(page: Page, shown: PipelineWorld, url: str):
    await page.open(url, SHOWN)
    await page.run(f"{pipeline_item('orders')}.querySelector('summary').focus()")
    await page.press("Enter")
    assert await page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    inside = f"{pipeline_item('orders')}.querySelector('details').innerText"
    await page.until(f"{inside}.includes('batch 8 of enrich waits at store')")
    assert "enrich is held to 400/s: store asks for less" in await page.run(inside)
    # It is kept up to date, and open, and the focus stays.
    line = shown.lines["orders"]
    line.batch(line.settings.stages[1], 500, shown.now_ms)
    await page.until(f"!{inside}.includes('batch 8 of')")
    assert await page.run("document.activeElement.tagName") == "SUMMARY"
    await page.press("Enter")
    assert not await page.run(f"{pipeline_item('orders')}.querySelector('details').open")


async def test_what_cannot_be_asked_for_is_said(page: Page, url: str):
    await page.open(url, SHOWN)
    await page.send("Network.setBlockedURLs", urls=["*v1/pipelines*"])
    await page.run(f"{pipeline_item('orders')}.querySelector('summary').click()")
    await page.until(
        f"{pipeline_item('orders')}.querySelector('.why .bad').innerText.includes('No contact')"
    )
    await page.send("Network.setBlockedURLs", urls=[])
    await page.until(
        f"{pipeline_item('orders')}.querySelector('.why').innerText.includes('batch 8')"
    )
    page.complaints.clear()  # the browser's, about what was blocked


async def test_hostile_names_are_text(page: Page, url: str):
    await page.open(url, SHOWN)
    name = f"p {HOSTILE}"
    await page.run(f"{pipeline_item(name)}.querySelector('summary').click()")
    inside = f"{pipeline_item(name)}.querySelector('details').innerText"
    await page.until(f"{inside}.includes('asks for less')")
    assert await page.run("document.querySelectorAll('main img').length") == 0
    assert HOSTILE in (await page.run(boxes(name)))[1]


async def test_nodes_are_a_list_to_a_screen_reader_at_any_width(page: Page, url: str):
    await page.open(url, SHOWN)
    for size in (WIDE, PHONE):
        await page.look(**size)
        tree = await page.send("Accessibility.getFullAXTree")
        nodes = [node for node in tree["nodes"] if not node["ignored"]]
        names = [node.get("name", {}).get("value") for node in nodes]
        assert "Sources and stages of orders, in order" in names
        assert not {"→", "↓"} & {name for name in names if name}
