"""What becomes of a run when the proxy is killed and started again amid it."""

import pytest
from backpressure_parts import (
    CLIENT,
    CONSUMER,
    IDENTITY,
    INTERVAL_MS,
    LABEL,
    STATIC,
    BackpressureWorld,
    ask,
    rule,
    told,
)
from driver_script import END, PER_BATCH, RATE, fresh, running, world_of
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.backpressure.backpressure import RETURN_FACTOR
from proxy.backpressure.driver_view import LIFE_WAIT_MS, REPORT_WAIT_MS, RESUME_WAIT_MS
from proxy.progress.query_registry import FORGET_AFTER_MS
from proxy.quota.rules import Rule
from proxy.wire.list_offsets import EARLIEST

PAUSE_MS = 100
"""From the start of the proxy until the driver has connected."""

PLANNED = END + PER_BATCH
HELD = running().looks(5000, PLANNED)
"""A driver that is reading a batch of its backlog."""

NUMBERED = running().asks_as(39).looks(5000, PLANNED)
"""The same, of a client that has sent so many requests."""

CRASHED = HELD.crashes()
MISTAKEN = NUMBERED.crashes().another(fresh().asks_as(300).looks(5000, PLANNED)).asks_as(60)
"""An executor has looked up the end before its driver, by a number near the driver's: it looked up
the start on an earlier connection."""

HEARD = CRASHED.after(100).batch(PLANNED, ms=2000).after(10)


def other_run(world: BackpressureWorld) -> None:
    world.start()


def clamp_why(world: BackpressureWorld) -> str:
    return world.document["clamp"]["why"]


def records(world: BackpressureWorld) -> int:
    world.keep()
    return len(world.kept("pressure/"))


