"""The section of Spark queries on the status page, in a real Chromium."""

from collections.abc import AsyncIterator

import pytest
from admin_world import HOSTILE
from chromium import PHONE, WIDE, Page, text
from spark_world import Job, SparkWorld, scene
from status_page import OPEN_QUERY, PARTITIONS, QUERIES, query_row, visited

from proxy.progress.query import FollowedQuery, LastBatch
from proxy.progress.report import ReportRefused

SHOWN = f"{QUERIES} === 5"


@pytest.fixture
def shown() -> SparkWorld:
    return scene()


@pytest.fixture
async def url(shown: SparkWorld, page: Page) -> AsyncIterator[str]:
    async with visited(shown.server(), page) as address:
        yield address


async def test_each_query_is_shown_with_its_troubles(page: Page, url: str):
    await page.open(url, SHOWN)
    for name, parts in {
        "payments": ("running", "etl-payments", "records/s", "of 10.0 MiB/s", "✓ Done"),
        "clicks": ("■ 2 partitions stuck", "not adaptive", "to no group"),
        "audit": ("✕ Failed: Job aborted", "▲ 200 records skipped"),
        "ledger": ("✕ Not committed", "✕ Fails", "a live member"),
    }.items():
        shown = await page.run(f"{query_row(name)}.innerText")
        for part in parts:
            assert part in shown, (name, part)
    assert await page.run("[...document.querySelectorAll('#queries > tr.alarm')].length") == 3
    assert await page.run(text("#queries-count")) == "5"
    assert await page.run(text("#queries-note")) == "■ 3 need a look"


class WithBatch:
    """Tells of one query what the registry tells, and its last batch."""

    def __init__(self, spark: SparkWorld) -> None:
        self.pressure = spark.pressure
        self.accept = spark.accept
        self.pipelines = spark.pipelines
        self._spark = spark

    def progress(self) -> list[FollowedQuery]:
        ended_ms = self._spark.now_ms - 30_000.0
        queries = list(self._spark.progress())
        for query in queries:
            query.last_batch = LastBatch(12, 4000, 1800.0, ended_ms)
        return queries


async def test_the_last_batch_is_shown(page: Page, shown: SparkWorld):
    async with visited(shown.server(reports=WithBatch(shown)), page) as url:
        await page.open(url, SHOWN)
        cell = await page.run(
            f"{query_row('payments')}.querySelector('[data-label=\"Last batch\"]').innerText"
        )
    assert cell.splitlines()[:2] == ["1.8 s", "4,000 rows"]
    assert cell.splitlines()[2].startswith("batch 12 · 3")


async def test_without_queries_there_is_no_section(page: Page):
    spark = SparkWorld(())
    async with visited(spark.server(), page) as url:
        await page.open(url, "document.querySelector('#loads li')")
        for each in ("queries-card", "queries-tile"):
            assert not await page.run(f"document.getElementById('{each}').checkVisibility()")
        spark.known.add("late")
        late = Job(spark, "late", "late")
        late.tell(late.report("started"))
        await page.until("document.getElementById('queries-card').checkVisibility()")


async def test_figures_follow_the_query(page: Page, shown: SparkWorld, url: str):
    await page.open(url, SHOWN)
    shown.registry.committed("ledger", {}, shown.now_ms)
    await page.until(f"!{query_row('ledger')}.innerText.includes('Fails')")
    query = shown.registry.query_of("etl-payments")
    assert query is not None
    query.log_end("payments", 0, 5_000_000, shown.now_ms)
    await page.until(f"{query_row('payments')}.innerText.includes('5,0')")


