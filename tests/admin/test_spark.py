"""Reports come in, or are refused and change nothing; progress and adaptive bounds are shown."""

import asyncio
import json
from typing import Any

import pytest
from admin_world import MIB, Ask, serve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parts.reports import uuid
from spark_world import REPORTS, Job, SparkWorld

from proxy.admin.pagination import PageRequest
from proxy.admin.query_documents import (
    COST_FACTOR,
    MAX_QUERY_SUMMARIES,
    ListedPartition,
    QueryDocuments,
    grouped_by_query,
    partition_page_builder,
    partitions_of,
)
from proxy.pipeline.running_pipeline import RunningPipeline
from proxy.progress.query import QuerySettings
from proxy.progress.report import MAX_REPORT_BYTES, RefusalReason
from proxy.slices import TimeSlicer

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def job(spark: SparkWorld) -> Job:
    return Job(spark, "payments", "etl-payments")


async def run_batch(ask: Ask, job: Job, step: int, duration_ms: int) -> dict[str, Any]:
    job.read(step)
    job.world.now_ms += 2000
    answer = await ask("POST", REPORTS, json=job.complete(duration_ms))
    assert answer.status == 200, answer.text
    return answer.json


async def test_a_report_is_answered_with_what_it_changed(ask_spark: Ask, job: Job):
    started = await ask_spark("POST", REPORTS, json=job.report("started"))
    assert (started.status, started.json) == (
        200,
        {"accepted": True, "lost_reports": 0, "advice": [], "rate": None, "bound": None},
    )
    job.read(10)
    first = await run_batch(ask_spark, job, 4000, 1500)
    assert (first["rate"], first["bound"]) == (None, 10 * MIB)
    job.driver.number += 2
    second = await run_batch(ask_spark, job, 1000, 1000)
    assert second["lost_reports"] == 2
    assert second["rate"] == pytest.approx(3000.0)
    assert second["bound"] < 10 * MIB


