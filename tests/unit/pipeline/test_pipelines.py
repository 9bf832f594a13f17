"""How pipelines are wired to what is measured and held: real parts, and a clock of the test's."""

import asyncio

import pytest
from parts.sensor_views import sensors_in_use
from wired_world import HIGH, NORMAL, PRODUCER, SECOND_MS, START_S, STATIC, WiredWorld, pipeline

from proxy.pipeline.completion import MAX_OUTPUTS
from proxy.pipeline.running import REAPPLY_MS
from proxy.state import MemoryStore, Record, StateError

# Completion


def test_a_root_goes_through_the_stages(tmp_path):
    world = WiredWorld(tmp_path, pipeline())
    world.write("one", "b", 0, 5)
    world.batch("one", "a", 0, 10, took_ms=500)
    world.tick()
    assert world.value("ledger_pending") == 1
    assert world.completion()["pending"]["first"][0]["waits_at"] == "two"
    world.now_ms += 2 * SECOND_MS
    world.batch("two", "b", 0, 5)
    world.tick()
    assert world.value("ledger_pending") == 0
    assert world.value("ledger_completion_seconds_count") == 1
    assert world.value("ledger_completion_seconds_sum") == 2.5


def test_what_is_written_after_a_batch_belongs_to_the_next(tmp_path):
    world = WiredWorld(tmp_path, pipeline())
    world.write("one", "b", 0, 5)
    world.now_ms += 50
    world.write("one", "b", 5, 8)
    world.batch("one", "a", 0, 10, age_ms=20)
    world.batch("two", "b", 0, 5)
    assert world.completion()["completed"] == 1
    world.batch("one", "a", 10, 20)
    assert world.completion()["pending"]["batches"] == 1
    world.batch("two", "b", 5, 8)
    assert world.completion()["completed"] == 2


def test_an_idle_report_that_comes_late_does_not_settle_what_was_written_since(tmp_path):
    world = WiredWorld(tmp_path, pipeline())
    world.now_ms += 100
    world.write("one", "b", 0, 5)
    world.batch("two", "b", 0, 5)
    world.report("one", "idle", age_ms=50)
    assert world.completion()["early_batches"] == 1
    world.batch("one", "a", 0, 10)
    assert world.completion()["completed"] == 1
    assert world.completion()["counts"]["foreign_records"] == 0
    world.batch("two", "b", 5, 6)
    assert world.completion()["early_batches"] == 1
    world.report("one", "idle")
    assert world.completion()["early_batches"] == 0


def test_the_first_batch_of_a_query_begins_where_the_log_does(tmp_path):
    world = WiredWorld(tmp_path, pipeline())
    world.write("one", "b", 3, 5)
    world.batch("one", "a", None, 10)
    assert world.completion()["pending"]["batches"] == 1
    world.batch("two", "b", None, 5)
    assert world.completion()["completed"] == 1


def test_who_is_no_stage_and_where_no_stage_writes(tmp_path):
    world = WiredWorld(tmp_path, pipeline())
    followed = [world.pipelines.follows(each) for each in ("one", "feed", "other")]
    assert followed == [True, True, False]
    world.write("one", "elsewhere", 0, 5)
    world.write("other", "b", 0, 5)
    world.batch("other", "b", 0, 5)
    world.batch("one", "a", 0, 10)
    assert world.completion()["completed"] == 1
    assert world.completion()["counts"]["unknown_stages"] == 0


def test_a_query_is_found_by_a_name_that_comes_after_its_client(tmp_path):
    world = WiredWorld(tmp_path, pipeline(first={"queries": ["query-one"]}))
    world.connect("id-of-one")
    world.registry.follow("id-of-one")
    before = world.pipelines.generation
    assert not world.pipelines.follows("id-of-one")
    world.report("query-one", "started", client_id="id-of-one")
    assert world.pipelines.follows("id-of-one")
    assert world.pipelines.generation > before, "connections must ask again"


