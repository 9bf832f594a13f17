"""The API answers what the quota manager and the rule book know."""

from dataclasses import asdict, fields
from urllib.parse import quote

import pytest
from admin_world import CONSUMER, MIB, PRODUCER, REQUEST, AdminWorld, Ask, tick
from aiohttp import hdrs

from proxy.admin.server import AdminServer
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.rule_registry import RuleEntry, RuleOrigin, RuleRegistry
from proxy.quota.rules import AdaptiveSettings, QuotaManagerSettings, Rule

ETL = "/v1/quotas/client-id=etl-orders"
HOSTILE = (
    "<script>alert(1)</script>",
    "../../etc/passwd",
    "a/b?c#d",
    "100% = 1,5 & <default>",
    "line\r\nSet-Cookie: a=b",
    "\N{RIGHT-TO-LEFT OVERRIDE}\x00\x1b[31m",
    "ключ-\N{PILE OF POO}",
    "\"'`${x}{{y}}",
    " ",
    "",
)


async def test_clients_say_rate_bound_window_and_rule(world: AdminWorld, ask: Ask):
    send = world.connect("etl-orders", user="bob")
    send(5 * MIB)
    world.now_ms += 1000
    (row,) = (
        client
        for client in (await ask("GET", "/v1/clients")).json["clients"]
        if client["quota"] == CONSUMER
    )
    assert row == {
        "entity": "client-id=etl-orders",
        "quota": "consumer_byte_rate",
        "unit": "bytes_per_second",
        "rate": round(5 * MIB / 10, 1),
        "bound": 10 * MIB,
        "leased": None,
        "window_s": 10.0,
        "throttled": False,
        "enforced": True,
        "would_throttle": 0,
        "above_s": 0,
        "holds": 0,
        "held_s": 0.0,
        "hold_ends_in_s": None,
        "waiting": 0,
        "rule": {
            "selector": "client-id=etl-orders",
            "title": "rule 0 (quota-proxy.yaml:12)",
            "place": "quota-proxy.yaml:12",
            "source": "file",
            "by": None,
            "at": None,
            "until": None,
            "schedule": None,
        },
        "client_count": 1,
        "clients": [{"listener": "default", "user": "bob", "client_id": "etl-orders"}],
        "static_bound": None,
        "adaptive": None,
        **dict.fromkeys(("budget", "weight", "guaranteed", "ceiling")),
        **dict.fromkeys(("fair_share", "borrowed", "lent", "waits_for")),
    }


async def test_a_hold_is_shown_with_its_end(world: AdminWorld, ask: Ask):
    send = world.connect("etl-orders")
    send(200 * MIB)
    (held,) = (await ask("GET", "/v1/clients")).json["clients"]
    ends = held["hold_ends_in_s"]
    assert (held["throttled"], held["holds"]) == (True, 1)
    assert ends == held["held_s"] > 0
    world.now_ms += 600
    (held,) = (await ask("GET", "/v1/clients")).json["clients"]
    assert held["hold_ends_in_s"] == pytest.approx(ends - 0.6)
    world.now_ms += ends * 1000
    (over,) = (await ask("GET", "/v1/clients")).json["clients"]
    assert (over["hold_ends_in_s"], over["holds"]) == (None, 1)


async def test_clients_that_no_rule_bounds_are_listed(ask_unruled: Ask, unruled: AdminWorld):
    unruled.connect("etl-orders")(MIB)
    for client_id, user in (("ETL-orders", "Anna"), ("etl\u200b-orders", None), (None, None)):
        unruled.connect(client_id, user)(MIB)
    shown = [
        {"listener": "default", "user": "Anna", "client_id": "ETL-orders", "rate": None},
        {"listener": "default", "user": None, "client_id": "etl\u200b-orders", "rate": None},
        {"listener": "default", "user": None, "client_id": None, "rate": None},
    ]
    for path, expected in {
        "": shown,
        "?limit=2": shown[:2],
        "?filter=anna": shown[:1],
        "?filter=orders": shown[:2],
        "?filter=nobody": [],
    }.items():
        for where in ("clients", "status"):
            answer = (await ask_unruled("GET", f"/v1/{where}{path}")).json
            assert (answer["unbounded"], answer["unbounded_clients"]) == (3, expected), path
    metrics = (await ask_unruled("GET", "/metrics")).text
    assert 'kafka_quota_proxy_unbounded_clients{member="0"} 3.0' in metrics
    await ask_unruled("PUT", "/v1/quotas/client-id=%3Cdefault%3E", json={"consumer_byte_rate": 1})
    sum(unruled.quotas.settling())
    assert (await ask_unruled("GET", "/v1/clients")).json["unbounded_clients"] == []


