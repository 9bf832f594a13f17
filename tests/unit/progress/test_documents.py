"""Progress as JSON, and the alarms that it shows."""

import json

from parts.query_world import learn_end
from progress_world import FOREIGN, Client, uuid

from proxy.admin.document_models import RowContext
from proxy.admin.query_documents import progress_documents
from proxy.progress.events import MAX_EVENTS
from proxy.progress.query import LIVE_MS, STUCK_AFTER_MS


def test_a_stuck_partition_is_noted_and_the_document_says_since_when(world, driver):
    world.query().log_end("t", 0, 50, world.now_ms)
    since_s = world.now_s
    world.wait(0)
    world.wait(STUCK_AFTER_MS)
    assert world.kinds() == ["stuck"]
    assert world.document()["partitions"][0]["stuck_since"] == since_s
    driver.batch(10, 20)
    assert world.kinds() == ["stuck", "unstuck"]
    assert world.document()["partitions"][0]["stuck_since"] is None


def test_a_query_that_ended_is_not_stuck(world, driver):
    world.query().log_end("t", 0, 50, world.now_ms)
    driver.send("terminated")
    world.wait(STUCK_AFTER_MS)
    world.wait(STUCK_AFTER_MS)
    assert world.kinds() == []


def test_the_state_of_a_query(world):
    assert world.document()["state"] == "silent"
    client = Client(world)
    client.read(0)
    assert world.document()["state"] == "running"
    world.wait(LIVE_MS)
    assert world.document()["state"] == "silent"


def test_the_document_of_a_query(world):
    driver = world.driver()
    driver.send("started")
    client = Client(world, node_id=4, topic_id=b"i" * 16)
    client.read(5, end=20, hw=100)
    driver.batch(None, 15)
    world.wait(2500)
    document = world.document()
    json.dumps(document, allow_nan=False)
    (partition,) = document.pop("partitions")
    assert document == {
        "name": "orders",
        "batch": {"id": 0, "rows": 0, "duration_s": 0.001, "ended": 1700001000.0},
        "query_id": driver.query_id,
        "run_id": driver.run_id,
        "client_id": "orders",
        "state": "running",
        "ended": False,
        "error": None,
        "trigger": None,
        "last_report": world.now_s - 2.5,
        "last_heard": world.now_s - 2.5,
        "report_age_s": 2.5,
        "last_batch": 0,
        "run_batches": 1,
        "reports": {"received": 2, "lost": 0, "repeated": 0, "refused": {}},
        "commit": {"group": "orders-progress", "last": None, "error": None, "backwards": 0},
        "advice": [],
        "notes": [],
        "adaptive": None,
        "totals": {
            "partitions": 1,
            "lag_records": 85,
            "lag_s": partition["lag_s"],
            "in_flight_records": 5,
            "failed_records": 0,
            "skipped_records": 0,
            "stuck_partitions": 0,
        },
    }
    assert partition == {
        "topic": "t",
        "partition": 0,
        "topic_id": "69" * 16,
        "leader": 4,
        "delivered_to": 20,
        "completed_to": 15,
        "completed_at": world.now_s - 2.5,
        "committed": None,
        "high_watermark": 100,
        "log_start": 0,
        "lag_records": 85,
        "lag_s": 2.5,
        "in_flight": {"records": 5, "ranges": [[15, 20]], "ranges_left_off": 0},
        "failed": {"records": 0, "ranges": [], "ranges_left_off": 0},
        "refetched": {"records": 0, "latest": None},
        "skipped": [],
        "skipped_records": 0,
        "stuck_since": None,
    }


def test_the_document_has_the_latest_notes_first(world, driver):
    for number in range(MAX_EVENTS + 10):
        driver.batch(20 + number * 10, 20 + number * 10)
    notes = world.document()["notes"]
    assert len(notes) == MAX_EVENTS
    assert notes[0]["text"].endswith("offsets 600 to before 610: unexplained")
    assert notes[0]["at"] == world.now_s


def test_log_ends_of_the_poll_reach_all_who_read_the_partition(world, driver):
    world.known.add("late")
    world.driver(name="late", query_id=FOREIGN, sender=uuid("s2")).batch(None, 5)
    assert set(world.registry.partitions()) == {("t", 0)}
    learn_end(world.registry, "t", 0, 50, world.now_ms)
    for each in world.registry.readers_of("t", 0):
        each.log.record_start(3)
    learn_end(world.registry, "nobody", 0, 50, world.now_ms)
    for client_id in ("orders", "late"):
        part = world.part(client_id=client_id)
        assert (part.log.high_watermark, part.log.log_start_offset) == (50, 3)


def test_partitions_that_come_and_go_between_two_steps_disturb_no_others(world):
    world.driver().batch(None, dict.fromkeys(range(3), 10))
    (query,) = world.registry.queries
    steps = progress_documents(world.registry.queries, RowContext(world.now_s, world.now_ms))
    assert next(steps) is None
    query.revoke(query.partitions["t", 1], "gone", world.now_ms)
    query.open("t", 7, world.now_ms)
    (document,) = filter(None, steps)
    assert [each["partition"] for each in document["partitions"]] == [0, 2]
