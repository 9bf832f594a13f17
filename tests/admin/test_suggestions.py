"""Rules that are suggested: what they allow, for whom, and that a configuration takes them."""

import asyncio
from pathlib import Path

import pytest
import yaml
from admin_world import CONSUMER, MIB, PRODUCER, AdminWorld, Ask, running, serve
from hypothesis import given
from hypothesis import strategies as st

from proxy.admin.suggestions import SUGGESTED_HEADROOM, round_up
from proxy.cli import main
from proxy.cluster.upstream import NonRetriableError
from proxy.config import load_config
from proxy.quota.entities import ClientIdentity
from proxy.quota.rule_registry import make_override
from proxy.quota.rules import (
    Budget,
    QuotaManagerSettings,
    Rule,
    RuleTable,
    Share,
    rule_mismatch,
)
from proxy.quota.values import parse_size
from proxy.usage.observed_usage import ObservedUsage

PATH = "/v1/suggestions"
RUN = "92017897-daab-4d28-a2d5-5cc4133bee8f"
EXECUTOR = f"consumer-spark-kafka-source-{RUN}-1-executor-1"
HOSTILE = (
    "line\nbreak: [",
    "next\x85line and\u2028more\u2029",
    "\x00\x1b[31m",
    "\"quotes\" and 'more' \\ # no comment",
    "%, = & <default>",
    "\N{PILE OF POO} ключ \N{RIGHT-TO-LEFT OVERRIDE}",
    "2026-11-22",
    "true",
    "~",
    " ",
)


def move(
    world: AdminWorld,
    client_id: str,
    *sizes_mib: float,
    api: str = "Fetch",
    user: str = "",
    listener: str = "default",
) -> None:
    """Let a client move so many MiB in each ten seconds."""
    world.sample()
    for size in sizes_mib:
        child = world.instruments.bytes_total.of(listener, user, client_id, api)
        child.inc(size * MIB)
        world.now_ms += 10_000
        world.sample()


def configured(folder: Path, text: str) -> QuotaManagerSettings:
    """Load a configuration with the suggested section."""
    listener = "{name: default, bind: '127.0.0.1:0', advertised_host: h, broker_ports: 0}"
    file = folder / "quota-proxy.yaml"
    head = f"cluster: {{bootstrap_servers: [b:9092]}}\nlisteners: [{listener}]\n"
    file.write_text(head + "state: {kind: memory}\n" + text)
    return load_config(file).quota_settings


def bounds(
    settings: QuotaManagerSettings, client_id: str, user: str | None = None
) -> list[float | None]:
    table, identity = RuleTable(settings.rules), ClientIdentity("default", user, client_id)
    found = (table.match(kind, identity) for kind in (CONSUMER, PRODUCER))
    kinds = (CONSUMER, PRODUCER)
    return [
        match.rule.bounds[kind] if match else None for match, kind in zip(found, kinds, strict=True)
    ]


@given(st.floats(0, 1e13))
def test_a_rounded_bound_is_no_lower_and_not_much_higher(rate: float):
    size = parse_size(round_up(rate))
    assert max(rate, 100 * 1024) <= size <= max(rate, 100 * 1024) * 1.1 + 1
    digits = round_up(rate).rstrip("KMGiB").replace(".", "").strip("0")
    assert len(digits) <= 2


@pytest.mark.parametrize(
    ("rate", "bound"),
    [
        (0.0, "100KiB"),
        (102_401.0, "110KiB"),
        (1000 * 1024.0, "1000KiB"),
        (1001 * 1024.0, "1MiB"),
        (1.44 * MIB, "1.5MiB"),
        (1.5 * MIB, "1.5MiB"),
        (1.5 * MIB + 1, "1.6MiB"),
        (9.91 * MIB, "10MiB"),
        (101 * MIB, "110MiB"),
        (1030 * MIB, "1.1GiB"),
        (123_456 * 1024 * MIB, "130000GiB"),
    ],
)
def test_a_bound_has_two_digits(rate: float, bound: str):
    assert round_up(rate) == bound


