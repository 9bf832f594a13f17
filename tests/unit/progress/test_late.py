"""What Spark tells of a run after it has told the start of the next."""

import pytest
from progress_world import Client, Driver, ProgressWorld, uuid

from proxy.progress.progress_records import read_progress_records

OLD, NEW = uuid("run-1"), uuid("run-2")


def begin_again(driver: Driver, **more) -> None:
    """Start another run; what the driver sends next is of the run before, but for what follows."""
    driver.run_id = NEW
    driver.send("started", **more)
    driver.run_id = OLD


def test_the_last_events_of_a_run_come_after_the_start_of_the_next(world, driver):
    Client(world).read(10, end=50)
    begin_again(driver)
    accepted = driver.batch(10, 50)
    assert (accepted.new_run, accepted.lost_reports) == (False, 0)
    driver.send("terminated")
    query = world.query()
    assert (query.run_id, query.run_batches, query.last_batch_id) == (NEW, 0, None)
    assert not query.ended
    assert (world.part().committed_to, world.part().lag_records()) == (50, 950)
    assert world.part().run_id == OLD
    assert world.registry.due_commits() == {"orders-progress": {("t", 0): 50}}
    assert (list(world.part().failed), world.kinds()) == ([], [])
    driver.run_id = NEW
    driver.batch(50, 60, batch_id=2)
    assert (world.part().committed_to, query.run_batches) == (60, 1)
    assert world.kinds() == []


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        pytest.param(10, 40, 40, id="goes on"),
        pytest.param(None, 40, 40, id="goes on, with no start"),
        pytest.param(0, 40, 40, id="from below"),
        pytest.param(20, 40, 40, id="reports were lost"),
        pytest.param(5, 8, None, id="all known"),
        pytest.param(10, 10, 10, id="empty"),
        pytest.param(40, 5, None, id="back"),
    ],
)
def test_nothing_goes_back(world, start, end, expected):
    driver = world.driver(run_id=uuid("run-0"))
    driver.send("started")
    driver.batch(0, 10)
    driver.run_id = OLD
    driver.send("started")
    begin_again(driver)
    if expected is None:
        driver.refused(start, end) if start > end else driver.batch(start, end)
    else:
        driver.batch(start, end)
    assert world.part().committed_to == (expected or 10)
    assert world.skipped() == []
    assert "reset" not in world.kinds()


def test_what_the_present_run_has_done_stands(world, driver):
    begin_again(driver)
    driver.run_id = NEW
    driver.batch(10, 30)
    driver.run_id = OLD
    driver.batch(10, 90, batch_id=5)
    assert (world.part().committed_to, world.part().run_id) == (30, NEW)


@pytest.mark.parametrize("event", ["started", "running"])
def test_a_run_that_was_never_heard_of_is_the_older_one_too(event):
    world = ProgressWorld()
    driver = world.driver()
    driver.run_id = NEW
    driver.send(event)
    driver.run_id = OLD
    driver.batch(0, 50)
    driver.send("idle")
    driver.send("terminated")
    query = world.query()
    assert (query.run_id, query.ended, query.idle) == (NEW, False, False)
    assert world.part().committed_to == 50


def test_another_driver_tells_of_a_new_run_whichever_event_comes_first(world, driver):
    begin_again(driver)
    other = world.driver(run_id=uuid("run-3"), sender=uuid("s2"))
    assert other.batch(10, 20).new_run
    assert world.query().run_id == uuid("run-3")


def test_what_a_late_batch_completed_is_kept(world, driver):
    world.registry.unwritten.take()
    begin_again(driver)
    driver.batch(10, 50)
    (record,), _ = world.registry.unwritten.take()
    world.reopen()
    assert world.registry.load(read_progress_records([record])) == []
    assert world.part().committed_to == 50
