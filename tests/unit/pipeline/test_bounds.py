"""What is a bound is kept: batch by batch, in virtual time, whoever is down or slow or late."""

import math
import random
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_jobs import Plant
from wired_world import SECOND_MS, WiredWorld, pipeline, stage

from proxy.pipeline.batch_limit import ROUND_SHARE, UpstreamStage, records_that_fit

NEVER = [0, 1_000_000]
"""A band that nothing leaves: nobody is held but by the bounds."""

MAX_LAG = 6_000
PER_S = 1_000
TRIGGER_S = 1
BATCH_S = 2.2
"""What a batch of half of MAX_LAG takes at most, with the wait for the trigger."""


def plant(folder, *, per_s=PER_S, partitions=2, more_stages=(), **more):
    """Make feed -> a -> one -> b -> two, with jobs for the stages that are not slow."""
    document = pipeline(second={"band": NEVER}, **more)
    document["stages"] += more_stages
    made = Plant(WiredWorld(folder, document), partitions=partitions)
    made.per_s["a"] = per_s
    return made, made.job("one", "a", "b", per_s=5_000), made.job("two", "b", per_s=5_000)


@contextmanager
def watched(made, value):
    """Collect what a value ever was, looked at whenever it may have changed."""
    seen = [value()]
    made.checks.append(lambda: seen.append(value()))
    yield seen
    made.checks.clear()


def pending(made):
    return made.world.completion()["pending"]["batches"]


@pytest.mark.parametrize("late_ms", [0.0, 2_500.0], ids=["reports at once", "reports are late"])
@pytest.mark.parametrize("limit", [1, 5, 12])
def test_no_more_source_batches_are_in_flight_than_max_pending(tmp_path, limit, late_ms):
    made, one, two = plant(tmp_path, max_pending={"batches": limit})
    one.late_ms = late_ms
    made.run(5)
    with watched(made, lambda: pending(made)) as seen:
        two.stop()
        made.run(40)
        # All that is known is in flight; the last one may wait for its report.
        assert seen[-1] == limit
        batches = len(one.batches)
        made.run(20)
        assert len(one.batches) == batches
        two.start()
        took_s = made.run(20, lambda: len(one.batches) > batches)
        assert took_s <= BATCH_S + 3 * TRIGGER_S + late_ms / SECOND_MS
        made.run(10)
    assert max(seen) == limit


def test_two_first_stages_share_max_pending(tmp_path):
    made = Plant(WiredWorld(tmp_path, two_feeders(max_pending={"batches": 3})))
    one, other, two = feeders(made)
    made.run(5)
    with watched(made, lambda: pending(made)) as seen:
        two.stop()
        made.run(30)
        two.start()
        made.run(30)
    assert max(seen) == 3
    assert min(len(one.batches), len(other.batches)) > 5, "neither starves"


def test_bytes_in_flight_pass_their_limit_by_no_more_than_a_batch(tmp_path):
    limit = 500_000
    made, one, two = plant(tmp_path, max_pending={"bytes": limit})
    made.run(5)
    two.stop()
    made.run(20)
    batches = len(one.batches)
    made.run(20)
    assert len(one.batches) == batches
    document = made.world.completion()["pending"]
    largest = max(root["size_bytes"] for root in document["first"])
    assert limit <= document["size_bytes"] <= limit + largest


def test_lag_is_never_above_max_lag_and_what_was_held_goes_on_at_once(tmp_path):
    made, one, two = plant(tmp_path, max_lag=MAX_LAG)
    made.run(10)
    with watched(made, lambda: two.lag) as seen:
        two.stop()
        made.run(60)
        assert two.lag == MAX_LAG, "all of the room is used"
        assert made.world.pressed("one").ceiling == 0
        batches = len(one.batches)
        two.start()
        drained_s = made.run(20, lambda: two.lag == 0)
        assert made.run(20, lambda: len(one.batches) > batches) <= 2 * TRIGGER_S
        assert one.batches[-1] == MAX_LAG * ROUND_SHARE, "not step by step"
        assert drained_s <= 2 * TRIGGER_S
        made.run(60, lambda: one.lag < 2 * PER_S)
        assert one.lag < 2 * PER_S, "what waited for the first stage is done"
    assert max(seen) == MAX_LAG


