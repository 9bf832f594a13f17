"""The teams' file: what it may say, and what is refused."""

import re
from typing import Any

import pytest

from proxy.spark.usage import record_frames, usage_figures
from proxy.spark.usage.command_line import UsageInputError, cause_of
from proxy.spark.usage.record_frames import RECORD_SCHEMA
from proxy.spark.usage.teams import parse_teams
from proxy.spark.usage.usage_report import rounded_bound
from proxy.usage import usage_record

A: dict[str, Any] = {"name": "a", "users": ["alice"], "client-ids": ["etl"], "topics": ["t"]}

REFUSED = {
    "no teams": ({}, "teams: is no list"),
    "not a mapping": ([], "is no mapping"),
    "no name": ({"teams": [{"users": ["x"]}]}, "teams[0]: name: None"),
    "the remainder's name": ({"teams": [{"name": "no team"}]}, "name: 'no team'"),
    "a name twice": ({"teams": [A, {"name": "a"}]}, "'a' is there twice"),
    "a key unknown": ({"teams": [{"name": "a", "client_ids": []}]}, "'client_ids' is not a known"),
    "a number": ({"teams": [{"name": "a", "users": [7]}]}, "teams[0]: users: 7 is no text"),
    "no list": ({"teams": [{"name": "a", "users": "bob"}]}, "users: is no list; fix: write [bob]"),
    "a user twice": (
        {"teams": [A, {"name": "b", "users": ["alice"]}]},
        "teams 'a' and 'b' overlap: a.users has 'alice', b.users has 'alice'",
    ),
    "a topic twice": ({"teams": [A, {"name": "b", "topics": ["t"]}]}, "b.topics has 't'"),
    "an id below a prefix": (
        {"teams": [A, {"name": "b", "client-id-prefixes": ["et"]}]},
        "'b' and 'a' overlap: b.client-id-prefixes has 'et', a.client-ids has 'etl'",
    ),
    "a prefix below another": (
        {
            "teams": [
                {"name": "a", "client-id-prefixes": ["note-"]},
                {"name": "b", "client-id-prefixes": ["note-b-"]},
            ]
        },
        "a.client-id-prefixes has 'note-', b.client-id-prefixes has 'note-b-'",
    ),
    "a price below nothing": (
        {"prices": {"read_per_gib": -1}, "teams": [A]},
        "prices: read_per_gib: -1 is no price",
    ),
    "a price as text": ({"prices": {"write_per_gib": "2"}, "teams": [A]}, "'2' is no price"),
    "a currency that is none": ({"prices": {"currency": 1}, "teams": [A]}, "1 is no text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_is_refused_with_what_where_and_how_to_mend_it(case: str):
    document, said = REFUSED[case]
    with pytest.raises(UsageInputError) as refused:
        parse_teams(document, "teams.yaml")
    text = str(refused.value)
    assert said in text
    assert text.startswith("teams.yaml: ")
    assert "; fix: " in text


def test_entries_of_one_team_may_overlap():
    teams = [{"name": "a", "client-ids": ["etl-1"], "client-id-prefixes": ["etl-"]}]
    assert parse_teams({"teams": teams}, "f").entries["a"]["client-ids"] == ["etl-1"]


@pytest.mark.parametrize("prices", [None, {}, {"currency": "EUR", "read_per_gib": 0.1}])
def test_without_both_prices_there_are_none(prices: dict[str, Any] | None):
    assert parse_teams({"prices": prices, "teams": [A]}, "f").prices is None


@pytest.mark.parametrize(
    ("rate", "bound"),
    [
        (0, "100KiB"),
        (102_401, "110KiB"),
        (1023 * 1024, "1MiB"),
        (1.5 * 2**20, "1.5MiB"),
        (1.51 * 2**20, "1.6MiB"),
        (11.01 * 2**20, "12MiB"),
        (101 * 2**30, "110GiB"),
    ],
)
def test_a_bound_has_two_digits_and_is_no_lower_than_the_rate(rate: float, bound: str):
    assert rounded_bound(rate) == bound


def test_the_innermost_cause_of_a_java_failure_is_one_line():
    text = (
        "An error occurred while calling o1.load.\n: java.lang.Outer: x\n\tat a.b(C.java:1)\n"
        "Caused by: org.apache.kafka.common.errors.TimeoutException: no answer\n\tat d.e(F.java:2)"
    )
    assert cause_of(RuntimeError(text)) == "TimeoutException: no answer"


def test_the_form_of_a_record_is_that_of_the_proxy():
    """Nothing of ours is imported there, so it is written twice."""
    assert record_frames.RECORD_VERSION == usage_record.SCHEMA_VERSION
    assert usage_figures.SKETCH_GROWTH == usage_record.BUCKET_GROWTH
    columns = re.findall(r"(\w+) (?:STRING|INT|BIGINT|DOUBLE|BOOLEAN|MAP)", RECORD_SCHEMA)
    assert columns == [*usage_record.UsageRecord.model_fields]
