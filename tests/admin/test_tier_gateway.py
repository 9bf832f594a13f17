"""Any machine of a tier answers for all of them, and passes on to the one that is meant."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trustme
from admin_world import MIB, Ask
from connected import HELD, PLAIN, Connected
from gateway_world import names
from tier_world import TierWorld
from tokens import CLOSED, OPEN, bearer

from proxy.admin.gateway.bundles import BUNDLE_TYPE
from proxy.admin.log_level import log_level
from proxy.admin.port.access import Access
from proxy.admin.port.member_headers import AUTHOR, CHANGES, FIRST_HEADER, ONLY, PEER, SCOPE
from proxy.admin.request_times import HISTOGRAMS

ETL = "/v1/quotas/client-id=etl-orders"
REPORTS = "/v1/spark/batches"
BODY = {"consumer_byte_rate": "1MiB", "by": "anna"}
SCOPED = {SCOPE: "machine"}
ALL = ["a/0", "a/1", "b/0", "b/1", "c/0", "c/1"]
BUNDLE_HEAD = (
    f"HTTP/1.1 200 OK\r\nContent-Type: {BUNDLE_TYPE}\r\nContent-Length: 2\r\n\r\n".encode()
)
Of = Callable[[str], Ask]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def tier() -> TierWorld:
    return TierWorld()


@pytest.fixture
async def of(tier: TierWorld) -> AsyncIterator[Of]:
    async with tier.asked() as of:
        yield of


def members(document: dict) -> list[str]:
    return [each["name"] for each in document["members"]]


async def test_each_machine_gives_one_view_of_all(tier: TierWorld, of: Of):
    tier.world("a/1").connect("etl-orders")(200 * MIB)
    tier.world("b/0").connect("mirror")(40 * MIB)
    tier.world("c/1").connect("dashboards")(30 * MIB)
    for machine in tier.machines:
        status = (await of(machine)("GET", "/v1/status?by=client")).json
        assert members(status) == ALL
        assert [each["machine"] for each in status["members"]] == ["a", "a", "b", "b", "c", "c"]
        assert names(status["clients"]) == ["a/1", "b/0", "c/1"]
        assert (status["bounded"], status["throttled"], status["unreachable"]) == (3, 1, [])
        assert sum(each["connections"] for each in status["listeners"]) == len(ALL) * 17
        assert status["tier"] == {**tier.tier()}
        clients = (await of(machine)("GET", "/v1/clients?limit=2")).json
        assert (names(clients["clients"]), clients["total"]) == (["a/1", "b/0"], 3)
        entity = (await of(machine)("GET", "/v1/clients/client-id=mirror")).json
        assert names(entity["quotas"]) == ["b/0"]
        assert (await of(machine)("GET", "/v1/clients/client-id=nobody")).status == 404
        for path in ("/v1/progress", "/v1/pipelines", "/v1/connections"):
            assert members((await of(machine)("GET", path)).json) == ALL


async def test_a_client_of_two_machines_is_one_row_of_its_owner(tier: TierWorld, of: Of):
    tier.owners["etl-orders"] = "b/1"
    tier.world("a/0").connect("etl-orders")(3 * MIB)
    tier.world("b/1").connect("etl-orders")(2 * MIB)
    tier.world("c/0").connect("etl-orders")(MIB)
    (row,) = (await of("c")("GET", "/v1/clients?by=client")).json["clients"]
    assert (row["member"], sorted(row["members"])) == ("b/1", ["a/0", "b/1", "c/0"])
    assert (row["client_count"], row["rate"]) == (1, pytest.approx(2 * MIB / 10, abs=0.1))


async def test_one_member_or_one_machine_is_asked_for(tier: TierWorld, of: Of):
    for name in ALL:
        tier.world(name).connect("mirror")(MIB)
    for machine in tier.machines:
        for asked, told in (("b", ["b/0", "b/1"]), ("b/1", ["b/1"]), ("a", ["a/0", "a/1"])):
            status = (await of(machine)("GET", f"/v1/status?member={asked}")).json
            assert members(status) == told
            assert {each["member"] for each in status["clients"]} <= set(told)
        for absent in ("d", "b/9", "a/9", "d/0", "0", "", "/", "b/"):
            answer = await of(machine)("GET", f"/v1/clients?member={absent}")
            assert (answer.status, set(answer.json)) == (404, {"error", "fix"}), absent


async def test_what_a_machine_counts_and_whether_it_is_ready_is_its_own(tier: TierWorld, of: Of):
    for name, amount in (("a/0", 1.0), ("a/1", 20.0), ("b/0", 300.0)):
        tier.world(name).instruments.bytes_total.of("default", "", "etl", "Fetch").inc(amount)
    text = (await of("a")("GET", "/metrics")).text
    name = "kafka_quota_proxy_bytes_total"
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    labels = 'api="Fetch",client_id="etl",listener="default",member="{}",user=""'
    assert lines == [
        f"{name}{{{labels.format(member)}}} {amount}"
        for member, amount in (("a/0", 1.0), ("a/1", 20.0))
    ]
    tier.world("b/0").not_ready = "closed"
    assert (await of("a")("GET", "/readyz")).status == 200
    assert (await of("b")("GET", "/readyz")).status == 503
    for path in ("/metrics", "/readyz"):
        assert (await of("a")("GET", f"{path}?member=b")).status == 404


async def test_connections_of_machines_are_told_apart(tier: TierWorld):
    held = {
        name: Connected([replace(PLAIN, number=7, ip=f"10.0.0.{at}"), replace(HELD, number=9)])
        for at, name in enumerate(("a/0", "b/1", "c/0"))
    }
    servers = {name: {"connections": each} for name, each in held.items()}
    for name in held:
        tier.world(name).now_ms = 60_000.0
    async with tier.asked(servers=servers) as of:
        listed = (await of("b")("GET", "/v1/connections")).json
        assert (listed["total"], len({row["id"] for row in listed["connections"]})) == (6, 6)
        seen, after = [], "0"
        while page := (await of("b")("GET", f"/v1/connections?limit=2&after={after}")).json:
            if not page["connections"]:
                break
            seen += [row["id"] for row in page["connections"]]
            after = seen[-1]
        assert seen == ["a/7", "b/7", "c/7", "a/9", "b/9", "c/9"]
        past = (await of("a")("GET", "/v1/connections?after=7")).json["connections"]
        assert [row["id"] for row in past] == ["a/9", "b/9", "c/9"]
        assert (await of("a")("GET", "/v1/connections?after=b/x")).status == 400

        closed = await of("a")("DELETE", "/v1/connections/b/7", headers=bearer("ops"))
        assert (closed.status, closed.json, CHANGES in closed.headers) == (
            200,
            {"closed": 7},
            False,
        )
        assert {name: len(each.listed) for name, each in held.items()} == {
            **{"a/0": 2, "b/1": 1, "c/0": 2}
        }
        # Asked at a machine that neither has the connection nor keeps the audit.
        away = await of("b")("DELETE", "/v1/connections/c/9", headers=bearer("night"))
        assert (away.status, len(held["c/0"].listed)) == (200, 1)
        assert (await of("b")("DELETE", "/v1/connections/a/9", headers=bearer("ops"))).status == 200
        for name, status in (("b/7", 404), ("7", 404), ("d/7", 404), ("a/7?member=b", 404)):
            again = await of("a")("DELETE", f"/v1/connections/{name}", headers=bearer("ops"))
            assert (again.status, set(again.json)) == (status, {"error", "fix"}), name
        changes = (await of("c")("GET", "/v1/audit")).json["changes"]
        assert [(each["who"], each["address"]) for each in changes] == [
            *(("ops", "127.0.0.1"), ("night", "127.0.0.1"), ("ops", "127.0.0.1"))
        ]
    assert {name: len(tier.world(name).audit) for name in ALL} == dict.fromkeys(ALL, 0) | {"a/0": 3}


async def test_a_change_is_made_at_the_first_member_in_the_name_of_who_asks(
    tier: TierWorld, of: Of
):
    tier.first = "b/1"
    forged = {AUTHOR: "root", PEER: "10.9.9.9", FIRST_HEADER: "c/0"}
    put = await of("a")("PUT", ETL, json=BODY, headers=bearer("ops") | forged)
    assert (put.status, put.json["source"]) == (200, "override")
    pause = await of("c")("POST", "/v1/throttling", json={"off": "1h"}, headers=bearer("night"))
    assert pause.status == 200
    for machine in tier.machines:
        (second, first) = (await of(machine)("GET", "/v1/audit")).json["changes"]
        assert (first["who"], first["address"]) == ("ops", "127.0.0.1")
        assert (second["who"], second["what"]) == ("night", "pauses")
        quotas = (await of(machine)("GET", "/v1/quotas")).json["quotas"]
        assert "override" in {each["source"] for each in quotas}
        throttling = (await of(machine)("GET", "/v1/throttling")).json["throttling"]
        assert len(throttling["paused"]) == 1
    bad = await of("a")("PUT", ETL, json={"consumer_byte_rate": "much"}, headers=bearer("ops"))
    assert (bad.status, set(bad.json)) == (400, {"error", "fix"})
    assert (await of("a")("DELETE", ETL, headers=bearer("ops"))).status == 200
    again = await of("c")("DELETE", ETL, headers=bearer("ops"))
    assert "no override is in force" in again.json["error"]
    assert {name: len(tier.world(name).audit) for name in ALL} == dict.fromkeys(ALL, 0) | {"b/1": 3}


async def test_reports_go_to_the_owner_of_their_client(tier: TierWorld, of: Of):
    tier.owners |= {"etl": "c/1", "homeless": None, "gone": "c/7", "lost": "d/0"}
    taken = tier.machines["c"].reports["c/1"].taken
    report = json.dumps({"client_id": "etl", "name": "x"}).encode()
    headers = {"Content-Type": "application/json"} | bearer("spark")
    for machine in tier.machines:
        answer = await of(machine)("POST", REPORTS, data=report, headers=headers)
        assert (answer.status, answer.json["accepted"], taken.pop()) == (200, True, report)
        refused = await of(machine)("POST", REPORTS, data=b"[]", headers=headers)
        assert (refused.status, refused.json["reason"]) == (400, "malformed")
        for client_id in ("homeless", "gone", "lost"):
            data = json.dumps({"client_id": client_id}).encode()
            answer = await of(machine)("POST", REPORTS, data=data, headers=headers)
            assert (answer.status, set(answer.json)) == (503, {"error", "fix"}), client_id
    await tier.kill("c")
    answer = await of("a")("POST", REPORTS, data=report, headers=headers)
    assert (answer.status, "'c'" in answer.json["error"]) == (503, True)


async def test_the_log_level_is_that_of_all(tier: TierWorld, of: Of):
    try:
        answer = await of("b")(
            "PUT", "/v1/log_level", json={"level": "debug"}, headers=bearer("ops")
        )
        assert (answer.status, answer.json) == (200, {"level": "debug"})
        shown = (await of("c")("GET", "/v1/log_level")).json
        assert shown["levels"][0]["name"] == "a/0"
        assert {each["name"] for each in shown["levels"]} == set(ALL)
        assert {each["level"] for each in shown["levels"]} == {"debug"}
        log_level.set("info")
        one = await of("a")(
            "PUT", "/v1/log_level?member=c/1", json={"level": "debug"}, headers=bearer("night")
        )
        assert one.status == 200
        changes = (await of("b")("GET", "/v1/audit")).json["changes"]
        assert changes[0]["who"] == "night"  # before: who is first, as all are one process here
        await tier.kill("c")
        partly = await of("a")(
            "PUT", "/v1/log_level", json={"level": "info"}, headers=bearer("ops")
        )
        assert (partly.status, "'c'" in partly.json["error"]) == (502, True)
    finally:
        log_level.set("info")


async def test_what_all_machines_have_seen_is_suggested_from_together(tier: TierWorld, of: Of):
    for name, rate, intervals in (("a/1", 100_000.0, 90), ("c/0", 9_000_000.0, 10)):
        world = tier.world(name)
        counter = world.instruments.bytes_total.of("default", "", "etl-new", "Fetch")
        world.sample()
        for _ in range(intervals):
            counter.inc(rate * 10)
            world.now_ms += 10_000.0
            world.sample()
    for machine in tier.machines:
        (client,) = (await of(machine)("GET", "/v1/suggestions?since=2h")).json["clients"]
        (quota,) = client["quotas"]
        assert (quota["intervals"], quota["total_bytes"]) == (100, 990_000_000)
        (alone,) = (await of(machine)("GET", "/v1/suggestions?member=c")).json["clients"]
        assert alone["quotas"][0]["intervals"] == 10


async def test_machines_ask_each_other_over_tls(tier: TierWorld):
    # A slow machine may take long for so many handshakes.
    async with tier.asked(authority=trustme.CA(), access=CLOSED, timeout_s=30.0) as of:
        status = (await of("a")("GET", "/v1/status", headers=bearer("desk"))).json
        assert (members(status), status["unreachable"]) == (ALL, [])
        tier.first = "b/0"
        assert (await of("c")("PUT", ETL, json=BODY, headers=bearer("ops"))).status == 200
        for name in ("b", "c"):  # signed by somebody else
            endpoint = tier.machines["a"].endpoints[name]
            tier.machines["a"].endpoints[name] = replace(endpoint, tls=None)
        status = (await of("a")("GET", "/v1/status", headers=bearer("desk"))).json
        assert [each["name"] for each in status["unreachable"]] == ["b", "c"]
        assert all("certificate is not trusted" in each["why"] for each in status["unreachable"])
        assert (await of("a")("PUT", ETL, json=BODY, headers=bearer("ops"))).status == 503


@pytest.mark.parametrize("token", ["desk-text", "night-text", "spark-text", "no-text"])
async def test_another_token_than_that_of_all_lets_no_machine_in(tier: TierWorld, token: str):
    async with tier.asked(token=token) as of:
        status = (await of("a")("GET", "/v1/status")).json
        assert members(status) == ["a/0", "a/1", "b", "c"]
        assert all("it refuses to answer with 40" in each["why"] for each in status["unreachable"])
        tier.first = "b/0"
        put = await of("a")("PUT", ETL, json=BODY, headers=bearer("ops"))
        assert (put.status, set(put.json)) == (503, {"error", "fix"})


@pytest.mark.parametrize("access", [OPEN, CLOSED])
async def test_headers_of_machines_are_believed_with_all_rights_only(
    tier: TierWorld, access: Access
):
    forged = {**SCOPED, AUTHOR: "root", PEER: "10.9.9.9", FIRST_HEADER: "a/0", ONLY: "a/0"}
    async with tier.asked(access=access) as of:
        for name in ("spark", "desk", "night", "wrong"):
            for method, path in (("GET", "/v1/status"), ("PUT", ETL), ("POST", REPORTS)):
                body = {} if method == "GET" else {"json": BODY}
                answer = await of("a")(method, path, headers=bearer(name) | forged, **body)
                assert answer.status in {401, 403}, (name, path)
                for hidden in ("/member/changes", "/member/observed"):
                    posted = await of("a")("POST", hidden, json=[], headers=bearer(name) | forged)
                    assert posted.status in {401, 403}
        assert (await of("a")("GET", "/v1/status", headers=forged)).status in {401, 403}
        for hidden in ("/member/changes", "/member/observed"):
            posted = await of("a")("POST", hidden, json=[], headers=bearer("ops"))
            assert posted.status == 404
        odd = await of("a")("GET", "/v1/status", headers=bearer("ops") | {SCOPE: "world"})
        assert odd.status == 400
        put = await of("a")("PUT", ETL, json=BODY, headers=bearer("ops") | forged)
        assert (put.status, put.headers["Content-Type"]) == (200, BUNDLE_TYPE)
        (change,) = (await of("a")("GET", "/v1/audit", headers=bearer("ops"))).json["changes"]
        assert (change["who"], change["address"]) == ("root", "10.9.9.9")


async def test_no_request_goes_in_a_circle(tier: TierWorld, of: Of):
    """Each machine is told of one machine more, which is itself."""
    for name, machine in tier.machines.items():
        machine.endpoints["self"] = replace(machine.endpoints["b" if name != "b" else "a"])
        machine.endpoints["self"] = replace(
            machine.endpoints["self"], name="self", url=tier.urls[name]
        )
    status = (await asyncio.wait_for(of("a")("GET", "/v1/status"), 5)).json
    assert members(status).count("a/0") == 2
    # Machines that each take the other one for the owner.
    tier.machines["a"].owners = {"etl": "b/0"}
    tier.machines["b"].owners = {"etl": "a/0"}
    report = {"client_id": "etl"}
    answer = await of("a")("POST", REPORTS, json=report, headers=bearer("spark"))
    assert (answer.status, len(tier.machines["b"].reports["b/0"].taken)) == (200, 1)
    scoped = await of("a")("GET", "/v1/status", headers=bearer("ops") | SCOPED)
    index = json.loads(scoped.text.partition("\n")[0])
    assert [each["name"] for each in index] == ["a/0", "a/1"]


@asynccontextmanager
async def hanging() -> AsyncIterator[tuple[str, list[int]]]:
    """Accept connections and say nothing; gives the URL, and a list with an item for each."""
    asked: list[int] = []

    async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(1)
        writers.append(writer)

    writers: list[asyncio.StreamWriter] = []
    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
        for writer in writers:
            writer.close()


async def test_the_rest_answers_when_a_machine_is_dead_or_hangs(tier: TierWorld, of: Of):
    tier.world("a/1").connect("etl-orders")(MIB)
    async with hanging() as (url, asked):
        await tier.kill("b")
        tier.point("c", url)
        for _ in range(3):
            status = (await of("a")("GET", "/v1/status")).json
            assert members(status) == ["a/0", "a/1", "b", "c"]
            assert [each["name"] for each in status["unreachable"]] == ["b", "c"]
            assert "connected to" in status["unreachable"][0]["why"]
            assert "did not answer within 1 s" in status["unreachable"][1]["why"]
            assert [each["alive"] for each in status["members"]] == [True, True, None, None]
            assert names(status["clients"]) == ["a/1"]
        assert len(asked) == 1  # not waited for again and again
    assert (await of("a")("GET", "/v1/clients/client-id=nobody")).status == 404
    tier.first = "b/0"
    assert (await of("a")("GET", "/v1/quotas")).status == 200
    put = await of("a")("PUT", ETL, json=BODY, headers=bearer("ops"))
    assert (put.status, "'b'" in put.json["error"]) == (503, True)


async def test_a_silent_machine_is_not_waited_for(tier: TierWorld, of: Of):
    tier.owners["etl"] = "c/0"
    async with hanging() as (url, asked):
        tier.point("c", url)
        tier.mark_silent("c")
        status = (await of("a")("GET", "/v1/status")).json
        report = await of("a")("POST", REPORTS, json={"client_id": "etl"}, headers=bearer("spark"))
        (silent,) = status["unreachable"]
        assert (silent["name"], "silent" in silent["why"], report.status) == ("c", True, 503)
        assert asked == []


async def test_a_machine_with_a_member_that_hangs_answers_for_the_others(tier: TierWorld, of: Of):
    await tier.machines["b"].servers["b/1"].stop()

    async def say_nothing(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        pass

    path = tier.machines["b"].endpoints["b/1"].path
    async with await asyncio.start_unix_server(say_nothing, path):
        status = (await of("a")("GET", "/v1/status")).json
    assert members(status) == ALL
    (away,) = status["unreachable"]
    assert (away["name"], "did not answer within 0.75 s" in away["why"]) == ("b/1", True)
    tier.machines["b"].mark_dead("b/1")
    status = (await of("a")("GET", "/v1/status")).json
    assert [each["alive"] for each in status["members"] if not each["answers"]] == [False]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{", id="half an answer"),
        pytest.param(b"no http\r\n\r\n", id="what is no HTTP"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", id="no bundle"),
        pytest.param(BUNDLE_HEAD + b"{}", id="a bad bundle"),
        pytest.param(BUNDLE_HEAD + b"[7", id="a broken bundle"),
        pytest.param(BUNDLE_HEAD + b"[]", id="an empty bundle"),
        pytest.param(BUNDLE_HEAD + b"\xff\xff", id="what is no text"),
    ],
)
async def test_a_machine_that_dies_in_mid_answer_is_named(tier: TierWorld, of: Of, sent: bytes):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        tier.point("b", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for path in ("/v1/status", "/v1/connections"):
            merged = await of("a")("GET", path)
            assert (merged.status, members(merged.json)) == (200, ["a/0", "a/1", "b", "c/0", "c/1"])
        tier.first = "b/0"
        put = await of("a")("PUT", ETL, json=BODY, headers=bearer("ops"))
        assert (put.status, "'b'" in put.json["error"]) == (502, True)


async def test_rules_that_differ_are_said(tier: TierWorld, of: Of):
    assert (await of("a")("GET", "/v1/status")).json["warning"] is None
    tier.rules = {"a": "d1", "b": "d2", "c": None}
    warning = (await of("c")("GET", "/v1/status")).json["warning"]
    assert "different rules: a by d1, b by d2" in warning


async def test_request_times_are_of_the_requests_of_all_machines(tier: TierWorld, of: Of):
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

    tier.world("a/0").request_times = [times([98, 0, 0, 0])]
    tier.world("c/1").request_times = [times([0, 0, 2, 0])]
    for machine in tier.machines:
        (fetch,) = (await of(machine)("GET", "/v1/status")).json["request_times"]
        assert (fetch["measured"], fetch["broker"]["p99_s"]) == (100, pytest.approx(0.055))
