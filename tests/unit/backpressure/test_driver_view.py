"""What a driver has done, where its reports and what it was given do not say the same."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from backpressure_parts import BackpressureWorld

from proxy.backpressure.driver_view import (
    DECISIONS,
    EVENT_JITTER_MS,
    RETRIES_MS,
    DriverView,
    LookupDecision,
)
from proxy.backpressure.drivers import QueryConnection

KEY = ("t", 0)
HERE, ELSEWHERE = QueryConnection(0.0), QueryConnection(0.0)
END = 5000
EVENT_MS = 1000.0


def view(done: int | None, *, is_resumed: bool = False, event_ms: float = EVENT_MS) -> DriverView:
    """A driver whose run has reported all below `done`; None: nothing yet."""
    world = BackpressureWorld()
    world.start()
    if done is not None:
        world.batch({0: done})
    pressure = world.query_backpressure
    drivers = pressure.clamp
    drivers.event_ms, drivers.answered_ms, drivers.is_resumed = event_ms, 0.0, is_resumed
    return DriverView(world.query, drivers, pressure.measurements, [KEY], HERE, RETRIES_MS)


def test_a_batch_that_took_less_than_was_told_is_reported():
    there = view(100)
    there.drivers.record_end(KEY, END, 150, HERE, EVENT_MS - EVENT_JITTER_MS)
    assert not there.is_unreported(KEY)
    assert there.done_by_now(KEY, is_overdue=True) is None


def test_what_was_told_just_before_an_event_may_be_of_a_later_batch():
    there = view(100)
    there.drivers.record_end(KEY, END, 150, HERE, EVENT_MS - EVENT_JITTER_MS + 1)
    assert there.is_unreported(KEY)
    assert there.done_by_now(KEY, is_overdue=False) is None
    assert there.done_by_now(KEY, is_overdue=True) == 150
    assert not there.is_refused, "it may have been read ahead"
    there.drivers.waited_ms = EVENT_MS
    assert there.is_refused


def test_a_batch_that_ends_where_was_told_before_is_the_one_before():
    there = view(100)
    there.drivers.record_end(KEY, END, 100, HERE, 1.0)
    there.drivers.record_end(KEY, END, 150, HERE, 2.0)
    assert there.is_unreported(KEY)


@pytest.mark.parametrize(("done", "is_resumed"), [(100, False), (None, True)])
def test_a_run_whose_place_is_proved_is_not_guessed_at(done, is_resumed):
    there = view(done, is_resumed=is_resumed, event_ms=-math.inf)
    there.drivers.record_end(KEY, END, 150, ELSEWHERE, 1.0)
    there.drivers.record_end(KEY, END, 150, HERE, 2.0)
    assert there.done_by_now(KEY, is_overdue=False) is None
    there.drivers.record_end(KEY, END, 200, HERE, 3.0)
    assert not there.knows_more


def test_a_new_run_knew_what_was_no_news_to_it():
    there = view(None)
    there.drivers.record_end(KEY, END, 150, ELSEWHERE, 1.0)
    assert there.done_by_now(KEY, is_overdue=False) is None
    there.drivers.record_end(KEY, END, 150, HERE, 2.0)
    assert there.done_by_now(KEY, is_overdue=False) == 150
    assert not there.knows_more
    there.drivers.record_end(KEY, END, 200, HERE, 3.0)
    assert not replace(there, now_ms=RETRIES_MS - 1).knows_more
    assert there.knows_more
    assert not replace(there, connection=ELSEWHERE).knows_more
    there.drivers.waited_ms = 1.0
    assert not there.knows_more


def test_the_documentation_has_the_same_rows():
    spark = (Path(__file__).parents[3] / "docs" / "spark.md").read_text()
    section = spark.partition("## What a driver's look-up gets")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    batch = ["R records/s make N offsets for one batch", *["the same"] * 3]
    assert [row[0] for row in rows] == [
        *(row.why.format(silent="N s") for row in DECISIONS if row.why is not None),
        *batch,
    ]
    assert [row.why for row in DECISIONS[-len(batch) :]] == [None] * len(batch)
    waits = [wait for _, _, wait in rows]
    none = (None, LookupDecision._field_defaults["until_ms"])
    assert [bool(wait) for wait in waits] == [row.until_ms not in none for row in DECISIONS]
    for before, row, wait in zip(DECISIONS, DECISIONS[1:], waits[1:], strict=False):
        assert wait != "the same" or row.until_ms is before.until_ms
