"""The report, on records whose figures are known."""

import csv
import re
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from metered.messages import FIRST, as_messages, end_ms, record
from pyspark.sql import SparkSession

from proxy.spark.usage.command_line import UsageInputError
from proxy.spark.usage.record_frames import StoredCounts, store_records
from proxy.spark.usage.teams import parse_teams, read_teams
from proxy.spark.usage.usage_figures import DateRange
from proxy.spark.usage.usage_report import write_report

pytestmark = pytest.mark.slow

WEEKS = DateRange(FIRST, FIRST + timedelta(13))
TEAMS = {
    "prices": {"currency": "EUR", "read_per_gib": 0.02, "write_per_gib": 0.03},
    "teams": [
        {"name": "analytics", "users": ["alice"], "client-id-prefixes": ["notebook-"]},
        {"name": "etl", "client-ids": ["etl"], "topics": ["orders"]},
        {"name": "idle", "client-ids": ["none"]},
    ],
}
GIB = 2**30
RATED = {"rates": {"100": 1}}


class Reported:
    """What a report says."""

    def __init__(self, out: Path, notes: list[str]) -> None:
        with (out / "usage.csv").open(newline="") as file:
            self.rows = {row["team"]: row for row in csv.DictReader(file)}
        self.page = (out / "usage.html").read_text()
        self.rules = yaml.safe_load((out / "suggested-rules.yaml").read_text())["quotas"]["rules"]
        self.notes = "\n".join(notes)

    def total(self, column: str) -> float:
        return sum(float(row[column]) for row in self.rows.values())


@pytest.fixture
def report(spark: SparkSession, tmp_path: Path) -> Callable[..., Reported]:
    """`report(values, teams=None, span=WEEKS, rules=())` stores them all, and reports."""

    def make(
        values: list[Any], teams: Any = None, span: DateRange = WEEKS, rules: Any = ()
    ) -> Reported:
        folder, out = str(tmp_path / "parquet"), tmp_path / "out"
        out.mkdir(exist_ok=True)
        store_records(as_messages(spark, values), folder)
        given = None if teams is None else parse_teams(teams, "teams.yaml")
        return Reported(out, write_report(spark, folder, span, out, given, rules)[1])

    return make


def test_teams_have_what_is_theirs_and_all_adds_up(report: Callable[..., Reported]) -> None:
    values = [
        record(0, bytes=2 * GIB, client_id="x", user="alice", requests=5, connections=2),
        record(1, bytes=GIB, client_id="notebook-7", direction="write", held_seconds=1.5),
        record(2, bytes=GIB, client_id="etl", topic=None),
        record(3, bytes=GIB, client_id="y", topic="orders"),
        record(4, bytes=7, client_id="z", topic="other", would_be_seconds=2),
        record(5, bytes=GIB, client_id="etl", user="alice", sampled=True),
    ]
    found = report(values, TEAMS)
    assert list(found.rows) == ["analytics", "etl", "idle", "no team"]
    analytics, etl, idle, rest = found.rows.values()
    assert (analytics["read_bytes"], analytics["written_bytes"]) == (str(3 * GIB), str(GIB))
    assert float(analytics["cost"]) == pytest.approx(3 * 0.02 + 0.03)
    assert (analytics["requests"], analytics["connections"]) == ("7", "2")
    assert (analytics["clients"], analytics["held_seconds"]) == ("3", "1.5")
    assert (etl["read_bytes"], etl["currency"]) == (str(2 * GIB), "EUR")
    assert (idle["read_bytes"], idle["cost"]) == ("0", "0.0")
    assert (rest["read_bytes"], rest["would_be_held_seconds"]) == ("7", "2.0")
    whole = sum(each["bytes"] for each in values)
    assert found.total("read_bytes") + found.total("written_bytes") == whole
    assert "4 GiB fit entries of two teams" in found.notes  # alice's, and a notebook's, of orders
    assert "7 B (0.0%) are of no team" in found.notes
    assert "13 of 14 days have no records at all: 2026-10-02, " in found.notes
    assert "by sampling" in found.notes


def test_percentiles_of_merged_sketches_are_at_most_5_percent_off(
    report: Callable[..., Reported],
) -> None:
    rates = [1000 * number for number in range(1, 1001)]

    def sketch(part: list[int]) -> dict[str, int]:
        counts: dict[str, int] = {}
        for rate in part:
            bucket = 0
            while 1.05**bucket < rate:
                bucket += 1
            counts[str(bucket)] = counts.get(str(bucket), 0) + 1
        return counts

    values = [
        record(number, day=number, rates=sketch(rates[number::4]), peak=max(rates[number::4]))
        for number in range(4)
    ]
    row = report(values).rows["etl"]
    assert float(row["read_p95"]) == pytest.approx(950_000, rel=0.05)
    assert float(row["read_p99"]) == pytest.approx(990_000, rel=0.05)
    assert (row["read_peak"], row["write_p99"]) == ("1000000", "0")