async def test_an_entity_says_why_its_rule_and_no_other(world: AdminWorld, ask: Ask):
    world.connect("etl-orders", user="alice")(MIB)
    answer = await ask("GET", "/v1/clients/client-id%3Detl-orders")
    (quota,) = answer.json["quotas"]
    (client,) = quota["connected"]
    assert (client["client_id"], client["user"]) == ("etl-orders", "alice")
    by_kind = {each["quota"]: each["rules"] for each in client["quotas"]}
    assert [(rule["selector"], rule["chosen"], rule["reason"]) for rule in by_kind[CONSUMER]] == [
        ("client-id=etl-orders", True, "applies to client-id=etl-orders"),
        (
            "client-id-prefix=consumer-reports-",
            False,
            "the client-id 'etl-orders' does not begin with 'consumer-reports-'",
        ),
        ("client-id=<default>", False, "rule 0 (quota-proxy.yaml:12) comes first"),
    ]
    assert [rule["selector"] for rule in by_kind[PRODUCER]] == ["user=alice,client-id=<default>"]
    assert by_kind[PRODUCER][0]["bound"] == 2 * MIB


async def test_a_topic_has_an_override_and_a_row_of_its_own(world: AdminWorld, ask: Ask):
    path = "/v1/quotas/client-id=etl-orders,topic=clicks"
    assert (await ask("PUT", path, json={CONSUMER: "1MiB"})).status == 200
    world.connect("etl-orders")(MIB)
    identity = ClientIdentity("default", None, "etl-orders")
    client = world.quotas.client(identity)
    meter = client.topic_meter(QuotaKind.CONSUMER_BYTE_RATE, "clicks", world.now_ms)
    client.charge_at(meter, MIB, world.now_ms)
    answer = await ask("GET", "/v1/clients/client-id%3Detl-orders%2Ctopic%3Dclicks")
    rows = {row["entity"]: row for row in answer.json["quotas"]}
    row = rows["client-id=etl-orders,topic=clicks"]
    assert (row["bound"], row["rule"]["selector"]) == (MIB, "client-id=etl-orders,topic=clicks")
    (connected,) = row["connected"]
    chosen = [
        rule["reason"]
        for quota in connected["quotas"]
        for rule in quota["rules"]
        if rule["chosen"] and rule["selector"] == row["rule"]["selector"]
    ]
    assert chosen == ["applies to its bytes of topic clicks"]
    client.close()


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("topic=a%2Fb", {CONSUMER: "1MiB"}, 'topic: "a/b" is no name of a topic'),
        ("topic=a,topic-prefix=b", {CONSUMER: "1MiB"}, "has both topic and topic-prefix"),
        ("topic=a", {"request_percentage": 5}, "request_percentage is of clients, not of what"),
        ("topic=a", {"max_connections": 5}, "max_connections is of clients, not of what they"),
    ],
)
async def test_what_is_no_rule_for_a_topic_is_refused(ask: Ask, path: str, body: dict, error: str):
    answer = await ask("PUT", f"/v1/quotas/{path}", json=body)
    assert answer.status == 400
    assert error in answer.json["error"]


@pytest.mark.parametrize("client_id", HOSTILE)
async def test_hostile_client_ids_come_back_as_they_are(
    world: AdminWorld, ask: Ask, client_id: str
):
    world.connect(client_id)(MIB)
    (row,) = (await ask("GET", "/v1/clients")).json["clients"]
    assert row["clients"] == [{"listener": "default", "user": None, "client_id": client_id}]
    answer = await ask("GET", f"/v1/clients/{quote(row['entity'], safe='')}")
    assert answer.status == 200
    assert answer.json["quotas"][0]["connected"][0]["client_id"] == client_id
    assert set(answer.headers) == set((await ask("GET", "/v1/quotas")).headers)


