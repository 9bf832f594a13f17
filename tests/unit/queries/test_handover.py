"""A query and its pipeline go from member to member, and nothing is applied twice, or lost."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts.member_world import (
    CONSUMER,
    NOTHING,
    OF_PIPELINE,
    MemberWorld,
    Owned,
    Tier,
    joined,
)
from parts.reports import ReportingDriver

from proxy.backpressure.driver_view import DriverView
from proxy.progress.query import ProgressSettings
from proxy.progress.report import ALL_QUERIES, RefusalReason, ReportRefused
from proxy.queries.following import SENT_ON_MS
from proxy.quota.entities import ClientIdentity
from proxy.state import MemoryStore, SqliteStore, StateError
from proxy.wire.apis import FETCH, LIST_OFFSETS

LONG_AGO_MS = 60_000
"""When batches began: before any handover."""


async def started(members=2, open_store=None):
    tier = Tier(members, open_store)
    for name in ("one", "two", "lone"):
        await tier.report(name, "started")
    return tier


async def take(tier, step):
    """Take a step; what is told apart as `hand over` changes nothing where there is one member."""
    kind, count = step
    member = tier.member("one")
    match kind:
        case "one":
            tier.write(count)
            await tier.batch("one", "a", tier.read["one"] + count)
        case "one, handed over in the batch":
            tier.write(count)
            await tier.hand_over()
            tier.write(count)
            await tier.batch("one", "a", tier.read["one"] + count, took_ms=LONG_AGO_MS)
        case "one, handed over in the report":
            tier.write(count)
            report = asyncio.ensure_future(tier.batch("one", "a", tier.read["one"] + count))
            for _ in range(count % 5):
                await asyncio.sleep(0)
            await tier.hand_over()
            await report
        case "two":
            await tier.batch("two", "b", max(tier.read["two"], tier.written - count))
        case "fetch":
            member.fetch("two", "b", tier.written)
        case "fetch, handed over meanwhile":
            respond = member.fetch("two", "b", tier.written, answers=False)
            await tier.hand_over()
            respond()
        case "lone":
            await tier.batch("lone", "c", tier.read["lone"] + count)
        case "commit":
            member.committer.commit()
        case "tick":
            await member.tick()
        case "hand over":
            await tier.hand_over()


KINDS = (
    "one",
    "one, handed over in the batch",
    "one, handed over in the report",
    "two",
    "fetch",
    "fetch, handed over meanwhile",
    "lone",
    "commit",
    "tick",
    "hand over",
)
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 9)), max_size=15)


@given(STEPS)
def test_the_totals_are_those_of_one_member(steps):
    async def run(members):
        tier = await started(members)
        for step in steps:
            await take(tier, step)
        await tier.batch("two", "b", tier.written)
        return await tier.totals()

    assert asyncio.run(run(2)) == asyncio.run(run(1))


async def test_members_that_share_one_file(tmp_path):
    steps = [(kind, count) for count in (1, 2, 4, 7) for kind in KINDS]
    store = SqliteStore(tmp_path / "state.db")
    totals = []
    for members, open_store in ((2, lambda: store), (1, None)):
        tier = await started(members, open_store)
        for step in steps:
            await take(tier, step)
        totals.append(await tier.totals())
        for member in tier.members:
            await member.queries.close()
    assert totals[0] == totals[1]
    store.close()


async def test_what_is_let_go_is_not_here_any_more():
    tier = await started()
    await take(tier, ("one", 5))
    old, new = tier.members
    await old.tick()
    assert old.wants("one") == {FETCH, LIST_OFFSETS}
    assert {query.client_id for query in old.registry.queries} == {"one", "two"}
    await tier.hand_over()
    assert list(old.queries.progress()) == []
    assert (list(old.queries.pipelines()), old.queries.pressure()) == ([], {})
    assert (old.registry.queries, old.pressure.clients) == ([], [])
    assert old.registry.unwritten.take() == ([], [])
    assert old.pressure.unwritten.take() == ([], [])
    assert {query.client_id for query in new.registry.queries} == {"one", "two", "lone"}
    assert len(new.queries.pipelines()) == 1
    series = {
        (sample.name, *sample.labels.values())
        for family in old.prometheus.collect()
        for sample in family.samples
        if {"one", "two", "p"} & set(sample.labels.values())
    }
    assert {name for name, *_ in series} <= {
        "kafka_quota_proxy_ledger_completion_seconds_bucket",
        "kafka_quota_proxy_ledger_completion_seconds_count",
        "kafka_quota_proxy_ledger_completion_seconds_created",
        "kafka_quota_proxy_ledger_completion_seconds_sum",
    }


async def test_a_member_that_owns_nothing_shows_nothing():
    tier = Tier()
    await tier.hand_over()
    member = tier.members[0]
    assert list(member.queries.progress()) == []
    assert list(member.queries.pipelines()) == []
    member.queries.update(tier.progress, tier.pipelines)
    assert list(member.queries.progress()) == []
    assert list(member.queries.pipelines()) == []


def reason_at(member):
    """Return why the bound of the query's clients is what it is at a member; None: by its rule."""
    client = member.client_quotas("one")
    client.charge(CONSUMER, 1.0, member.clock())
    (row,) = [each for each in member.rows(member.clock()) if each.entity == "client-id=one"]
    client.close()
    return row.reason


