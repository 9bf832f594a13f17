"""Any member of a tier answers for all of them, and passes on to the one that is meant."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain

import pipeline_world
import pytest
import spark_world
import trustme
from admin_world import HOSTILE, MIB, PRODUCER, AdminWorld, Answer, Ask, serve, tick
from connected import HELD, PLAIN, Connected
from prometheus_client.parser import text_string_to_metric_families
from tier_world import NAMES, Of, TierWorld, members, names
from tokens import CLOSED, OPEN, TOKENS, bearer

from metrics import MemberInstruments
from proxy.admin.peers.fan_out_middleware import MAX_MEMBER_VALUES
from proxy.admin.port.guard import (
    AUTHOR,
    CHANGES,
    LEAVE_AUDIT,
    OPEN_PATHS,
    PEER,
    SCOPE,
    AccessRight,
    AccessRules,
)
from proxy.admin.request_times import HISTOGRAMS
from proxy.log_queue import log_level
from proxy.tier.peer_client import PeerClient
from proxy.tier.peers import MAX_PEER_ANSWER_BYTES

ETL = "/v1/quotas/client-id=etl-orders"
REPORTS = "/v1/spark/batches"
BODY = {"consumer_byte_rate": "1MiB", "by": "anna"}
SCOPED = {SCOPE: "member"}
HIDDEN = {"/member/changes": "POST"}
LIMIT_S = 20
MEMBER_HEAD = f"HTTP/1.1 200 OK\r\n{SCOPE}: member\r\nContent-Length: 2\r\n\r\n".encode()


@pytest.fixture
def tier() -> TierWorld:
    return TierWorld()


@pytest.fixture
async def of(tier: TierWorld) -> AsyncIterator[Of]:
    async with tier.asked() as of:
        yield of


def audited(tier: TierWorld) -> dict[str, int]:
    """Return how many changes are in the audit of each member, but for those with none."""
    recorded = {name: world.audit.documents()[0] for name, world in tier.worlds.items()}
    return {name: count for name, count in recorded.items() if count}


async def test_every_path_asks_for_the_right_to_it(tier: TierWorld):
    def routes_of(name: str) -> set[tuple[str, str]]:
        return {
            (route.method, route.resource.canonical.replace("{tail}", "x"))
            for route in tier.servers[name].application().router.routes()
            if route.resource is not None
        }

    async with tier.asked(access=CLOSED, servers={"c/1": {"tier": None}}) as of:
        routes = routes_of("a/0")
        more = {path for _, path in routes - routes_of("c/1")}
        alive = {f"/v1/tier/{name}" for name in ("alive", "visits", "records", "budgets")}
        assert more == {*HIDDEN, *alive, "/v1/tier"}
        for method, path in routes:
            if path in OPEN_PATHS:
                continue
            right = AccessRight.READ if method in {"GET", "HEAD"} else AccessRight.QUOTAS
            right = AccessRight.REPORT if path == REPORTS else right
            assert (await of("a/0")(method, path)).status == 401, (method, path)
            for token in TOKENS:
                answer = await of("a/0")(method, path, headers=bearer(token.name))
                is_refused = right not in token.rights or (path in alive and token.name != "ops")
                assert (answer.status == 403) is is_refused, (method, path, token)
                assert answer.status != 500, (method, path, token)


async def test_each_member_gives_one_view_of_all(tier: TierWorld, of: Of):
    tier.worlds["a/1"].connect("etl-orders")(200 * MIB)
    tier.worlds["b/0"].connect("mirror")(40 * MIB)
    tier.worlds["c/1"].connect("dashboards")(30 * MIB)
    tier.worlds["c/1"].connect(None, listener="tenants")(1.0, PRODUCER)
    for asked in NAMES:
        status = (await of(asked)("GET", "/v1/status?by=client")).json
        assert members(status) == list(NAMES)
        assert [each["machine"] for each in status["members"]] == ["a", "a", "b", "b", "c", "c"]
        assert [each["connections"] for each in status["members"]] == [17] * 6
        assert names(status["clients"]) == ["a/1", "b/0", "c/1"]
        assert (status["bounded"], status["throttled"], status["held"]) == (3, 1, 1)
        assert status["unreachable"] == []
        assert [each["connections"] for each in status["listeners"]] == [84, 18]
        assert status["delay_queues"] == {"fetch": 24, "produce": 6, "request": 0}
        assert len(status["brokers"]) == len(status["config_loads"]) == 2
        assert status["tier"] == tier.tiers[asked].document()
        for by in ("quota", "client"):
            told = (await of(asked)("GET", f"/v1/clients?by={by}&limit=2")).json
            assert (names(told["clients"]), told["total"]) == (["a/1", "b/0"], 3)
            counts = told["client_counts"]
            assert (counts["bounded"], counts["throttled"], counts["held"]) == (3, 1, 1)
        entity = (await of(asked)("GET", "/v1/clients/client-id=mirror")).json
        assert names(entity["quotas"]) == ["b/0"]
        absent = await of(asked)("GET", "/v1/clients/client-id=nobody")
        assert (absent.status, "no client is measured" in absent.json["error"]) == (404, True)
        for path in ("/v1/progress", "/v1/pipelines", "/v1/connections"):
            assert members((await of(asked)("GET", path)).json) == list(NAMES)


async def test_the_status_has_the_slots_of_each_member_that_answers(tier: TierWorld, of: Of):
    slots = {"owned": 85, "bytes_per_s": 9, "cpu_share": 0.9, "overloaded": []}
    for name in ("a/0", "a/1", "b/0"):
        tier.tiers[name].own_slots = slots
    await tier.kill("b/0")
    status = (await of("a/1")("GET", "/v1/status")).json
    shown = [each.get("slots") for each in status["members"]]
    assert (shown, "slots" in status) == ([slots, slots, None, None, None, None], False)
    rows = (await of("a/1")("GET", "/v1/clients")).json["members"]
    assert not any("slots" in each for each in rows)


async def test_a_client_of_several_members_is_one_row_of_its_owner(tier: TierWorld, of: Of):
    tier.owners["etl-orders"] = "b/1"
    for name, sent in (("a/0", 3 * MIB), ("b/1", 2 * MIB), ("c/0", MIB)):
        tier.worlds[name].connect("etl-orders")(sent)
    told = (await of("c/1")("GET", "/v1/clients?by=client")).json
    (row,) = told["clients"]
    assert (row["member"], row["members"], row["client_count"]) == ("b/1", ["b/1", "a/0", "c/0"], 1)
    assert row["rate"] == pytest.approx(2 * MIB / 10, abs=0.1)
    assert (told["total"], told["client_counts"]["bounded"]) == (1, 1)
    (entity,) = (await of("c/1")("GET", "/v1/clients/client-id=etl-orders")).json["quotas"]
    assert len(entity["connected"]) == 1


async def test_one_member_or_one_machine_is_asked_for(tier: TierWorld, of: Of):
    for world in tier.worlds.values():
        world.connect("mirror")(MIB)
    for name in ("a/0", "b/1", "c/1"):
        for asked, told in (("b", ["b/0", "b/1"]), ("b/1", ["b/1"]), ("a", ["a/0", "a/1"])):
            status = (await of(name)("GET", f"/v1/status?member={asked}")).json
            assert members(status) == told
            assert {each["member"] for each in status["clients"]} <= set(told)
        for absent in ("d", "b/9", "a/9", "d/0", "0", "", "/", "b/"):
            answer = await of(name)("GET", f"/v1/clients?member={absent}")
            assert (answer.status, set(answer.json)) == (404, {"error", "fix"}), absent


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/clients?limit=x", "/v1/status?by=y", "/v1/suggestions?since=1y", "/v1/clients/%ff"),
        *("/v1/progress?query=none", "/v1/pipelines?pipeline=none", "/v1/quotas/bad", "/v1/none"),
    ],
)
async def test_what_one_process_refuses_is_refused_alike(world: AdminWorld, of: Of, path: str):
    method = "DELETE" if "quotas/" in path else "GET"
    answer = await of("b/0")(method, path, headers=bearer("ops"))
    async with serve(world.server()) as alone:
        told = await alone(method, path)
    assert (answer.status, answer.json) == (told.status, told.json)


async def test_a_change_is_made_at_the_leader_in_the_name_of_who_asks(tier: TierWorld, of: Of):
    tier.leader = "b/1"
    forged = {AUTHOR: "root", PEER: "10.9.9.9", LEAVE_AUDIT: "1"}
    put = await of("a/0")("PUT", ETL, json=BODY, headers=bearer("ops") | forged)
    assert (put.status, put.json["source"]) == (200, "override")
    pause = await of("b/1")("POST", "/v1/throttling", json={"off": "1h"}, headers=bearer("night"))
    assert pause.status == 200
    for name in NAMES:
        (second, first) = (await of(name)("GET", "/v1/audit")).json["changes"]
        assert (first["who"], first["address"]) == ("ops", "127.0.0.1")
        assert (second["who"], second["what"]) == ("night", "pauses")
        quotas = (await of(name)("GET", "/v1/quotas")).json["quotas"]
        assert "override" in {each["source"] for each in quotas}
        throttling = (await of(name)("GET", "/v1/throttling")).json["throttling"]
        assert len(throttling["paused"]) == 1
    bad = await of("a/0")("PUT", ETL, json={"consumer_byte_rate": "much"}, headers=bearer("ops"))
    assert (bad.status, set(bad.json)) == (400, {"error", "fix"})
    assert (await of("a/1")("DELETE", ETL, headers=bearer("ops"))).status == 200
    again = await of("c/0")("DELETE", ETL, headers=bearer("ops"))
    assert (again.status, again.json["error"]) == (
        404,
        "no override is in force for client-id=etl-orders",
    )
    assert audited(tier) == {"b/1": 3}


async def test_what_says_who_asks_is_not_believed_of_who_is_no_member(world: AdminWorld):
    forged = {AUTHOR: "root", PEER: "10.9.9.9", LEAVE_AUDIT: "1", **SCOPED}
    async with serve(world.server()) as ask:
        assert (await ask("PUT", ETL, json=BODY, headers=forged)).status == 200
        for path, method in HIDDEN.items():
            assert (await ask(method, path, json=[], headers=forged)).status == 404
        (change,) = (await ask("GET", "/v1/audit")).json["changes"]
    assert (change["who"], change["address"]) == ("local", "127.0.0.1")


async def test_reports_go_to_the_owner_of_their_client(tier: TierWorld, of: Of):
    tier.owners |= {"etl": "c/1", "homeless": None, "gone": "c/7", "lost": "d/0"}
    taken = tier.reports["c/1"].taken
    report = json.dumps({"client_id": "etl", "name": "x"}).encode()
    headers = {"Content-Type": "application/json"} | bearer("spark")
    for name in ("a/0", "b/1", "c/1"):
        answer = await of(name)("POST", REPORTS, data=report, headers=headers)
        assert (answer.status, answer.json["accepted"], taken) == (200, True, [report])
        taken.clear()
        for malformed in (
            *(b"{}", b'{"client_id": 7}', b'{"client_id": ["etl"]}', b'{"name"'),
            b'{"a":' * 9999,
        ):
            await of(name)("POST", REPORTS, data=malformed, headers=headers)
            assert tier.reports["a/0"].taken.pop() == malformed
        refused = await of(name)("POST", REPORTS, data=b"[]", headers=headers)
        assert (refused.status, refused.json["reason"]) == (400, "malformed")
        assert (await of(name)("POST", REPORTS, data=b"{}", headers=bearer("ops"))).status == 415
    lost = [
        of("a/0")("POST", REPORTS, json={"client_id": each}, headers=bearer("spark"))
        for each in ("homeless", "gone", "lost")
    ]
    for answer in await asyncio.gather(*lost):
        assert (answer.status, set(answer.json)) == (503, {"error", "fix"})
    await tier.kill("c/1")
    answer = await of("a/0")("POST", REPORTS, data=report, headers=headers)
    assert (answer.status, "'c/1'" in answer.json["error"]) == (503, True)


async def test_connections_of_machines_are_told_apart(tier: TierWorld):
    held = {
        name: Connected([replace(PLAIN, number=7, ip=f"10.0.0.{at}"), replace(HELD, number=9)])
        for at, name in enumerate(("a/0", "b/1", "c/0"))
    }
    for name in held:
        tier.worlds[name].now_ms = 60_000.0
    async with tier.asked(servers={name: {"connections": held[name]} for name in held}) as of:
        listed = (await of("b/0")("GET", "/v1/connections")).json
        assert (listed["total"], len({row["id"] for row in listed["connections"]})) == (6, 6)
        assert (listed["matching"], listed["held"]) == (6, 3)
        assert listed["connections"][-1]["held"]["rule"]["place"] == "quota-proxy.yaml:12"
        seen, after = [], "0"
        while page := (await of("b/0")("GET", f"/v1/connections?limit=2&after={after}")).json:
            assert page["matching"] == 6 - len(seen)
            if not page["connections"]:
                break
            seen += [row["id"] for row in page["connections"]]
            after = seen[-1]
        assert seen == ["a/7", "b/7", "c/7", "a/9", "b/9", "c/9"]
        past = (await of("a/0")("GET", "/v1/connections?after=7")).json["connections"]
        assert [row["id"] for row in past] == ["a/9", "b/9", "c/9"]
        for bad in ("b/x", "-1", "x"):
            assert (await of("a/0")("GET", f"/v1/connections?after={bad}")).status == 400

        closed = await of("a/0")("DELETE", "/v1/connections/b/7", headers=bearer("ops"))
        assert (closed.status, closed.json) == (200, {"closed": 7})
        assert CHANGES not in closed.headers
        assert [len(each.listed) for each in held.values()] == [2, 1, 2]
        # Asked at a member that neither has the connection nor keeps the audit.
        away = await of("b/0")("DELETE", "/v1/connections/c/9", headers=bearer("night"))
        assert (away.status, len(held["c/0"].listed)) == (200, 1)
        own = await of("c/0")("DELETE", "/v1/connections/c/7", headers=bearer("ops"))
        assert own.status == 200
        own = await of("b/0")("DELETE", "/v1/connections/a/9", headers=bearer("ops"))
        assert own.status == 200
        for name in ("b/7", "7", "d/7", "a/7?member=b", "c/x"):
            again = await of("a/0")("DELETE", f"/v1/connections/{name}", headers=bearer("ops"))
            assert (again.status, set(again.json)) == (404, {"error", "fix"}), name
        changes = (await of("c/0")("GET", "/v1/audit")).json["changes"]
        assert [each["who"] for each in changes] == ["ops", "ops", "night", "ops"]
        assert {each["address"] for each in changes} == {"127.0.0.1"}
        assert (changes[0]["before"]["user"], changes[0]["after"]) == ("Anna", None)
        await tier.kill("b/1")
        gone = await of("a/0")("DELETE", "/v1/connections/b/9", headers=bearer("ops"))
        assert gone.status == 503
    assert audited(tier) == {"a/0": 4}


async def test_the_log_level_is_that_of_all(tier: TierWorld, of: Of):
    async def put(name: str, level: str, who: str = "ops", path: str = "/v1/log_level") -> Answer:
        return await of(name)("PUT", path, json={"level": level}, headers=bearer(who))

    try:
        answer = await put("b/0", "debug")
        assert (answer.status, answer.json) == (200, {"level": "debug"})
        shown = (await of("c/0")("GET", "/v1/log_level")).json
        assert (shown["level"], shown["levels"][0]["name"]) == ("debug", "a/0")
        assert {each["name"] for each in shown["levels"]} == set(NAMES)
        assert {each["level"] for each in shown["levels"]} == {"debug"}
        assert (await put("b/0", "loud")).status == 400
        log_level.set("info")
        one = await put("a/0", "debug", "night", "/v1/log_level?member=c/1")
        assert one.status == 200
        changes = (await of("b/0")("GET", "/v1/audit")).json["changes"]
        assert changes[0]["who"] == "night"  # before: who is first, as all are one process here
        await tier.kill("c/0")
        partly = await put("a/0", "info")
        assert (partly.status, "'c/0'" in partly.json["error"]) == (502, True)
    finally:
        log_level.set("info")


async def test_ready_is_a_machine_whose_members_that_run_are_ready(tier: TierWorld, of: Of):
    assert (await of("a/0")("GET", "/readyz")).json == {"status": "ready"}
    tier.worlds["a/1"].warning = "no login"
    tier.tiers["a/1"].warning = "no quorum"
    assert (await of("a/0")("GET", "/readyz")).json["warning"] == "no quorum; no login"
    tier.worlds["a/0"].warning = "no login"
    assert (await of("c/0")("GET", "/v1/status")).json["warning"] == "no login; no quorum"
    tier.tiers["a/1"].not_ready = "closed"
    answer = await of("a/0")("GET", "/readyz")
    assert (answer.status, answer.json["reason"]) == (503, "member 'a/1': closed")
    assert (await of("b/0")("GET", "/readyz")).status == 200
    status = (await of("b/0")("GET", "/v1/status")).json
    assert (status["ready"], status["not_ready_reason"]) == (False, "member a/1: closed")
    await tier.kill("a/1")
    answer = await of("a/0")("GET", "/readyz")
    assert (answer.status, "'a/1' does not answer" in answer.json["reason"]) == (503, True)
    tier.mark_silent("a/1")
    answer = await of("a/0")("GET", "/readyz")
    assert (answer.status, answer.json["warning"]) == (200, "no login; member 'a/1' does not run")
    assert (await of("a/0")("GET", "/readyz?member=a/1")).status == 503
    assert (await of("a/0")("GET", "/readyz?member=b")).status == 404
    assert (await of("a/0")("GET", "/healthz")).status == 200


@asynccontextmanager
async def answering(sent: bytes | None) -> AsyncIterator[tuple[str, list[int]]]:
    """Send these bytes to who asks, None: nothing; gives the URL, and an item for each."""
    asked: list[int] = []
    writers: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(1)
        writers.append(writer)
        if sent is not None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(sent)
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
        for writer in writers:
            writer.close()


async def test_the_rest_answers_when_a_member_is_dead_or_hangs(tier: TierWorld, of: Of):
    tier.worlds["a/1"].connect("etl-orders")(MIB)
    async with answering(None) as (url, asked):
        await tier.kill("b/0")
        tier.point("c/1", url)
        for _ in range(3):
            status = (await of("a/0")("GET", "/v1/status")).json
            assert members(status) == list(NAMES)
            assert [each["name"] for each in status["unreachable"]] == ["b/0", "c/1"]
            assert "connected to" in status["unreachable"][0]["why"]
            assert "did not answer within 5 s" in status["unreachable"][1]["why"]
            assert [each["answers"] for each in status["members"]] == [
                *(True, True, False, True, True, False)
            ]
            assert names(status["clients"]) == ["a/1"]
        assert len(asked) == 1  # not waited for again and again
    absent = await of("a/0")("GET", "/v1/clients/client-id=nobody")
    assert (absent.status, "'b/0', 'c/1'" in absent.json["fix"]) == (404, True)
    tier.leader = "b/0"
    assert (await of("a/0")("GET", "/v1/quotas")).status == 200  # the same at all
    put = await of("a/0")("PUT", ETL, json=BODY, headers=bearer("ops"))
    assert (put.status, "'b/0'" in put.json["error"]) == (503, True)
    assert (await of("a/0")("GET", "/v1/status?member=b/0")).status == 503
    assert (await of("a/0")("GET", "/metrics?member=a/1")).status == 200


async def test_a_silent_member_is_not_waited_for(tier: TierWorld, of: Of):
    tier.owners["etl"] = "c/0"
    async with answering(None) as (url, asked):
        tier.point("c/0", url)
        tier.mark_silent("c/0")
        status = (await of("a/0")("GET", "/v1/status")).json
        report = {"client_id": "etl"}
        answer = await of("a/0")("POST", REPORTS, json=report, headers=bearer("spark"))
        (silent,) = status["unreachable"]
        assert (silent["name"], "silent" in silent["why"], answer.status) == ("c/0", True, 503)
        assert [each["alive"] for each in status["members"] if not each["answers"]] == [False]
        assert asked == []


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{", id="half an answer"),
        pytest.param(b"no http\r\n\r\n", id="what is no HTTP"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", id="no member"),
        pytest.param(MEMBER_HEAD + b"{,", id="what is no JSON"),
        pytest.param(MEMBER_HEAD + b"[]", id="another document"),
        pytest.param(MEMBER_HEAD + b"{}", id="a document of another version"),
    ],
)
async def test_a_member_that_dies_in_mid_answer_is_named(tier: TierWorld, of: Of, sent: bytes):
    async with answering(sent) as (url, _):
        tier.point("b/0", url)
        for path in ("/v1/status", "/v1/connections"):
            merged = await asyncio.wait_for(of("a/0")("GET", path), LIMIT_S)
            assert (merged.status, members(merged.json)) == (200, list(NAMES))
            assert [each["name"] for each in merged.json["unreachable"]] == ["b/0"]
            assert [each["answers"] for each in merged.json["members"]].count(False) == 1
        if MEMBER_HEAD not in sent:
            tier.leader = "b/0"
            put = await of("a/0")("PUT", ETL, json=BODY, headers=bearer("ops"))
            assert (put.status, "'b/0'" in put.json["error"]) == (502, True)


@pytest.mark.parametrize(
    "change",
    [{"uptime_s": "x"}, {"uptime_s": 10**400}, {"members": []}, {"clients": [[]]}, {"tier": "x"}],
    ids=lambda change: next(iter(change)),
)
async def test_a_member_that_makes_no_sense_with_others_is_named(
    tier: TierWorld, of: Of, change: dict[str, object]
):
    tier.worlds["a/0"].connect("etl-orders")(MIB)
    honest = (await of("c/1")("GET", "/v1/status", headers=SCOPED)).json
    sent = json.dumps(honest | change).encode()
    head = MEMBER_HEAD.replace(b": 2", b": %d" % len(sent))
    async with answering(head + sent) as (url, _):
        tier.point("c/1", url)
        for leader in ("a/0", "c/1"):
            tier.leader = leader
            merged = await asyncio.wait_for(of("a/0")("GET", "/v1/status"), LIMIT_S)
            assert (merged.status, members(merged.json)) == (200, list(NAMES))
            assert {"c/1"} >= {each["name"] for each in merged.json["unreachable"]}
            assert names(merged.json["clients"]) == ["a/0"]


async def test_a_member_that_says_more_than_any_is_not_read(tier: TierWorld, of: Of):
    honest = (await of("c/1")("GET", "/v1/status", headers=SCOPED)).json
    sent = json.dumps(honest | {"more": [0] * (MAX_MEMBER_VALUES + 1)}).encode()
    async with answering(MEMBER_HEAD.replace(b": 2", b": %d" % len(sent)) + sent) as (url, _):
        tier.point("c/1", url)
        merged = await asyncio.wait_for(of("a/0")("GET", "/v1/status"), LIMIT_S)
        assert (merged.status, members(merged.json)) == (200, list(NAMES))
        assert [each["name"] for each in merged.json["unreachable"]] == ["c/1"]
        assert "not understood" in merged.json["unreachable"][0]["why"]
    sent = json.dumps({"status": "ready", "warning": "x" * MAX_PEER_ANSWER_BYTES}).encode()
    async with answering(MEMBER_HEAD.replace(b": 2", b": %d" % len(sent)) + sent) as (url, _):
        tier.point("a/1", url)
        assert (await of("a/0")("GET", "/readyz")).json == {"status": "ready"}


@pytest.mark.parametrize("scrape", [b"# HELP", b"# HELP \n\n", b"# HELP a b\n", b"\xff" * 100])
async def test_a_scrape_that_is_none_harms_no_other(tier: TierWorld, of: Of, scrape: bytes):
    head = MEMBER_HEAD.replace(b": 2", b": %d" % len(scrape))
    async with answering(head + scrape) as (url, _):
        tier.point("a/1", url)
        answer = await of("a/0")("GET", "/metrics")
        assert answer.status == 200
        assert "kafka_quota_proxy_connections" in answer.text


async def test_members_ask_each_other_over_tls(tier: TierWorld):
    # A slow machine may take long for so many handshakes.
    authority, trusting = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(trusting)
    async with tier.asked(authority=authority, access=CLOSED, timeout_s=30.0) as of:
        status = (await of("a/0")("GET", "/v1/status", headers=bearer("desk"))).json
        assert (members(status), status["unreachable"]) == (list(NAMES), [])
        tier.leader = "b/0"
        assert (await of("c/0")("PUT", ETL, json=BODY, headers=bearer("ops"))).status == 200
        await tier.tiers["a/0"].client.close()
        tier.tiers["a/0"].client = PeerClient("ops-text")  # which knows not who signs
        status = (await of("a/0")("GET", "/v1/status", headers=bearer("desk"))).json
        assert [each["name"] for each in status["unreachable"]] == list(NAMES[1:])
        assert all("certificate is not trusted" in each["why"] for each in status["unreachable"])
        assert (await of("a/0")("PUT", ETL, json=BODY, headers=bearer("ops"))).status == 503
        tier.tiers["a/0"].client.tls = trusting
        assert (await of("a/0")("PUT", ETL, json=BODY, headers=bearer("ops"))).status == 200


@pytest.mark.parametrize("token", ["desk-text", "night-text", "spark-text", "no-text", None])
async def test_another_token_than_that_of_all_lets_no_member_in(tier: TierWorld, token: str | None):
    async with tier.asked(token=token) as of:
        status = (await of("a/0")("GET", "/v1/status")).json
        assert members(status) == list(NAMES)
        assert [each["name"] for each in status["unreachable"]] == list(NAMES[1:])
        assert all("it refuses to answer with 40" in each["why"] for each in status["unreachable"])
        tier.leader = "b/0"
        put = await of("a/0")("PUT", ETL, json=BODY, headers=bearer("ops"))
        assert (put.status, "it refuses to answer with 40" in put.json["error"]) == (503, True)
    assert audited(tier) == {}


@pytest.mark.parametrize("access", [OPEN, CLOSED])
async def test_headers_of_members_are_believed_with_all_rights_only(
    tier: TierWorld, access: AccessRules
):
    tier.leader = "b/0"
    forged = {**SCOPED, AUTHOR: "root", PEER: "10.9.9.9"}
    async with tier.asked(access=access) as of:
        ask = of("a/0")
        for name in ("spark", "desk", "night", "wrong"):
            for method, path in (("GET", "/v1/status"), ("PUT", ETL), ("POST", REPORTS)):
                body = {} if method == "GET" else {"json": BODY}
                answer = await ask(method, path, headers=bearer(name) | forged, **body)
                assert answer.status in {401, 403}, (name, path)
            for hidden, method in HIDDEN.items():
                asked = await ask(method, hidden, json=[], headers=bearer(name) | forged)
                assert asked.status in {401, 403}
        assert (await ask("GET", "/v1/status", headers=forged)).status in {401, 403}
        for hidden, method in HIDDEN.items():
            assert (await ask(method, hidden, json=[], headers=bearer("ops"))).status == 404
            asked = await ask(method, hidden, json=[7], headers=bearer("ops") | forged)
            assert asked.status == {"GET": 200, "POST": 400}[method]
        for odd in ("world", "machine"):
            scoped = bearer("ops") | {SCOPE: odd}
            assert (await ask("GET", "/v1/status", headers=scoped)).status == 400
        left = bearer("ops") | forged | {LEAVE_AUDIT: "1"}
        put = await ask("PUT", ETL, json=BODY, headers=left)
        assert (put.status, CHANGES in put.headers, audited(tier)) == (200, True, {})
        assert (await ask("DELETE", ETL, headers=bearer("ops") | forged)).status == 200
        (change,) = (await ask("GET", "/v1/audit?member=a/0", headers=bearer("ops"))).json[
            "changes"
        ]
        assert (change["who"], change["address"]) == ("root", "10.9.9.9")


async def test_no_request_goes_in_a_circle(tier: TierWorld, of: Of):
    """Members that each take the other one for the owner, and for the leader."""
    scoped = await of("a/0")("GET", "/v1/status", headers=bearer("ops") | SCOPED)
    assert (scoped.status, "members" in scoped.json) == (200, False)
    tier.owners["etl"] = "b/0"
    answer = await of("a/0")(
        "POST", REPORTS, json={"client_id": "etl"}, headers=bearer("ops") | SCOPED
    )
    assert (answer.status, len(tier.reports["a/0"].taken)) == (200, 1)
    put = await of("c/1")("PUT", ETL, json=BODY, headers=bearer("ops") | SCOPED)
    assert (put.status, audited(tier)) == (200, {"c/1": 1})


async def test_a_member_needs_no_way_to_itself(tier: TierWorld, of: Of):
    tier.worlds["a/0"].connect("etl-orders")(MIB)
    own = replace(tier.tiers["a/0"].endpoints["a/0"], url="http://127.0.0.1:1", alive=False)
    tier.tiers["a/0"].endpoints["a/0"] = own
    status = (await of("a/0")("GET", "/v1/status")).json
    assert (status["unreachable"], names(status["clients"])) == ([], ["a/0"])
    put = await of("a/0")("PUT", ETL, json=BODY, headers=bearer("ops"))
    assert (put.status, audited(tier)) == (200, {"a/0": 1})
    forbidden = await of("a/0")("PUT", ETL, json=BODY, headers=bearer("desk"))
    assert forbidden.status == 403


async def test_a_member_that_fails_is_named_and_fails_no_other(tier: TierWorld, of: Of):
    for name in ("a/0", "b/0"):
        tier.worlds[name].relay = None
    status = (await of("a/0")("GET", "/v1/status")).json
    assert [each["name"] for each in status["unreachable"]] == ["a/0", "b/0"]
    assert {each["why"] for each in status["unreachable"]} == {"it refuses to answer with 500"}
    assert [each["answers"] for each in status["members"]].count(False) == 2


async def test_who_is_alone_answers_by_itself(world: AdminWorld):
    alone = TierWorld(["a/0"])
    alone.rules = None
    alone.worlds["a/0"] = world
    world.connect("etl-orders")(MIB)
    connected = Connected([PLAIN])
    async with alone.asked(connections=connected) as of:
        async with serve(world.server(access=OPEN, connections=connected)) as ask:
            for path in ("/v1/clients", "/v1/connections", "/v1/progress", "/v1/log_level"):
                answers = [(await each("GET", path)).json for each in (of("a/0"), ask)]
                for row in chain.from_iterable(each.get("connections", ()) for each in answers):
                    del row["since"]  # by the clock on the wall, which goes on
                assert answers[0] == answers[1], path
        assert "members" not in (await of("a/0")("GET", "/v1/status")).json
        # One of a tier that is known as such has what is promised of a tier.
        alone.rules = {"a": "d1"}
        assert members((await of("a/0")("GET", "/v1/status")).json) == ["a/0"]
        rows = (await of("a/0")("GET", "/v1/connections")).json["connections"]
        assert [row["id"] for row in rows] == ["a/7"]


async def test_members_may_come_and_go(tier: TierWorld, of: Of):
    known = tier.tiers["a/0"].endpoints
    gone = known.pop("c/1")
    assert members((await of("a/0")("GET", "/v1/status")).json) == list(NAMES[:-1])
    known["c/3"] = replace(gone, name="c/3")
    assert members((await of("a/0")("GET", "/v1/status")).json) == [*NAMES[:-1], "c/3"]


async def test_request_times_are_of_all_requests(tier: TierWorld, of: Of):
    def times(counts: list[int]) -> dict[str, object]:
        part = {"p50_s": 9.0, "p99_s": 9.0}
        histogram = {"bounds": [0.001, 0.01, 0.1], "counts": counts}
        parts = ("broker", "proxy", "hold")
        return {
            "api": "Fetch",
            "measured": sum(counts),
            HISTOGRAMS: dict.fromkeys(parts, histogram),
            **dict.fromkeys(parts, part),
        }

    tier.worlds["a/0"].request_times = [times([98, 0, 0, 0])]
    tier.worlds["c/1"].request_times = [times([0, 0, 2, 0])]
    for name in ("a/0", "b/0", "c/1"):
        (fetch,) = (await of(name)("GET", "/v1/status")).json["request_times"]
        assert (fetch["measured"], fetch["broker"]["p99_s"]) == (100, pytest.approx(0.055))
        assert HISTOGRAMS not in fetch


async def test_the_owner_has_the_charts_of_its_clients(tier: TierWorld, of: Of):
    for name in ("a/0", "b/1"):
        world = tier.worlds[name]
        send = world.connect("etl-orders")
        for _ in range(4):
            tick(world.history, world.now_ms)
            send(MIB)
            world.now_ms += 5000
    (row,) = (await of("a/0")("GET", "/v1/status")).json["clients"]
    assert len(row["history"]["rates"]) == 3
    assert row["history"]["bounds"] == [[0, 10 * MIB]]


async def test_queries_and_pipelines_come_from_the_members_that_have_them(tier: TierWorld):
    spark, pipelines = spark_world.scene(), pipeline_world.scene()
    tier.worlds |= {"a/1": spark, "c/0": pipelines}
    servers = {"a/1": {"reports": spark}, "c/0": {"reports": pipelines}}
    async with tier.asked(servers=servers) as of:
        ask: Ask = of("b/0")
        progress = (await ask("GET", "/v1/progress")).json["queries"]
        assert names(progress) == ["a/1"] * 5
        (one,) = (await ask("GET", "/v1/progress?query=payments&limit=2")).json["queries"]
        assert (one["name"], one["totals"]["partitions"], len(one["partitions"])) == (
            *("payments", 4),
            2,
        )
        assert (await ask("GET", "/v1/progress?query=none")).status == 404
        found = (await ask("GET", "/v1/pipelines")).json["pipelines"]
        assert names(found) == ["c/0"] * 3
        (orders,) = (await ask("GET", "/v1/pipelines?pipeline=orders")).json["pipelines"]
        assert orders["completion"]["pending"]["full"] is True
        status = (await ask("GET", "/v1/status")).json
        assert (status["followed"], names(status["queries"])) == (5, ["a/1"] * 5)
        assert (status["pipelines_total"], names(status["pipelines"])) == (3, ["c/0"] * 3)
        async with serve(spark.server()) as alone:
            of_one = (await alone("GET", "/v1/status")).json["queries"]
        assert [each["name"] for each in status["queries"]] == [each["name"] for each in of_one]
        assert status["pipelines"][0]["name"] == "orders"


async def test_metrics_are_those_of_each_member_of_the_machine_as_they_are(tier: TierWorld, of: Of):
    labels = ("default", "", HOSTILE, "Fetch")
    for name, amount in (("a/0", 1.0), ("a/1", 20.0), ("b/0", 300.0)):
        tier.worlds[name].instruments.bytes_total.of(*labels).inc(amount)
        tier.worlds[name].instruments.throttle_seconds.labels("consumer_byte_rate").observe(amount)
        MemberInstruments(tier.worlds[name].prometheus).slots_owned.set(amount)

    async def shown(query: str = "") -> dict[str, dict[str, float]]:
        """Return samples of each name by their member; each family must come once."""
        text = (await of("a/0")("GET", f"/metrics{query}")).text
        families = list(text_string_to_metric_families(text))
        assert len({family.name for family in families}) == len(families)
        found: dict[str, dict[str, float]] = {}
        for sample in chain.from_iterable(family.samples for family in families):
            of_name = found.setdefault(sample.name.removeprefix("kafka_quota_proxy_"), {})
            if sample.labels.get("client_id", HOSTILE) == HOSTILE:
                of_name[sample.labels["member"]] = sample.value
        return found

    for found in await asyncio.gather(*(shown() for _ in range(5))):
        assert found["bytes_total"] == {"a/0": 1.0, "a/1": 20.0}
        assert found["slots_owned"] == {"a/0": 1.0, "a/1": 20.0}
        assert found["throttle_seconds_sum"] == {"a/0": 1.0, "a/1": 20.0}
        assert found["throttle_seconds_count"] == {"a/0": 1.0, "a/1": 1.0}
        assert found["member_up"] == {"a/0": 1.0, "a/1": 1.0}
    found = await shown("?member=a/1")
    assert (found["bytes_total"], "member_up" in found) == ({"a/1": 20.0}, False)
    scoped = await of("a/0")("GET", "/metrics", headers=bearer("ops") | SCOPED)
    assert ('member="a/1"' in scoped.text, "member_up{" in scoped.text) == (False, False)
    assert (await of("a/0")("GET", "/metrics?member=b/0")).status == 404
    await tier.kill("a/1")
    found = await shown()
    assert (found["bytes_total"], found["member_up"]) == ({"a/0": 1.0}, {"a/0": 1.0, "a/1": 0.0})
