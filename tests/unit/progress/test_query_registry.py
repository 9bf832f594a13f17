"""The book of queries: reports in order and out of it, runs, labels, bounds; all or nothing."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parts.query_world import learn_end
from parts.reports import batch_document
from progress_world import FOREIGN, Client, Driver, ProgressWorld, configured, uuid

from proxy.progress.events import ADVICE
from proxy.progress.log_offsets import MIN_END_AGE_MS
from proxy.progress.query import (
    LIVE_MS,
    MAX_PARTITIONS,
    STUCK_AFTER_MS,
    ProgressSettings,
    QuerySettings,
)
from proxy.progress.query_registry import MAX_SENDERS
from proxy.progress.report import BatchReport, ReportRefused

# --- what is accepted


def test_a_run_from_start_to_end(world):
    driver = world.driver()
    accepted = driver.send("started")
    assert (accepted.new_run, accepted.lost_reports, accepted.query.name) == (True, 0, "orders")
    accepted = driver.batch(None, 10)
    assert (accepted.new_run, accepted.query.run_batches) == (False, 1)
    driver.batch(10, 25)
    query = world.query()
    assert (query.query_id, query.run_id, query.last_batch_id) == (
        driver.query_id,
        driver.run_id,
        1,
    )
    assert (world.part().committed_to, world.document()["state"]) == (25, "running")
    driver.send("idle")
    assert world.document()["state"] == "idle"
    driver.send("terminated")
    assert (query.ended, world.document()["state"]) == (True, "ended")
    assert world.kinds() == []


def test_a_query_that_failed_has_its_records_delivered_again(world, driver):
    client = Client(world)
    client.read(10, end=40)
    driver.send("terminated", error="x" * 9999)
    document = world.document()
    (partition,) = document["partitions"]
    assert (document["state"], len(document["error"])) == ("failed", 1000)
    assert partition["failed"]["ranges"] == [[10, 40]]
    assert partition["in_flight"]["records"] == 0
    driver.restart("run-2")
    client.read(10, end=20)
    assert world.document()["partitions"][0]["failed"]["ranges"] == [[20, 40]]
    driver.batch(10, 40)
    assert world.document()["partitions"][0]["failed"]["records"] == 0


def test_a_driver_that_was_killed_has_its_records_delivered_again(world, driver):
    Client(world).read(10, end=40)
    driver.restart("run-2", sender="another")
    assert list(world.part().failed) == [(10, 40)]


def test_a_query_that_was_stopped_left_its_records_in_flight(world, driver):
    Client(world).read(10, end=40)
    driver.send("terminated")
    assert (world.part().pending, list(world.part().failed)) == ([(10, 40)], [])


def test_the_query_is_found_by_its_client_id_or_by_the_name_in_the_configuration():
    settings = ProgressSettings(
        queries=(QuerySettings(name="orders", client_id="etl", commit_group="g"),)
    )
    world = ProgressWorld(settings)
    assert world.driver(name="orders").send("started").query is world.query("etl")
    other = foreign(world, name="other", client_id="etl")
    assert other.send("started").query is world.query("etl")
    assert world.query("etl").name == "orders"


def test_a_client_that_has_connected_needs_no_configuration(world):
    world.known.add("late")
    generation = world.registry.generation
    driver = world.driver(name="late", query_id=FOREIGN)
    driver.batch(None, 5)
    assert world.registry.generation != generation
    assert world.query("late").name == "late"


def test_an_unnamed_query_goes_by_its_id(world):
    driver = world.driver(name=None, client_id="c", query_id=FOREIGN)
    assert driver.send("started").query.name == FOREIGN


# --- numbers


@pytest.mark.parametrize(
    ("numbers", "lost"),
    [
        pytest.param([1, 2, 3], [0, 0, 0], id="all there"),
        pytest.param([40, 41], [0, 0], id="a sender unknown here may start anywhere"),
        pytest.param([1, 2, 5], [0, 0, 2], id="two lost"),
    ],
)
def test_a_gap_in_the_numbers_is_lost_reports(world, numbers, lost):
    driver = world.driver()
    driver.send("started", number=numbers[0])
    got = [0] + [driver.send("idle", number=number).lost_reports for number in numbers[1:]]
    assert got == lost
    assert world.document()["reports"]["lost"] == sum(lost)


def test_a_number_that_came_before_is_repeated(world, driver):
    assert driver.refused(10, 20, number=2) == "repeated"
    assert driver.refused(10, 20, number=1) == "repeated"
    reports = world.document()["reports"]
    assert (reports["repeated"], reports["refused"]) == (2, {"repeated": 2})
    assert world.part().committed_to == 10


def test_a_report_that_was_refused_is_not_lost(world, driver):
    assert driver.refused(3, 2) == "impossible"
    assert driver.batch(10, 20).lost_reports == 0


def test_numbers_of_two_queries_of_one_sender_are_one_row(world, driver):
    other = world.driver(name="second", query_id=FOREIGN, run_id=uuid("r"))
    other.send("started", number=3)
    driver.number = 3
    assert driver.batch(10, 20).lost_reports == 0


def test_the_number_of_senders_has_a_bound(world):
    first = world.driver(sender=uuid("0"))
    first.send("started", number=5)
    for number in range(1, MAX_SENDERS + 1):
        world.driver(sender=uuid(str(number))).send("idle", number=5)
    with pytest.raises(ReportRefused, match="number 5 of this sender"):
        world.driver(sender=uuid("1")).send("idle", number=5)
    first.send("idle", number=5)


# --- gaps in the offsets


def test_lost_reports_explain_a_gap(world, driver):
    driver.lose()
    driver.batch(30, 40, batch_id=3)
    assert (world.part().committed_to, world.skipped()) == (40, [])
    assert world.kinds() == ["lost_reports"]


def test_reports_lost_before_another_query_of_the_driver_explain_it_too(world, driver):
    other = world.driver(name="second", query_id=FOREIGN, run_id=uuid("r"), number=driver.number)
    other.lose()
    other.send("started")
    driver.number = other.number
    driver.batch(30, 40, batch_id=3)
    assert world.kinds() == ["lost_reports"]


def test_a_gap_that_nothing_explains_is_skipped(world, driver):
    driver.batch(30, 40)
    assert world.skipped() == [(10, 30, "unexplained")]
    driver.batch(40, 50)
    assert (world.part().committed_to, world.part().skipped.records) == (50, 20)


def test_an_old_loss_explains_no_later_gap(world, driver):
    driver.lose()
    driver.batch(10, 20)
    driver.batch(30, 40)
    assert world.skipped() == [(20, 30, "unexplained")]


def test_retention_explains_a_gap(world, driver):
    world.query().log_start("t", 0, 25, world.now_ms)
    driver.batch(30, 40)
    assert world.skipped() == [(10, 25, "retention"), (25, 30, "unexplained")]


def test_the_last_report_of_a_run_that_crashed_explains_a_gap(world, driver):
    driver.restart("run-2", sender="another")
    driver.batch(20, 30, batch_id=2)
    assert (world.part().committed_to, world.kinds()) == (30, ["lost_reports"])


def test_so_does_one_of_a_run_that_was_stopped_by_the_same_driver(world, driver):
    driver.restart("run-2")
    driver.batch(20, 30, batch_id=2)
    assert world.kinds() == ["lost_reports"]
    driver.batch(40, 50)
    assert world.skipped() == [(30, 40, "unexplained")]


# --- runs


def test_what_was_read_before_the_first_report_came_did_not_fail(world):
    Client(world).read(0, end=40)
    world.driver().send("started")
    assert (world.part().pending, list(world.part().failed)) == ([(0, 40)], [])


def test_a_replay_reads_the_last_batch_again(world, driver):
    driver.restart("run-2")
    driver.batch(0, 10, batch_id=0)
    driver.batch(10, 20)
    assert (world.part().committed_to, world.kinds()) == (20, ["replay"])


def test_a_reset_goes_back(world, driver):
    driver.batch(10, 50)
    driver.restart("run-2")
    driver.batch(10, 20, batch_id=1)
    assert (world.part().committed_to, world.kinds()) == (20, ["replay", "reset"])
    driver.batch(20, 30)
    assert world.part().committed_to == 30


@pytest.mark.parametrize(
    ("start", "end", "batch_id", "reason"),
    [
        pytest.param(10, 20, 0, "repeated", id="the same batch again"),
        pytest.param(0, 10, 1, "repeated", id="the same offsets again"),
        pytest.param(5, 8, 1, "repeated", id="some of them"),
        pytest.param(5, 20, 1, "out_of_order", id="from below"),
        pytest.param(None, 5, 1, "out_of_order", id="no start, and an end below"),
        pytest.param(20, 15, 1, "impossible", id="end below start"),
    ],
)
def test_what_a_run_cannot_report(world, driver, start, end, batch_id, reason):
    assert driver.refused(start, end, batch_id=batch_id) == reason
    assert driver.batch(10, 20, batch_id=1).query.run_batches == 2


def test_batches_go_up(world, driver):
    driver.batch(10, 20, batch_id=7)
    assert driver.refused(20, 30, batch_id=6) == "out_of_order"
    driver.batch(20, 30, batch_id=9)


def test_a_run_that_is_over_begins_no_more(world, driver):
    old = driver.run_id
    driver.restart("run-2")
    driver.run_id = old
    with pytest.raises(ReportRefused) as caught:
        driver.send("started")
    assert caught.value.reason == "repeated"
    assert world.query().run_id == uuid("run-2")


@pytest.mark.parametrize(
    ("event", "reason"),
    [("started", "repeated"), ("idle", "out_of_order"), ("terminated", "repeated")],
)
def test_nothing_comes_after_the_end_of_a_run(driver, event, reason):
    driver.send("terminated")
    with pytest.raises(ReportRefused) as caught:
        driver.send(event)
    assert caught.value.reason == reason


def test_a_run_begins_once(driver):
    with pytest.raises(ReportRefused) as caught:
        driver.send("started")
    assert caught.value.reason == "repeated"


# --- lies about the log


def test_an_end_beyond_the_log_is_a_lie_when_the_driver_was_told_the_log_end(world, driver):
    world.query().log_end("t", 0, 100, world.now_ms)
    assert driver.refused(10, 101) == "impossible"
    driver.batch(10, 100)


def test_it_is_not_when_nobody_was_told(world, driver):
    learn_end(world.registry, "t", 0, 100, world.now_ms)
    driver.batch(10, 101)
    assert world.part().committed_to == 101


def test_what_an_earlier_run_was_told_is_too_old(world, driver):
    world.query().log_end("t", 0, 100, world.now_ms)
    driver.restart("run-2")
    driver.batch(10, 101)
    assert world.part().committed_to == 101


def test_a_topic_made_anew_is_followed_in_the_same_run(world, driver):
    query = world.query()
    query.log_end("t", 0, 100, world.now_ms)
    driver.batch(10, 100)
    query.log_end("t", 0, 5, world.now_ms)
    driver.batch(100, 5)
    driver.batch(5, 8)
    assert world.part().committed_to == 8
    assert "recreated" in world.kinds()


def test_a_report_that_was_refused_does_not_stop_the_partition_for_ever(world, driver):
    driver.batch(10, 100)
    assert driver.refused(100, 5) == "impossible"  # nothing said yet that the log is another one
    assert driver.refused(5, 8) == "repeated"
    for _ in range(2):
        learn_end(world.registry, "t", 0, 9, world.now_ms)
        world.wait(1000)
    driver.batch(8, 9)
    assert world.part().committed_to == 9


# --- who reads with a client id


def foreign(world, **more) -> Driver:
    return world.driver(query_id=FOREIGN, run_id=uuid("foreign"), sender=uuid("s2"), **more)


def test_a_client_id_belongs_to_the_query_that_reports(world, driver):
    other = foreign(world)
    assert other.refused(0, 5) == "client_taken"
    assert world.document()["reports"]["refused"] == {"client_taken": 1}
    assert world.query().query_id == driver.query_id


def test_another_query_takes_over_when_it_starts(world, driver):
    foreign(world).send("started")
    assert world.query().query_id == FOREIGN
    assert world.kinds() == ["taken_over"]
    assert driver.refused(10, 20) == "client_taken"


@pytest.mark.parametrize("how", ["ended", "silent"])
def test_another_query_takes_over_from_one_that_is_gone(world, driver, how):
    if how == "ended":
        driver.send("terminated")
    else:
        world.wait(LIVE_MS)
    foreign(world).batch(0, 5)
    assert (world.query().query_id, world.part().committed_to) == (FOREIGN, 5)


def test_who_takes_over_has_a_checkpoint_of_its_own(world, driver):
    other = foreign(world)
    other.send("started")
    Client(world).read(70)
    other.batch(None, 90)
    assert world.skipped() == [(10, 70, "new_checkpoint")]


def test_who_takes_over_does_not_inherit_what_it_does_not_read(world, driver):
    driver.batch({0: 10, 1: 0}, {0: 20, 1: 30})
    other = foreign(world)
    other.send("started")
    other.batch(None, 7, topic="u")
    assert set(world.query().partitions) == {("u", 0)}
    assert world.kinds().count("left") == 2


def test_a_run_id_belongs_to_one_query(world, driver):
    other = foreign(world)
    other.run_id = driver.run_id
    assert other.refused(0, 5) == "impossible"


def test_a_query_that_reads_with_another_client_id_takes_its_progress_along(world):
    world.known |= {"a", "b"}
    driver = world.driver(name="moving", client_id="a", query_id=FOREIGN)
    driver.batch(None, 10)
    driver.send("terminated")
    driver.client_id = "b"
    driver.restart("run-2")
    driver.batch(10, 20)
    assert world.query("a") is None
    assert (world.query("b").name, world.part(client_id="b").committed_to) == ("moving", 20)


def test_late_reports_of_a_query_that_moved_are_refused(world):
    world.known |= {"a", "b"}
    driver = world.driver(name="moving", client_id="a", query_id=FOREIGN)
    driver.batch(None, 10)
    world.wait(LIVE_MS)
    old = driver.run_id
    driver.client_id = "b"
    driver.restart("run-2")
    driver.run_id, driver.client_id = old, "a"
    world.wait(LIVE_MS)
    assert driver.refused(10, 20) == "out_of_order"
    assert world.query("a") is None


# --- refusals


def test_no_client(world):
    with pytest.raises(ReportRefused) as caught:
        world.driver(name=None).send("started")
    assert caught.value.reason == "no_client"


def test_unknown_query(world):
    driver = world.driver(name="nobody", query_id=FOREIGN)
    assert driver.refused(None, 5) == "unknown_query"
    driver.send("started")  # it starts before it connects
    driver.batch(None, 5)


def test_too_many_partitions_of_a_query_are_refused_and_otherwise_noted(world, driver):
    many = dict.fromkeys(range(1, MAX_PARTITIONS), 0)
    driver.batch(many, many)
    assert len(world.query().partitions) == MAX_PARTITIONS
    assert driver.refused({MAX_PARTITIONS: 0}, {MAX_PARTITIONS: 0}) == "malformed"
    for partition in (MAX_PARTITIONS, MAX_PARTITIONS + 1):
        Client(world).ask(0, partition=partition)
    (note,) = world.events
    assert (note.kind, note.at_ms) == ("too_many", world.now_ms)


def test_queries_that_no_configuration_names_have_so_many_partitions_together():
    world = ProgressWorld(replace(configured("orders"), max_other_partitions=3))
    names = "one", "two", "three"
    made_up = [world.driver(name=name, query_id=uuid(name), sender=uuid(name)) for name in names]
    world.known |= set(names)
    for driver in made_up[:2]:
        driver.batch(None, {0: 5, 1: 5})
    assert [len(world.query(each).partitions) for each in ("one", "two")] == [2, 1]
    world.driver().batch(None, dict.fromkeys(range(5), 5))
    assert len(world.query().partitions) == 5
    world.wait(LIVE_MS / 2)
    made_up[1].batch({0: 5}, {0: 6})
    made_up[2].batch(None, 5)
    assert not world.query("three").partitions
    assert "no room for more partitions: name the query under queries" in world.events[-1].text
    world.wait(LIVE_MS / 2)
    assert world.query("one") is None
    assert world.query("two") is not None
    made_up[2].batch(5, 6)
    assert len(world.query("three").partitions) == 1


NAMES = st.sampled_from(["orders", "second", None])
EVENT = st.sampled_from(["started", "progress", "progress", "progress", "idle", "terminated"])
OFFSET = st.integers(0, 30)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            EVENT,
            NAMES,
            st.sampled_from([uuid("query"), FOREIGN]),
            st.sampled_from(["run-1", "run-2"]),
            st.integers(1, 12),
            st.integers(0, 4),
            st.none() | OFFSET,
            OFFSET,
            st.integers(0, 40_000),
        ),
        max_size=25,
    )
)
def test_a_refused_report_changes_nothing_but_counts(steps):
    world = ProgressWorld(configured("orders", max_queries=2))
    kept = {}
    for event, name, query_id, run_id, number, batch_id, start, end, wait_ms in steps:
        world.wait(wait_ms)
        before = snapshot(world, kept)
        driver = world.driver(name=name, query_id=query_id, run_id=uuid(run_id))
        try:
            if event == "progress":
                driver.batch(
                    {0: start} if start is not None else None, end, batch_id, number=number
                )
            else:
                driver.send(event, number=number)
        except ReportRefused:
            assert snapshot(world, kept) == before
        else:
            for query in world.registry.queries:
                for partition in query.partitions.values():
                    assert partition.committed_to is None or partition.committed_to <= 30


def snapshot(world, kept):
    """Return all that may not change: documents without their counts and advice, state, commits,
    notes.
    """
    records, deletes = world.registry.unwritten.take()
    kept.update({record.key: record for record in records})
    for key in deletes:
        kept.pop(key, None)
    documents = world.documents()
    for document in documents:
        del document["reports"]["refused"], document["reports"]["repeated"], document["advice"]
    return (
        json.dumps(documents, allow_nan=False),
        dict(kept),
        world.registry.due_commits(),
        [note for note in world.events if note.kind not in ADVICE],
        world.registry.generation,
    )


# --- whose log ends the cluster is asked for


@pytest.mark.parametrize(
    ("silent_ms", "age_ms", "is_stale"),
    [
        pytest.param(0, MIN_END_AGE_MS - 1, False, id="just learned"),
        pytest.param(0, MIN_END_AGE_MS, True, id="learned a while ago"),
        pytest.param(60_000, 999, False, id="silent for a minute, learned less than a second ago"),
        pytest.param(60_000, 1000, True, id="silent for a minute, learned a second ago"),
        pytest.param(3_600_000, 59_999, False, id="silent for an hour, learned within a minute"),
    ],
)
def test_an_end_may_be_the_older_the_longer_its_query_is_silent(
    world, driver, silent_ms, age_ms, is_stale
):
    driver.batch(10, 20)
    began_ms = world.now_ms
    learn_end(world.registry, "t", 0, 100, began_ms + silent_ms - age_ms)
    stale = set(world.registry.stale(began_ms + silent_ms))
    assert stale == ({("t", 0)} if is_stale else set())


def test_what_passes_and_what_was_looked_up_makes_an_end_recent(world, driver):
    driver.batch({0: 10, 1: 10}, {0: 20, 1: 20})
    assert set(world.registry.stale(world.now_ms)) == {("t", 0), ("t", 1)}
    Client(world).read(20, end=25)
    assert set(world.registry.stale(world.now_ms)) == {("t", 1)}
    learn_end(world.registry, "t", 1, 5, world.now_ms)  # a lower one is left out, but was learned
    assert set(world.registry.stale(world.now_ms)) == set()
    assert set(world.registry.partitions()) == {("t", 0), ("t", 1)}


def test_a_query_that_has_ended_or_was_never_seen_has_no_stale_ends(world, driver):
    driver.batch(10, 20)
    driver.send("terminated")
    assert set(world.registry.stale(world.now_ms)) == set()
    world.registry.follow("other")
    assert set(world.registry.stale(world.now_ms)) == set()


def test_an_end_is_told_to_every_query_that_reads_the_partition(world, driver):
    world.known.add("other")
    other = world.driver(
        name="other", query_id=FOREIGN, run_id=uuid("run-2"), sender=uuid("another")
    )
    driver.batch(10, 20)
    other.batch(10, 20)
    for end, ask in enumerate(
        (world.registry.partitions, lambda: world.registry.stale(world.now_ms)), 30
    ):
        assert set(ask()) == {("t", 0)}
        learn_end(world.registry, "t", 0, end, world.now_ms)
        ends = [world.part(client_id=each).log.high_watermark for each in ("orders", "other")]
        assert ends == [end, end]
        world.now_ms += MIN_END_AGE_MS


def test_what_a_query_has_let_go_of_is_told_nothing(world, driver):
    driver.batch(10, 20)
    gone = world.part()
    list(world.registry.partitions())
    world.query().revoke(gone, "as a test", world.now_ms)
    learn_end(world.registry, "t", 0, 100, world.now_ms)
    assert gone.log.high_watermark is None


def test_what_comes_and_goes_during_a_sweep_disturbs_no_others(world):
    world.driver().batch(None, dict.fromkeys(range(4), 10))
    for partition in range(4):
        learn_end(world.registry, "t", partition, 50, world.now_ms)
    list(world.registry.sweeping(world.now_ms))
    (query,) = world.registry.queries
    sweep = world.registry.sweeping(world.now_ms + STUCK_AFTER_MS)
    next(sweep)
    query.revoke(query.partitions["t", 1], "gone", world.now_ms)
    batch = BatchReport(**batch_document(99, {2: 10}, {2: 50}))
    list(query.completing(batch, world.now_ms, world.now_s))
    query.open("t", 7, world.now_ms)
    list(sweep)
    assert [key for key, each in query.partitions.items() if each.stuck] == [("t", 0), ("t", 3)]