async def test_an_adapted_bound_goes_with_its_query():
    tier = await started()
    for _ in range(3):
        tier.members[0].wants("one")
        await tier.batch("one", "a", tier.read["one"] + 10, took_ms=1000)
    old, new = tier.members
    (before,) = old.pressure.of_client("one")
    rate = before.rate
    assert rate is not None
    await tier.hand_over()
    assert old.pressure.of_client("one") == []
    assert reason_at(old) is None
    (after,) = new.pressure.of_client("one")
    assert after.rate == rate
    await tier.hand_over()
    (back,) = old.pressure.of_client("one")
    assert (back.rate, reason_at(new)) == (rate, None)
    assert "100 records/s" in reason_at(old)


async def test_a_visitor_is_followed_by_nobody_and_its_driver_is_sent_on():
    tier = await started()
    old = tier.members[0]
    assert old.look_up("one") == 1000
    await tier.hand_over()
    assert old.look_up("one") is None
    assert old.client("one").wants(LIST_OFFSETS, old.clock())
    identity = ClientIdentity("default", None, "two")
    assert not old.queries.following.client(identity, 1).wants(FETCH, old.clock())
    assert old.registry.queries == []
    assert tier.members[1].look_up("one") == 1000
    await tier.hand_over()
    assert old.look_up("one") == 1000


async def test_an_executor_that_visits_is_let_be():
    tier = await started()
    old = tier.members[0]
    old.fetch("two", "b", 5)
    await tier.hand_over()
    assert old.wants("two") == set()
    assert old.look_up("two", "b") == 1000


async def test_what_visitors_do_after_that_is_written_by_nobody():
    tier = await started()
    old = tier.members[0]
    await take(tier, ("one", 5))
    respond = old.fetch("two", "b", 5, answers=False)
    await tier.hand_over()
    kept = tier.store.items("")
    respond()
    old.running.appended("one", "b", 0, 5, 9, old.clock())
    await old.tick()
    assert tier.store.items("") == kept


async def test_a_report_that_comes_too_late_is_to_be_sent_again():
    tier = await started()
    old = tier.members[0]
    await tier.hand_over()
    document = ReportingDriver("one").document("started")
    with pytest.raises(ReportRefused) as caught:
        await old.queries.accept(json.dumps(document).encode(), ALL_QUERIES)
    assert (caught.value.reason, caught.value.status) == (RefusalReason.OWNED_ELSEWHERE, 503)


class FullStore(MemoryStore):
    """Takes nothing."""

    def put_many(self, records, *, delete=()):  # noqa: ARG002
        raise StateError("the disk is full", "make room")