async def test_a_bound_is_the_p99_with_headroom(world: AdminWorld, ask: Ask, tmp_path: Path):
    move(world, "new-job", *[10.0] * 98, 20.0, 900.0)
    move(world, "new-job", *[30.0] * 3, api="Produce")
    answer = (await ask("GET", PATH)).json
    settings = configured(tmp_path, answer["yaml"])
    read, written = bounds(settings, "new-job")
    assert 2 * MIB * SUGGESTED_HEADROOM <= read <= 2 * MIB * SUGGESTED_HEADROOM * 1.1 * 1.4
    assert 3 * MIB * SUGGESTED_HEADROOM <= written <= 3 * MIB * SUGGESTED_HEADROOM * 1.1 * 1.4
    assert bounds(settings, "else") == [None, None]
    (client,) = answer["clients"]
    figures = {each["quota"]: each for each in client["quotas"]}
    assert (client["keys"], client["example"]) == ({"client-id": "new-job"}, "new-job")
    assert figures[CONSUMER]["intervals"] == 100
    assert figures[CONSUMER]["p50"] == pytest.approx(MIB, rel=0.1)
    assert figures[CONSUMER]["peak"] == 90 * MIB
    assert figures[CONSUMER]["total_bytes"] == 1900 * MIB
    assert "peak 90 MiB/s" in answer["yaml"]
    assert "1.86 GiB in 0.278 h with traffic" in answer["yaml"]


async def test_executors_get_one_bound_together(world: AdminWorld, ask: Ask, tmp_path: Path):
    for number in (1, 2, 3):
        move(world, f"{EXECUTOR[:-1]}{number}", 10.0)
    text = (await ask("GET", PATH)).json["yaml"]
    (rule,) = configured(tmp_path, text).rules
    assert (rule.client_id_prefix, rule.scope) == ("consumer-spark-kafka-source-", "shared")
    other = EXECUTOR.replace("92017897", "00000000")
    assert rule_mismatch(rule.keys, ClientIdentity("l", None, other)) is None


async def test_who_has_no_rule_comes_first(unruled: AdminWorld, ask_unruled: Ask, tmp_path: Path):
    move(unruled, "etl-orders", 900.0)
    move(unruled, "small", 1.0)
    move(unruled, "large", 2.0)
    move(unruled, "large", 3.0, user="anna")
    answer = (await ask_unruled("GET", PATH)).json
    assert [each["keys"] for each in answer["clients"]] == [
        {"user": "anna", "client-id": "large"},
        {"client-id": "large"},
        {"client-id": "small"},
        {"client-id": "etl-orders"},
    ]
    walked: list[object] = []
    cursor = ""
    while cursor is not None:
        page = (await ask_unruled("GET", f"{PATH}?limit=1&cursor={cursor}")).json
        walked += [each["keys"] for each in page["clients"]]
        cursor = page["next"]
    keys = [("etl-orders", ""), ("large", "anna"), ("large", ""), ("small", "")]
    assert sorted((each["client-id"], each.get("user", "")) for each in walked) == sorted(keys)
    assert answer["clients"][0]["quotas"][0]["rule"] is None
    assert answer["yaml"].count("NO RULE BOUNDS IT") == 3
    assert [rule.keys for rule in configured(tmp_path, answer["yaml"]).rules] == [
        {"user": "anna", "client-id": "large"},
        {"client-id": "large"},
        {"client-id": "small"},
    ]
    assert '# - client-id: "etl-orders"' in answer["yaml"]
    held = 'held to 10MiB per second by "client-id=etl-orders", quota-proxy.yaml:12'
    assert held in answer["yaml"]
    await unruled.rules.put(
        make_override({"client-id": "etl-orders"}, {CONSUMER: MIB}, enforce=False)
    )
    assert "not enforced: 1MiB per second by" in (await ask_unruled("GET", PATH)).json["yaml"]


@pytest.mark.parametrize("client_id", HOSTILE)
async def test_hostile_names_stay_names(
    world: AdminWorld, ask: Ask, tmp_path: Path, client_id: str
):
    move(world, client_id, 10.0)
    move(world, f"{client_id}{RUN}", 10.0)
    text = (await ask("GET", PATH)).json["yaml"]
    assert all(char.isprintable() for line in text.split("\n") for char in line)
    one, together = configured(tmp_path, text).rules
    assert {one.client_id, together.client_id} == {client_id, None}
    assert {one.client_id_prefix, together.client_id_prefix} == {client_id, None}