@pytest.mark.parametrize("client_id", [each for each in HOSTILE if each])
async def test_hostile_client_ids_can_be_bounded(world: AdminWorld, ask: Ask, client_id: str):
    selector = f"client-id={quote(client_id, safe='')}"
    path = f"/v1/quotas/{quote(selector, safe='')}"
    put = await ask("PUT", path, json={"consumer_byte_rate": "1MiB"})
    assert put.status == 200, put.text
    assert put.json["keys"] == {"client-id": client_id}
    match = world.quotas.table.match(CONSUMER, ClientIdentity("default", None, client_id))
    assert match is not None
    assert match.rule.client_id == client_id
    assert (await ask("DELETE", path)).status == 200


async def test_the_most_pressing_clients_come_first_and_can_be_filtered(
    world: AdminWorld, ask: Ask
):
    for number in range(5):
        world.connect(f"job-{number}", user="Anna" if number == 3 else None)(number * MIB)
    world.connect("etl-orders")(200 * MIB)
    answer = await ask("GET", "/v1/clients?limit=2")
    assert [each["entity"] for each in answer.json["clients"]] == [
        "client-id=etl-orders",
        "client-id=job-4",
    ]
    assert answer.json["total"] == 6
    for text in ("job-3", "JOB-3", "anna"):
        found = (await ask("GET", f"/v1/clients?filter={text}")).json["clients"]
        assert [each["entity"] for each in found] == ["client-id=job-3"]
    assert (await ask("GET", "/v1/clients?filter=nobody")).json["clients"] == []


@pytest.mark.parametrize("limit", ["-1", "x", "1001", "9" * 50, "%D9%A3", ""])
async def test_a_bad_limit_is_refused(ask: Ask, limit: str):
    answer = await ask("GET", f"/v1/clients?limit={limit}")
    assert (answer.status, set(answer.json)) == (400, {"error", "fix"})
    assert answer.json["error"].endswith(" is no number from 0 to 1000")


async def test_a_rule_is_shown_with_all_that_it_has(world: AdminWorld, ask: Ask):
    bounds = {kind: float(number) for number, kind in enumerate(QuotaKind, 1)}
    rule = Rule(
        client_id="all",
        bounds=bounds,
        adaptive=AdaptiveSettings(batch_interval_ms=2000.0),
        expected=True,
        enforce=False,
        place="f:1",
    )
    await world.rules.use_file(QuotaManagerSettings(rules=(rule,)))
    (shown,) = (await ask("GET", "/v1/quotas")).json["quotas"]
    assert shown["bounds"] == {str(kind): bound for kind, bound in bounds.items()}
    assert (shown["expected"], shown["enforce"]) == (True, False)
    assert shown["adaptive"] == asdict(rule.adaptive)
    until = {"until": "2h", "consumer_byte_rate": 1}
    made = (await ask("PUT", "/v1/quotas/client-id=all", json=until)).json
    assert (made["until"] is not None, made["expected"], made["enforce"]) == (True, True, False)
    hidden = {"rule", "by", "at_s", "until_s", "enforce", "source", "entity_keys"}  # other names
    attributes = {each.name for each in (*fields(Rule), *fields(RuleEntry))} - hidden
    keys = {"user", "client_id", "client_id_prefix", "listener", "number", "topic", "topic_prefix"}
    assert attributes - keys <= made.keys(), "what a rule gets one day is to be shown, too"


async def test_an_override_holds_at_once_and_goes_again(world: AdminWorld, ask: Ask):
    body = {"consumer_byte_rate": "1MiB", "request_percentage": 12.5, "by": "anna"}
    put = await ask("PUT", ETL, json=body)
    assert put.status == 200
    assert put.json["bounds"] == {"consumer_byte_rate": MIB, "request_percentage": 12.5}
    assert (put.json["source"], put.json["by"], put.json["in_force"]) == ("override", "anna", True)
    assert put.json["at"].endswith("+00:00")

    listed = [
        (rule["source"], rule["in_force"])
        for rule in (await ask("GET", "/v1/quotas")).json["quotas"]
        if rule["selector"] == "client-id=etl-orders"
    ]
    assert listed == [("override", True), ("file", False)]
    world.connect("etl-orders")(MIB)
    (shown,) = (await ask("GET", "/v1/clients")).json["clients"]
    assert (shown["bound"], shown["rule"]["source"], shown["rule"]["by"]) == (
        MIB,
        "override",
        "anna",
    )

    deleted = await ask("DELETE", ETL)
    assert (deleted.status, deleted.json) == (200, {"deleted": "client-id=etl-orders"})
    assert all(entry.source is RuleOrigin.FILE for entry in world.rules.composed.entries)


