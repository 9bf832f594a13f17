"""A token reports on its own queries, and whatever it says it does nothing to those of others."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from admin_world import Ask, serve
from parts.reports import uuid
from spark_world import REPORTS, Job, SparkWorld
from tier_world import TierWorld
from tokens import OPEN, bearer

from proxy.admin.audit import RECORDED, REFUSAL_INTERVAL_S
from proxy.admin.document_models import RowContext
from proxy.admin.port.guard import (
    AUTHOR,
    ONE_MEMBER,
    QUERIES_HEADER,
    SCOPE,
    AccessRight,
    AdminToken,
)
from proxy.admin.query_documents import progress_documents
from proxy.progress.query import QuerySettings
from proxy.progress.report import ReportableQueries

TEAM_A = ReportableQueries(("team-a-*", "orders"))
TOKENS = (
    *OPEN.tokens,
    AdminToken("team-a", "team-a-text", (AccessRight.REPORT,), TEAM_A),
    AdminToken("most", "most-text", tuple(AccessRight), TEAM_A),
)
ACCESS = replace(OPEN, tokens=TOKENS)
OTHERS = (
    QuerySettings(name="payments", client_id="etl-payments"),
    QuerySettings(name="invoices", client_id="team-a-7"),
    QuerySettings(name="orders", client_id="etl-orders"),
)
"""Of other teams, by name or by client id."""

WRITTEN = "this token may not report on the query with the "

Spoil = Callable[[dict[str, Any], Job], dict[str, Any]]


@pytest.fixture
def spark() -> SparkWorld:
    return SparkWorld(OTHERS)


@pytest.fixture
def others(spark: SparkWorld) -> Job:
    """A query of another team that is not configured, and has completed a batch."""
    spark.known |= {"team-b-etl", "team-a-etl"}
    job = Job(spark, "team-b-etl", "team-b-etl")
    job.tell(job.report("started"))
    job.read(100)
    job.tell(job.complete(500))
    job.read(100)
    return job


@pytest.fixture
def own(spark: SparkWorld) -> Job:
    return Job(spark, "team-a-etl", "team-a-etl")


@pytest.fixture
async def ask(spark: SparkWorld) -> AsyncIterator[Ask]:
    async with serve(spark.server(access=ACCESS)) as ask:
        yield ask


def seen(spark: SparkWorld) -> list[Any]:
    return [
        [document[key] for key in ("name", "client_id", "run_id", "partitions", "reports")]
        for document in progress_documents(spark.progress(), RowContext(spark.now_s, spark.now_ms))
        if document is not None and document["client_id"] != "team-a-etl"
    ]


ATTACKS: dict[str, tuple[str, Spoil]] = {
    "the other's report": ("client id 'team-b-etl'", lambda theirs, _: theirs),
    "its name alone": ("client id 'team-b-etl'", lambda theirs, _: {**theirs, "client_id": None}),
    "its client id alone": ("client id 'team-b-etl'", lambda theirs, _: {**theirs, "name": None}),
    "own name": ("client id 'team-b-etl'", lambda theirs, _: {**theirs, "name": "team-a-etl"}),
    "own client id": ("name 'team-b-etl'", lambda theirs, _: {**theirs, "client_id": "team-a-etl"}),
    "own name that another client has": (
        "client id 'etl-orders'",
        lambda theirs, _: {**theirs, "name": "orders", "client_id": None},
    ),
    "own client id that a configured query has": (
        "name in the configuration 'invoices'",
        lambda _, own: {**own.report("started"), "client_id": "team-a-7"},
    ),
    "own names but a configured client": (
        "client id 'etl-payments'",
        lambda _, own: {**own.report("started"), "client_id": "etl-payments"},
    ),
    "heartbeat": (
        "client id 'team-b-etl'",
        lambda theirs, own: {**own.report("running"), "client_id": theirs["client_id"]},
    ),
    "end of the run": (
        "client id 'team-b-etl'",
        lambda theirs, _: {**theirs, "event": "terminated", "batch": None},
    ),
    "a new run": (
        "client id 'team-b-etl'",
        lambda theirs, _: {**theirs, "event": "started", "batch": None, "run_id": uuid("mine")},
    ),
    "upper case": (
        "client id 'Team-a-etl'",
        lambda theirs, _: {**theirs, "client_id": "Team-a-etl"},
    ),
    "a pattern": ("client id '*'", lambda theirs, _: {**theirs, "client_id": "*"}),
}


@pytest.mark.parametrize(("said", "spoil"), ATTACKS.values(), ids=ATTACKS)
async def test_what_is_not_its_own_is_refused_and_nothing_changes(
    spark: SparkWorld, others: Job, own: Job, ask: Ask, said: str, spoil: Spoil
):
    before = seen(spark)
    bad = spoil(others.complete(500), own)
    answer = await ask("POST", REPORTS, json=bad, headers=bearer("team-a"))
    assert (answer.status, answer.json["reason"]) == (403, "not_allowed"), answer.text
    assert answer.json["error"] == WRITTEN + said
    assert "admin.tokens" in answer.json["fix"]
    assert seen(spark) == before
    assert spark.registry.report_results["not_allowed"] == 1
    (change,) = (await ask("GET", "/v1/audit")).json["changes"]
    assert (change["who"], change["address"]) == ("team-a", "127.0.0.1")
    assert (change["what"], change["before"], change["after"]) == (
        "report refused",
        None,
        answer.json["error"],
    )


async def test_the_number_of_a_refused_report_is_still_to_come(others: Job, own: Job, ask: Ask):
    theirs = others.complete(500)
    for number in (theirs["number"], theirs["number"] + 1, 2**62):
        bad = {**theirs, "number": number, "name": "team-a-etl"}
        assert (await ask("POST", REPORTS, json=bad, headers=bearer("team-a"))).status == 403
    answer = await ask("POST", REPORTS, json=theirs, headers=bearer("spark"))
    assert (answer.status, answer.json["lost_reports"]) == (200, 0)


async def test_two_client_ids_in_one_report_are_not_two_reports(others: Job, own: Job, ask: Ask):
    """What is checked is what is applied, whichever of two equal keys counts."""
    said = own.report("started")
    for first, last in (("team-a-etl", "team-b-etl"), ("team-b-etl", "team-a-etl")):
        text = str({**said, "client_id": first}).replace("None", "null").replace("'", '"')
        text = text.replace("{", f'{{"client_id": "{last}", ', 1)
        headers = {"Content-Type": "application/json"} | bearer("team-a")
        answer = await ask("POST", REPORTS, data=text.encode(), headers=headers)
        counted = others.world.registry.query_of("team-b-etl")
        assert counted is not None
        assert counted.received == 2
        assert answer.status in {200, 403}, answer.text


async def test_the_checkpoint_of_another_does_not_bring_its_progress(
    spark: SparkWorld, others: Job, own: Job, ask: Ask
):
    """A query is known by its id when it comes back with another client id: if it is one's own."""
    spark.now_ms += 600_000.0
    taken = {**own.report("started"), "query_id": others.driver.query_id}
    before = seen(spark)
    answer = await ask("POST", REPORTS, json=taken, headers=bearer("team-a"))
    assert answer.status == 200, answer.text
    assert seen(spark) == before
    query = spark.registry.query_of("team-a-etl")
    assert query is not None
    assert not query.partitions
    # Its owner finds it, and so does who may report on all.
    spark.now_ms += 600_000.0
    back = {**others.report("started"), "client_id": "team-b-2", "run_id": uuid("another")}
    assert (await ask("POST", REPORTS, json=back, headers=bearer("spark"))).status == 200
    moved = spark.registry.query_of("team-b-2")
    assert moved is not None
    assert moved.partitions


