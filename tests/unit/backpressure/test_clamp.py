"""What a driver is told of the log ends: each rule of the clamp by its name."""

import pytest
from backpressure_parts import (
    CLIENT,
    CONSUMER,
    INTERVAL_MS,
    NO_LEADER,
    STATIC,
    VERSION,
    World,
    answer,
    ask,
    read,
    rule,
    tell_earliest,
    told,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.backpressure.planner import MISSED_ANSWERS, REPORT_WAIT_MS, DriverLookups
from proxy.quota.rules import Rule
from proxy.wire.offsets import EARLIEST, LATEST, READ_COMMITTED

RATE = 100.0
PER_BATCH = 200
"""RATE in one interval."""
MAX_TIMESTAMP = -3


def running(world: World, ends: dict[int, int] | None = None) -> DriverLookups:
    """A driver in mid-run: it was told `ends`, read them, and RATE is known."""
    ends = ends or {0: 1000}
    world.start()
    world.pass_ms(10)
    driver = world.lookups()
    told(world, driver, ends)
    world.pass_ms(100)
    world.rated(RATE, ends)
    world.pass_ms(10)
    return driver


def world_of(**settings) -> World:
    return World(rule(**{"min_rate": 1.0, "integral": 0.0, **settings}))


def test_a_batch_is_clamped_to_the_rate_for_one_interval():
    world = world_of()
    driver = running(world)
    assert told(world, driver, {0: 5000}) == {0: 1000 + PER_BATCH}


def test_what_fits_one_interval_is_told_truly():
    world = world_of()
    driver = running(world)
    frame = answer({0: 1000 + PER_BATCH})
    assert driver.answered(ask([0]), VERSION, frame, world.now_ms) is frame


def test_it_is_shared_by_lag():
    world = world_of()
    driver = running(world, {0: 1000, 1: 2000, 2: 50})
    seen = told(world, driver, {0: 1600, 1: 2200, 2: 50})
    assert seen == {0: 1000 + 150, 1: 2000 + 50, 2: 50}


def test_shares_add_up_to_the_whole():
    world = world_of()
    ends = dict.fromkeys(range(7), 1000)
    driver = running(world, ends)
    seen = told(world, driver, {index: 2000 + 37 * index for index in ends})
    assert sum(seen.values()) == 7 * 1000 + PER_BATCH


def test_partitions_of_other_brokers_have_their_share_as_last_seen():
    world = world_of()
    driver = running(world, {0: 1000, 1: 1000})
    other = world.lookups()
    world.pass_ms(10)
    assert told(world, other, {1: 4000}) == {1: 1000 + PER_BATCH}
    assert told(world, driver, {0: 2000}) == {0: 1000 + PER_BATCH // 4}


def test_a_partition_that_is_asked_for_no_more_has_no_share():
    world = world_of()
    driver = running(world, {0: 1000, 1: 1000})
    told(world, driver, {0: 9000, 1: 9000})
    done = 1000 + PER_BATCH // 2
    for _ in range(MISSED_ANSWERS):
        world.pass_ms(INTERVAL_MS)
        world.batch({0: done}, rate=RATE)
        world.pass_ms(10)
        done = told(world, driver, {0: 9000})[0]
    world.pass_ms(INTERVAL_MS)
    world.batch({0: done}, rate=RATE)
    world.pass_ms(10)
    assert told(world, driver, {0: 9000}) == {0: done + PER_BATCH}


def test_never_below_what_was_told_before():
    world = world_of()
    driver = running(world)
    told(world, driver, {0: 5000})
    world.pass_ms(INTERVAL_MS)
    # The same trigger asks again, and the report has not come: nothing is planned anew.
    assert told(world, driver, {0: 5000}) == {0: 1000 + PER_BATCH}
    world.pressure.limit(1.0, "by hand", world.now_ms)
    assert told(world, driver, {0: 5000}) == {0: 1000 + PER_BATCH}


def test_never_below_what_the_query_knows():
    world = world_of()
    driver = running(world)
    told(world, driver, {0: 1001})
    world.batch({0: 1001}, rate=RATE)
    world.pressure.limit(0.1, "by hand", world.now_ms)
    assert told(world, driver, {0: 1001}) == {0: 1001}
    assert told(world, driver, {0: 5000}) == {0: 1002}


def test_never_above_the_truth_even_if_the_log_was_cut():
    world = world_of()
    driver = running(world)
    assert told(world, driver, {0: 900}) == {0: 900}


def test_what_lies_below_the_log_start_takes_no_share():
    world = world_of()
    driver = running(world)
    tell_earliest(world, driver, {0: 3000})
    assert told(world, driver, {0: 9000}) == {0: 3000 + PER_BATCH}


def test_other_timestamps_are_left_alone():
    world = world_of()
    driver = running(world)
    for timestamp in (EARLIEST, MAX_TIMESTAMP, 0, 1_700_000_000_000):
        frame = answer({0: 5000})
        assert driver.answered(ask([0], timestamp), VERSION, frame, world.now_ms) is frame


def test_errors_and_missing_offsets_are_left_alone():
    world = world_of()
    driver = running(world, {0: 1000, 1: 1000, 2: 1000})
    latest = {0: 5000, 1: 5000, 2: -1}
    frame = driver.answered(ask(latest), VERSION, answer(latest, errors=[1]), world.now_ms)
    seen = read(frame)
    assert seen["t", 0].offset < 5000
    assert seen["t", 1] == (NO_LEADER, 5000)
    assert seen["t", 2] == (0, -1)


def test_with_read_committed_the_stable_end_is_the_truth():
    world = world_of()
    driver = running(world)
    assert told(world, driver, {0: 1100}, isolation=READ_COMMITTED) == {0: 1100}
    assert told(world, driver, {0: 5000}, isolation=READ_COMMITTED) == {0: 1000 + PER_BATCH}
    # A stable end is no log end.
    assert world.query.partitions["t", 0].high_watermark == 1000


def test_progress_learns_the_real_ends_and_starts():
    world = world_of()
    driver = running(world)
    told(world, driver, {0: 5000})
    tell_earliest(world, driver, {0: 20})
    partition = world.query.partitions["t", 0]
    assert (partition.high_watermark, partition.log_start) == (5000, 20)


def test_without_an_adaptive_rule_progress_learns_them_too():
    world = world_of()
    lookups = DriverLookups(world.query, None, world.now_ms)
    assert lookups.wait_ms(ask([0]), world.now_ms) == 0
    assert told(world, lookups, {0: 5000}) == {0: 5000}
    assert world.query.partitions["t", 0].high_watermark == 5000


def test_an_executor_is_told_the_truth():
    world = world_of()
    running(world)
    executor = world.lookups()
    executor.fetched()
    assert told(world, executor, {0: 5000}) == {0: 5000}
    assert executor.wait_ms(ask([0]), world.now_ms) == 0


def test_what_an_executor_was_told_binds_nobody():
    world = world_of()
    driver = running(world)
    executor = world.lookups()
    executor.fetched()
    told(world, executor, {0: 5000})
    assert told(world, driver, {0: 5000}) == {0: 1000 + PER_BATCH}


def test_before_the_first_report_of_a_run_the_truth_is_told():
    world = world_of()
    driver = world.lookups()
    assert told(world, driver, {0: 5000}) == {0: 5000}
    world.start()
    assert told(world, driver, {0: 9000}) == {0: 9000}


def test_before_the_first_rate_the_truth_is_told():
    world = world_of()
    world.start()
    driver = world.lookups()
    told(world, driver, {0: 1000})
    world.pass_ms(1)
    world.batch({0: 1000})
    assert told(world, driver, {0: 9000}) == {0: 9000}


def test_a_rate_before_the_first_one_clamps_the_second_batch():
    world = world_of(initial_rate=50.0)
    world.start()
    driver = world.lookups()
    tell_earliest(world, driver, {0: 0})
    assert told(world, driver, {0: 1000}) == {0: 100}
    world.pass_ms(1)
    world.batch({0: 100})
    assert told(world, driver, {0: 9000}) == {0: 200}


def test_a_new_partition_is_told_truly_until_it_was_read():
    world = world_of()
    driver = running(world)
    assert told(world, driver, {0: 9000, 1: 700}) == {0: 1000 + PER_BATCH, 1: 700}
    world.pass_ms(INTERVAL_MS)
    world.batch({0: 1000 + PER_BATCH, 1: 700}, rate=RATE)
    assert told(world, driver, {0: 9000, 1: 900}) == {
        0: 1200 + round(PER_BATCH * 7800 / 8000),
        1: 700 + round(PER_BATCH * 200 / 8000),
    }


def test_a_topic_made_anew_is_told_truly():
    world = world_of()
    driver = running(world)
    assert told(world, driver, {0: 30}) == {0: 30}
    assert told(world, driver, {0: 60}) == {0: 60}


def test_when_the_run_has_ended_the_truth_is_told():
    world = world_of()
    driver = running(world)
    world.send("terminated")
    assert told(world, driver, {0: 5000}) == {0: 5000}


def test_when_reports_have_stopped_the_truth_is_told():
    world = world_of(hold_ms=10_000.0)
    driver = running(world)
    world.pass_ms(9_000)
    assert told(world, driver, {0: 5000}) == {0: 1000 + PER_BATCH}
    world.pass_ms(1_100)
    assert told(world, driver, {0: 5000}) == {0: 5000}
    assert world.document["clamp"]["why"] == "no report for 10 s"


def test_idle_events_are_reports():
    world = world_of(hold_ms=10_000.0)
    driver = running(world)
    for _ in range(5):
        world.pass_ms(8_000)
        world.send("idle")
    assert told(world, driver, {0: 5000}) == {0: 1000 + PER_BATCH}


def test_when_the_rule_is_adaptive_no_more_the_truth_is_told():
    world = world_of()
    driver = running(world)
    world.update(Rule(client_id=CLIENT, bounds={CONSUMER: STATIC}))
    world.backpressure.tick(world.now_ms)
    assert told(world, driver, {0: 5000}) == {0: 5000}


def test_offsets_that_are_no_records_do_not_count():
    """Every second offset ends a transaction: a batch of as many records goes on twice as far."""
    world = world_of()
    world.start()
    driver = world.lookups()
    told(world, driver, {0: 4000})
    for end in (2000, 4000):
        world.pass_ms(INTERVAL_MS)
        world.batch({0: end}, rows=1000, ms=10_000)
    world.pass_ms(10)
    assert told(world, driver, {0: 90_000}) == {0: 4000 + 2 * PER_BATCH}


def test_after_a_batch_that_was_held_the_next_is_as_long_as_it_could_read():
    """A query that could take more than it may read must not plan ever longer batches."""
    world = world_of()
    driver = running(world)
    told(world, driver, {0: 1100})
    world.pressure.held(world.now_ms, world.now_ms + 3900)
    world.pass_ms(4000)
    world.batch({0: 1100}, ms=4000)
    assert world.pressure.rate == pytest.approx(1000)
    assert told(world, driver, {0: 5000}) == {0: 1100 + 50}
    world.pass_ms(INTERVAL_MS)
    world.batch({0: 1150}, ms=50)
    assert told(world, driver, {0: 5000}) == {0: 1150 + 75}


def test_a_wait_for_a_report_says_nothing_of_how_fast_it_may_read():
    world = world_of()
    driver = running(world)
    told(world, driver, {0: 1100})
    world.pass_ms(INTERVAL_MS)
    driver.wait_ms(ask([0]), world.now_ms)
    world.pass_ms(200)
    world.batch({0: 1100}, rate=RATE, age_ms=200)
    told(world, driver, {0: 1102})
    world.pass_ms(20)
    world.batch({0: 1102}, ms=220)
    assert told(world, driver, {0: 5000}) == {0: 1102 + PER_BATCH}


def test_a_ceiling_from_outside_shapes_the_batch_too():
    world = world_of()
    driver = running(world)
    world.pressure.limit(25.0, "the next stage is slow", world.now_ms)
    assert told(world, driver, {0: 5000}) == {0: 1000 + 50}
    world.batch({0: 1050}, rate=RATE)
    world.pressure.limit(None, "", world.now_ms)
    assert told(world, driver, {0: 5000}) == {0: 1050 + PER_BATCH}


def test_any_rate_is_a_number_of_offsets():
    world = world_of(proportional=1e300, batch_interval_ms=1e10)
    world.start()
    driver = world.lookups()
    told(world, driver, {0: 2000})
    for end, rate in ((1000, 100), (2000, 1e5)):
        world.pass_ms(INTERVAL_MS)
        world.batch({0: end}, rate=rate)
    world.pass_ms(10)
    assert world.pressure.rate == pytest.approx(1e305, rel=0.1)
    assert told(world, driver, {0: 9_000_000}) == {0: 9_000_000}


def test_a_very_low_rate_still_gets_on():
    world = world_of(min_rate=0.01)
    driver = running(world)
    world.pressure.limit(0.01, "by hand", world.now_ms)
    assert told(world, driver, {0: 5000}) == {0: 1001}


# Whose connection is it?


def test_a_connection_newer_than_the_latest_report_is_told_the_truth():
    """AvailableNow, started while a killed run is still on the books, takes its end from it."""
    world = world_of()
    driver = running(world)
    driver.closed()
    world.pass_ms(500)
    fresh = world.lookups()
    assert told(world, fresh, {0: 5000}) == {0: 5000}
    assert world.document["clamp"]["why"] == "the connection is newer than the latest report"


def test_it_is_trusted_after_the_next_report():
    world = world_of()
    driver = running(world)
    driver.closed()
    world.pass_ms(500)
    fresh = world.lookups()
    told(world, fresh, {0: 1100})
    world.pass_ms(500)
    world.batch({0: 1100}, rate=RATE)
    assert told(world, fresh, {0: 5000}) == {0: 1100 + PER_BATCH}


def test_a_report_that_was_made_before_the_connection_does_not_make_it_trusted():
    world = world_of()
    driver = running(world)
    driver.closed()
    world.pass_ms(500)
    fresh = world.lookups()
    world.pass_ms(500)
    world.batch({0: 1000}, rate=RATE, age_ms=600)
    assert told(world, fresh, {0: 5000}) == {0: 5000}


def test_a_connection_to_another_broker_is_trusted_beside_one_that_is():
    world = world_of()
    running(world)
    world.pass_ms(500)
    second = world.lookups()
    assert told(world, second, {0: 5000}) == {0: 1000 + PER_BATCH}


def test_an_executors_connection_makes_nobody_trusted():
    world = world_of()
    driver = running(world)
    driver.fetched()
    world.pass_ms(500)
    assert told(world, world.lookups(), {0: 5000}) == {0: 5000}


def test_what_an_untrusted_driver_was_told_counts_as_told():
    world = world_of()
    driver = running(world)
    driver.closed()
    world.pass_ms(500)
    fresh = world.lookups()
    told(world, fresh, {0: 3000})
    world.start()
    told(world, fresh, {0: 3500})
    world.pass_ms(500)
    world.batch({0: 1200}, rate=RATE)
    world.pass_ms(INTERVAL_MS)
    world.batch({0: 1300}, rate=RATE)
    assert told(world, fresh, {0: 9000}) == {0: 3500}


# Runs


def test_a_new_run_begins_with_the_truth_and_forgets_what_was_told():
    world = world_of()
    driver = running(world)
    told(world, driver, {0: 5000})
    world.pass_ms(INTERVAL_MS)
    world.batch({0: 1200}, rate=RATE)
    told(world, driver, {0: 5000})
    world.pass_ms(INTERVAL_MS)
    world.batch({0: 1400}, rate=RATE)
    world.send("terminated")
    driver.closed()
    # From an older checkpoint: what the run before was told is nothing to this one.
    world.pass_ms(5000)
    world.start()
    world.pass_ms(10)
    driver = world.lookups()
    assert told(world, driver, {0: 1500}) == {0: 1500}


def test_what_was_told_after_the_last_event_of_a_run_is_kept_for_the_next():
    """The batch that it was told for is in the checkpoint: the next run begins with it."""
    world = world_of(initial_rate=RATE)
    driver = running(world)
    assert told(world, driver, {0: 5000}) == {0: 1000 + PER_BATCH}
    driver.closed()
    world.pass_ms(1000)
    world.start()
    world.pass_ms(10)
    driver = world.lookups()
    world.pressure.limit(1.0, "by hand", world.now_ms)
    assert told(world, driver, {0: 5000}) == {0: 1000 + PER_BATCH}


def test_a_process_that_did_not_see_the_last_plan_tells_the_truth_once():
    """After a restart of the proxy the driver may know an end that nobody here does."""
    world = world_of()
    world.start()
    driver = world.lookups()
    world.pass_ms(10)
    world.rated(RATE, {0: 1000})
    assert told(world, driver, {0: 5000}) == {0: 5000}
    world.pass_ms(10)
    world.batch({0: 5000}, rate=RATE)
    assert told(world, driver, {0: 9000}) == {0: 5000 + PER_BATCH}


# The first batches of a run, when the rule sets a rate for them


def test_initial_rate_clamps_the_first_batch_from_the_earliest_offset():
    world = world_of(initial_rate=50.0)
    world.start()
    driver = world.lookups()
    tell_earliest(world, driver, {0: 300})
    assert told(world, driver, {0: 5000}) == {0: 300 + 100}


def test_initial_rate_clamps_the_first_batch_from_what_was_completed_before():
    world = world_of(initial_rate=50.0)
    running(world)
    world.send("terminated")
    world.pass_ms(5000)
    world.start()
    world.pass_ms(10)
    driver = world.lookups()
    assert told(world, driver, {0: 5000}) == {0: 1000 + 100}


def test_initial_rate_needs_to_know_where_the_query_begins():
    """`startingOffsets: latest` is such a look-up: less than the truth would be read again."""
    world = world_of(initial_rate=50.0)
    world.start()
    assert told(world, world.lookups(), {0: 5000}) == {0: 5000}


def test_initial_rate_does_not_begin_where_another_checkpoint_was():
    world = world_of(initial_rate=50.0)
    running(world)
    world.send("terminated")
    world.pass_ms(5000)
    world.checkpoint += 1
    world.start()
    assert told(world, world.lookups(), {0: 5000}) == {0: 5000}


def test_initial_rate_waits_for_the_run_to_be_known():
    world = world_of(initial_rate=50.0)
    driver = world.lookups()
    tell_earliest(world, driver, {0: 0})
    assert told(world, driver, {0: 5000}) == {0: 5000}


def test_initial_rate_leaves_a_run_alone_that_reads_what_an_earlier_one_planned():
    """It takes up a batch from its checkpoint without asking, so its end is not known here."""
    world = world_of(initial_rate=50.0)
    running(world)
    world.send("terminated")
    world.pass_ms(5000)
    world.start()
    world.pass_ms(10)
    driver = world.lookups()
    world.query.fetch_asked("t", 0, None, 1000, world.now_ms)
    assert told(world, driver, {0: 5000}) == {0: 5000}


def test_initial_rate_is_lifted_when_reports_do_not_come():
    world = world_of(initial_rate=50.0, hold_ms=10_000.0)
    world.start()
    driver = world.lookups()
    tell_earliest(world, driver, {0: 0})
    assert told(world, driver, {0: 5000}) == {0: 100}
    world.pass_ms(10_001)
    assert told(world, driver, {0: 5000}) == {0: 5000}


# The report on the batch before may come a little later than the driver asks


def test_an_answer_waits_for_the_report_on_the_batch_before():
    world = world_of()
    driver = running(world)
    assert driver.wait_ms(ask([0]), world.now_ms) == 0
    told(world, driver, {0: 5000})
    world.pass_ms(INTERVAL_MS)
    assert driver.wait_ms(ask([0]), world.now_ms) == REPORT_WAIT_MS
    world.pass_ms(100)
    assert driver.wait_ms(ask([0]), world.now_ms) == REPORT_WAIT_MS - 100
    world.batch({0: 1200}, rate=RATE, age_ms=100)
    assert driver.wait_ms(ask([0]), world.now_ms) == 0
    assert told(world, driver, {0: 5000}) == {0: 1200 + PER_BATCH}


def test_it_waits_no_longer_than_that_and_then_does_not_guess():
    world = world_of()
    driver = running(world)
    told(world, driver, {0: 5000})
    world.pass_ms(INTERVAL_MS)
    assert driver.wait_ms(ask([0]), world.now_ms) == REPORT_WAIT_MS
    world.pass_ms(REPORT_WAIT_MS)
    assert driver.wait_ms(ask([0]), world.now_ms) == 0
    assert told(world, driver, {0: 5000}) == {0: 1000 + PER_BATCH}


def test_one_wait_in_vain_is_enough_until_a_report_comes():
    world = world_of()
    driver = running(world)
    told(world, driver, {0: 5000})
    for ms, wait_ms in [(INTERVAL_MS, REPORT_WAIT_MS), (REPORT_WAIT_MS, 0.0), (INTERVAL_MS, 0.0)]:
        world.pass_ms(ms)
        assert driver.wait_ms(ask([0]), world.now_ms) == wait_ms
    told(world, driver, {0: 5000})
    world.batch({0: 1200}, rate=RATE)
    told(world, driver, {0: 5000})
    world.pass_ms(INTERVAL_MS)
    assert driver.wait_ms(ask([0]), world.now_ms) == REPORT_WAIT_MS


def test_it_waits_also_when_a_batch_took_longer_than_reports_may_be_silent():
    world = world_of(hold_ms=10_000.0)
    driver = running(world)
    told(world, driver, {0: 5000})
    world.pass_ms(60_000)
    assert driver.wait_ms(ask([0]), world.now_ms) == REPORT_WAIT_MS
    world.pass_ms(20)
    world.batch({0: 1200}, ms=59_000, age_ms=20)
    assert driver.wait_ms(ask([0]), world.now_ms) == 0
    assert told(world, driver, {0: 5000})[0] < 5000


@pytest.mark.parametrize(
    "wanted", [ask([0], EARLIEST), ask([1], LATEST), ask([])], ids=["earliest", "other", "nothing"]
)
def test_it_does_not_wait_for(wanted):
    world = world_of()
    driver = running(world)
    told(world, driver, {0: 5000})
    world.pass_ms(INTERVAL_MS)
    assert driver.wait_ms(wanted, world.now_ms) == 0


def test_it_does_not_wait_on_a_connection_that_told_nothing_new():
    """A second source of the query asks for the same partitions in the same trigger."""
    world = world_of()
    driver = running(world)
    second = world.lookups()
    told(world, driver, {0: 5000})
    assert second.wait_ms(ask([0]), world.now_ms + 1) == 0


def test_it_does_not_wait_when_the_batch_took_less_than_it_was_told():
    """With maxOffsetsPerTrigger the driver plans less than it may: the report is there."""
    world = world_of()
    driver = running(world)
    told(world, driver, {0: 5000})
    world.pass_ms(INTERVAL_MS)
    world.batch({0: 1050}, rate=RATE)
    world.pass_ms(10)
    assert driver.wait_ms(ask([0]), world.now_ms) == 0


def test_a_late_report_on_an_earlier_batch_is_not_the_one_it_waits_for():
    world = world_of()
    driver = running(world)
    told(world, driver, {0: 1100})
    world.pass_ms(INTERVAL_MS)
    # The report on 1000..1100 was too late for this answer ...
    assert told(world, driver, {0: 1150}) == {0: 1150}
    world.pass_ms(20)
    world.batch({0: 1100}, rate=RATE, age_ms=22)
    # ... and is about the batch before the one that is being read now.
    world.pass_ms(1000)
    assert driver.wait_ms(ask([0]), world.now_ms) == REPORT_WAIT_MS


def test_a_wait_is_time_that_the_proxy_held_the_query():
    world = world_of()
    driver = running(world)
    told(world, driver, {0: 5000})
    world.pass_ms(INTERVAL_MS)
    driver.wait_ms(ask([0]), world.now_ms)
    world.pass_ms(250)
    world.batch({0: 1200}, ms=1000, age_ms=250)
    told(world, driver, {0: 5000})
    world.pass_ms(750)
    world.batch({0: 1400}, ms=1000)
    assert "held 250 ms left out" in world.document["reason"]


def test_an_idle_query_has_done_all_that_it_was_told():
    """Its batch was reported to nobody: without this it would be told the same for ever."""
    world = world_of()
    driver = running(world)
    told(world, driver, {0: 5000})
    world.pass_ms(INTERVAL_MS)
    assert told(world, driver, {0: 5000}) == {0: 1000 + PER_BATCH}
    world.pass_ms(10_000)
    world.send("idle")
    assert told(world, driver, {0: 5000}) == {0: 1000 + 2 * PER_BATCH}
    assert world.query.partitions["t", 0].completed_to == 1000


def test_idle_says_nothing_of_what_was_told_after_it():
    world = world_of()
    driver = running(world)
    told(world, driver, {0: 5000})
    world.pass_ms(100)
    world.send("idle", age_ms=200)
    assert told(world, driver, {0: 5000}) == {0: 1000 + PER_BATCH}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(0, 2), st.integers(0, 2000)),
        st.tuples(st.just("look"), st.integers(1, 7), st.just(0)),
        st.tuples(st.just("batch"), st.integers(50, 20_000), st.booleans()),
        st.tuples(st.just("idle"), st.integers(0, 500), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 40_000), st.just(0)),
        st.tuples(st.just("limit"), st.sampled_from([None, 1.0, 300.0]), st.just(0)),
        st.tuples(st.just("rule"), st.sampled_from([None, 10.0, 1000.0]), st.just(0)),
        st.tuples(st.just("connect"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, initial=st.sampled_from([None, 50.0]))
def test_whatever_happens_the_driver_is_never_told_less_than_before(steps, initial):
    """And never more than there is: Spark takes a step back for lost data."""
    world = world_of(initial_rate=initial)
    world.start()
    world.pass_ms(1)
    driver = world.lookups()
    tell_earliest(world, driver, {0: 0, 1: 0, 2: 0})
    latest = {0: 100, 1: 100, 2: 100}
    known = {0: 0, 1: 0, 2: 0}
    done = dict(known)
    for what, number, more in steps:
        world.pass_ms(10)
        if what == "grow":
            latest[number] += more
        elif what == "look":
            wanted = {p: end for p, end in latest.items() if number >> p & 1}
            while (wait_ms := driver.wait_ms(ask(wanted), world.now_ms)) > 0:
                world.pass_ms(min(wait_ms, 20.0))
            seen = told(world, driver, wanted)
            assert all(known[p] <= end <= latest[p] for p, end in seen.items())
            known.update(seen)
        elif what == "batch":
            rows = sum(known.values()) - sum(done.values())
            done = dict(known)
            if more:  # else its report is lost
                world.pass_ms(number)
                world.batch(done, rows=rows, ms=number, bytes_read=rows * 50)
        elif what == "idle":
            world.send("idle", age_ms=number)
        elif what == "wait":
            world.tick(number)
        elif what == "limit":
            world.pressure.limit(number, "by hand", world.now_ms)
        elif what == "rule":
            world.update(rule(min_rate=1.0, initial_rate=number))
        else:
            driver.closed()
            driver = world.lookups()
