"""Rules and a budget begin and end by the clock, in a running proxy, as at a reload."""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.operating import call, quota_proxy, running, until_bound
from support.proxy_process import ProxyProcess, config, until
from support.raw import RawClient

from examples.devkit.broker import EmbeddedBroker

CLIENT = "etl"
BEFORE_BYTES, AFTER_BYTES, BUDGET_BYTES = 3 * 10**9, 2 * 10**9, 10**9
BEFORE = timedelta(seconds=12)
"""Between the start of the proxy and the minute at which all begins, by the proxy's clock."""
BEGINS_WITHIN_S = 90
HELD_WITHIN_S = 30

pytestmark = pytest.mark.slow


class AheadClock:
    """The clock of a proxy, put forward so that a full minute comes soon."""

    def __init__(self) -> None:
        now = datetime.now(UTC)
        self.begin = now.replace(second=0, microsecond=0) + timedelta(minutes=2)
        self._ahead = self.begin - BEFORE - now
        self.changes = (
            "import time; wall = time.time\n"
            f"time.time = lambda: wall() + {self._ahead.total_seconds()}\n"
        )
        """What its Python is to execute first."""

    def now(self) -> datetime:
        return datetime.now(UTC) + self._ahead


@pytest.fixture
def clock() -> AheadClock:
    return AheadClock()


def between(begin: datetime, end: datetime) -> dict[str, str]:
    return {"from": f"{begin:%H:%M}", "to": f"{end:%H:%M}"}


@pytest.fixture
def process(kafka: EmbeddedBroker, tmp_path: Path, clock: AheadClock) -> Iterator[ProxyProcess]:
    begin = clock.begin
    later = begin + timedelta(hours=12)
    key, rate = {"client-id": CLIENT}, "consumer_byte_rate"
    rules = [
        {**key, rate: BEFORE_BYTES, "when": between(later, begin)},
        {**key, rate: AFTER_BYTES, "when": between(begin, later)},
        {"client-id": "notebook", "budget": "all"},
    ]
    budget = {"name": "all", rate: BUDGET_BYTES, "when": between(begin, later)}
    made = config(kafka.bootstrap, rules=rules, quotas={"budgets": [budget]})
    with running(ProxyProcess(made, tmp_path, changes=clock.changes)) as started:
        yield started


def in_force(process: ProxyProcess) -> list[bool]:
    """Whether the rules, in the order of the file, and the budget are in force."""
    listed = json.loads(process.get("/v1/quotas")[1])
    quotas = sorted(listed["quotas"], key=lambda each: str(each["title"]))
    assert [each["when"] is None for each in quotas] == [False, False, True]
    return [each["in_force"] for each in (*quotas, *listed["budgets"])]


def changes(process: ProxyProcess) -> list[dict[str, Any]]:
    audit = call(process, "GET", "/v1/audit").document
    return [each for each in audit["changes"] if each["what"] == "schedules"]


def test_rules_and_budgets_begin_and_end_by_the_clock(
    process: ProxyProcess, clock: AheadClock, topic: Callable[..., str], fill: Callable[..., None]
) -> None:
    name = topic()
    fill(name, 1, 1000)
    early, changed = in_force(process), changes(process)
    if clock.now() < clock.begin:  # it was started in time
        assert early == [True, False, False, False]
        assert changed == []
    until(lambda: in_force(process)[1], "the second rule is in force", BEGINS_WITHIN_S)
    assert clock.now() >= clock.begin
    assert in_force(process) == [False, True, True, True]
    throttling = call(process, "GET", "/v1/clients").document["throttling"]
    told = [" ".join(each["schedule"].split()[:-2]) for each in throttling["scheduled"]]
    assert sorted(told) == ["begins", "in force until", "in force until"]
    with RawClient(process.bootstrap, CLIENT) as client:
        until_bound(process, client, name, AFTER_BYTES, HELD_WITHIN_S)
    with RawClient(process.bootstrap, "notebook") as client:
        until_bound(process, client, name, BUDGET_BYTES, HELD_WITHIN_S)
    if early[0]:
        (change,) = until(lambda: changes(process), "it is recorded")
        assert change["who"] == "file"
        after = {title.partition(" (")[0]: word for title, word in change["after"].items()}
        begun = dict.fromkeys(("rule 1", "budget all"), "in force")
        assert after == {"rule 0": "not in force", **begun}

    at = (clock.begin - timedelta(minutes=1)).isoformat()
    code, out, err = quota_proxy("check", "-c", process.config_file, "--at", at)
    assert (code, err) == (0, "")
    idle = [line.partition(" (")[0] for line in out.splitlines() if "is not in force at" in line]
    assert idle == ["rule 1", "rule 2", "budget all"]