def test_outputs_that_nobody_reports_are_bounded(tmp_path):
    world = WiredWorld(tmp_path, pipeline())
    for number in range(MAX_OUTPUTS + 10):
        world.write("one", "b", 2 * number, 2 * number + 1)
    world.batch("one", "a", 0, 10)
    assert world.completion()["edges"] == MAX_OUTPUTS + 1


# Flow


def test_a_stage_that_is_too_slow_holds_the_one_before(tmp_path):
    world = WiredWorld(tmp_path, pipeline())
    world.hurry()
    rate = world.value("stage_rate", stage="one")
    assert world.value("stage_state", stage="one") == 1
    assert rate <= HIGH
    assert world.pressed("one").ceiling == rate
    assert world.value("stage_state", stage="two") == 0
    assert world.value("stage_rate", stage="two") == NORMAL
    for _ in range(4):  # nothing comes any more: too little
        world.tick(SECOND_MS)
    assert world.value("stage_state", stage="one") == 0
    assert world.pressed("one").ceiling is None


def test_a_partition_that_becomes_known_has_not_arrived_just_now(tmp_path):
    world = WiredWorld(tmp_path, pipeline())
    world.batch("two", "b", 0, 10)
    for partition in range(10):
        world.see("two", "b", 1_000_000 * partition, partition)
        world.tick(SECOND_MS)
    assert world.value("stage_state", stage="one") == 0
    assert [each["received_rate"] for each in world.document()["stages"]] == [None, 0.0]


def test_max_pending_lets_the_first_stage_wait(tmp_path):
    world = WiredWorld(tmp_path, pipeline(max_pending={"batches": 1}))
    world.write("one", "b", 0, 5)
    world.batch("one", "a", 0, 10)
    world.tick()
    assert world.pressed("one").ceiling == 0
    assert world.pressed("two").ceiling is None
    world.batch("two", "b", 0, 5)
    world.tick()
    assert world.pressed("one").ceiling is None


def produce_bounds(world):
    rows = list(sensors_in_use(world.quotas, lambda: world.now_ms))
    return [row.bound for row in rows if row.kind is PRODUCER]


def hurry_the_source(world):
    """Let stage `one` be sent more than it takes, so that the source is held; return its rate."""
    for identity in (world.connect("feed", user) for user in (None, "alice")):
        world.quotas.client(identity).charge(PRODUCER, 1.0, world.now_ms)
    assert produce_bounds(world) == [STATIC, STATIC]
    for _ in range(10):
        world.pipelines.sent("feed", 2000, 10)
    world.pipelines.sent("other", 10**9, 1)
    world.batch("one", "a", 0, HIGH, took_ms=1000)
    for second in range(5):
        world.see("one", "a", 10 * HIGH * second)
        world.tick(SECOND_MS)
    rate = world.value("stage_rate", stage="feed")
    assert rate <= HIGH
    return rate


def test_a_producer_is_held_under_every_rule_that_it_has(tmp_path):
    world = WiredWorld(tmp_path, pipeline(hold_producers=True, first={"band": [0, HIGH]}))
    rate = hurry_the_source(world)
    assert produce_bounds(world) == [pytest.approx(200 * rate)] * 2
    world.reload(pipeline())
    world.tick()
    assert produce_bounds(world) == [STATIC, STATIC]


def test_a_producer_stays_held_when_another_pipeline_reads_it_and_holds_nobody(tmp_path):
    other = pipeline("q", first={"client-ids": ["three"]}, last="four")
    other["stages"][0]["name"] = "three"
    first = pipeline(hold_producers=True, first={"band": [0, HIGH]})
    world = WiredWorld(tmp_path, first, other)
    rate = hurry_the_source(world)
    assert produce_bounds(world) == [pytest.approx(200 * rate)] * 2