def test_rules_fit_the_p99_and_name_what_is_made_anew_by_its_beginning(
    report: Callable[..., Reported],
) -> None:
    anew = "spark-x-92017897-daab-4d28-a2d5-5cc4133bee8f-1-executor-{}"
    rates = {"rates": {"300": 100}, "peak": 2_200_000.0}
    values = [
        record(0, bytes=9000, **rates),
        record(1, client_id=anew.format(1), **rates),
        record(2, client_id=anew.format(2), direction="write", **rates),
        record(3, client_id="", **rates),
        record(4, client_id="4f2a", hashed=True, **rates),
        record(5, client_id='="\n{{', user="bob", **rates),
    ]
    found = report(values)
    least = 1.5 * min(1.05**300, 2_200_000)
    assert least <= 3.3 * 2**20
    assert {"client-id": "etl", "consumer_byte_rate": "3.2MiB"} in found.rules
    assert found.rules[1:] == [
        {
            "client-id-prefix": "spark-x-",
            "scope": "shared",
            "consumer_byte_rate": "3.2MiB",
            "producer_byte_rate": "3.2MiB",
        },
        {"user": "bob", "client-id": '="\n{{', "consumer_byte_rate": "3.2MiB"},
    ]
    assert "Names are hashed" in found.notes
    assert "'=\"\n{{ (bob)" in found.rows  # no formula


def test_rates_of_those_who_are_several_are_added_up_in_each_interval(
    report: Callable[..., Reported],
) -> None:
    anew = "spark-92017897-daab-4d28-a2d5-5cc4133bee8f-executor-{}"
    values = [
        record(4 * minute + number, minute=minute + 1, client_id=client_id, peak=rate, **RATED)
        for minute in range(2)
        for number, (client_id, rate) in enumerate(
            [(anew.format(1), 100.0), (anew.format(2), 200.0), ("notebook-1", 50.0)]
        )
    ]
    values.append(record(9, minute=1, client_id="notebook-1", direction="write", peak=7.0))
    alone = report(values).rows
    assert alone["spark-…"]["read_peak"] == alone["spark-…"]["read_p99"] == "300"
    assert alone["notebook-1"]["read_peak"] == "50"

    teams = {"teams": [{"name": "a", "client-id-prefixes": ["spark-", "notebook-"]}]}
    row = report([], teams).rows["a"]
    assert (row["read_peak"], row["write_peak"], row["busy_seconds"]) == ("350", "7", "60")


def test_growth_is_that_of_the_last_seven_days(report: Callable[..., Reported]) -> None:
    values = [record(day, day=day, bytes=100 if day < 7 else 150) for day in range(14)]
    assert report(values).rows["etl"]["growth_percent"] == "50.0"
    week = DateRange(FIRST + timedelta(3), WEEKS.last)
    assert report([], span=week).rows["etl"]["growth_percent"] == ""


def test_quotas_that_are_too_small_or_unused_are_told_of(report: Callable[..., Reported]) -> None:
    busy = {"rates": {"100": 6}, "peak": 100.0}
    values = [
        record(0, rule="small", held_seconds=30, **busy),
        record(1, rule="good", held_seconds=1, **busy),
    ]
    page = report(values, rules=["small", "good", "spare"]).page
    found = dict(re.findall(r'<td class="text">(\w+)</td><td class="text">([\w ]*)</td>', page))
    assert found.items() >= {"small": "too small", "good": "", "spare": "unused"}.items()


def test_what_is_doubtful_is_said(report: Callable[..., Reported], spark: SparkSession) -> None:
    soon = (date.today() - FIRST).days + 30  # noqa: DTZ011 - whatever the time zone
    far = 200_000  # days from now, whenever that is
    values: list[Any] = [
        record(2),
        record(3, day=1, start_ms=end_ms(5)),
        record(7, day=2),
        record(8, day=soon),
        record(18, day=far),
        {**record(9), "schema_version": 2, "bytes": "new"},
        {**record(10), "bytes": -1},
        {**record(11), "rates": {"high": 1}},
        *({**record(13 + number), "requests": 2**62} for number in range(2)),
        {**record(15), "connections": 2**63 - 1},
        {**record(16), "rates": {"1": 2**63 - 1}},
        {**record(17), "held_seconds": "NaN"},
        record(2**63 - 1),
        {**record(12), "topic": 7, "bytes": [1]},
        b'{"schema_version": 1, "memb',
        b"\xff\x00",
        b"[]",
        b"{}",
        None,
    ]
    found = report(values)
    assert found.total("read_bytes") == 3000
    for said in (
        "11 of 14 days have no records at all",
        "5 records are missing, by gaps in the numbers of host/0",
        "15 messages were rejected and are in no sum: 8 a field is missing or has an impossible "
        "value, 4 damaged: not JSON, or a field of another type, 2 no usage record, 1 schema "
        "version newer than 1",
        "1 records start after their end",
        "Records of days to come are not counted",
        "each client is its own team",
    ):
        assert said in found.notes, found.notes
        assert said in found.page


