"""What the broker has removed: lost where a reported batch did not get it, and once."""

import pytest
from parts.reports import batch_document
from progress_world import Client, uuid

from proxy.progress.progress_records import read_progress_records
from proxy.state import MemoryStore

OUT_OF_RANGE = 1
ALL = 12_000
"""Offsets of the log, all of which the broker removes."""

NEXT = uuid("run-2")


@pytest.fixture
def store():
    return MemoryStore()


def restart(world, store):
    """Let another process go on from what was written with the last report."""
    world.registry.load(read_progress_records(store.items("progress/")))


def report(driver, start, end, *, rows):
    """Report a batch that had so many rows."""
    driver.batch_id += 1
    document = batch_document(driver.batch_id, start, end, rows=rows)
    return driver.send("progress", batch=document)


def remove(world, below):
    """Let the broker remove what is below an offset, and the proxy look the log start up."""
    for each in world.registry.readers_of("t", 0):
        each.log.record_start(below)


def test_what_was_delivered_is_not_lost_before_its_batch_is_reported(world, driver):
    Client(world).read(10, end=ALL, hw=ALL)
    remove(world, ALL)
    assert world.skipped() == []
    report(driver, 10, 4_200, rows=4_190)
    report(driver, 4_200, ALL, rows=7_800)
    assert (world.skipped(), world.kinds()) == ([], [])


@pytest.mark.parametrize("rows", [7_800, 0], ids=["counted", "not counted by Spark"])
def test_nor_is_what_was_delivered_before_a_restart(world, driver, store, rows):
    Client(world).read(10, end=4_200, hw=ALL)
    report(driver, 10, 4_200, rows=4_190)
    records, _ = world.registry.unwritten.take()
    Client(world).read(4_200, end=ALL, hw=ALL)  # of this no record is due
    store.put_many(records)
    world.reopen()
    restart(world, store)
    remove(world, ALL)
    assert world.skipped() == []
    Client(world).read(ALL, count=0, hw=ALL, start=ALL)  # its executors have gone on
    for start in range(4_200, ALL, 1_300):
        report(driver, start, start + 1_300, rows=rows // 6)
    assert (world.part().committed_to, world.skipped(), world.kinds()) == (ALL, [], [])


@pytest.mark.parametrize("rows", [7_800, 0], ids=["counted", "not counted by Spark"])
def test_nor_is_what_was_read_ahead_although_its_end_is_not_known(world, driver, rows):
    Client(world).read(10, hw=ALL)
    remove(world, ALL)
    report(driver, 10, ALL, rows=rows)
    assert (world.skipped(), world.kinds()) == ([], [])


def test_where_rows_say_that_all_was_read_the_proxy_has_not_seen_it_all(world, driver):
    """As when a connection was served by another member."""
    Client(world).read(10, end=500)
    remove(world, ALL)
    report(driver, 10, ALL, rows=ALL - 10)
    assert (world.skipped(), world.kinds()) == ([], [])


def test_so_do_markers_of_transactions_which_are_no_rows(world, driver):
    Client(world).read(10, end=500)
    remove(world, ALL)
    report(driver, 10, ALL, rows=ALL - 10 - 78)
    assert world.skipped() == []


def test_a_run_that_ended_may_report_late_that_it_had_what_was_in_flight(world, driver):
    Client(world).read(10, end=500)
    former, driver.run_id = driver.run_id, NEXT
    driver.send("started")
    remove(world, 500)
    driver.run_id = former
    report(driver, 10, 500, rows=490)
    assert (world.part().committed_to, world.skipped()) == (500, [])


def test_what_nobody_was_given_is_lost_with_the_batch_that_should_have_had_it(world, driver):
    Client(world).read(10, end=4_200, hw=ALL)
    remove(world, ALL)
    report(driver, 10, 4_000, rows=3_990)
    assert world.skipped() == []
    report(driver, 4_000, 5_000, rows=200)
    assert world.skipped() == [(4_200, 5_000, "retention")]
    report(driver, 5_000, ALL, rows=0)
    assert world.skipped() == [(4_200, 5_000, "retention"), (5_000, ALL, "retention")]
    assert (world.part().skipped.records, world.kinds()) == (7_800, ["skipped", "skipped"])


def test_what_failed_and_was_not_read_again_is_lost(world, driver):
    Client(world).read(10, end=40)
    driver.run_id = NEXT
    driver.send("started")
    remove(world, 30)
    assert world.skipped() == []
    Client(world).read(30, end=40, start=30)
    report(driver, 10, 40, rows=10)
    assert world.skipped() == [(10, 30, "retention")]


def test_a_loss_that_a_reader_was_told_of_is_counted_at_once_and_no_more(world, driver):
    client = Client(world)
    client.read(10, end=4_200, hw=ALL)
    remove(world, 9_000)
    client.read(4_200, error=OUT_OF_RANGE, count=0, hw=-1, start=-1)
    client.read(9_000, end=ALL, hw=ALL, start=9_000)
    assert world.skipped() == [(4_200, 9_000, "retention")]
    report(driver, 10, 5_000, rows=4_190)
    report(driver, 5_000, ALL, rows=3_000)
    assert world.part().skipped.records == 4_800


def test_a_loss_is_counted_although_the_log_start_is_not_known(world, driver):
    client = Client(world)
    client.read(10, error=OUT_OF_RANGE, count=0, hw=-1, start=-1)
    client.read(60, start=-1)
    assert world.skipped() == [(10, 60, "out_of_range")]


def test_an_executor_that_comes_back_late_has_not_lost_what_others_read_meanwhile(world, driver):
    first, second = Client(world), Client(world)
    first.read(10, error=OUT_OF_RANGE, count=0, hw=-1, start=-1)
    second.read(10, error=OUT_OF_RANGE, count=0, hw=-1, start=-1)
    second.read(60, end=500, start=60)
    report(driver, 10, 500, rows=440)
    second.read(500, end=900, start=60)
    first.read(900, start=60)
    assert (world.skipped(), world.part().skipped.records) == ([(10, 60, "out_of_range")], 50)


def test_a_reader_that_goes_on_further_behind_has_lost_what_was_removed_only(world, driver):
    """Another executor has the rest, in an answer whose end is not known."""
    first, second = Client(world), Client(world)
    second.read(600)
    remove(world, 600)
    first.read(10, error=OUT_OF_RANGE, count=0, hw=-1, start=-1)
    first.read(1_000, start=600)
    assert world.skipped() == [(10, 600, "retention")]
    report(driver, 10, 1_000, rows=400)
    assert world.part().skipped.records == 590


def test_two_readers_of_one_partition_lose_what_lies_between_them_once(world, driver):
    first, second = Client(world), Client(world)
    first.read(500, error=OUT_OF_RANGE, count=0, hw=-1, start=-1)
    second.read(10, error=OUT_OF_RANGE, count=0, hw=-1, start=-1)
    first.read(600, start=-1)
    second.read(600, start=-1)
    report(driver, 10, 700, rows=100)
    assert world.part().skipped.records == 590


def test_reports_that_were_left_out_are_no_loss_although_their_numbers_join(world, driver):
    """As where a driver is asked for its last batch, and Spark did not tell of those before."""
    driver.batch(30, 40, batch_id=3)
    assert (world.part().committed_to, world.skipped()) == (40, [])
    assert world.kinds() == ["lost_reports"]