async def test_a_row_opens_to_its_partitions_by_keyboard(page: Page, shown: SparkWorld, url: str):
    await page.open(url, SHOWN)
    await page.run(f"{query_row('clicks')}.querySelector('button').focus()")
    assert await page.run("document.activeElement.getAttribute('aria-expanded')") == "false"
    await page.press("Enter")
    await page.until(f"{PARTITIONS} === 2")
    assert await page.run("document.activeElement.getAttribute('aria-expanded')") == "true"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert await page.run(outline) == "solid"
    inside = await page.run(text(f"{OPEN_QUERY} .partitions"))
    assert "clicks-1" in inside
    assert "90,000" in inside
    assert "■ stuck since" in inside
    assert "stands at" in await page.run(text(f"{OPEN_QUERY} .notes"))
    # It is kept up to date, and open, and the focus stays.
    query = shown.registry.query_of("clicks")
    assert query is not None
    query.log_end("clicks", 1, 123_456, shown.now_ms)
    await page.until(f"{text(f'{OPEN_QUERY} .partitions')}.includes('123,456')")
    assert await page.run("document.activeElement.className") == "more"
    await page.press("Enter")
    await page.until(f"!document.querySelector('{OPEN_QUERY}')")


async def test_skipped_ranges_say_why(page: Page, url: str):
    await page.open(url, SHOWN)
    await page.run(f"{query_row('audit')}.querySelector('button').click()")
    await page.until(f"{PARTITIONS} === 1")
    inside = await page.run(text(f"{OPEN_QUERY} .partitions"))
    assert "▲ 200 records skipped, last offsets 7300 to before 7500: retention" in inside


async def test_what_is_to_be_mended_is_said(page: Page, shown: SparkWorld, url: str):
    await page.open(url, SHOWN)
    other = Job(shown, "other", "etl-payments")
    with pytest.raises(ReportRefused):
        other.tell(other.complete(100))
    row = query_row("payments")
    await page.until(f"{row}.innerText.includes('▲ another query, other (')")
    payments = Job(shown, "payments", "etl-payments")
    trigger = {"kind": "processing_time", "interval_ms": 5000}
    payments.tell(payments.report("running", trigger=trigger))
    await page.until(f"{row}.innerText.includes('write batch_interval: 5s')")


async def test_a_hostile_name_is_text(page: Page, url: str):
    await page.open(url, SHOWN)
    await page.run(f"{query_row(HOSTILE)}.querySelector('button').click()")
    await page.until(f"{PARTITIONS} === 2")
    assert await page.run("document.querySelectorAll('main img').length") == 0
    label = f"document.querySelector('{OPEN_QUERY} .partitions').getAttribute('aria-label')"
    assert await page.run(label) == f"Partitions of {HOSTILE}"


async def test_what_cannot_be_asked_for_is_said(page: Page, url: str):
    await page.open(url, SHOWN)
    await page.send("Network.setBlockedURLs", urls=["*v1/progress*"])
    await page.run(f"{query_row('ledger')}.querySelector('button').click()")
    await page.until(
        f"document.querySelector('{OPEN_QUERY} .bad')?.innerText.includes('No contact')"
    )
    await page.send("Network.setBlockedURLs", urls=[])
    await page.until(f"{PARTITIONS} === 3")
    assert await page.run(text(f"{OPEN_QUERY} .bad")) == ""
    page.complaints.clear()  # the browser's, about what was blocked


async def test_a_query_that_is_gone_leaves(page: Page, shown: SparkWorld, url: str):
    await page.open(url, SHOWN)
    await page.run(f"{query_row(HOSTILE)}.querySelector('button').click()")
    await page.until(f"{PARTITIONS} === 2")
    shown.now_ms += 4 * 86_400_000.0
    list(shown.registry.sweeping(shown.now_ms))
    await page.until(f"{QUERIES} === 4")
    assert not await page.run(f"document.querySelector('{OPEN_QUERY}')")


async def test_it_is_a_table_to_a_screen_reader_at_any_width(page: Page, url: str):
    await page.open(url, SHOWN)
    await page.run(f"{query_row('clicks')}.querySelector('button').click()")
    await page.until(f"{PARTITIONS} === 2")
    for size in (WIDE, PHONE):
        await page.look(**size)
        tree = await page.send("Accessibility.getFullAXTree")
        roles = [node["role"]["value"] for node in tree["nodes"] if not node["ignored"]]
        clients, queries, partitions = 5, 5, 2
        assert roles.count("table") == 3
        assert roles.count("columnheader") == 4 + 6 + 7
        assert roles.count("cell") == clients * 4 + queries * 6 + 1 + partitions * 7