async def test_its_own_queries_it_reports_on(spark: SparkWorld, own: Job, ask: Ask):
    spark.known.add("team-a-etl")
    for name in ("team-a", "most", "spark", "ops"):
        own.driver.run_id = uuid(name)
        answer = await ask("POST", REPORTS, json=own.report("started"), headers=bearer(name))
        assert answer.status == 200, answer.text
        own.read(10)
        answer = await ask("POST", REPORTS, json=own.complete(5), headers=bearer(name))
        assert answer.status == 200, answer.text
    assert (await ask("GET", "/v1/audit")).json["changes"] == []


async def test_the_audit_is_not_filled_with_refusals(
    spark: SparkWorld, own: Job, ask: Ask, monkeypatch: pytest.MonkeyPatch
):
    now_s = [1_800_000_000.0]
    monkeypatch.setattr("proxy.admin.api.time.time", lambda: now_s[0])
    for _ in range(2):
        for number in range(3 * RECORDED):
            bad = {**own.report("started"), "client_id": f"team-b-{number}"}
            assert (await ask("POST", REPORTS, json=bad, headers=bearer("team-a"))).status == 403
    assert spark.audit.documents()[0] == RECORDED
    bad = {**own.report("started"), "client_id": "team-b-0"}
    await ask("POST", REPORTS, json=bad, headers=bearer("most"))
    assert spark.audit.documents()[0] == RECORDED + 1
    now_s[0] += REFUSAL_INTERVAL_S
    await ask("POST", REPORTS, json=bad, headers=bearer("team-a"))
    assert spark.audit.documents()[0] == RECORDED + 2


async def test_it_holds_on_the_way_to_another_member(spark: SparkWorld, others: Job, own: Job):
    tier = TierWorld()
    tier.owners |= {"team-b-etl": "c/1", "team-a-etl": "c/1"}
    before = seen(spark)
    async with tier.asked(access=ACCESS, servers={"c/1": {"reports": spark}}) as of:
        theirs = others.complete(500)
        for member in ("a/0", "b/1", "c/1"):
            for name in ("team-a", "most"):
                for more in ({}, {QUERIES_HEADER: "team-b-%2A", AUTHOR: "root"}):
                    headers = bearer(name) | more
                    answer = await of(member)("POST", REPORTS, json=theirs, headers=headers)
                    assert (answer.status, answer.json["reason"]) == (403, "not_allowed")
                # All the rights, but not on all queries: no member of the tier.
                scoped = bearer(name) | {SCOPE: ONE_MEMBER, AUTHOR: "root"}
                answer = await of(member)("POST", REPORTS, json=theirs, headers=scoped)
                assert (answer.status, "member of the tier" in answer.json["error"]) == (403, True)
        assert seen(spark) == before
        mine = own.report("started")
        answer = await of("a/0")("POST", REPORTS, json=mine, headers=bearer("team-a"))
        assert answer.status == 200, answer.text
        answer = await of("a/0")("POST", REPORTS, json=theirs, headers=bearer("spark"))
        assert answer.status == 200, answer.text
        changes = (await of("b/0")("GET", "/v1/audit")).json["changes"]
        assert [(each["who"], each["what"]) for each in changes] == [
            ("most", "report refused"),
            ("team-a", "report refused"),
        ]
    recorded = {name: world.audit.documents()[0] for name, world in tier.worlds.items()}
    assert recorded == dict.fromkeys(tier.worlds, 0) | {"a/0": 2}
