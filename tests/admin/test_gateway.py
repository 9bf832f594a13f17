"""One port answers for many members: what they know together, and whom a change goes to."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pipeline_world
import pytest
import spark_world
from admin_world import HOSTILE, MIB, PRODUCER, AdminWorld, Ask, serve, tick
from connected import HELD, PLAIN, Connected
from gateway_world import GatewayWorld, names
from prometheus_client.parser import text_string_to_metric_families
from tokens import CLOSED, OPEN, TOKENS, bearer
from yarl import URL

from proxy.admin.log_level import log_level
from proxy.admin.port.access import OPEN_PATHS, Right
from proxy.admin.port.member_headers import AUTHOR, LEAVE_AUDIT, PEER
from proxy.admin.request_times import HISTOGRAMS

ETL = "/v1/quotas/client-id=etl-orders"
REPORTS = "/v1/spark/batches"
BODY = {"consumer_byte_rate": "1MiB", "by": "anna"}
LIMIT_S = 20

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def tier() -> GatewayWorld:
    return GatewayWorld()


@pytest.fixture
async def ask(tier: GatewayWorld) -> AsyncIterator[Ask]:
    async with tier.asked(timeout_s=1.0) as ask:
        yield ask


async def test_every_path_asks_for_the_right_to_it(tier: GatewayWorld):
    async with tier.asked(access=CLOSED) as ask:
        assert tier.gateway._runner is not None
        routes = {
            (route.method, route.resource.canonical.replace("{tail}", "x"))
            for route in tier.gateway._runner.app.router.routes()
            if route.resource is not None
        }
        one = next(iter(tier.servers.values()))
        assert one._runner is not None
        of_one = {
            (route.method, route.resource.canonical.replace("{tail}", "x"))
            for route in one._runner.app.router.routes()
            if route.resource is not None
        }
        assert {each for each in of_one if not each[1].startswith("/member/")} == routes
        for method, path in routes:
            if path in OPEN_PATHS:
                continue
            right = Right.READ if method in {"GET", "HEAD"} else Right.QUOTAS
            right = Right.REPORT if path == REPORTS else right
            assert (await ask(method, path)).status == 401, (method, path)
            for token in TOKENS:
                answer = await ask(method, path, headers=bearer(token.name))
                assert (answer.status == 403) is (right not in token.rights), (method, path, token)
                assert answer.status != 500, (method, path, token)


async def test_one_document_has_the_clients_of_all(tier: GatewayWorld, ask: Ask):
    tier.worlds["0"].connect("etl-orders")(200 * MIB)
    tier.worlds["1"].connect("dashboards")(30 * MIB)
    tier.worlds["2"].connect("mirror")(40 * MIB)
    tier.worlds["2"].connect(None, listener="tenants")(1.0, PRODUCER)
    for by in ("quota", "client"):
        told = (await ask("GET", f"/v1/clients?by={by}")).json
        assert names(told["clients"]) == ["0", "2", "1"]
        assert (told["total"], told["client_counts"]["bounded"]) == (3, 3)
        assert told["client_counts"]["throttled"] == told["client_counts"]["held"] == 1
        assert [each["name"] for each in told["members"]] == ["0", "1", "2"]
        assert told["unreachable"] == []
        (few,) = (await ask("GET", f"/v1/clients?by={by}&limit=1")).json["clients"]
        assert few["entity"] == "client-id=etl-orders"
        (one,) = (await ask("GET", f"/v1/clients?by={by}&member=1")).json["clients"]
        assert one["member"] == "1"
    status = (await ask("GET", "/v1/status")).json
    assert (status["bounded"], status["throttled"], status["held"]) == (3, 1, 1)
    assert [each["connections"] for each in status["listeners"]] == [42, 9]
    assert status["delay_queues"] == {"fetch": 12, "produce": 3, "request": 0}
    assert len(status["brokers"]) == len(status["config_loads"]) == 2
    assert [each["connections"] for each in status["members"]] == [17] * 3


async def test_the_status_has_the_slots_of_each_member_that_answers(tier: GatewayWorld):
    slots = {"owned": 85, "bytes_per_s": 9, "cpu_share": 0.9, "overloaded": []}
    async with tier.asked(slots=lambda: {"1": slots, "2": slots}, timeout_s=1.0) as ask:
        await tier.kill("2")
        members = (await ask("GET", "/v1/status")).json["members"]
        assert [each.get("slots") for each in members] == [None, slots, None]
        members = (await ask("GET", "/v1/clients")).json["members"]
        assert not any("slots" in each for each in members)


async def test_a_client_of_two_members_is_one_row_of_its_owner(tier: GatewayWorld, ask: Ask):
    tier.owners["etl-orders"] = "1"
    tier.worlds["0"].connect("etl-orders")(3 * MIB)
    tier.worlds["1"].connect("etl-orders")(2 * MIB)
    told = (await ask("GET", "/v1/clients?by=client")).json
    (row,) = told["clients"]
    assert (row["member"], row["members"], row["client_count"]) == ("1", ["1", "0"], 1)
    assert row["rate"] == pytest.approx(2 * MIB / 10, abs=0.1)
    assert (told["total"], told["client_counts"]["bounded"]) == (1, 1)
    (entity,) = (await ask("GET", "/v1/clients/client-id=etl-orders")).json["quotas"]
    assert len(entity["connected"]) == 1


async def test_one_client_is_found_where_it_is(tier: GatewayWorld, ask: Ask):
    tier.worlds["2"].connect("etl-orders")(MIB)
    found = await ask("GET", "/v1/clients/client-id=etl-orders")
    assert names(found.json["quotas"]) == ["2"]
    absent = await ask("GET", "/v1/clients/client-id=nobody")
    assert (absent.status, "no client is measured" in absent.json["error"]) == (404, True)
    await tier.kill("1")
    absent = await ask("GET", "/v1/clients/client-id=nobody")
    assert (absent.status, "'1'" in absent.json["fix"]) == (404, True)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/clients?limit=x", "/v1/status?by=y", "/v1/connections?after=-1"),
        *("/v1/suggestions?since=1y", "/v1/progress?query=none", "/v1/pipelines?pipeline=none"),
        *("/v1/quotas/bad", "/v1/nothing", "/v1/clients/%ff"),
    ],
)
async def test_what_one_process_refuses_is_refused_alike(tier: GatewayWorld, ask: Ask, path: str):
    method = "DELETE" if "quotas/" in path else "GET"
    answer = await ask(method, path)
    session = aiohttp.UnixConnector(str(tier.endpoints["0"].path))
    async with aiohttp.ClientSession(connector=session) as direct:
        url = f"http://member{path}"
        async with direct.request(method, URL(url, encoded=True)) as alone:
            assert (answer.status, answer.json) == (alone.status, await alone.json())


async def test_a_change_is_made_at_the_first_member_in_the_name_of_who_asks(tier: GatewayWorld):
    tier.first = "1"
    forged = {AUTHOR: "root", PEER: "10.9.9.9", LEAVE_AUDIT: "1"}
    async with tier.asked(access=OPEN) as ask:
        put = await ask("PUT", ETL, json=BODY, headers=bearer("ops") | forged)
        assert (put.status, put.json["source"]) == (200, "override")
        pause = await ask("POST", "/v1/throttling", json={"off": "1h"}, headers=bearer("night"))
        assert pause.status == 200
        (second, first) = (await ask("GET", "/v1/audit")).json["changes"]
        assert (first["who"], first["address"]) == ("ops", "127.0.0.1")
        assert (second["who"], second["what"]) == ("night", "pauses")
        quotas = (await ask("GET", "/v1/quotas")).json["quotas"]
        assert "override" in {each["source"] for each in quotas}
        assert (await ask("DELETE", ETL, headers=bearer("ops"))).status == 200
        again = await ask("DELETE", ETL, headers=bearer("ops"))
        assert (again.status, again.json["error"]) == (
            404,
            "no override is in force for client-id=etl-orders",
        )
    assert [len(world.audit) for world in tier.worlds.values()] == [0, 3, 0]


async def test_what_says_who_asks_is_not_believed_over_tcp(world: AdminWorld):
    forged = {AUTHOR: "root", PEER: "10.9.9.9", LEAVE_AUDIT: "1"}
    async with serve(world.server()) as ask:
        assert (await ask("PUT", ETL, json=BODY, headers=forged)).status == 200
        for path in ("/member/changes", "/member/observed"):
            assert (await ask("POST", path, json=[])).status == 404
        (change,) = (await ask("GET", "/v1/audit")).json["changes"]
    assert (change["who"], change["address"]) == ("local", "127.0.0.1")


async def test_reports_go_to_the_owner_of_their_client(tier: GatewayWorld, ask: Ask):
    tier.owners |= {"etl": "2", "homeless": None, "gone": "7"}
    taken = {name: each.taken for name, each in tier.reports.items()}
    report = json.dumps({"client_id": "etl", "name": "x"}).encode()
    headers = {"Content-Type": "application/json"}
    answer = await ask("POST", REPORTS, data=report, headers=headers)
    assert (answer.status, answer.json["accepted"], taken["2"]) == (200, True, [report])
    for malformed in (
        b"{}",
        b'{"client_id": 7}',
        b'{"client_id": ["etl"]}',
        b'{"name"',
        b'{"a":' * 9999,
    ):
        await ask("POST", REPORTS, data=malformed, headers=headers)
        assert taken["0"].pop() == malformed
    refused = await ask("POST", REPORTS, data=b"[]", headers=headers)
    assert (refused.status, refused.json["reason"]) == (400, "malformed")
    assert (await ask("POST", REPORTS, data=b"{}")).status == 415
    for client_id in ("homeless", "gone"):
        answer = await ask("POST", REPORTS, json={"client_id": client_id})
        assert (answer.status, set(answer.json)) == (503, {"error", "fix"})
    await tier.kill("2")
    answer = await ask("POST", REPORTS, data=report, headers=headers)
    assert (answer.status, "'2'" in answer.json["error"]) == (503, True)


async def test_a_connection_is_closed_where_it_is_and_the_first_member_records_it(
    tier: GatewayWorld,
):
    connected = {"1": Connected([HELD]), "2": Connected([PLAIN])}
    servers = {name: {"connections": each} for name, each in connected.items()}
    for world in tier.worlds.values():
        world.now_ms = 60_000.0
    async with tier.asked(access=OPEN, servers=servers) as ask:
        listed = (await ask("GET", "/v1/connections")).json
        assert [(row["id"], row["member"]) for row in listed["connections"]] == [(7, "2"), (9, "1")]
        assert (listed["total"], listed["matching"], listed["held"]) == (2, 2, 1)
        assert listed["connections"][1]["held"]["rule"]["place"] == "quota-proxy.yaml:12"
        paged = (await ask("GET", "/v1/connections?after=7")).json
        assert ([row["id"] for row in paged["connections"]], paged["matching"]) == ([9], 1)
        closed = await ask("DELETE", "/v1/connections/9", headers=bearer("ops"))
        assert (closed.status, closed.json) == (200, {"closed": 9})
        assert connected["1"].listed == []
        (change,) = (await ask("GET", "/v1/audit")).json["changes"]
        assert (change["who"], change["what"]) == ("ops", "connection 10.0.0.9:50312")
        assert (change["before"]["user"], change["after"]) == ("Anna", None)
        again = await ask("DELETE", "/v1/connections/9", headers=bearer("ops"))
        assert (again.status, again.json["error"]) == (404, "no connection '9' is open")
        await tier.kill("1")
        away = await ask("DELETE", "/v1/connections/9", headers=bearer("ops"))
        assert away.status == 503
    assert [len(world.audit) for world in tier.worlds.values()] == [1, 0, 0]


async def test_the_log_level_is_that_of_all(tier: GatewayWorld, ask: Ask):
    try:
        answer = await ask("PUT", "/v1/log_level", json={"level": "debug"})
        assert (answer.status, answer.json) == (200, {"level": "debug"})
        shown = (await ask("GET", "/v1/log_level")).json
        assert (shown["level"], len(shown["levels"])) == ("debug", 3)
        assert (await ask("PUT", "/v1/log_level", json={"level": "loud"})).status == 400
        await tier.kill("2")
        partly = await ask("PUT", "/v1/log_level", json={"level": "info"})
        assert (partly.status, "'2'" in partly.json["error"]) == (502, True)
    finally:
        log_level.set("info")


async def test_ready_is_who_has_all_that_run_ready(tier: GatewayWorld, ask: Ask):
    assert (await ask("GET", "/readyz")).json == {"status": "ready"}
    tier.worlds["1"].warning = "no login"
    assert (await ask("GET", "/readyz")).json["warning"] == "no login"
    tier.worlds["1"].not_ready = "closed"
    answer = await ask("GET", "/readyz")
    assert (answer.status, answer.json["reason"]) == (503, "member '1': closed")
    status = (await ask("GET", "/v1/status")).json
    assert (status["ready"], status["not_ready_reason"]) == (False, "member 1: closed")
    await tier.kill("1")
    answer = await ask("GET", "/readyz")
    assert (answer.status, "'1' does not answer" in answer.json["reason"]) == (503, True)
    tier.mark_dead("1")
    answer = await ask("GET", "/readyz")
    assert (answer.status, answer.json["warning"]) == (200, "member '1' does not run")
    for name in ("0", "2"):
        tier.mark_dead(name)
    assert (await ask("GET", "/readyz")).status == 503
    assert (await ask("GET", "/healthz")).status == 200


async def test_the_rest_answers_when_one_does_not(tier: GatewayWorld, ask: Ask):
    tier.worlds["0"].connect("etl-orders")(MIB)
    await tier.kill("2")
    for path in ("/v1/status", "/v1/clients", "/v1/connections", "/v1/progress"):
        answer = await ask("GET", path)
        assert answer.status == 200, path
        (away,) = answer.json["unreachable"]
        assert (away["name"], "connected to" in away["why"]) == ("2", True)
        assert [each["answers"] for each in answer.json["members"]] == [True, True, False]
    assert (await ask("GET", "/metrics")).status == 200
    await tier.kill("0")
    put = await ask("PUT", ETL, json=BODY)
    assert (put.status, set(put.json)) == (503, {"error", "fix"})
    assert (await ask("GET", "/v1/quotas")).status == 200  # the same at all
    await tier.kill("1")
    assert (await ask("GET", "/v1/status")).status == 503
    assert (await ask("GET", "/v1/status?member=9")).status == 404


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{", id="half an answer"),
        pytest.param(b"no http\r\n\r\n", id="what is no HTTP"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{,", id="what is no JSON"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", id="another document"),
        pytest.param(None, id="silence"),
    ],
)
async def test_a_member_that_dies_in_mid_answer_is_named(
    tier: GatewayWorld, ask: Ask, sent: bytes | None
):
    await tier.kill("2")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if sent is None:
            await asyncio.sleep(LIMIT_S)
        else:
            writer.write(sent)
        writer.close()

    path = tier.endpoints["2"].path
    server = await asyncio.start_unix_server(answer, path)
    async with server:
        for asked in ("/v1/status", "/v1/connections"):
            merged = await asyncio.wait_for(ask("GET", asked), LIMIT_S)
            assert merged.status == 200, merged.text
            assert [each["name"] for each in merged.json["unreachable"]] == ["2"]
            assert [each["answers"] for each in merged.json["members"]] == [True, True, False]
        if sent is not None and b"Length: 2" not in sent:
            tier.first = "2"
            routed = await ask("PUT", ETL, json=BODY)
            assert (routed.status, "'2'" in routed.json["error"]) == (502, True)


async def test_what_all_have_seen_is_suggested_from_together(tier: GatewayWorld, ask: Ask):
    # One member has seen slow times, the other fast ones: the p99 of both is not their average.
    for name, rate, intervals in (("1", 100_000.0, 90), ("2", 9_000_000.0, 10)):
        world = tier.worlds[name]
        counter = world.instruments.bytes_total.of("default", "", "etl-new", "Fetch")
        world.sample()
        for _ in range(intervals):
            counter.inc(rate * 10)
            world.now_ms += 10_000.0
            world.sample()
    told = (await ask("GET", "/v1/suggestions?since=2h")).json
    (client,) = told["clients"]
    (quota,) = client["quotas"]
    assert (quota["intervals"], quota["total_bytes"]) == (100, 990_000_000)
    assert quota["p50"] < 110_000
    assert quota["p99"] == pytest.approx(9_000_000, rel=0.1)
    assert quota["rule"] == "rule 3 (quota-proxy.yaml:15)"
    assert "etl-new" in told["yaml"]
    (alone,) = (await ask("GET", "/v1/suggestions?member=1")).json["clients"]
    assert alone["quotas"][0]["intervals"] == 90


async def test_request_times_are_of_all_requests(tier: GatewayWorld, ask: Ask):
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

    tier.worlds["0"].request_times = [times([98, 0, 0, 0])]
    tier.worlds["1"].request_times = [times([0, 0, 2, 0])]
    (fetch,) = (await ask("GET", "/v1/status")).json["request_times"]
    assert fetch["measured"] == 100
    assert fetch["broker"]["p99_s"] == pytest.approx(0.055)
    assert HISTOGRAMS not in fetch


async def test_the_owner_has_the_charts_of_its_clients(tier: GatewayWorld, ask: Ask):
    for name in ("0", "1"):
        world = tier.worlds[name]
        send = world.connect("etl-orders")
        for _ in range(4):
            tick(world.history, world.now_ms)
            send(MIB)
            world.now_ms += 5000
    (row,) = (await ask("GET", "/v1/status")).json["clients"]
    assert len(row["history"]["rates"]) == 3
    assert row["history"]["bounds"] == [[0, 10 * MIB]]


async def test_members_may_come_and_go(tier: GatewayWorld, ask: Ask):
    gone = tier.endpoints.pop("2")
    assert len((await ask("GET", "/v1/status")).json["members"]) == 2
    tier.endpoints["2"] = replace(gone, name="3")
    assert [each["name"] for each in (await ask("GET", "/v1/status")).json["members"]] == [
        *("0", "1", "3")
    ]


async def test_who_looks_on_does_not_wait_again_for_a_silent_member(tier: GatewayWorld, ask: Ask):
    await tier.kill("2")
    asked = 0

    async def say_nothing(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1

    async with await asyncio.start_unix_server(say_nothing, tier.endpoints["2"].path):
        for _ in range(5):
            (away,) = (await ask("GET", "/v1/status")).json["unreachable"]
            assert "did not answer within 1 s" in away["why"]
    assert asked == 1


async def test_queries_and_pipelines_come_from_the_members_that_have_them(tier: GatewayWorld):
    spark, pipelines = spark_world.scene(), pipeline_world.scene()
    tier.worlds |= {"1": spark, "2": pipelines}
    servers = {"1": {"reports": spark}, "2": {"reports": pipelines}}
    async with tier.asked(servers=servers) as ask:
        progress = (await ask("GET", "/v1/progress")).json["queries"]
        assert names(progress) == ["1"] * 5
        (one,) = (await ask("GET", "/v1/progress?query=payments&limit=2")).json["queries"]
        assert (one["name"], one["totals"]["partitions"], len(one["partitions"])) == (
            *("payments", 4),
            2,
        )
        assert (await ask("GET", "/v1/progress?query=none")).status == 404
        found = (await ask("GET", "/v1/pipelines")).json["pipelines"]
        assert names(found) == ["2"] * 3
        (orders,) = (await ask("GET", "/v1/pipelines?pipeline=orders")).json["pipelines"]
        assert orders["completion"]["pending"]["full"] is True
        status = (await ask("GET", "/v1/status")).json
        assert (status["followed"], names(status["queries"])) == (5, ["1"] * 5)
        assert (status["pipelines_total"], names(status["pipelines"])) == (3, ["2"] * 3)
        direct = spark.server()
        async with serve(direct) as alone:
            of_one = (await alone("GET", "/v1/status")).json["queries"]
        assert [each["name"] for each in status["queries"]] == [each["name"] for each in of_one]
        assert status["pipelines"][0]["name"] == "orders"


async def test_metrics_are_those_of_each_member_as_they_are(tier: GatewayWorld, ask: Ask):
    labels = ("default", "", HOSTILE, "Fetch")
    for name, amount in (("0", 1.0), ("1", 20.0), ("2", 300.0)):
        tier.worlds[name].instruments.bytes_total.of(*labels).inc(amount)
        tier.worlds[name].instruments.throttle_seconds.labels("consumer_byte_rate").observe(amount)

    async def shown(query: str = "") -> dict[str, dict[str, float]]:
        """Return samples of each name by their member; each family must come once."""
        text = (await ask("GET", f"/metrics{query}")).text
        families = list(text_string_to_metric_families(text))
        assert len({family.name for family in families}) == len(families)
        found: dict[str, dict[str, float]] = {}
        for family in families:
            for sample in family.samples:
                of_name = found.setdefault(sample.name.removeprefix("kafka_quota_proxy_"), {})
                if sample.labels.get("client_id", HOSTILE) == HOSTILE:
                    of_name[sample.labels.get("member", "")] = sample.value
        return found

    for found in await asyncio.gather(*(shown() for _ in range(5))):
        assert found["bytes_total"] == {"0": 1.0, "1": 20.0, "2": 300.0}
        assert found["throttle_seconds_sum"] == {"0": 1.0, "1": 20.0, "2": 300.0}
        assert found["throttle_seconds_count"] == dict.fromkeys("012", 1.0)
        assert found["member_up"] == dict.fromkeys("012", 1.0)
    found = await shown("?member=1")
    assert found["bytes_total"] == {"1": 20.0}
    assert "member_up" not in found
    await tier.kill("2")
    tier.mark_dead("0")
    found = await shown()
    assert found["bytes_total"] == {"1": 20.0}
    assert found["member_up"] == {"0": 0.0, "1": 1.0, "2": 0.0}
    await tier.kill("1")
    assert (await shown())["member_up"] == dict.fromkeys("012", 0.0)