async def test_clients_that_no_rule_can_name_are_only_told(
    world: AdminWorld, ask: Ask, tmp_path: Path
):
    for client_id in ("", RUN, "<default>"):
        move(world, client_id, 10.0)
    text = (await ask("GET", PATH)).json["yaml"]
    assert configured(tmp_path, text).rules == ()
    assert text.count("No rule can name these clients alone") == 3


async def test_nothing_was_seen(ask: Ask, tmp_path: Path):
    answer = (await ask("GET", PATH)).json
    assert (answer["clients"], answer["since_s"]) == ([], 86_400)
    assert configured(tmp_path, answer["yaml"]).rules == ()


@pytest.mark.parametrize("since", ["", "24", "soon", "8000h", "-1h", "0"])
async def test_a_bad_time_is_refused(ask: Ask, since: str):
    answer = await ask("GET", f"{PATH}?since={since}")
    assert answer.status == 400
    assert answer.json["error"].startswith("since: ")


async def test_the_command_prints_rules(
    world: AdminWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    move(world, "new-job", 10.0)
    async with running(world.server()) as url:
        assert await asyncio.to_thread(main, ["suggest", "--url", url, "--since", "1h"]) == 0
        text = capsys.readouterr().out
        assert await asyncio.to_thread(main, ["suggest", "--url", url, "--since", "1"]) == 2
        assert "no unit" in capsys.readouterr().err
    assert "in the last 1h" in text
    (rule,) = configured(tmp_path, text).rules
    assert rule.client_id == "new-job"
    assert yaml.safe_load(text)["quotas"]["rules"][0]["consumer_byte_rate"] == "1.5MiB"


async def test_who_is_left_out_is_counted(world: AdminWorld, ask: Ask):
    world.max_clients = 1
    for number in range(4):
        move(world, f"c{number}", 1.0)
    text = (await ask("GET", PATH)).json["yaml"]
    assert "# 1 clients or more are left out" in text


async def test_a_client_in_a_budget_stays_in_it(tmp_path: Path):
    adhoc = Budget(name="adhoc", bounds={CONSUMER: 100 * MIB})
    world = AdminWorld((Rule(client_id="<default>", bounds={}, share=Share(adhoc)),))
    move(world, "new-job", 10.0)
    async with serve(world.server()) as ask:
        text = (await ask("GET", PATH)).json["yaml"]
    assert 'held to 100MiB per second by "client-id=<default>"' in text
    budgets = "quotas:\n  budgets: [{name: adhoc, consumer_byte_rate: 100MiB}]\n"
    (rule,) = configured(tmp_path, text.replace("quotas:\n", budgets)).rules
    assert (rule.client_id, rule.share.budget.name) == ("new-job", "adhoc")


async def test_hashed_names_get_no_rule(world: AdminWorld, ask: Ask, tmp_path: Path):
    world.meter.hash_key = b"0123456789abcdef"
    move(world, "new-job", 10.0)
    answer = (await ask("GET", PATH)).json
    assert configured(tmp_path, answer["yaml"]).rules == ()
    assert "names are hashed" in answer["yaml"]
    assert answer["clients"][0]["keys"] == {}


async def test_without_records_it_is_said_how_to_get_them(world: AdminWorld):
    async with serve(world.server(observe=None)) as ask:
        answer = await ask("GET", PATH)
    assert answer.status == 404
    assert "usage: {topic: quota-proxy-usage}" in answer.json["fix"]


async def test_records_that_cannot_be_read_are_said(world: AdminWorld):
    async def refuse(since_s: float) -> ObservedUsage:
        raise NonRetriableError(f"TOPIC_AUTHORIZATION_FAILED in {since_s:g} s", 29)

    async with serve(world.server(observe=refuse)) as ask:
        answer = await ask("GET", f"{PATH}?since=1h")
    assert answer.status == 503
    assert "TOPIC_AUTHORIZATION_FAILED in 3600 s" in answer.json["error"]


async def test_what_was_not_read_is_said(world: AdminWorld):
    async def observe(_: float) -> ObservedUsage:
        return ObservedUsage(10, is_cut=True, unread=3)

    async with serve(world.server(observe=observe)) as ask:
        text = (await ask("GET", PATH)).json["yaml"]
    assert "# Not all records could be read" in text
    assert "# 3 messages of the topic are no records" in text
