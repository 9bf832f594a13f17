"""Pauses over HTTP, and where they are shown: the API, the page, the terminal, the commands."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from admin_world import CONSUMER, MIB, AdminWorld, Ask, running
from chromium import Page, text
from rich.console import Console
from status_page import CLIENTS, visited

from proxy.admin.commands.asking_commands import run_top
from proxy.admin.commands.operator_commands import AdminPortClient
from proxy.cli import main
from proxy.quota.rules import Rule
from proxy.quota.schedules import Schedule

PATH = "/v1/throttling"
ENFORCED = {"throttling": {"enforced": True, "paused": [], "scheduled": []}}
HALF_HOUR_S = 1800


async def test_all_quotas_are_paused_and_enforced_again(world: AdminWorld, ask: Ask):
    assert (await ask("GET", PATH)).json == ENFORCED
    answer = await ask("POST", PATH, json={"off": "30m", "by": "anna"})
    (pause,) = answer.json["throttling"]["paused"]
    assert answer.status == 200
    assert (pause["selector"], pause["keys"], pause["by"]) == ("all", {}, "anna")
    assert pause["left_s"] == pytest.approx(HALF_HOUR_S, abs=1)
    at, until = (datetime.fromisoformat(pause[key]) for key in ("at", "until"))
    assert until - at == timedelta(seconds=HALF_HOUR_S)
    world.connect("etl-orders")(200 * MIB)
    for path in ("/v1/status", "/v1/clients", "/v1/quotas", PATH):
        (shown,) = (await ask("GET", path)).json["throttling"]["paused"]
        assert shown["until"] == pause["until"]
    (row,) = (await ask("GET", "/v1/clients")).json["clients"]
    assert (row["enforced"], row["throttled"]) == (False, False)
    assert (row["would_throttle"], row["above_s"]) == (1, 1)
    assert (
        'kafka_quota_proxy_throttling_paused{member="0"} 1.0' in (await ask("GET", "/metrics")).text
    )
    assert (await ask("POST", PATH, json={"on": True})).json == ENFORCED
    assert (await ask("POST", PATH, json={"on": True})).json == ENFORCED
    assert (
        'kafka_quota_proxy_throttling_paused{member="0"} 0.0' in (await ask("GET", "/metrics")).text
    )


async def test_some_are_paused(world: AdminWorld, ask: Ask):
    end = datetime.now(UTC) + timedelta(hours=2)
    asked = {"off": end.isoformat(), "client-id": "etl-orders", "user": "alice"}
    answer = await ask("POST", PATH, json=asked)
    (pause,) = answer.json["throttling"]["paused"]
    assert pause["selector"] == "user=alice,client-id=etl-orders"
    assert pause["until"] == end.isoformat(timespec="seconds")
    assert world.rules.pauses()[0].until_s == pytest.approx(end.timestamp())
    only = {"on": True, "client-id": "etl-orders"}
    refused = await ask("POST", PATH, json=only)
    assert (refused.status, refused.json["error"]) == (404, "client-id=etl-orders is not paused")
    assert (await ask("POST", PATH, json={**only, "user": "alice"})).json == ENFORCED


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "exactly one"),
        ({"off": "30m", "on": True}, "exactly one"),
        ({"on": False}, "on: false is not true"),
        ({"off": 30}, "no unit"),
        ({"off": "soon"}, "not a duration"),
        ({"off": "0s"}, "not above 0"),
        ({"off": "2020-01-01T00:00:00Z"}, "is over"),
        ({"off": "2999-01-01T00:00:00Z"}, "more than a year"),
        ({"off": "2999-01-01T00:00:00"}, "no zone"),
        ({"off": "2999-99-01"}, "not a time"),
        ({"off": None}, "not a duration"),
        ({"off": "1h", "topic": "x"}, "unknown key"),
        ({"off": "1h", "client-id": 7}, "not text"),
        ({"off": "1h", "client-id": "a", "client-id-prefix": "a"}, "both"),
        ({"off": "1h", "by": 7}, "by:"),
        ([], "not a JSON object"),
    ],
)
async def test_what_is_no_change_is_refused(world: AdminWorld, ask: Ask, body: object, said: str):
    answer = await ask("POST", PATH, json=body)
    assert answer.status == 400
    assert said in answer.json["error"]
    assert answer.json["fix"]
    assert world.rules.pauses() == []


async def test_a_pause_that_cannot_be_kept_is_not_made(world: AdminWorld, ask: Ask):
    world.store.is_full = True
    assert (await ask("POST", PATH, json={"off": "1h"})).status == 503
    assert (await ask("GET", PATH)).json == ENFORCED


async def test_it_takes_the_token(ask_guarded: Ask):
    assert (await ask_guarded("POST", PATH, json={"off": "1h"})).status == 401
    assert (await ask_guarded("GET", PATH)).json == ENFORCED


async def test_an_override_may_end_and_may_not_be_enforced(world: AdminWorld, ask: Ask):
    body = {"consumer_byte_rate": "1MiB", "until": "2h", "enforce": False}
    made = (await ask("PUT", "/v1/quotas/client-id=etl-orders", json=body)).json
    assert made["enforce"] is False
    assert made["left_s"] == pytest.approx(7200, abs=1)
    assert datetime.fromisoformat(made["until"]) > datetime.now(UTC) + timedelta(minutes=119)
    listed = (await ask("GET", "/v1/quotas")).json["quotas"]
    of_file = [each for each in listed if each["source"] == "file"]
    assert listed[1]["selector"] == made["selector"]
    assert {(each["until"], each["left_s"], each["enforce"]) for each in of_file} == {
        (None, None, True)
    }
    world.connect("etl-orders")(200 * MIB)
    (row,) = (await ask("GET", "/v1/clients")).json["clients"]
    assert (row["bound"], row["enforced"]) == (MIB, False)
    (ended,) = await world.rules.end_due(time.time() + 7201)
    assert ended.rule.bounds == {CONSUMER: MIB}
    assert (await ask("GET", "/v1/quotas")).json["quotas"][1]["source"] == "file"


@pytest.mark.parametrize(
    "wrong",
    [{"enforce": "no"}, {"enforce": 0}, {"until": "soon"}, {"until": 7}, {"until": "2020-01-01"}],
)
async def test_an_override_with_a_bad_end_is_refused(ask: Ask, wrong: dict[str, object]):
    body = {"consumer_byte_rate": "1MiB", **wrong}
    answer = await ask("PUT", "/v1/quotas/client-id=etl-orders", json=body)
    assert answer.status == 400
    assert answer.json["error"].startswith(next(iter(wrong)))


def shown_by_top(url: str) -> str:
    console = Console(width=160, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    run_top(AdminPortClient(url), once=True, console=console)
    return console.export_text()


async def test_the_terminal_shows_it(world: AdminWorld):
    async with running(world.server()) as url:
        assert "QUOTAS" not in await asyncio.to_thread(shown_by_top, url)
        world.connect("etl-orders")(MIB)
        code = await asyncio.to_thread(
            main, ["pause", "--url", url, "--for", "2h", "--client-id", "etl-orders"]
        )
        assert code == 0
        shown = await asyncio.to_thread(shown_by_top, url)
        assert "QUOTAS ARE PAUSED: client-id=etl-orders until 20" in shown
        assert "(7,200 s)" in shown


async def test_the_commands_pause_and_resume(
    world: AdminWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    token = tmp_path / "token"
    token.write_text("secret\n")

    async def command(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, arguments)
        said = capsys.readouterr()
        printed = [line for line in said.out.splitlines(True) if not line.startswith("20")]
        return code, "".join(printed), said.err  # without the server's log

    async with running(world.server(token="secret")) as url:
        where = ("--url", url, "--token-file", str(token))
        code, out, _ = await command("pause", *where)
        assert (code, out.startswith("paused: all until 20")) == (0, True)
        assert world.rules.pauses()[0].until_s == pytest.approx(time.time() + HALF_HOUR_S, abs=5)
        code, out, _ = await command(
            "pause", "--for", "1h", "--user", "a,b", "--by", "anna", *where
        )
        assert (code, out.count("\n"), "user=a%2Cb" in out) == (0, 2, True)
        assert world.rules.pauses()[1].by == "anna"
        assert (await command("resume", "--user", "a,b", *where))[0] == 0
        assert await command("resume", *where) == (0, "all quotas are enforced\n", "")
        code, _, err = await command("resume", "--user", "a", *where)
        assert (code, "user=a is not paused" in err, "fix:" in err) == (1, True, True)
        code, _, err = await command("pause", "--url", url)
        assert (code, "--token-file" in err) == (1, True)
        code, _, err = await command("pause", "--for", "soon", *where)
        assert (code, "not a duration" in err) == (2, True)
    code, _, err = await command("pause", *where)
    assert (code, "does not answer" in err) == (1, True)
    code, _, err = await command("pause", "--url", "nowhere")
    assert (code, "not a URL" in err) == (2, True)
    code, _, err = await command("pause", "--url", url, "--token-file", str(tmp_path / "none"))
    assert (code, "No such file" in err) == (2, True)


async def test_the_page_shows_it(world: AdminWorld, page: Page):
    hidden = "document.getElementById('paused').hidden"
    world.connect("etl-orders")(MIB)
    async with visited(world.server(), page) as url:
        await page.open(url, f"{CLIENTS} === 1")
        assert await page.run(hidden)
        await asyncio.to_thread(main, ["pause", "--url", url, "--by", "<b>anna"])
        await page.until(f"!{hidden}")
        shown = await page.run(text("#paused"))
        assert "Quotas are paused: all clients for" in shown
        assert "by <b>anna" in shown
        world.now_ms += 1000
        world.connect("etl-orders")(200 * MIB)
        await page.until(f"{text('#clients')}.includes('not enforced, above for 1 s')")
        await asyncio.to_thread(main, ["resume", "--url", url])
        await page.until(hidden)


async def test_it_is_shown_until_when_a_rule_is_in_force_and_when_one_begins(page: Page):
    """At the start of 1970, a Thursday, as the clock of the rules stands here."""
    schedules = {"etl-orders": Schedule(("thu",)), "backfill": Schedule(("fri",), "08:00")}
    rules = tuple(
        Rule(client_id=client_id, number=number, bounds={CONSUMER: MIB}, when=when)
        for number, (client_id, when) in enumerate(schedules.items())
    )
    told = [
        "client-id=backfill begins 1970-01-02 08:00+00:00",
        "client-id=etl-orders in force until 1970-01-02 00:00+00:00",
    ]
    world = AdminWorld(rules)
    world.connect("etl-orders")(MIB)
    async with visited(world.server(), page) as url:
        shown = await asyncio.to_thread(shown_by_top, url)
        assert f"schedules: {'; '.join(told)}" in " ".join(shown.split())
        await page.open(url, f"{CLIENTS} === 1")
        assert await page.run(text("#scheduled")) == f"Schedules: {'; '.join(told)}"
        assert told[1].split(" ", 1)[1] in await page.run(text("#clients"))