async def test_what_cannot_be_written_is_not_written_later(monkeypatch):
    monkeypatch.setattr("proxy.queries.queries.FLUSH_TIMEOUT_S", 0.0)
    tier = await started()
    await take(tier, ("one", 5))
    old = tier.members[0]
    store = tier.store
    old.queries.resume(FullStore())
    assert not await old.queries.revoke(owns=NOTHING)
    old.queries.resume(store)
    await old.tick()
    assert store.items("") == []


async def test_a_store_that_cannot_be_read_leaves_all_as_it_was():
    tier = await started()
    await take(tier, ("one", 5))
    old, new = tier.members
    await old.queries.revoke(owns=NOTHING)

    class Broken:
        def items(self, prefix):  # noqa: ARG002
            raise StateError("broken", "mend it")

    owns = joined(new.queries.registry.owns, OF_PIPELINE)
    with pytest.raises(StateError):
        await new.queries.assign(Broken(), owns=owns)
    assert new.queries.registry.owns == Owned(frozenset({"lone"}))
    assert [query.client_id for query in new.registry.queries] == ["lone"]
    await new.queries.assign(tier.store, owns=owns)
    assert new.registry.query_of("one").partitions["a", 0].committed_to == 5


async def test_records_of_others_and_of_nobody_stay_at_the_start():
    tier = await started()
    await take(tier, ("one", 5))
    await tier.members[0].tick()
    kept = tier.store.items("")
    assert {record.key.partition("/")[0] for record in kept} >= {"progress", "ledger"}
    other = MemberWorld(tier, Owned(frozenset({"lone"})))
    await other.tick()
    assert tier.store.items("") == kept


async def test_who_is_told_that_a_stage_s_batch_was_taken_need_not_send_it_again():
    tier = await started(members=1)
    *_, write_on = tier.members[0].queries.works()
    writing = asyncio.create_task(write_on())
    await asyncio.sleep(0)  # it writes
    await take(tier, ("one", 5))
    kept = {record.key.partition("/")[0] for record in tier.store.items("")}
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert "ledger" in kept


async def test_a_stage_may_report_to_a_member_that_its_client_has_not_come_to_yet():
    tier = Tier(members=1)
    tier.members[0].unknown |= {"one"}
    tier.members[0].queries.update(ProgressSettings(queries=()), tier.pipelines)
    assert (await tier.batch("one", "a", 5))["accepted"]


async def test_what_comes_late_of_what_was_let_go_makes_no_record_due():
    tier = await started()
    old = tier.members[0]
    old.wants("one")
    await take(tier, ("one", 5))
    query, (pressed,) = old.registry.query_of("one"), old.pressure.of_client("one")
    await tier.hand_over()
    query.changed(("a", 0))
    query.revoke(query.partitions["a", 0], "its topic is gone", 0.0)
    view = DriverView(query, pressed.clamp, pressed.measurements)
    pressed.advertise(view, {}, is_new=True)
    assert old.registry.unwritten.take() == ([], [])
    assert old.pressure.unwritten.take() == ([], [])


async def test_numbers_that_other_members_got_are_not_lost():
    tier = await started()
    await tier.batch("one", "a", 5)
    tier.drivers["one"].number += 5
    document = await tier.batch("one", "a", 9)
    assert document["lost_reports"] == 0
    tier.read["one"] = 20
    tier.batches["one"] += 1  # a batch whose report was lost
    await tier.batch("one", "a", 25)
    partition = tier.members[0].registry.query_of("one").partitions["a", 0]
    assert (partition.committed_to, partition.skipped.records) == (25, 0)


async def test_owners_that_change_again_and_again_keep_no_client_for_ever():
    """Executors are refused as drivers are, and a Kafka client gives up after a minute."""
    tier = await started()
    visited, refused = tier.members[0], []
    for at_ms in range(0, 60_000, 1000):
        if at_ms % 5000 == 0:
            await tier.hand_over()
        visited.clock = lambda at_ms=at_ms: float(at_ms)
        if visited.look_up("lone") is None:
            refused.append(at_ms)
    assert refused == list(range(0, int(SENT_ON_MS), 1000))