def test_a_lost_report_of_the_last_batch_does_not_hold_the_stage_before_for_ever(tmp_path):
    """Its driver died between the commit and the report, and begins again with nothing to read."""
    made, one, two = plant(tmp_path, max_lag=MAX_LAG)
    made.run(10)
    two.stop()
    made.run(60)
    assert two.lag == MAX_LAG
    two.late_ms = math.inf
    two.start()
    made.run(3 * TRIGGER_S, lambda: not two.lag)
    for partition in made.world.registry.query_of("two").partitions.values():
        partition.read_ms = made.world.now_ms
    two.stop()
    two.start()
    made.run(3 * TRIGGER_S)
    batches = len(one.batches)
    assert made.world.pressed("one").ceiling == 0, "nobody has said that all was read"
    made.world.report("two", "idle")
    made.run(3 * TRIGGER_S)
    assert len(one.batches) > batches


def test_a_slow_stage_is_kept_at_work_within_the_bound(tmp_path):
    made, _, two = plant(tmp_path, max_lag=MAX_LAG)
    made.run(10)
    two.per_s = 500
    with watched(made, lambda: two.lag) as seen:
        made.run(30)
        before = sum(two.batches)
        made.run(60)
    assert max(seen) <= MAX_LAG
    assert sum(two.batches) - before >= 0.8 * 60 * two.per_s


def test_the_bound_survives_a_restart(tmp_path):
    made, _, two = plant(tmp_path, max_lag=MAX_LAG, max_pending={"batches": 8})
    made.run(10)
    two.stop()
    made.run(30)
    waited, in_flight = two.lag, pending(made)
    made.world.restart()
    assert made.world.pressed("one").ceiling == 0, "before anybody asks"
    with watched(made, lambda: (two.lag, pending(made))) as seen:
        made.run(30)
        assert seen[-1][0] == waited <= MAX_LAG
        two.start()
        made.run(30)
    assert max(lag for lag, _ in seen) <= MAX_LAG
    assert max(count for _, count in seen) <= 8
    assert in_flight <= 8
    assert sum(two.batches) > waited


def test_a_stage_that_never_ran_is_waited_for(tmp_path):
    made, _, two = plant(tmp_path, max_lag=MAX_LAG)
    two.stop()
    made.run(60)
    assert made.log("b").total <= MAX_LAG
    assert made.world.document()["stages"][0]["waits"] == {
        "for": "two",
        "records": 0,
        "reason": f"{MAX_LAG:,} records wait for two, and max_lag is {MAX_LAG:,}",
    }
    assert made.world.value("stage_state", stage="one") == 1
    assert made.world.value("stage_rate", stage="one") == 0


def test_a_stage_that_never_ran_is_waited_for_while_another_reads_the_topic(tmp_path):
    made, *_ = plant(tmp_path, max_lag=MAX_LAG, more_stages=[stage("id-of-one", "b")])
    made.run(60)
    assert made.log("b").total <= MAX_LAG


def test_a_bound_below_one_record_of_each_partition_does_not_stop_the_stage(tmp_path):
    made, _, two = plant(tmp_path, max_lag=3, partitions=5, per_s=2)
    made.run(60)
    assert sum(two.batches) > 60


def two_feeders(**more):
    document = pipeline(second={"band": NEVER}, **more)
    document["stages"][1]["consumes"] = ["b", "c"]
    document["sources"].append({**document["sources"][0], "client-id": "feed2", "produces": ["z"]})
    document["stages"].append(stage("id-of-one", "z", "c"))
    return document


def feeders(made):
    made.world.connect("id-of-one")
    made.per_s |= {"a": PER_S, "z": PER_S}
    return (
        made.job("one", "a", "b", per_s=5_000),
        made.job("id-of-one", "z", "c", per_s=5_000),
        made.job("two", "b c", per_s=10_000),
    )


