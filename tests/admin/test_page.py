"""The status page in a real Chromium: what it shows, to whom, and what it never does."""

from collections.abc import AsyncIterator

import pytest
from admin_world import CONSUMER, HOSTILE, MIB, PRODUCER, REQUEST, AdminWorld, running
from chromium import PHONE, WIDE, Page, text
from status_page import CHANGES, CLIENTS, changed_world, visited
from traffic import TICK_MS, play, scene

from proxy.admin.audit import BY_FILE
from proxy.admin.port.guard import AccessRight, AccessRules, AdminToken
from proxy.admin.server import PAGE_FILES
from proxy.quota.rule_registry import make_override

SHOWN = f"{CLIENTS} === 7"


@pytest.fixture
async def url(world: AdminWorld, page: Page) -> AsyncIterator[str]:
    server = world.server()
    scene(world)
    async with visited(server, page) as address:
        yield address


async def test_clients_are_shown_with_rate_bound_and_state(page: Page, url: str):
    await page.open(url, SHOWN)
    first = await page.run(text("#clients tr"))
    for part in ("client-id=etl-orders", "10.0 MiB/s", "Throttled", "rule 0 (quota-proxy.yaml:12)"):
        assert part in first
    assert await page.run(text("#throttled")) == "3"
    assert await page.run(text("#state")) == "✓ Ready"
    assert "broker-2.kafka.example:9092" in await page.run(text("#brokers"))
    assert "[::1]:19093 · TLS" in await page.run(text("#listeners"))
    assert "10mb is not a size" in await page.run(text("#loads"))
    label = await page.run("document.querySelector('svg.chart').getAttribute('aria-label')")
    assert label.startswith("Last 10 minutes: from ")
    assert "bound 10.0 MiB/s" in label


async def test_the_quotas_of_a_client_are_below_its_name(world: AdminWorld, page: Page):
    async with visited(world.server(), page) as url:
        send = world.connect("etl-orders", user="alice")
        for value, kind in ((600 * MIB, CONSUMER), (MIB, PRODUCER), (1.0, REQUEST)):
            send(value, kind)
        world.connect("b")(1.0)
        await page.open(url, f"{CLIENTS} === 4")
        rows = await page.run("[...document.querySelectorAll('#clients tr')].map(r => r.className)")
        assert rows == ["throttled beside", "beside further", "beside further", ""]
        names = (
            "[...document.querySelectorAll('#clients .name:not(.unseen)')].map(n => n.innerText)"
        )
        assert await page.run(names) == ["etl-orders", "client-id=b"]
        assert "alice, listener default" in await page.run(text("#clients tr"))
        assert await page.run(text("#throttled")) == "1"
        assert await page.run(text("#throttled-note")) == "of 2 clients, 1 holding now"
        assert await page.run(text("#shown")) == "2 of 2 clients"
        assert await page.run("document.querySelectorAll('#clients svg.chart').length") == 4


@pytest.mark.parametrize("width", [400, 1440])
async def test_long_names_and_paths_lose_their_middle_and_are_copied_whole(
    world: AdminWorld, page: Page, width: int
):
    path = f"/var/lib/{'long-directory/' * 15}state.sqlite"
    world.warning = f"{path} is not writable"
    long = "".join(f"{number:03}" for number in range(83))
    world.connect(long, user="alice")(1.0)
    await page.look(width=width, height=900)
    async with visited(world.server(), page) as url:
        await page.open(url, f"{CLIENTS} === 1")
        for shown, whole in {"#state .long": path, "#clients .long": f"client-id={long}"}.items():
            assert await page.run(f"document.querySelector('{shown}').title") == whole
            copied = f"(getSelection().selectAllChildren(document.querySelector('{shown}')), "
            assert await page.run(f"{copied} getSelection().toString())") == whole
            lines = f"document.querySelector('{shown}').getBoundingClientRect().height"
            assert await page.run(lines) < 60
        assert await page.run("document.documentElement.scrollWidth") <= width