SCRIPTS = {
    # The first report
    "the first batch after a restart is as large as the one before": HEARD.looks(
        5000, PLANNED + PER_BATCH
    ),
    "so is the first one of a driver that was idle": running()
    .looks(END)
    .crashes()
    .after(100)
    .sends("idle")
    .looks(5000, PLANNED),
    "a look-up waits for the first report": CRASHED.waits(RESUME_WAIT_MS - PAUSE_MS)
    .after(2000)
    .waits(RESUME_WAIT_MS - PAUSE_MS - 2000)
    .batch(PLANNED, ms=2000)
    .waits(0)
    .looks(5000, PLANNED + PER_BATCH),
    "it does not wait for ever": CRASHED.waits(RESUME_WAIT_MS - PAUSE_MS)
    .after(RESUME_WAIT_MS - PAUSE_MS)
    .waits(0)
    .looks(5000, 5000)
    .sees(clamp_why, "no report came yet")
    .after(INTERVAL_MS)
    .waits(0),
    # Its batch was long: it is done now, and its report comes a moment later.
    "long after the restart it waits as long as for any report": CRASHED.after(20_000)
    .waits(REPORT_WAIT_MS)
    .after(50)
    .batch(PLANNED, ms=21_000)
    .waits(0)
    .looks(5000, PLANNED + PER_BATCH),
    "when the report comes after all, what was told meanwhile is not taken back": CRASHED.after(
        RESUME_WAIT_MS
    )
    .looks(3000, 3000)
    .reads(PLANNED)
    .after(500)
    .batch(PLANNED, age_ms=400)
    .looks(5000, 3000 + PER_BATCH),
    "only look-ups of the end wait": CRASHED.waits(0, ask([0], EARLIEST)),
    "an executor does not wait": CRASHED.another(fresh().fetches().waits(0).looks(5000, 5000)),
    # The report on the batch that was planned before the crash may be just behind it.
    "after a report from before the restart it waits for another": CRASHED.batch(END, age_ms=500)
    .waits(REPORT_WAIT_MS)
    .after(50)
    .batch(PLANNED, ms=1000)
    .waits(0)
    .looks(5000, PLANNED + PER_BATCH),
    "and if none comes does not guess": CRASHED.waits(RESUME_WAIT_MS - PAUSE_MS)
    .after(1000)
    .batch(END, age_ms=1500)
    .waits(REPORT_WAIT_MS)
    .after(REPORT_WAIT_MS)
    .waits(0)
    .looks(5000, PLANNED),
    # The driver's own request says who it is
    "a driver whose requests go on needs no report": NUMBERED.crashes()
    .asks_as(40)
    .waits(LIFE_WAIT_MS - PAUSE_MS)
    .after(LIFE_WAIT_MS - PAUSE_MS)
    .waits(0)
    # What was told last may be under way: nothing more until it asks again.
    .looks(5000, PLANNED)
    .reads()
    .after(INTERVAL_MS)
    .waits(0)
    .looks(5000, PLANNED + PER_BATCH),
    "nor does it wait where all that it was told is done": running()
    .asks_as(39)
    .looks(END)
    .crashes()
    .asks_as(40)
    .waits(REPORT_WAIT_MS)
    .after(REPORT_WAIT_MS)
    .waits(0)
    .looks(5000, PLANNED),
    "a heartbeat ends the wait for what can't be known": NUMBERED.crashes()
    .asks_as(40)
    .waits_for_heartbeat(LIFE_WAIT_MS - PAUSE_MS)
    .looks(5000, PLANNED),
    "with a heartbeat any connection is the driver's": CRASHED.waits_for_heartbeat(
        RESUME_WAIT_MS - PAUSE_MS
    )
    .looks(5000, PLANNED)
    .after(INTERVAL_MS)
    .reads()
    .looks(5000, PLANNED + PER_BATCH),
    "it waits for a heartbeat where an executor was taken for it": MISTAKEN.waits_for_heartbeat(
        RESUME_WAIT_MS - PAUSE_MS
    ).looks(5000, PLANNED),
    "but not for ever": MISTAKEN.after(RESUME_WAIT_MS - PAUSE_MS)
    .waits(0)
    .looks(5000, 5000)
    .sees(clamp_why, "the connection is newer than the latest report"),
    "another driver counts from 0": NUMBERED.crashes()
    .asks_as(5)
    .waits(RESUME_WAIT_MS - PAUSE_MS)
    .after(RESUME_WAIT_MS - PAUSE_MS)
    .waits(0)
    .looks(5000, 5000),
    "a long silence lifts the clamp, whoever asks": NUMBERED.crashes()
    .after(30_000)
    .asks_as(40)
    .looks(5000, 5000)
    .sees(clamp_why, "no report for 30 s"),
    # What was told
    "never below what was told before the restart": HELD.crashes()
    .after(100)
    .sends("idle", age_ms=1000)
    .limit(1.0)
    .looks(5000, PLANNED),
    "never above the truth even if the log was cut meanwhile": CRASHED.after(100)
    .sends("idle", age_ms=1000)
    .looks(900, 900)
    .looks(950, 950),
    "what lies below the log start takes no share": HEARD.another(fresh().earliest(3000)).looks(
        9000, 3000 + PER_BATCH
    ),
    "a new partition is told truly": HEARD.looks(
        {0: 5000, 1: 700}, {0: PLANNED + round(PER_BATCH), 1: 700}
    ),
    "partitions of other brokers have their share as before": running({0: END, 1: END})
    .looks({0: 9000, 1: 9000})
    .next_batch({0: END + PER_BATCH // 2, 1: END + PER_BATCH // 2})
    .crashes()
    .after(100)
    .sends("idle")
    .looks({0: 9000}, {0: END + PER_BATCH}),
    # Whose connection it is
    "another connection of the driver is trusted too": HEARD.another(
        fresh().looks(5000, PLANNED + PER_BATCH)
    ),
    "as long as none has earned it": CRASHED.after(100)
    .sends("idle", age_ms=150)  # before it connected
    .reconnects()
    .looks(5000, PLANNED + PER_BATCH)
    .next_batch(PLANNED + PER_BATCH)
    .reconnects()
    .looks(5000, 5000)
    .sees(clamp_why, "the connection is newer than the latest report"),
    # Runs
    "a new run begins with the truth": HELD.does(lambda world: world.crash(1000))
    .after(PAUSE_MS)
    .connects()
    .waits(RESUME_WAIT_MS - PAUSE_MS)
    .after(500)
    .does(other_run)
    .waits(0)
    .looks(5000, 5000),
    "but not below what was told, which may be in its checkpoint": running(initial_rate=RATE)
    .looks(5000, PLANNED)
    .crashes()
    .after(500)
    .does(other_run)
    .limit(1.0)
    .looks(5000, PLANNED),
    "for a run that has ended only the start of the next is waited for": HELD.sends("terminated")
    .sees(records, 1)
    .crashes()
    .waits(REPORT_WAIT_MS)
    .after(REPORT_WAIT_MS)
    .waits(0)
    .looks(5000, 5000),
    "the first batches of a run go on at the initial rate": fresh(initial_rate=RATE / 2)
    .starts()
    .earliest(300)
    .looks(5000, 300 + 100)
    .crashes()
    .after(500)
    .batch(400, ms=1000)
    .looks(5000, 400 + 100),
    "even if its first batch is not reported": fresh(initial_rate=RATE / 2)
    .starts()
    .earliest(300)
    .looks(5000, 300 + 100)
    .crashes()
    .after(500)
    .sends("idle")
    .looks(5000, 400 + 100),
    # What is known
    "without a run nothing is kept": fresh().connects().looks(5000).sees(records, 0),
    "a second restart finds what the first one did": HELD.crashes()
    .after(500)
    .crashes()
    .after(100)
    .batch(PLANNED, ms=1000)
    .looks(5000, PLANNED + PER_BATCH),
    "offsets that are no records are still known": fresh()
    .starts()
    .looks(4000)
    .next_batch(2000, rows=1000, ms=10_000)
    .next_batch(4000, rows=1000, ms=10_000)
    .crashes()
    .after(100)
    .sends("idle")
    .looks(90_000, 4000 + 2 * PER_BATCH),
    "nobody knows how long a batch took amid which the proxy was away": HELD.crashes(8000)
    .after(100)
    .batch(PLANNED, ms=8100)
    .sees(lambda world: world.query_backpressure.rate, pytest.approx(RATE))
    .next_batch(PLANNED + 100, ms=2000)
    .sees(lambda world: world.query_backpressure.rate, pytest.approx(RATE / 2)),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_after_a_restart(script):
    script.play()


def test_a_wait_for_the_first_report_is_time_that_the_proxy_held_the_query():
    begun = HELD.crashes().waits(RESUME_WAIT_MS - PAUSE_MS).after(1000).sends("idle")
    run = begun.looks(5000, PLANNED + PER_BATCH).after(2000).batch(PLANNED + PER_BATCH, ms=3000)
    assert "held 1,000 ms left out" in run.play().world.document["reason"]


def bounded() -> BackpressureWorld:
    """A query that reads 100 bytes for a record, RATE records/s."""
    world = world_of()
    world.start()
    assert world.query_backpressure is not None
    world.rated(RATE, {0: END})
    assert world.query_backpressure.bound == pytest.approx(100 * RATE)
    return world


def test_the_bound_is_in_force_before_anybody_connects_and_goes_as_if_there_was_no_restart():
    world = bounded()
    hold_ms = rule().adaptive.hold_ms
    world.tick(hold_ms - 1000)
    assert world.crash(5000) == []
    assert world.document["bound"] == pytest.approx(100 * RATE)
    assert world.document["query"] == LABEL
    assert world.document["reason"] == "100 records/s since before the restart of 100 bytes"
    assert world.document["report_age_s"] is None
    assert world.gauge == pytest.approx(100 * RATE)
    world.tick(hold_ms)
    assert world.document["bound"] == pytest.approx(100 * RATE)
    world.tick(1000)
    assert world.document["bound"] == pytest.approx(100 * RATE * RETURN_FACTOR)


def test_settings_that_changed_meanwhile_apply():
    world = bounded()
    world.crash(0, rule(min_rate=500.0))
    assert world.query_backpressure.rate == 500.0


def test_a_client_that_does_not_come_back_is_forgotten():
    world = bounded()
    world.crash()
    world.pass_ms(FORGET_AFTER_MS + 1)
    world.tick()
    assert records(world) == 0


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ([Rule(client_id=CLIENT, bounds={CONSUMER: STATIC})], 0),
        ([Rule(client_id="other", bounds={CONSUMER: STATIC})], 0),
        ([rule(static=1e6)], 1),
    ],
    ids=["not adaptive", "no rule", "another bound"],
)
def test_a_record_goes_with_its_rule(rules, left):
    world = bounded()
    refused = world.crash(0, *rules)
    assert len(refused) == 1 - left
    assert all("no adaptive rule applies" in each for each in refused)
    assert records(world) == left
    assert (world.backpressure.of_identity(IDENTITY, world.now_ms) is not None) == bool(left)


def test_a_rule_that_goes_at_run_time_takes_the_record_with_it():
    world = bounded()
    assert records(world) == 1
    world.update(Rule(client_id=CLIENT, bounds={CONSUMER: STATIC}))
    world.tick()
    assert records(world) == 0


def test_somebody_is_told_when_there_is_something_to_write():
    world = bounded()
    world.keep()
    before = world.record_changes
    driver = world.lookups()
    for latest, count in [(5000, 1), (5000, 1), (5001, 2)]:
        told(world, driver, {0: latest})
        assert world.record_changes - before == count
    world.send("idle")
    assert world.record_changes - before == 3


def test_what_could_not_be_written_is_written_with_the_next():
    world = bounded()
    first, _ = world.backpressure.unwritten.take()
    world.backpressure.unwritten.give_back()
    again, _ = world.backpressure.unwritten.take()
    assert [record.key for record in first] == [record.key for record in again]
    assert world.backpressure.unwritten.take() == ([], [])


BATCHES = st.lists(
    st.tuples(st.integers(1, 500), st.integers(100, 10_000), st.integers(0, 3000)), max_size=5
)


@settings(max_examples=100, deadline=None)
@given(before=BATCHES, after=BATCHES, away_ms=st.integers(0, 10_000))
def test_a_restart_changes_no_batch(before, after, away_ms):
    """A proxy that was away between two batches goes on as one that was not."""

    def told_in(*, is_restarted: bool) -> list[object]:
        world = BackpressureWorld(rule(min_rate=1.0, derivative=0.1))
        world.start()
        world.pass_ms(1)
        driver = world.lookups()
        done = {0: 0, 1: 0}
        latest = dict.fromkeys(done, 0)
        seen: list[object] = []

        def batches(steps: list[tuple[int, int, int]]) -> None:
            nonlocal done
            for rows, took_ms, more in steps:
                latest[rows % 2] += rows + more
                done = told(world, driver, latest)
                seen.append(done)
                world.pass_ms(took_ms)
                world.batch(done, ms=took_ms)
                world.pass_ms(1)
                seen.append(world.query_backpressure.rate)

        batches([(400, 2000, 0), (400, 2000, 0), *before])
        if is_restarted:
            assert world.crash(away_ms) == []
            world.pass_ms(1)
            driver = world.lookups()
        else:
            world.pass_ms(away_ms + 1)
        world.pass_ms(1)
        world.send("idle")
        batches(after)
        return seen

    assert told_in(is_restarted=True) == told_in(is_restarted=False)