def test_stages_that_feed_one_share_its_room(tmp_path):
    made = Plant(WiredWorld(tmp_path, two_feeders(max_lag=MAX_LAG)))
    *_, two = feeders(made)
    made.run(10)
    with watched(made, lambda: two.lag) as seen:
        two.stop()
        made.run(40)
        written = [made.log(topic).total for topic in "bc"]
        two.start()
        two.per_s = 1_000
        made.run(60)
    assert max(seen) <= MAX_LAG
    rates = [made.log(topic).total - before for topic, before in zip("bc", written, strict=True)]
    assert min(rates) >= 0.7 * max(rates)


RATIOS = {
    "one for two": 0.5,
    "three for one": 3.0,
    "nearly nothing": 0.01,
}


@pytest.mark.parametrize("ratio", RATIOS.values(), ids=RATIOS.keys())
def test_records_are_converted(tmp_path, ratio):
    made, one, two = plant(tmp_path, max_lag=MAX_LAG)
    one.ratio = lambda _: ratio
    made.run(10)
    with watched(made, lambda: two.lag) as seen:
        two.stop()
        made.run(40)
        two.start()
        made.run(20)
    assert max(seen) <= MAX_LAG + 1
    assert sum(one.batches) > 0


def test_a_batch_that_writes_more_than_the_ones_before_passes_the_bound_by_that(tmp_path):
    made, one, two = plant(tmp_path, max_lag=MAX_LAG)
    chosen = random.Random(5)
    one.ratio = lambda _: chosen.choice((0.5, 1.0, 1.5))
    made.run(20)
    with watched(made, lambda: two.lag) as seen:
        for _ in range(5):
            two.stop()
            made.run(15)
            two.start()
            made.run(15)
    assert max(seen) <= MAX_LAG + 1.5 / 0.5 * MAX_LAG * ROUND_SHARE


JOBS = st.sampled_from(["one", "two"])
SECONDS = st.integers(1, 12)


def events(*kinds):
    return st.lists(st.tuples(st.sampled_from(kinds), JOBS, SECONDS), max_size=12)


@settings(max_examples=20)
@given(
    st.integers(1, 6),
    # How many reports are late is not known to a process that has just begun.
    events("stop", "start", "slow", "fast", "late")
    | events("stop", "start", "slow", "fast", "restart"),
)
def test_bounds_hold_whatever_happens(tmp_path_factory, limit, events):
    made, _, two = plant(
        tmp_path_factory.mktemp("world"), max_lag=MAX_LAG, max_pending={"batches": limit}
    )
    made.run(3)
    with watched(made, lambda: (two.lag, pending(made))) as seen:
        for event, name, seconds in events:
            job = made.jobs[name]
            match event:
                case "stop":
                    job.stop()
                case "start" if not job.is_up:
                    job.start()
                case "slow" | "fast":
                    job.per_s = 300 if event == "slow" else 5_000
                case "late":
                    job.late_ms = 100.0 * seconds
                case "restart":
                    made.world.restart()
            made.run(seconds)
    assert max(lag for lag, _ in seen) <= MAX_LAG
    assert max(count for _, count in seen) <= limit


@given(
    st.integers(1, 10_000),
    st.integers(0, 20_000),
    st.lists(
        st.tuples(
            st.floats(0.1, 1_000.0),
            st.floats(0.01, 10.0),
            st.integers(0, 5_000),
            st.integers(0, 5_000),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 50),
)
def test_whoever_plans_next_leaves_the_bound_kept(max_lag, lag, rows, least):
    writers = [UpstreamStage(*row) for row in rows]
    coming = sum(each.coming for each in writers)
    for number, each in enumerate(writers):
        others = writers[:number] + writers[number + 1 :]
        records = records_that_fit(max_lag, lag, each, others, least)
        assert records is not None
        if lag == 0 and coming == 0 and records == least:
            continue
        assert records == 0 or records >= least
        assert records == 0 or lag + coming + records * each.records_out <= max_lag * (1 + 1e-9)


def test_who_writes_nothing_has_no_bound():
    assert records_that_fit(10, 100, UpstreamStage(1.0, 0.0), []) is None