async def test_clients_without_a_bound_are_counted_and_told_apart(unruled: AdminWorld, page: Page):
    async with visited(unruled.server(), page) as url:
        unruled.connect("etl-orders")(MIB)
        await page.open(url, f"{CLIENTS} === 1")
        hidden = "document.getElementById('unbounded-card').hidden"
        assert await page.run(hidden)
        for client_id in ("ETL", "et\u200bl", "etl ", "e\U000e0001\u3164tl", HOSTILE, None):
            unruled.connect(client_id, user="an\u202ena")
        await page.until(f"{text('#unbounded-count')} === '6'")
        assert not await page.run(hidden)
        shown = await page.run(
            "[...document.querySelectorAll('#unbounded b')].map(b => b.textContent)"
        )
        escaped = ["ETL", r"et\u200bl", r"etl\u0020", r"e\u{e0001}\u3164tl", HOSTILE]
        assert shown == [*escaped, "(no client id)"]
        assert r"an\u202ena, listener default" in await page.run(text("#unbounded"))
        await unruled.rules.put(make_override({"client-id": "<default>"}, {CONSUMER: MIB}))
        sum(unruled.quotas.settling())
        await page.until(hidden)


async def test_figures_follow_the_proxy(world: AdminWorld, page: Page, url: str):
    await page.open(url, SHOWN)
    await world.rules.put(make_override({"client-id": "etl-orders"}, {CONSUMER: 3 * MIB}))
    play(world, until_ms=world.now_ms + 30 * TICK_MS)
    await page.until(f"{text('#clients')}.includes('of 3.00 MiB/s')")
    world.not_ready = "the Kafka cluster does not answer"
    world.relay = {**world.relay, "cluster_answers": False}
    await page.until(f"{text('#state')} === '✕ Not ready: {world.not_ready}'")
    await page.until(f"{text('#cluster')} === '✕ Silent'")


async def test_a_warning_is_shown_while_it_is_ready(world: AdminWorld, page: Page, url: str):
    await page.open(url, SHOWN)
    world.warning = "the Kafka cluster does not answer"
    await page.until(f"{text('#state')} === '■ Ready, but {world.warning}'")
    world.warning = None
    await page.until(f"{text('#state')} === '✓ Ready'")


async def test_where_requests_spend_their_time(world: AdminWorld, page: Page, url: str):
    await page.open(url, SHOWN)
    hidden = "document.getElementById('times-card').hidden"
    assert await page.run(hidden)
    parts = ("broker", "proxy", "hold")
    times = zip(parts, ((0.0005, 0.0421), (0.00003, 0.0021), (0.0, 12.3)), strict=True)
    shown = {part: {"p50_s": p50_s, "p99_s": p99_s} for part, (p50_s, p99_s) in times}
    world.request_times = [{"api": "Fetch", "measured": 1234, **shown}]
    await page.until(f"!{hidden}")
    cells = await page.run(
        "[...document.querySelectorAll('#times td')].map(cell => cell.innerText)"
    )
    assert [cell.split("\n") for cell in cells] == [
        ["Fetch", "1,234 requests measured"],
        ["42 ms", "median 500 µs"],
        ["2.1 ms", "median 30 µs"],
        ["12 s", "median 0"],
    ]


async def test_a_lost_proxy_is_said_and_found_again(world: AdminWorld, page: Page):
    server = world.server()
    async with running(server) as address:
        port = server.port
        await page.open(address, f"{text('#none')}.includes('has sent anything yet')")
    await page.until("!document.getElementById('lost').hidden")
    assert "No contact with the proxy" in await page.run(text("#lost"))
    async with running(world.server(), port):
        await page.until("document.getElementById('lost').hidden")


async def test_changes_are_shown_with_who_made_them(page: Page):
    world = changed_world()
    async with visited(world.server(), page) as url:
        await page.open(url, f"{CHANGES} === 4")
        rows = await page.run("[...document.querySelectorAll('#changes tr')].map(r => r.innerText)")
        assert HOSTILE in rows[0]
        assert r"et\u200bl" in rows[0]
        assert "nothing" in rows[1]
        for part in ("night-shift", "10.20.30.40", "quota client-id=etl-orders"):
            assert part in rows[2]
        for part in ("consumer_byte_rate 10MiB per second", "source override"):
            assert part in rows[2]
        assert "and 4 more, see v1/audit" in rows[3]
        assert await page.run("document.querySelectorAll('main img').length") == 0
        await world.audit.record(BY_FILE, "throttling", None, "paused", 1_790_000_100.0)
        await page.until(f"{CHANGES} === 5")
        assert "paused" in await page.run(text("#changes tr"))