async def test_reports_do_not_keep_the_loop_from_looking(tmp_path):
    world = WiredWorld(tmp_path, pipeline())
    task = asyncio.create_task(world.pipelines.run())
    try:
        async with asyncio.timeout(20):
            for _ in range(1_000_000):
                world.now_ms += 10
                world.report("one", "idle", run=1)
                await asyncio.sleep(0)
                if world.value("ledger_pending") is not None:
                    break
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert world.value("ledger_pending") == 0


# State


HELD = {
    "pipeline": "p",
    "node": "one",
    "rate": 400.0,
    "since_s": START_S,
    "why": "two asks for less",
    "by": "two",
    "direction": "decrease",
    "holders": ["two"],
    "revision": 3,
}


async def test_the_flow_is_read_again_at_a_period(tmp_path):
    world = WiredWorld(tmp_path, pipeline())
    pipelines, store, start_ms = world.pipelines, world.store, world.now_ms

    def rate():
        return world.document()["stages"][0]["rate"]

    store.put_many([Record.of("flow/p/one", HELD)])  # another process holds it
    world.now_ms = start_ms + REAPPLY_MS - SECOND_MS
    await pipelines.reapply()
    assert rate() is None
    world.now_ms = start_ms + REAPPLY_MS
    await pipelines.reapply()
    assert rate() == 400.0
    store.put_many((), delete=("flow/p/one",))  # somebody removed it
    world.now_ms = start_ms + 2 * REAPPLY_MS - SECOND_MS
    await pipelines.reapply()
    world.keep()
    assert store.get("flow/p/one") is None
    world.now_ms = start_ms + 2 * REAPPLY_MS
    await pipelines.reapply()
    world.keep()
    assert store.get("flow/p/one").value == HELD


def test_another_process_goes_on(tmp_path):
    world = WiredWorld(tmp_path, pipeline())
    world.write("one", "b", 0, 5)
    world.batch("one", "a", 5, 10)
    world.hurry()
    rate = world.value("stage_rate", stage="one")
    world.keep()
    world.start()
    world.tick()
    assert world.value("stage_state", stage="one") == 1
    assert world.value("stage_rate", stage="one") == rate
    assert world.pressed("one").ceiling == rate
    assert world.value("ledger_pending") >= 0


def test_roots_survive(tmp_path):
    world = WiredWorld(tmp_path, pipeline())
    world.write("one", "b", 0, 5)
    world.batch("one", "a", 0, 10)
    world.keep()
    world.start()
    world.batch("two", "b", 0, 5)
    world.tick()
    assert world.value("ledger_completion_seconds_count") == 1
    assert world.value("ledger_pending") == 0


class Failing(MemoryStore):
    """A store that can't be written for a while."""

    fails = False

    def put_many(self, records, *, delete=()):
        if self.fails:
            raise StateError("no room", "make some")
        return super().put_many(records, delete=delete)


def crashed_amid_a_batch(tmp_path):
    """Stage `one` has a batch under way, of whose output only an earlier process saw a part."""
    world = WiredWorld(tmp_path, pipeline())
    world.write("one", "b", 0, 5)
    world.batch("one", "a", 0, 10)
    world.keep()
    world.write("one", "b", 5, 8)
    world.start()
    world.now_ms += SECOND_MS
    return world


def test_what_was_written_before_a_crash_belongs_to_the_batch_that_is_reported_after_it(tmp_path):
    world = crashed_amid_a_batch(tmp_path)
    world.write("one", "b", 8, 9)
    world.now_ms += 100
    world.ends = {("b", 0): 12}
    world.batch("one", "a", 10, 20, took_ms=3000, age_ms=1.0)
    world.write("one", "b", 9, 13)  # the response was late: all but one record are counted
    world.batch("two", "b", 0, 5)
    assert world.completion()["completed"] == 1
    world.batch("two", "b", 5, 11)
    assert world.completion()["completed"] == 1
    world.batch("two", "b", 11, 12)
    assert world.completion()["completed"] == 2
    world.batch("one", "a", 20, 30)
    assert world.completion()["pending"]["batches"] == 1
    world.batch("two", "b", 12, 13)
    assert world.completion()["completed"] == 3
    assert world.completion()["failed"] == {}


