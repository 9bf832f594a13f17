"""Budgets and what clients have of them: in documents, on the page, in `top`, and over members."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from admin_world import MIB, Ask, running, serve
from budget_world import NOTEBOOKS, BudgetWorld
from chromium import Page, text
from status_page import CLIENTS, visited
from terminal import run_once

from proxy.admin import pagination
from proxy.admin.peers.merged_documents import TABLES, MemberDocuments


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    async with serve(BudgetWorld().server()) as ask:
        yield ask


@pytest.mark.parametrize("path", ["clients", "status"])
async def test_budgets_are_listed_with_what_their_clients_have(ask: Ask, path: str):
    document = (await ask("GET", f"/v1/{path}")).json
    analytics, adhoc = document["budgets"]
    assert analytics.pop("rate") == pytest.approx(453 * MIB, rel=0.01)
    assert analytics == {
        "name": "analytics",
        "parent": None,
        "quota": "consumer_byte_rate",
        "unit": "bytes_per_second",
        "leased": None,
        "bound": 200 * MIB,
        "guaranteed": 60 * MIB,
        "active_clients": 3,
        "waiting": 4,
        "enforced": True,
        "throttled": False,
        "holds": 0,
        "held_s": 0.0,
    }
    assert (adhoc["name"], adhoc["parent"], adhoc["waiting"]) == ("adhoc", "analytics", 4)
    assert (adhoc["active_clients"], adhoc["guaranteed"]) == (2, 0)
    assert adhoc["rate"] == pytest.approx(420 * MIB, rel=0.01)


async def test_clients_say_what_they_have_of_their_budgets(ask: Ask):
    rows = {row["entity"]: row for row in (await ask("GET", "/v1/clients")).json["clients"]}
    names = ("budget", "weight", "guaranteed", "ceiling", "fair_share")
    etl = rows["client-id=etl-orders"]
    assert [etl[name] for name in names] == [
        *("analytics", 3, 60 * MIB, 150 * MIB, 150 * MIB),
    ]
    assert etl["lent"] == pytest.approx(150 * MIB - etl["rate"], abs=0.2)
    assert (etl["borrowed"], etl["waits_for"], etl["waiting"]) == (0, None, 0)
    notebook = rows["client-id=notebook-a"]
    assert [notebook[name] for name in names] == ["adhoc", 1, 0, 200 * MIB, 25 * MIB]
    assert notebook["borrowed"] == pytest.approx(notebook["rate"] - 25 * MIB, abs=0.2)
    assert notebook["lent"] == 0
    assert notebook["waits_for"] == "waits for its turn in budget analytics, with 1 other"
    assert notebook["waiting"] == 2
    plain = rows["client-id=plain"]
    assert {plain[name] for name in (*names, "borrowed", "lent", "waits_for")} == {None}


async def test_one_client_says_the_same(ask: Ask):
    (quota,) = (await ask("GET", "/v1/clients/client-id=notebook-a")).json["quotas"]
    assert (quota["budget"], quota["waiting"]) == ("adhoc", 2)
    assert quota["fair_share"] == 25 * MIB


async def test_rules_say_what_they_have_of_budgets(ask: Ask):
    rules = {each["selector"]: each for each in (await ask("GET", "/v1/quotas")).json["quotas"]}
    etl, notebooks = rules["client-id=etl-orders"], rules["client-id-prefix=notebook-"]
    assert etl["share"] == {"budget": "analytics", "weight": 3, "guaranteed": 60 * MIB}
    assert etl["ceilings"] == {"consumer_byte_rate": 150 * MIB}
    assert (notebooks["bounds"], notebooks["ceilings"]) == ({}, {"consumer_byte_rate": 200 * MIB})
    assert rules["client-id=plain"]["share"] is None


async def test_a_budget_is_overridden_as_a_rule_is(ask: Ask):
    path, body = "/v1/quotas/budget=analytics", {"consumer_byte_rate": "100MiB", "by": "anna"}
    made = (await ask("PUT", path, json=body)).json
    assert (made["name"], made["selector"], made["source"]) == (
        *("analytics", "budget=analytics", "override"),
    )

    async def listed():
        budgets = (await ask("GET", "/v1/quotas")).json["budgets"]
        analytics = next(each for each in budgets if each["name"] == "analytics")
        return analytics["bounds"]["consumer_byte_rate"], analytics["source"], analytics["by"]

    assert await listed() == (100 * MIB, "override", "anna")
    changes = (await ask("GET", "/v1/audit")).json["changes"]
    assert changes[0]["after"]["consumer_byte_rate"] == "100MiB per second"
    assert (await ask("DELETE", path)).status == 200
    assert await listed() == (200 * MIB, "file", None)


@pytest.mark.parametrize(
    ("name", "body", "error"),
    [
        ("budget=analytic", {"consumer_byte_rate": 1}, "no rule's clients are in a budget"),
        ("budget=analytics", {"consumer_byte_rate": "59MiB"}, "less than its clients are guar"),
        ("budget=analytics", {"request_percentage": 5}, "is nothing that a budget has"),
        ("budget=analytics", {}, "sets no quota"),
        ("budget=analytics", {"scope": "each", "consumer_byte_rate": 1}, "scope is nothing that"),
        ("budget=analytics,user=a", {"consumer_byte_rate": 1}, "is not known here"),
    ],
)
async def test_a_bad_override_of_a_budget_says_why(ask: Ask, name: str, body, error: str):
    answer = await ask("PUT", f"/v1/quotas/{name}", json=body)
    assert answer.status == 400
    assert error in answer.json["error"]
    assert answer.json["fix"]


async def test_the_limit_is_of_budgets_too(ask: Ask):
    assert len((await ask("GET", "/v1/clients?limit=1")).json["budgets"]) == 1


@pytest.mark.parametrize("width", [80, 120, 320])
async def test_top_has_a_line_for_each_budget_above_its_clients(width: int):
    async with running(BudgetWorld().server()) as url:
        out = await run_once(url, width)
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    begin = (
        "budget analytics",
        "  client-id=etl",
        "budget adhoc",
        "  client-id=note",
        "client-id=pl",
    )
    at = [next(n for n, line in enumerate(lines) if line.startswith(each)) for each in begin]
    assert at == sorted(at)
    assert "226%" in lines[at[0]]
    shown = " ".join(out.split())
    for part in ("borrows 185 MiB/s", "lends 117 MiB/s", "60 MiB/s guaranteed", "in analytics"):
        assert (part in shown) == (width == 320)


async def test_the_page_has_a_line_for_each_budget_above_its_clients(page: Page):
    async with visited(BudgetWorld().server(), page) as url:
        await page.open(url, f"{CLIENTS} === 6")
        names = "[...document.querySelectorAll('#clients .name')].map(n => n.innerText)"
        first, etl, second, *notebooks, plain = await page.run(names)
        assert (first, etl, second) == ("budget analytics", "client-id=etl-orders", "budget adhoc")
        assert plain == "client-id=plain"
        assert len(notebooks) == len(NOTEBOOKS)
        budget = await page.run(text("#clients tr.budget"))
        for part in (
            "200 MiB/s",
            "3 active clients · 60.0 MiB/s guaranteed",
            "4 connections waiting",
        ):
            assert part in budget
        clients = await page.run(text("#clients"))
        for part in ("lends 117 MiB/s", "share 25.0 MiB/s · borrows 185 MiB/s", "in analytics"):
            assert part in clients
        assert "waits for its turn in budget analytics, with 1 other" in clients


def test_budgets_of_members_are_one():
    def told(**figures: Any) -> dict[str, Any]:
        about = {"name": "analytics", "parent": None, "quota": "consumer_byte_rate", "bound": 200.0}
        held: dict[str, Any] = {"throttled": bool(figures["waiting"]), "holds": 2, "held_s": 0.5}
        return {"budgets": [about | held | figures]}

    by_member = {
        "a": told(rate=50.25, leased=80.0, active_clients=2, waiting=1),
        "b": told(rate=100.0, leased=120.0, active_clients=1, waiting=0),
        "older": {},
    }
    _, budgets = TABLES["/v1/budgets"]
    (merged,) = budgets(MemberDocuments(by_member, pagination.PageRequest(9)))["budgets"]
    assert (merged["rate"], merged["active_clients"], merged["waiting"]) == (150.2, 3, 1)
    assert (merged["throttled"], merged["holds"], merged["held_s"]) == (True, 4, 1.0)
    assert (merged["bound"], merged["leased"], "member" in merged) == (200.0, 200.0, False)
    assert budgets(MemberDocuments(by_member, pagination.PageRequest(0))) == {"budgets": []}