async def test_an_override_is_kept(world: AdminWorld, ask: Ask):
    await ask("PUT", "/v1/quotas/user=bob", json={"producer_byte_rate": 70_000, "scope": "shared"})
    again = RuleRegistry(world.quotas, world.store, world.quotas.settings)
    (entry,) = (each for each in again.composed.entries if each.source is RuleOrigin.OVERRIDE)
    assert (entry.rule.user, entry.rule.scope) == ("bob", "shared")
    assert dict(entry.rule.bounds) == {PRODUCER: 70_000.0}


async def test_what_is_not_overridden_cannot_be_deleted(ask: Ask):
    answer = await ask("DELETE", ETL)
    assert answer.status == 404
    assert answer.json["fix"] == "see GET /v1/quotas; rules of the file are changed in the file"


async def test_a_change_that_cannot_be_kept_is_not_made(world: AdminWorld, ask: Ask):
    assert (await ask("PUT", ETL, json={"consumer_byte_rate": "1MiB"})).status == 200
    before = world.rules.composed.entries
    world.store.is_full = True
    for method in ("PUT", "DELETE"):
        answer = await ask(method, ETL, json={"consumer_byte_rate": "2MiB"})
        assert (answer.status, answer.json) == (
            503,
            {"error": "the disk is full", "fix": "make room"},
        )
    assert world.rules.composed.entries == before


async def test_the_status_has_all_that_the_page_shows(world: AdminWorld, ask: Ask):
    tick(world.history, world.now_ms)
    world.connect("etl-orders")(200 * MIB)
    world.connect("dashboards")(30.0, REQUEST)
    world.now_ms += 5000
    tick(world.history, world.now_ms)
    world.not_ready = "the Kafka cluster does not answer"
    status = (await ask("GET", "/v1/status")).json
    assert (status["ready"], status["not_ready_reason"]) == (False, world.not_ready)
    assert (status["uptime_s"], status["throttle_mode"]) == (5.0, "delay")
    assert (status["bounded"], status["throttled"], status["held"]) == (2, 1, 1)
    assert status["delay_queues"] == {"fetch": 4, "produce": 1, "request": 0}
    assert status["listeners"][1] == {
        "name": "tenants",
        "host": "::1",
        "port": 19093,
        "tls": True,
        "connections": 3,
    }
    assert status["brokers"][0] == {"node_id": 1, "host": "broker-1.kafka.example", "port": 9092}
    assert [load["result"] for load in status["config_loads"]] == ["failed", "ok"]
    first = status["clients"][0]
    assert first["history"]["rates"] == [first["rate"]]
    assert first["history"]["bounds"] == [[0, 10 * MIB]]


async def test_metrics_and_health_stay_as_they_were(world: AdminWorld, ask: Ask):
    metrics = await ask("GET", "/metrics")
    assert metrics.headers[hdrs.CONTENT_TYPE] == "text/plain; version=0.0.4; charset=utf-8"
    assert "kafka_quota_proxy_bytes_total" in metrics.text
    assert (await ask("GET", "/healthz")).json == {"status": "up"}
    assert (await ask("GET", "/readyz")).json == {"status": "ready"}
    world.not_ready = "closed"
    ready = await ask("GET", "/readyz")
    assert (ready.status, ready.json) == (503, {"status": "not ready", "reason": "closed"})


async def test_what_is_wrong_with_a_proxy_that_is_ready_is_said(world: AdminWorld, ask: Ask):
    assert (await ask("GET", "/v1/status")).json["warning"] is None
    world.warning = "no login"
    ready = await ask("GET", "/readyz")
    assert (ready.status, ready.json) == (200, {"status": "ready", "warning": "no login"})
    assert (await ask("GET", "/v1/status")).json["warning"] == "no login"


async def test_a_server_that_never_started_can_be_stopped(world: AdminWorld):
    server: AdminServer = world.server()
    await server.stop()
