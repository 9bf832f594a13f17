"""Lists are walked through page by page: each row comes once, whatever comes and goes meanwhile."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import spark_world
from admin_world import CONSUMER, MIB, REQUEST, AdminWorld, Ask, serve
from budget_world import BudgetWorld
from connected import PLAIN, Connected
from hypothesis import given
from hypothesis import strategies as st
from pipeline_world import scene as pipelines
from tier_world import TierWorld

from proxy.admin.pagination import PageBuilder, PageRequest, cursor_of
from proxy.admin.replies import json_text, parse_json


async def walk(ask: Ask, path: str, limit: int = 2) -> list[Any]:
    """Return the documents of a walk."""
    pages: list[Any] = []
    cursor = ""
    while cursor is not None:
        mark = "&" if "?" in path else "?"
        answer = await ask("GET", f"{path}{mark}cursor={cursor}&limit={limit}")
        assert answer.status == 200, answer.text
        pages.append(answer.json)
        cursor = answer.json["next"]
        assert len(pages) < 100
    return pages


def names(pages: list[Any], key: str, name: str) -> Iterator[Any]:
    return (row[name] for page in pages for row in page[key])


async def test_clients_are_walked_by_entity_and_quota(world: AdminWorld, ask: Ask):
    for name in ("d", "b", "a", "c"):
        send = world.connect(name)
        send(600 * MIB if name == "d" else MIB)
        send(1.0, REQUEST)
    pages = await walk(ask, "/v1/clients", 3)
    assert [len(page["clients"]) for page in pages] == [3, 3, 2]
    keys = [(row["entity"], row["quota"]) for page in pages for row in page["clients"]]
    assert keys == [(f"client-id={name}", kind) for name in "abcd" for kind in (CONSUMER, REQUEST)]
    pages = await walk(ask, "/v1/clients?by=client&filter=id", 3)
    groups = [list(names([page], "clients", "entity")) for page in pages]
    assert groups == [[f"client-id={name}" for name in "aabbcc"], ["client-id=d"] * 2]
    first = (await ask("GET", "/v1/clients?limit=1")).json
    assert (first["clients"][0]["entity"], "next" in first) == ("client-id=d", False)


async def test_what_comes_and_goes_meanwhile_leaves_no_row_out(world: AdminWorld, ask: Ask):
    for name in ("b", "d", "f"):
        world.connect(name)(MIB)
    page = (await ask("GET", "/v1/clients?cursor=&limit=1")).json
    for name in ("a", "c"):
        world.connect(name)(MIB)
    world.now_ms += 1000.0  # rows are shown again for half a second
    rest = (await ask("GET", f"/v1/clients?cursor={page['next']}")).json
    seen = list(names([page, rest], "clients", "entity"))
    assert seen == [f"client-id={name}" for name in "bcdf"]


@pytest.mark.parametrize("name", ["\x9b31m", "\u202exe", "\ud800", "ä", "plain"])
def test_what_could_steer_a_terminal_is_escaped(name: str):
    body = json_text({"clients": [{"client_id": name}]})
    assert body.isascii()
    assert body == json.dumps(json.loads(body), separators=(",", ":")).encode()
    assert parse_json(body) == {"clients": [{"client_id": name}]}


async def test_rules_connections_and_changes_are_walked(world: AdminWorld):
    connected = Connected([replace(PLAIN, number=number) for number in (9, 1, 5)])
    async with serve(world.server(connections=connected)) as ask:
        for name in ("x", "y", "z"):
            path = f"/v1/quotas/client-id={name}"
            assert (await ask("PUT", path, json={"consumer_byte_rate": "1MiB"})).status == 200
        quotas = await walk(ask, "/v1/quotas")
        listed = (await ask("GET", "/v1/quotas")).json
        assert sorted(names([listed], "quotas", "selector")) == list(
            names(quotas, "quotas", "selector")
        )
        assert quotas[0]["total"] == listed["total"] == len(listed["quotas"])
        found = names(await walk(ask, "/v1/connections"), "connections", "id")
        assert list(found) == [1, 5, 9]
        assert list(names(await walk(ask, "/v1/audit"), "changes", "number")) == [3, 2, 1]


async def test_partitions_and_pipelines_are_walked():
    async with serve(spark_world.scene().server()) as ask:
        whole = (await ask("GET", "/v1/progress")).json["queries"]
        keys = [
            (query["name"], each["topic"], each["partition"])
            for query in whole
            for each in query["partitions"]
        ]
        seen = [
            (query["name"], each["topic"], each["partition"])
            for page in await walk(ask, "/v1/progress", 3)
            for query in page["queries"]
            for each in query["partitions"]
        ]
        assert seen == sorted(keys)
        shown = names(await walk(ask, "/v1/progress", 1), "queries", "name")
        assert set(shown) == {query["name"] for query in whole}
    async with serve(pipelines().server()) as ask:
        found = list(names(await walk(ask, "/v1/pipelines", 1), "pipelines", "name"))
        assert (found, len(found)) == (sorted(found), 3)


async def test_clients_without_a_bound_are_walked(unruled: AdminWorld):
    for name in ("b", None, "", "a"):
        unruled.connect(name)(MIB)
    unruled.connect("c", user="")(MIB)
    async with serve(unruled.server()) as ask:
        pages = await walk(ask, "/v1/unbounded")
        assert list(names(pages, "unbounded_clients", "client_id")) == [None, "", "a", "b", "c"]
        assert {page["unbounded"] for page in pages} == {5}
        (page,) = await walk(ask, "/v1/unbounded?filter=b")
        assert page["unbounded_clients"][0]["client_id"] == "b"


async def test_budgets_are_walked():
    async with serve(BudgetWorld().server()) as ask:
        listed = (await ask("GET", "/v1/budgets")).json
        shown = (await ask("GET", "/v1/clients")).json["budgets"]
        assert (listed["budgets"], listed["total"]) == (shown, len(shown))
        pages = await walk(ask, "/v1/budgets", 1)
        assert list(names(pages, "budgets", "name")) == sorted(each["name"] for each in shown)


async def test_a_tier_is_walked_as_one_process():
    tier = TierWorld(["a/0", "a/1", "b/0"])
    for number in range(7):
        tier.worlds[tier.names[number % 3]].connect(f"c{number}")(MIB)
    tier.owners["c0"] = "a/0"
    tier.worlds["b/0"].connect("c0")(MIB)
    held = {
        name: {"connections": Connected([replace(PLAIN, number=n) for n in (1, 2)])}
        for name in tier.names[::2]
    }
    async with tier.asked(servers=held) as of:
        pages = await walk(of("b/0"), "/v1/clients", 2)
        assert list(names(pages, "clients", "entity")) == [f"client-id=c{n}" for n in range(7)]
        assert {page["total"] for page in pages} == {7}
        pages = await walk(of("a/0"), "/v1/connections", 3)
        assert list(names(pages, "connections", "id")) == ["a/1", "b/1", "a/2", "b/2"]


DEEP = "W1tb" * 1500  # [[[...


@pytest.mark.parametrize(
    "cursor",
    ["x", "%00", "WzFd", cursor_of((1, 2)), cursor_of(("a",)), "%F0%9F%98%80", "bnVsbA", DEEP],
)
@pytest.mark.parametrize("path", ["clients", "quotas"])
async def test_a_bad_cursor_is_refused(ask: Ask, path: str, cursor: str):
    answer = await ask("GET", f"/v1/{path}?cursor={cursor}")
    assert (answer.status, "is none of this list" in answer.json["error"]) == (400, True)


@given(st.lists(st.tuples(st.integers(0, 9), st.text(max_size=2)), unique=True), st.integers(1, 5))
def test_a_walk_has_each_row_once_in_the_order_of_keys(rows: list[Any], limit: int):
    seen: list[Any] = []
    after: Any = ()
    while True:
        found = PageBuilder(PageRequest(limit, after), lambda row: row, rows=rows)
        seen += found.rows()
        if found.next()["next"] is None:
            break
        after = seen[-1]
    assert seen == sorted(rows)