async def test_a_page_that_wants_a_token_takes_it_as_password(world: AdminWorld, page: Page):
    scene(world)
    desk = AdminToken("desk", "desk-text", (AccessRight.READ,))
    server = world.server(access=AccessRules((desk,), read_needs_token=True))
    async with visited(server, page) as url:
        await page.give_password("desk-text")
        await page.open(url, SHOWN)
        assert await page.run(text("#state")) == "✓ Ready"
        assert page.asked_for_password == 1
        put = "fetch('/v1/quotas/user=a', {method: 'PUT', headers: {'Content-Type': "
        put += "'application/json'}, body: '{\"consumer_byte_rate\": 1}'}).then(a => a.status)"
        assert await page.run(put) == 401  # a password is not enough to change something
        page.complaints.clear()


HIDE = """(hidden) => {
  Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
  document.dispatchEvent(new Event('visibilitychange'));
}"""
"""Stands in for a tab behind another one, which a browser without windows does not have."""


async def test_nothing_is_asked_for_while_nobody_looks(page: Page, url: str):
    await page.open(url, SHOWN)
    await page.run(f"({HIDE})(true)")
    asked = len(page.urls)
    await page.skip(60_000)
    assert len(page.urls) == asked


async def test_who_looks_again_sees_the_present(world: AdminWorld, page: Page, url: str):
    await page.open(url, SHOWN)
    await page.run(f"({HIDE})(true)")
    world.not_ready = "closed"
    await page.run(f"({HIDE})(false)")
    await page.until(f"{text('#state')} === '✕ Not ready: closed'")


async def test_hostile_client_ids_are_text(page: Page, url: str):
    await page.open(url, SHOWN)
    row = "[...document.querySelectorAll('#clients tr')].find(r => r.innerText.includes('img'))"
    await page.run(f"{row}.querySelector('summary').click()")
    await page.until(f"{row}.innerText.includes({HOSTILE!r})")
    assert await page.run("document.querySelectorAll('main img').length") == 0


async def test_the_keyboard_reaches_filter_and_reasons(page: Page, url: str):
    await page.open(url, SHOWN)
    await page.press("Tab")
    assert await page.run("document.activeElement.id") == "filter"
    await page.type("ALICE")
    await page.until(f"{CLIENTS} === 1")
    await page.press("Tab")
    assert await page.run("document.activeElement.tagName") == "SUMMARY"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert await page.run(outline) == "solid"
    await page.press("Enter")
    await page.until("document.querySelector('details[open] li')")
    reasons = await page.run(text("details[open]"))
    assert "set by anna" in reasons
    assert "rule 4 (override by anna) comes first" in reasons
    # An update keeps what is open and where the focus is.
    polls = "performance.getEntriesByType('resource').filter(e => e.name.includes('status')).length"
    await page.until(f"{polls} >= {await page.run(polls) + 2}")
    assert await page.run("document.activeElement.tagName") == "SUMMARY"
    assert await page.run("document.querySelectorAll('details[open] li').length") > 0


async def test_it_is_a_table_to_a_screen_reader_at_any_width(page: Page, url: str):
    await page.open(url, SHOWN)
    for size in (WIDE, PHONE):
        await page.look(**size)
        tree = await page.send("Accessibility.getFullAXTree")
        roles = [node["role"]["value"] for node in tree["nodes"] if not node["ignored"]]
        assert roles.count("table") == 1
        assert roles.count("columnheader") == 4
        assert roles.count("cell") == 7 * 4
        assert roles.count("image") >= 7


async def test_each_file_of_the_page_is_served_and_kept_to_itself(page: Page, url: str):
    await page.open(url, SHOWN)
    for path, (_, content_type) in PAGE_FILES.items():
        found = await page.run(
            f"fetch('{path}').then(a => [a.status, ...['content-type', 'content-security-policy']"
            ".map(name => a.headers.get(name))])"
        )
        assert found[:2] == [200, f"{content_type}; charset=utf-8"]
        assert "default-src 'self'" in found[2]