def changed(document: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {**document, **keys}


REFUSED = {
    "not JSON": (RefusalReason.MALFORMED, 400, lambda _: b"{"),
    "unknown event": (RefusalReason.MALFORMED, 400, lambda r: changed(r, event="paused")),
    "nobody": (RefusalReason.NO_CLIENT, 400, lambda r: changed(r, name=None, client_id=None)),
    "unknown query": (
        RefusalReason.UNKNOWN_QUERY,
        404,
        lambda r: changed(r, name="other", client_id="other", query_id=uuid("other")),
    ),
    "client taken": (
        RefusalReason.CLIENT_TAKEN,
        409,
        lambda r: changed(r, query_id=uuid("other"), run_id=uuid("other")),
    ),
    "repeated": (RefusalReason.REPEATED, 409, lambda r: changed(r, number=1)),
    "out of order": (
        RefusalReason.OUT_OF_ORDER,
        409,
        lambda r: changed(r, batch=changed(r["batch"], batch_id=0)),
    ),
    "negative rows": (
        RefusalReason.IMPOSSIBLE,
        422,
        lambda r: changed(r, batch=changed(r["batch"], rows=-1)),
    ),
}


@pytest.mark.parametrize(("reason", "status", "spoil"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_refused_report_says_why_and_changes_nothing(
    ask_spark: Ask, job: Job, reason: RefusalReason, status: int, spoil: Any
):
    await ask_spark("POST", REPORTS, json=job.report("started"))
    for _ in range(2):
        await run_batch(ask_spark, job, 100, 500)
    job.read(100)

    async def state() -> Any:
        (query,) = (await ask_spark("GET", "/v1/progress?query=payments")).json["queries"]
        return [query[key] for key in ("partitions", "last_batch", "run_id", "adaptive", "notes")]

    before = await state()
    bad = spoil(job.complete(500))
    data = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    answer = await ask_spark("POST", REPORTS, data=data, headers=JSON)
    assert answer.status == status, answer.text
    assert set(answer.json) == {"error", "fix", "reason"}
    assert answer.json["reason"] == reason
    assert await state() == before


BAD_REQUESTS = {
    "no token": (401, {}, b"{}"),
    "a wrong token": (401, {"Authorization": "Bearer other"}, b"{}"),
    "a form": (415, {"Content-Type": "application/x-www-form-urlencoded"}, b"{}"),
    "too large": (413, {}, b" " * (MAX_REPORT_BYTES + 1)),
    "empty": (400, {}, b""),
}


@pytest.mark.parametrize(("status", "headers", "data"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
async def test_what_is_no_report_is_refused(
    spark: SparkWorld, status: int, headers: dict[str, str], data: bytes
):
    token = {} if status == 401 else {"Authorization": "Bearer secret"}
    async with serve(spark.server(token="secret")) as ask:
        answer = await ask("POST", REPORTS, data=data, headers={**JSON, **token, **headers})
        assert answer.status == status, answer.text
        assert {"error", "fix"} <= set(answer.json)
        assert (await ask("GET", REPORTS)).status == 405


async def test_a_report_may_be_longer_than_an_override(ask_spark: Ask, spark: SparkWorld):
    wide = Job(spark, "payments", "etl-payments", partitions=10_000)
    report = wide.complete(500)
    assert 64 * 1024 < len(json.dumps(report)) < MAX_REPORT_BYTES
    assert (await ask_spark("POST", REPORTS, json=report)).status == 200


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(
        lambda value: json.dumps(value).encode()
    )
)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
async def test_no_body_makes_it_fail(ask_spark: Ask, data: bytes):
    answer = await ask_spark("POST", REPORTS, data=data, headers=JSON)
    assert (answer.status, answer.json["reason"]) == (400, "malformed")


async def test_progress_is_shown_with_totals_and_bound(spark: SparkWorld, ask_spark: Ask, job: Job):
    await ask_spark("POST", REPORTS, json=job.report("started"))
    job.read(10)
    for _ in range(3):
        await run_batch(ask_spark, job, 1000, 1000)
    job.ends(5000)
    job.read(500)
    (payments,) = (
        query
        for query in (await ask_spark("GET", "/v1/progress")).json["queries"]
        if query["name"] == "payments"
    )
    assert [part["completed_to"] for part in payments["partitions"]] == [3010] * 3
    assert payments["totals"] == {
        "partitions": 3,
        "lag_records": 3 * 1990,
        "lag_s": 2.0,
        "in_flight_records": 3 * 500,
        "failed_records": 0,
        "skipped_records": 0,
        "stuck_partitions": 0,
    }
    assert payments["adaptive"]["rate"] == pytest.approx(3000.0)
    assert payments["commit"]["group"] == "payments-progress"
    (client,) = (await ask_spark("GET", "/v1/clients?filter=etl-payments")).json["clients"]
    assert client["static_bound"] == 10 * MIB
    assert client["bound"] < 10 * MIB
    assert client["adaptive"]["rate_records"] == pytest.approx(3000.0)
    assert client["adaptive"]["bound"] == client["bound"]
    assert "-> 3,000 records/s" in client["adaptive"]["reason"]
    (quota,) = (await ask_spark("GET", "/v1/clients/client-id=etl-payments")).json["quotas"]
    assert quota["adaptive"] == client["adaptive"]


async def test_what_is_to_be_mended_is_told_to_all(ask_spark: Ask, job: Job):
    trigger = {"kind": "processing_time", "interval_ms": 3000}
    started = await ask_spark("POST", REPORTS, json=job.report("started", trigger=trigger))
    (advice,) = started.json["advice"]
    assert advice.startswith("batch_interval is 2 s, but the query's trigger fires every 3 s")
    await ask_spark("POST", REPORTS, json=job.report("idle"))
    (query,) = (await ask_spark("GET", "/v1/progress?query=payments")).json["queries"]
    assert query["trigger"] == {"kind": "processing_time", "interval_s": 3.0}
    assert [(note["kind"], note["text"]) for note in query["advice"]] == [("interval", advice)]
    assert [note.text for note in job.world.events] == [advice]  # one line in the log
    status = (await ask_spark("GET", "/v1/status")).json["queries"]
    assert [each["advice"] for each in status if each["name"] == "payments"] == [[advice]]
    other = changed(job.report("idle"), query_id=uuid("other"), run_id=uuid("other"), name="other")
    refused = await ask_spark("POST", REPORTS, json=other)
    assert refused.json["error"].startswith("query 'payments' (")
    (query,) = (await ask_spark("GET", "/v1/progress?query=payments")).json["queries"]
    assert [note["kind"] for note in query["advice"]] == ["interval", "client_shared"]


async def test_one_query_can_be_asked_for(ask_spark: Ask):
    (only,) = (await ask_spark("GET", "/v1/progress?query=clicks")).json["queries"]
    assert (only["name"], only["partitions"], only["adaptive"]) == ("clicks", [], None)
    for name in ("other", "", "%00", "%3Cscript%3E"):
        answer = await ask_spark("GET", f"/v1/progress?query={name}")
        assert answer.status == 404
        assert "GET /v1/progress" in answer.json["fix"]


@pytest.mark.parametrize("limit", ["-1", "x", "1001", ""])
async def test_a_bad_limit_is_refused(ask_spark: Ask, limit: str):
    answer = await ask_spark("GET", f"/v1/progress?limit={limit}")
    assert (answer.status, set(answer.json)) == (400, {"error", "fix"})


async def test_the_partitions_of_an_answer_are_limited(ask_spark: Ask, job: Job):
    await ask_spark("POST", REPORTS, json=job.report("started"))
    await run_batch(ask_spark, job, 100, 500)
    job.ends(150)
    query = job.world.registry.query_of("etl-payments")
    assert query is not None
    query.log_end("payments", 1, 900, job.world.now_ms)
    for limit, numbers in ((1, [1]), (2, [0, 1]), (3, [0, 1, 2])):
        answer = await ask_spark("GET", f"/v1/progress?query=payments&limit={limit}")
        (found,) = answer.json["queries"]
        assert [each["partition"] for each in found["partitions"]] == numbers
        assert found["totals"]["lag_records"] == 50 + 800 + 50


async def test_there_may_be_no_queries(ask: Ask):
    status = (await ask("GET", "/v1/status")).json
    assert (status["followed"], status["queries"]) == (0, [])
    assert (await ask("GET", "/v1/progress")).json == {"queries": []}


async def test_the_status_tells_queries_briefly(spark: SparkWorld, ask_spark: Ask, job: Job):
    await ask_spark("POST", REPORTS, json=job.report("started"))
    await run_batch(ask_spark, job, 1000, 1000)
    spark.registry.commit_failed("payments-progress", "the group has live members" * 100)
    clicks = Job(spark, "clicks", "clicks", topic="clicks", partitions=1)
    clicks.ends(500)
    clicks.read(100)
    spark.now_ms += 1000
    for _ in range(2):
        spark.now_ms += 60_001
        list(spark.registry.sweeping(spark.now_ms))
    status = (await ask_spark("GET", "/v1/status")).json
    assert status["followed"] == 2
    assert [query["name"] for query in status["queries"]] == ["clicks", "payments"]
    first, second = status["queries"]
    assert (first["stuck_partitions"], first["lag_records"]) == (1, 400)
    assert (first["commit"], first["adaptive"]) == (None, None)
    assert second["commit"]["ok"] is False
    assert second["commit"]["error"].endswith("…")
    assert second["adaptive"]["static_bound"] == 10 * MIB
    assert len(json.dumps(second)) < 1500


async def test_the_status_shows_a_limited_number_of_queries():
    names = [f"query-{number}" for number in range(MAX_QUERY_SUMMARIES + 20)]
    spark = SparkWorld(tuple(QuerySettings(name=name, client_id=name) for name in names))
    async with serve(spark.server()) as ask:
        status = (await ask("GET", "/v1/status")).json
        assert (status["followed"], len(status["queries"])) == (len(names), MAX_QUERY_SUMMARIES)
        assert len((await ask("GET", "/v1/progress")).json["queries"]) == len(names)


class Slow:
    """A world in which it takes a while to find out about queries."""

    now_ms = 0.0
    asked = 0

    def clock(self) -> float:
        return self.now_ms

    def accept(self, raw: bytes) -> dict[str, object]:
        return {"accepted": bool(raw)}

    def progress(self) -> list[dict[str, object]]:
        self.asked += 1
        self.now_ms += 100.0
        return []

    def pressure(self) -> dict[str, dict[str, object]]:
        return {}

    def pipelines(self) -> list[RunningPipeline]:
        return []


async def test_what_is_dear_to_make_is_made_seldom():
    slow = Slow()
    queries = QueryDocuments(slow, TimeSlicer(), clock_ms=slow.clock, cpu_ms=slow.clock)
    await asyncio.gather(queries.documents(), queries.documents())
    for _ in range(10):
        await queries.documents()
        await queries.adaptive()
        await queries.summaries(0.0)
    assert slow.asked == 1
    slow.now_ms += 100.0 * COST_FACTOR
    await queries.documents()
    assert slow.asked == 2


async def test_what_a_machine_pauses_for_is_no_cost():
    slow = Slow()
    queries = QueryDocuments(slow, TimeSlicer(), clock_ms=slow.clock, cpu_ms=lambda: 7.0)
    for _ in range(3):
        await queries.documents()
    assert slow.asked == 3


PARTITION = st.fixed_dictionaries(
    {
        "topic": st.sampled_from(["a", "b", 'x"}]']),
        "partition": st.integers(0, 50),
        "stuck_since": st.none() | st.floats(1, 9),
        "lag_records": st.none() | st.integers(0, 9),
    }
)
DOCUMENT = st.fixed_dictionaries(
    {"name": st.text(max_size=2), "partitions": st.lists(PARTITION, max_size=6)}
)


@given(st.lists(DOCUMENT, max_size=3), st.integers(0, 9))
def test_partitions_left_off_need_nobody_sooner(documents: list[dict[str, Any]], most: int):
    def need(row: ListedPartition) -> tuple[bool, int]:
        each = row[1]
        return (False, 0) if each is None else (bool(each["stuck_since"]), each["lag_records"] or 0)

    rows = list(partitions_of(documents))
    shown = partition_page_builder(PageRequest(most), rows).rows()
    assert len(shown) == min(most, len(rows))
    left = list(rows)
    for row in shown:
        left.remove(row)
    assert not shown or not left or min(map(need, shown)) >= max(map(need, left))
    queries = grouped_by_query(shown)
    assert sum(len(each["partitions"]) or 1 for each in queries) == len(shown)