def test_what_the_next_batch_was_seen_to_write_is_not_counted_to_the_one_before(tmp_path):
    world = crashed_amid_a_batch(tmp_path)
    world.write("one", "b", 10, 12)
    world.ends = {("b", 0): 12}
    world.batch("one", "a", 10, 20, took_ms=3000, age_ms=1.0)
    world.batch("two", "b", 0, 10)
    assert world.completion()["completed"] == 2
    world.batch("one", "a", 20, 30)
    world.batch("two", "b", 10, 12)
    assert world.completion()["completed"] == 3
    assert world.completion()["failed"] == {}


def test_a_batch_that_began_after_the_crash_was_seen_whole(tmp_path):
    world = crashed_amid_a_batch(tmp_path)
    world.ends = {("b", 0): 12}
    world.batch("one", "a", 10, 20, took_ms=1)
    assert world.completion()["completed"] == 1
    assert world.completion()["pending"]["batches"] == 1  # the one from before the crash


def test_what_cannot_be_written_is_written_later(tmp_path):
    world = WiredWorld(tmp_path, pipeline(), store=Failing())
    world.write("one", "b", 0, 5)
    world.store.fails = True
    world.batch("one", "a", 0, 10)
    world.keep()
    world.batch("one", "a", 10, 20)
    world.keep()
    assert world.keys == set()
    world.store.fails = False
    world.keep()
    assert world.keys
    world.start()
    assert world.completion()["pending"]["batches"] == 1


def test_what_other_pipelines_left_is_deleted(tmp_path):
    world = WiredWorld(tmp_path, pipeline("q"))
    world.write("one", "b", 0, 5)
    world.batch("one", "a", 0, 10)
    world.keep()
    assert world.keys
    world.config = world.configured(pipeline())
    world.start()
    world.keep()
    assert world.keys == set()


# Reloads


def test_a_pipeline_that_goes_is_released_and_leaves_nothing(tmp_path):
    world = WiredWorld(tmp_path, pipeline(first={"produces": ["b", "c"]}))
    world.write("one", "b", 0, 5)
    world.hurry()
    world.keep()
    assert world.pressed("one").ceiling is not None
    assert {key.split("/")[0] for key in world.keys} == {"flow", "ledger"}
    pending = world.value("ledger_pending")
    world.reload()
    assert world.pressed("one").ceiling is None
    assert world.value("stage_state", stage="one") is None
    assert world.value("ledger_pending") is None
    assert (world.value("ledger_failed_total", reason="pipeline_changed") or 0) == pending
    assert not world.pipelines.follows("one")
    world.reload(pipeline())
    world.keep()
    world.tick(10 * SECOND_MS)
    assert world.value("stage_state", stage="one") == 0, "it does not take up what was before"
    assert world.value("ledger_pending") == 0
    world.start()
    assert world.completion()["pending"]["batches"] == 0


def test_a_pipeline_that_changes_goes_on(tmp_path):
    world = WiredWorld(tmp_path, pipeline(first={"produces": ["b", "c"]}))
    world.hurry()
    rate = world.pressed("one").ceiling
    world.write("one", "b", 5000, 5005)
    world.batch("one", "a", 1010, 1020)
    world.write("one", "c", 0, 5)  # not reported when c is taken out
    world.reload(pipeline(timeout="20m"))
    assert world.pressed("one").ceiling == rate, "there is no gap in the hold"
    world.batch("one", "a", 1020, 1030)
    assert world.completion()["pending"]["batches"] == 1
    world.reload(pipeline(last="three"))
    world.tick()
    assert world.value("stage_state", stage="two") is None
    assert world.value("stage_state", stage="three") == 0
    assert world.value("ledger_pending") == 0
    assert world.value("ledger_failed_total", reason="pipeline_changed") == 1
