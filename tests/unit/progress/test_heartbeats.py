"""Signs of life of runs: what they begin and keep alive, and what they leave alone."""

import pytest
from progress_world import FOREIGN, Client, ProgressWorld, uuid

from proxy.progress.query import LIVE_MS
from proxy.progress.report import ReportRefused

SECONDS = {"kind": "processing_time", "interval_ms": 2000}


def test_a_sign_of_life_is_no_event(world, driver):
    before = world.document()
    world.wait(5000)
    accepted = driver.send("running", trigger=SECONDS, last_batch_id=0)
    assert (accepted.new_run, accepted.lost_reports) == (False, 0)
    after = world.document()
    assert after.pop("last_heard") == before.pop("last_heard") + 5
    assert after.pop("trigger") == {"kind": "processing_time", "interval_s": 2.0}
    assert after.pop("report_age_s") == before.pop("report_age_s") + 5
    del before["trigger"]
    assert after == before
    assert driver.batch(10, 20).lost_reports == 0
    assert world.registry.report_results == {"accepted": 3, "lost": 0}


def test_it_keeps_a_query_live(world, driver):
    for _ in range(3):
        world.wait(LIVE_MS - 1)
        driver.send("running")
    assert world.document()["state"] == "running"
    world.wait(LIVE_MS)
    assert world.document()["state"] == "silent"


def test_a_run_that_is_not_known_began_some_time_ago(world):
    driver = world.driver()
    assert driver.send("running", trigger=SECONDS).new_run
    query = world.query()
    assert (query.run_id, query.query_id) == (driver.run_id, driver.query_id)
    assert (query.run_began_ms, query.run_batches, query.last_report_ms) == (None, 0, None)
    assert (query.trigger_kind, query.trigger_interval_ms) == ("processing_time", 2000.0)
    driver.send("idle")
    assert query.run_began_ms is None  # nothing says that it has planned no batch
    driver.batch(None, 10, batch_id=7)
    assert (query.run_began_ms, query.last_batch_id) == (world.now_ms, 7)


def test_what_was_asked_for_may_be_of_the_run_that_is_found_alive(world):
    Client(world).ask(70)
    driver = world.driver()
    driver.send("running")
    driver.batch(None, 90)
    assert world.part().committed_to == 90
    assert world.part().fetched_from == 70


def test_a_trigger_belongs_to_its_run(world, driver):
    driver.send("running", trigger=SECONDS)
    driver.send("running")  # Spark did not answer in time
    assert world.query().trigger_kind == "processing_time"
    driver.restart("run-2")
    assert world.query().trigger_kind is None


@pytest.mark.parametrize("is_known", [True, False], ids=["former run", "run never heard of"])
def test_a_run_that_is_over_is_left_alone(world, driver, is_known):
    old = driver.run_id if is_known else uuid("run-0")
    driver.restart("run-2")
    world.wait(1000)
    heard_ms = world.query().last_heard_ms
    if not is_known:
        driver.sender = uuid("a driver that lives on")
    driver.run_id = old
    accepted = driver.send("running")
    assert (accepted.new_run, accepted.query.run_id) == (False, uuid("run-2"))
    assert world.query().last_heard_ms == heard_ms


def test_an_event_of_another_run_is_believed_more_than_its_sign_of_life(world):
    killed, driver = world.driver(run_id=uuid("run-0")), world.driver(sender=uuid("s2"))
    killed.send("running")
    driver.send("running")
    assert world.query().run_id == killed.run_id
    driver.batch(None, 10)
    assert world.query().run_id == driver.run_id


def test_a_run_that_has_ended_stays_so(world, driver):
    driver.send("terminated")
    driver.send("running")
    assert world.document()["state"] == "ended"


def test_another_query_is_refused_while_the_first_is_heard(world, driver):
    other = world.driver(query_id=FOREIGN, run_id=uuid("foreign"), sender=uuid("s2"))
    with pytest.raises(ReportRefused) as caught:
        other.send("running")
    assert caught.value.reason == "client_taken"
    world.wait(LIVE_MS)
    assert other.send("running").new_run
    assert world.kinds() == ["client_shared", "taken_over"]


def test_a_query_that_never_connected_is_followed_too():
    world = ProgressWorld()
    driver = world.driver(name="late", query_id=FOREIGN)
    assert driver.send("running").query is world.query("late")
