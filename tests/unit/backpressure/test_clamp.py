"""What a driver is told of the log ends: each rule of the clamp by its name."""

import pytest
from backpressure_parts import (
    CLIENT,
    CONSUMER,
    INTERVAL_MS,
    NO_LEADER,
    STATIC,
    VERSION,
    BackpressureWorld,
    answer,
    ask,
    read,
    rule,
    tell_earliest,
    told,
)
from driver_script import END, PER_BATCH, RATE, fresh, running, world_of
from hypothesis import given, settings
from hypothesis import strategies as st
from parts.reports import uuid

from proxy.backpressure.backpressure import ConnectionLookups
from proxy.backpressure.driver_view import REPORT_WAIT_MS
from proxy.backpressure.drivers import MISSED_ANSWERS
from proxy.progress.report import TriggerKind
from proxy.progress.tracker import QueryReader
from proxy.quota.rules import Rule
from proxy.wire.list_offsets import EARLIEST, LATEST, READ_COMMITTED

MAX_TIMESTAMP = -3
# The earliest comes last: from it the next batch begins.
TIMESTAMPS = (MAX_TIMESTAMP, 0, 1_700_000_000_000, EARLIEST)
TWO = {0: END, 1: END}
FIVE = dict.fromkeys(range(5), END)
UNEQUAL = {0: END, 1: 2000, 2: 50}


def partition(world: BackpressureWorld):
    return world.query.partitions["t", 0]


def ends_known(world: BackpressureWorld) -> tuple[int, int]:
    return partition(world).log.high_watermark, partition(world).log.log_start_offset


def clamp_why(world: BackpressureWorld) -> str:
    return world.document["clamp"]["why"]


def clamp_of(world: BackpressureWorld) -> tuple[int, str]:
    clamp = world.document["clamp"]
    return clamp["offsets"], clamp["why"]


def hold(world: BackpressureWorld) -> None:
    world.query_backpressure.record_hold(world.now_ms, world.now_ms + 3900)


def adaptive_no_more(world: BackpressureWorld) -> None:
    world.update(Rule(client_id=CLIENT, bounds={CONSUMER: STATIC}))
    world.backpressure.tick(world.now_ms)


def every_interval(world: BackpressureWorld) -> None:
    world.query.trigger_kind = TriggerKind.PROCESSING_TIME


def once(world: BackpressureWorld) -> None:
    world.query.trigger_kind = TriggerKind.AVAILABLE_NOW


def other_checkpoint(world: BackpressureWorld) -> None:
    world.driver.query_id = uuid("another checkpoint")


RATE_MAKES = "100 records/s make 200 offsets for one batch"
WAITED = running().looks(9000).after(INTERVAL_MS).waits(REPORT_WAIT_MS).after(REPORT_WAIT_MS)
UNREAD = WAITED.waits(0).looks(9000, 1400).looks(9000, 1600).looks(9000, 1800)
"""It was told of four batches, with nothing read meanwhile: all may have been read ahead."""
REFUSED = running().looks(9000, END + PER_BATCH).waits_for_data()
"""It was told of a batch, and waits for more."""

INITIAL = fresh(initial_rate=RATE / 2)
FRESH = fresh(min_rate=RATE / 2).starts().does(every_interval)
STARTED = FRESH.earliest(0).looks(5000, 100).after(1).batch(100, ms=1000).after(10)
AGAIN_FREE = running().sends("terminated")
AGAIN = running(initial_rate=RATE / 2).sends("terminated")