def test_days_that_cannot_be_have_no_folders(spark: SparkSession, tmp_path: Path) -> None:
    values = [record(0), *(record(1, day=far) for far in (-20_000, -1000, 400_000))]
    for _ in range(2):
        store_records(as_messages(spark, values), str(tmp_path))
    folders = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/day=*")}
    assert folders == {f"usage/day={FIRST}", "rejected/day=2026-01-01"}
    assert spark.read.parquet(str(tmp_path / "rejected")).count() == 3


def test_doubles_are_left_out_now_and_later(spark: SparkSession, tmp_path: Path) -> None:
    values = [record(number, day=number % 3) for number in range(30)]
    folder = str(tmp_path)
    assert store_records(
        as_messages(spark, [*values[:20], *values[:5], b"x"]), folder
    ) == StoredCounts(20, 5, 1)
    assert store_records(as_messages(spark, [b"x", *values[10:], values[29]]), folder)[:2] == (
        10,
        11,
    )
    stored = spark.read.parquet(f"{folder}/usage")
    assert stored.selectExpr("sum(bytes)", "count(distinct sequence)").first() == (30_000, 30)


def test_the_largest_figures_that_there_may_be_add_up(report: Callable[..., Reported]) -> None:
    most = dict.fromkeys(("bytes", "requests", "connections", "held_seconds"), 2**53)
    values = [record(number, rates={"1": 2**53}, **most) for number in range(1025)]
    found = report(values, TEAMS)
    row = found.rows["etl"]
    whole = str(1025 * 2**53)
    assert (row["read_bytes"], row["requests"], row["connections"]) == (whole, whole, whole)
    assert row["busy_seconds"] == f"{whole}0"


def test_prices_may_lack(report: Callable[..., Reported]) -> None:
    found = report([record(0)], {**TEAMS, "prices": {"currency": "EUR", "read_per_gib": 1}})
    assert found.rows["etl"]["cost"] == ""
    assert "lacks prices.read_per_gib or prices.write_per_gib: no cost" in found.notes


def test_the_page_needs_nothing_else_and_shows_names_as_text(
    report: Callable[..., Reported],
) -> None:
    name = "<script>alert(1)</script>"
    page = report([record(0, client_id=name, topic=name, rule=name, held_seconds=1)]).page
    assert not re.search(r"<script|<link|<img|src=|href=|url\(|@import|https?:", page)
    assert "&lt;script&gt;" in page
    assert page.count("<svg") == page.count("</svg>") == 3


def test_names_that_are_longer_than_any_should_be_are_cut(report: Callable[..., Reported]) -> None:
    names = [f"{number}{'x' * 32_000}" for number in range(2)]
    values = [record(number, client_id=name, rule=name) for number, name in enumerate(names)]
    found = report(values)
    assert {*found.rows} == {*names}
    assert len(found.page) < 64_000
    assert f">{names[0][:255]}…</td>" in found.page


def test_a_topic_that_is_not_ours_is_told_from_one_without_records(
    report: Callable[..., Reported], spark: SparkSession, tmp_path: Path
) -> None:
    with pytest.raises(UsageInputError, match="all 2 messages of topic 'usage' were rejected"):
        report([b"hello", b"{}"])
    store_records(as_messages(spark, [record(0)]), str(tmp_path / "parquet"))
    with pytest.raises(UsageInputError, match="fix: choose days from 2026-10-01 to 2026-10-01"):
        report([], span=DateRange(WEEKS.last, WEEKS.last))


def test_teams_are_read_from_yaml_and_json(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "teams.yaml"
    file.write_text("prices: {currency: EUR}\nteams:\n  - {name: a, users: [alice]}  # one\n")
    assert read_teams(spark, file).entries["a"]["users"] == ["alice"]
    for text, said in (
        ("teams: [\n", "teams.yaml:2: is not YAML"),
        ("teams: []\nteams: []\n", "Duplicate field 'teams'"),
        ("", "is no mapping"),
        ("teams: [{name: a, users: [no: 1]}]", "is no text"),
    ):
        file.write_text(text)
        with pytest.raises(UsageInputError) as refused:
            read_teams(spark, file)
        assert said in str(refused.value)