SCRIPTS = {
    # How much it is
    "a batch is clamped to the rate for one interval": running().looks(5000, END + PER_BATCH),
    "what fits one interval is told truly": running().leaves_alone(END + PER_BATCH, LATEST),
    "it is shared by lag": running(UNEQUAL).looks(
        {0: 1600, 1: 2200, 2: 50}, {0: END + 150, 1: 2000 + 50, 2: 50}
    ),
    "a partition with little lag has a record of each batch, beside any backlog": running(TWO)
    .looks({0: END + 3, 1: 10_000_000}, {0: END + 1, 1: END + PER_BATCH - 1})
    .next_batch({0: END + 1, 1: END + PER_BATCH - 1})
    .after(10)
    .looks({0: END + 3, 1: 10_000_000}, {0: END + 2, 1: END + 2 * (PER_BATCH - 1)}),
    "of more partitions than the rate has records, each with lag has one": running(FIVE)
    .limit(1.0)
    .looks({**FIVE, 0: 9000, 1: 9000}, {**FIVE, 0: END + 1, 1: END + 1})
    .sees(clamp_of, (2, "1 records/s make 2 offsets for one batch"))
    .looks(dict.fromkeys(FIVE, 9000), dict.fromkeys(FIVE, END + 1))
    .sees(clamp_of, (5, "1 records/s make 2 offsets for one batch; each of 5 partitions gets one")),
    "partitions of other brokers have their share as last seen": running(TWO)
    .another(fresh().after(10).looks({1: 4000}, {1: END + PER_BATCH}))
    .looks({0: 2000}, {0: END + PER_BATCH // 4}),
    "never below what was told before": running()
    .looks(5000)
    .after(INTERVAL_MS)
    # The same trigger asks again, and the report has not come: nothing is planned anew.
    .looks(5000, END + PER_BATCH)
    .limit(1.0)
    .looks(5000, END + PER_BATCH),
    "never below what the query knows": running()
    .looks(1001)
    .batch(1001)
    .limit(0.1)
    .looks(1001, 1001)
    .looks(5000, 1002),
    "never above the truth even if the log was cut": running().looks(900, 900),
    "what lies below the log start takes no share": running()
    .another(fresh().earliest(3000))
    .looks(9000, 3000 + PER_BATCH),
    "other timestamps are left alone": running().leaves_alone(5000, *TIMESTAMPS),
    "with read_committed the stable end is the truth, but no log end": running()
    .looks(1100, 1100, isolation=READ_COMMITTED)
    .looks(5000, END + PER_BATCH, isolation=READ_COMMITTED)
    .sees(lambda world: partition(world).log.high_watermark, END),
    "progress learns the real ends and starts": running()
    .looks(5000)
    .earliest(20)
    .sees(ends_known, (5000, 20)),
    "a new partition is told truly until it was read": running()
    .looks({0: 9000, 1: 700}, {0: 1200, 1: 700})
    .next_batch({0: 1200, 1: 700})
    .looks(
        {0: 9000, 1: 900},
        {0: 1200 + round(PER_BATCH * 7800 / 8000), 1: 700 + round(PER_BATCH * 200 / 8000)},
    ),
    "a topic made anew is told truly": running().looks(30, 30).looks(60, 60),
    # Every second offset ends a transaction: a batch of as many records goes on twice as far.
    "offsets that are no records do not count": fresh()
    .starts()
    .looks(4000)
    .next_batch(2000, rows=1000, ms=10_000)
    .next_batch(4000, rows=1000, ms=10_000)
    .after(10)
    .looks(90_000, 4000 + 2 * PER_BATCH),
    # A query that could take more than it may read must not plan ever longer batches.
    "after a batch that was held the next is as long as it could read": running()
    .looks(1100)
    .does(hold)
    .after(4000)
    .batch(1100, ms=4000)
    .sees(lambda world: world.query_backpressure.rate, pytest.approx(1000))
    .looks(5000, 1100 + 50)
    .next_batch(1150, ms=50)
    .looks(5000, 1150 + 75),
    "a wait for a report says nothing of how fast it may read": running()
    .looks(1100)
    .after(INTERVAL_MS)
    .waits(REPORT_WAIT_MS)
    .after(200)
    .batch(1100, age_ms=200)
    .looks(1102)
    .after(20)
    .batch(1102, ms=220)
    .looks(5000, 1102 + PER_BATCH),
    "a ceiling from outside shapes the batch too": running()
    .limit(25.0)
    .looks(5000, END + 50)
    .batch(1050)
    .limit(None)
    .looks(5000, 1050 + PER_BATCH),
    "a ceiling of 0 lets no batch begin": running()
    .limit(0.0)
    .looks(5000, END)
    .after(INTERVAL_MS)
    .looks(6000, END)
    .limit(None)
    .looks(6000, END + PER_BATCH),
    "any rate is a number of offsets": fresh(proportional=1e300, batch_interval_ms=1e10)
    .starts()
    .looks(2000)
    .next_batch(1000, rate=100)
    .next_batch(2000, rate=1e5)
    .after(10)
    .sees(lambda world: world.query_backpressure.rate, pytest.approx(1e305, rel=0.1))
    .looks(9_000_000, 9_000_000),
    "a very low rate still gets on": running(min_rate=0.01).limit(0.01).looks(5000, 1001),
    # minOffsetsPerTrigger: the driver plans no batch of fewer
    "a driver that plans no batch is offered twice as much": REFUSED.looks(
        9000, END + 2 * PER_BATCH
    )
    .after(INTERVAL_MS)
    .waits_for_data()
    .looks(9000, END + 4 * PER_BATCH)
    .sees(clamp_of, (800, f"{RATE_MAKES}; the driver plans none of so few, 800 are offered")),
    "once for each time that it is seen to wait": REFUSED.looks(9000).looks(9000, 1400),
    "never more than there is": REFUSED.looks(1250, 1250).waits_for_data().looks(1260, 1260),
    "what it takes at last is what it is offered from then on": REFUSED.looks(90_000, 1400)
    .reads()
    .next_batch(1400, ms=2000)
    .after(10)
    .looks(90_000, 1800),
    "that nothing was read does not show that nothing was planned": UNREAD.looks(9000, 2000),
    "a wait that may have been before the answer shows nothing": running()
    .looks(9000, END + PER_BATCH)
    .waits_for_data(times=1)
    .looks(9000, END + PER_BATCH),
    "nor does one after a batch that was not reported": running()
    .looks(9000, END + PER_BATCH)
    .waits_for_data(unreported=1)
    .looks(9000, END + PER_BATCH),
    "an idle event does not make done what it never read": running()
    .looks(9000)
    .after(INTERVAL_MS)
    .sends("idle")
    .after(10)
    .looks(9000, END + PER_BATCH),
    "a batch of what it seemed to refuse shows that its report was late": REFUSED.looks(9000)
    .batch(END + PER_BATCH)
    .sees(lambda world: world.query_backpressure.clamp.least_offsets, 0),
    # When the truth is told
    "an executor is told the truth": running().another(
        fresh().fetches().looks(5000, 5000).waits(0)
    ),
    "what an executor was told binds nobody": running()
    .another(fresh().fetches().looks(5000))
    .looks(5000, END + PER_BATCH),
    "before the first report of a run the truth is told": fresh()
    .connects()
    .looks(5000, 5000)
    .sees(clamp_why, "no report came yet")
    .starts()
    .looks(9000, 9000)
    .sees(clamp_why, "no batch of this run was reported yet"),
    "before the first rate the truth is told": fresh()
    .starts()
    .looks(1000)
    .after(1)
    .batch(1000, ms=1000)
    .looks(9000, 9000),
    "when the run has ended the truth is told": running()
    .sends("terminated")
    .looks(5000, 5000)
    .sees(clamp_why, "the run has ended"),
    "when reports have stopped the truth is told": running(hold_ms=10_000.0)
    .after(9_000)
    .looks(5000, END + PER_BATCH)
    .after(1_100)
    .looks(5000, 5000)
    .sees(clamp_why, "no report for 10 s"),
    "when the rule is adaptive no more the truth is told": running()
    .does(adaptive_no_more)
    .looks(5000, 5000),
    # Runs
    "a new run begins with the truth and forgets what was told": running()
    .looks(5000)
    .next_batch(1200)
    .looks(5000)
    .next_batch(1400)
    .sends("terminated")
    # From an older checkpoint: what the run before was told is nothing to this one.
    .restarts()
    .looks(1500, 1500),
    # The batch that it was told for is in the checkpoint: the next run begins with it.
    "what was told after the last event of a run is kept for the next": running(initial_rate=RATE)
    .looks(5000, END + PER_BATCH)
    .restarts(1000)
    .limit(1.0)
    .looks(5000, END + PER_BATCH),
    "a batch that was given up is taken up by the next run": running(initial_rate=RATE)
    .looks(5000, END + PER_BATCH)
    .after(500)
    .sends("terminated")
    .restarts()
    .does(lambda world: QueryReader(world.query).fetch_asked("t", None, [(0, END)], world.now_ms))
    .looks(5000, END + PER_BATCH)
    .after(10)
    .batch(END + PER_BATCH, ms=500)
    .looks(5000, END + 2 * PER_BATCH),
    "also one that did not read again, as it had read before": running(initial_rate=RATE)
    .looks(5000, END + PER_BATCH)
    .after(500)
    .sends("terminated")
    .limit(1.0)
    .restarts()
    .looks(5000, END + PER_BATCH),
    "also the first one of all": INITIAL.starts()
    .earliest(300)
    .looks(5000, 300 + 100)
    .after(500)
    .sends("terminated")
    .restarts()
    .does(lambda world: QueryReader(world.query).fetch_asked("t", None, [(0, 300)], world.now_ms))
    .looks(5000, 300 + 100),
    # After a restart without state the driver may know an end that nobody here does.
    "a process that did not see the last plan tells the truth once": fresh()
    .starts()
    .after(10)
    .does(lambda world: world.rated(RATE, {0: END}))
    .looks(5000, 5000)
    .after(10)
    .batch(5000)
    .looks(9000, 5000 + PER_BATCH),
    # The first batches of a run, when the rule sets a rate for them
    "initial_rate clamps the first batch from the earliest offset": INITIAL.starts()
    .earliest(300)
    .looks(5000, 300 + 100),
    "initial_rate clamps the first batch from what was completed before": AGAIN.restarts().looks(
        5000, END + 100
    ),
    "initial_rate clamps the second batch, before the first rate": INITIAL.starts()
    .earliest(0)
    .looks(1000, 100)
    .after(1)
    .batch(100, ms=1000)
    .looks(9000, 200),
    # `startingOffsets: latest` is such a look-up: less than the truth would be read again.
    "initial_rate needs to know where the query begins": INITIAL.starts().looks(5000, 5000),
    "initial_rate does not begin where another checkpoint was": AGAIN.does(other_checkpoint)
    .restarts()
    .looks(5000, 5000),
    "initial_rate waits for the run to be known": INITIAL.connects().earliest(0).looks(5000, 5000),
    # It takes up a batch from its checkpoint without asking, so its end is not known here.
    "initial_rate leaves a run alone that reads what an earlier one planned": AGAIN.restarts()
    .does(lambda world: QueryReader(world.query).fetch_asked("t", None, [(0, END)], world.now_ms))
    .looks(5000, 5000),
    "initial_rate is lifted when reports do not come": fresh(initial_rate=50.0, hold_ms=10_000.0)
    .starts()
    .earliest(0)
    .looks(5000, 100)
    .after(10_001)
    .looks(5000, 5000),
    # An earlier run may have read past this proxy, and Spark knows an end that nobody here does.
    "initial_rate gives way to a driver that asks a third time and reads nothing": AGAIN.restarts()
    .looks(9000, END + 100)
    .after(1000)
    .looks(9000, END + 100)
    .after(1000)
    .looks(9000, 9000)
    .after(10)
    .batch(9000)
    .looks(20_000, 9000 + 100),
    # Its last batch was not reported. It has nothing to read, and is told of the next one then.
    "first to one that was told nothing new": running(initial_rate=RATE)
    .looks(5000, END + PER_BATCH)
    .after(500)
    .sends("terminated")
    .restarts()
    .looks(5000, END + PER_BATCH)
    .after(1000)
    .looks(5000, END + 2 * PER_BATCH)
    .after(1000)
    .looks(5000, 5000),
    "nor to one that has waited for data": AGAIN.restarts()
    .looks(9000, END + 100)
    .after(1)
    .sends_heartbeat(is_waiting=True)
    .after(1)
    .sends_heartbeat(is_waiting=True)
    .after(INTERVAL_MS)
    .looks(9000, END + 200),
    "but not to one that has read": INITIAL.starts()
    .earliest(0)
    .looks(9000, 100)
    .after(100)
    .does(lambda world: QueryReader(world.query).fetch_asked("t", None, [(0, 0)], world.now_ms))
    .after(400)
    .looks(9000, 100),
    "nor to one that was told all there was": AGAIN.restarts()
    .looks(END)
    .after(1000)
    .looks(9000, END + 100),
    # A slow start, where nothing is known
    "a query of which nothing is known starts at min_rate": FRESH.earliest(300).looks(5000, 400),
    "what came in since its last look-up is taken beside that": STARTED.looks(5400, 500),
    "in all partitions together": FRESH.earliest(0)
    .looks({0: 5000, 1: 0}, {0: 100, 1: 0})
    .after(1)
    .batch({0: 100, 1: 0}, ms=1000)
    .after(10)
    .looks({0: 5000, 1: 400}, {0: 100 + 370, 1: 30}),
    "if it is more": STARTED.looks(5010, 200),
    "not more than max_rate": fresh(min_rate=RATE / 2, max_rate=RATE)
    .starts()
    .does(every_interval)
    .earliest(0)
    .looks(5000, 100)
    .after(1)
    .batch(100, ms=1000)
    .after(10)
    .looks(9000, 100 + PER_BATCH),
    "nor than another bound": STARTED.limit(RATE).looks(9000, 100 + PER_BATCH),
    "a lower one holds from the first": FRESH.limit(10).earliest(0).looks(5000, 20),
    "also where the trigger is not known": fresh()
    .starts()
    .limit(10)
    .earliest(0)
    .looks(5000, 5000)
    .after(1)
    .batch(5000, ms=1000)
    .after(10)
    .looks(9000, 5020),
    "nor there is a batch above max_rate, before the first rate": fresh(max_rate=RATE)
    .starts()
    .earliest(0)
    .looks(5000, 5000)
    .after(1)
    .batch(5000, ms=1000)
    .after(10)
    .looks(9000, 5000 + PER_BATCH),
    "there it does not start slowly": fresh().starts().earliest(0).looks(5000, 5000),
    "nor where it reads to the end once": FRESH.does(once).earliest(0).looks(5000, 5000),
    # Without initial_rate: what is known of the runs before, or what the rule lets be read
    "the second batch of a run goes at the rate of the run before": AGAIN_FREE.restarts()
    .looks(5000, 5000)
    .reads()
    .next_batch(5000, ms=100)
    .after(10)
    .looks(9000, 5000 + PER_BATCH),
    "and the first where the trigger is known to go on": AGAIN_FREE.restarts()
    .does(every_interval)
    .looks(5000, END + PER_BATCH),
    "not where it reads to the end once": AGAIN_FREE.restarts().does(once).looks(5000, 5000),
    "nor does any of its batches": running().does(once).looks(5000, 5000),
    # Idle events
    # Its batch was reported to nobody: without this it would be told the same for ever.
    "an idle query has done all that it was told": running()
    .looks(5000)
    .reads()
    .after(INTERVAL_MS)
    .looks(5000, END + PER_BATCH)
    .after(10_000)
    .sends("idle")
    .looks(5000, END + 2 * PER_BATCH)
    .sees(lambda world: partition(world).committed_to, END),
    "idle says nothing of what was told after it": running()
    .looks(5000)
    .after(100)
    .sends("idle", age_ms=200)
    .looks(5000, END + PER_BATCH),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_what_the_driver_is_told(script):
    script.play()


def test_idle_events_are_reports():
    run = running(hold_ms=10_000.0).play()
    for _ in range(5):
        run.after(8_000)
        run.sends("idle")
    run.looks(5000, END + PER_BATCH)


def test_shares_add_up_to_the_whole():
    ends = dict.fromkeys(range(7), END)
    seen = running(ends).play().looks({index: 2000 + 37 * index for index in ends})
    assert sum(seen.values()) == 7 * END + PER_BATCH


def test_a_partition_that_is_asked_for_no_more_has_no_share():
    run = running(TWO).looks({0: 9000, 1: 9000}).play()
    done = END + PER_BATCH // 2
    for _ in range(MISSED_ANSWERS + 1):
        run.next_batch(done)
        run.after(10)
        before, done = done, run.looks(9000)[0]
    assert done == before + PER_BATCH


def test_errors_and_missing_offsets_are_left_alone():
    run = running(dict.fromkeys(range(3), END)).play()
    latest = {0: 5000, 1: 5000, 2: -1}
    frame = answer(latest, errors=[1])
    seen = read(run.driver.answered(ask(latest), VERSION, frame, run.world.now_ms))
    assert seen["t", 0].offset < 5000
    assert seen["t", 1] == (NO_LEADER, 5000)
    assert seen["t", 2] == (0, -1)


def test_without_an_adaptive_rule_progress_learns_the_ends_too():
    world = world_of()
    lookups = ConnectionLookups(world.now_ms, query=world.query)
    assert lookups.wait_ms(ask([0]), world.now_ms) == 0
    assert told(world, lookups, {0: 5000}) == {0: 5000}
    assert partition(world).log.high_watermark == 5000


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
        st.tuples(st.just("crash"), st.integers(0, 40_000), st.just(0)),
        st.tuples(st.just("restart"), st.integers(0, 2000), st.booleans()),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    steps=STEPS,
    initial=st.sampled_from([None, 50.0]),
    trigger=st.sampled_from([None, {"kind": "processing_time", "interval_ms": INTERVAL_MS}]),
)
def test_whatever_happens_the_driver_is_never_told_less_than_before(steps, initial, trigger):
    """And never more than there is: Spark takes a step back for lost data."""
    world = world_of(initial_rate=initial)
    world.start(trigger=trigger)
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
            world.query_backpressure.set_ceiling(number, "by hand", world.now_ms)
        elif what == "rule":
            world.update(rule(min_rate=1.0, initial_rate=number))
        elif what == "crash":
            world.crash(number)
            driver = world.lookups()
        elif what == "restart":  # of the query, from its checkpoint
            driver.closed()
            if more:  # else its end is not reported
                world.send("terminated")
            world.pass_ms(number)
            world.start(trigger=trigger)
            driver = world.lookups()
        else:
            driver.closed()
            driver = world.lookups()
