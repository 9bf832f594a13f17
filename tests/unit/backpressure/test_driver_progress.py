"""What a driver has done, where its reports and what it was told do not say the same."""

import math
from dataclasses import replace

import pytest
from backpressure_parts import BackpressureWorld

from proxy.backpressure.advertised_ends import AdvertisedEnds
from proxy.backpressure.driver_progress import EVENT_JITTER_MS, RETRIES_MS, DriverProgress

KEY = ("t", 0)
HERE, ELSEWHERE = object(), object()
END = 5000
EVENT_MS = 1000.0


def position(
    done: int | None, *, is_resumed: bool = False, event_ms: float = EVENT_MS, **known: float
) -> DriverProgress:
    """Of a run that has reported all below `done`; None: nothing yet."""
    world = BackpressureWorld()
    world.start()
    if done is not None:
        world.batch({0: done})
    known = {"waited_ms": -math.inf, "answered_ms": 0.0, **known}
    return DriverProgress(world.query, AdvertisedEnds(), event_ms, is_resumed=is_resumed, **known)


def test_a_batch_that_took_less_than_was_told_is_reported():
    there = position(100)
    there.advertised.record(KEY, END, 150, HERE, EVENT_MS - EVENT_JITTER_MS)
    assert not there.is_unreported(KEY, HERE)
    assert there.done_by_now(KEY, HERE, is_overdue=True) is None


def test_what_was_told_just_before_an_event_may_be_of_a_later_batch():
    there = position(100)
    there.advertised.record(KEY, END, 150, HERE, EVENT_MS - EVENT_JITTER_MS + 1)
    assert there.is_unreported(KEY, HERE)
    assert there.done_by_now(KEY, HERE, is_overdue=False) is None
    assert there.done_by_now(KEY, HERE, is_overdue=True) == 150
    assert not there.is_refused(KEY, HERE), "it may have been read ahead"
    assert replace(there, waited_ms=EVENT_MS).is_refused(KEY, HERE)


def test_a_batch_that_ends_where_was_told_before_is_the_one_before():
    there = position(100)
    there.advertised.record(KEY, END, 100, HERE, 1.0)
    there.advertised.record(KEY, END, 150, HERE, 2.0)
    assert there.is_unreported(KEY, HERE)


@pytest.mark.parametrize(("done", "is_resumed"), [(100, False), (None, True)])
def test_a_run_whose_place_is_proved_is_not_guessed_at(done, is_resumed):
    there = position(done, is_resumed=is_resumed, event_ms=-math.inf)
    there.advertised.record(KEY, END, 150, ELSEWHERE, 1.0)
    there.advertised.record(KEY, END, 150, HERE, 2.0)
    assert there.done_by_now(KEY, HERE, is_overdue=False) is None
    there.advertised.record(KEY, END, 200, HERE, 3.0)
    assert not there.knows_more([KEY], HERE, RETRIES_MS)


def test_a_new_run_knew_what_was_no_news_to_it():
    there = position(None)
    there.advertised.record(KEY, END, 150, ELSEWHERE, 1.0)
    assert there.done_by_now(KEY, HERE, is_overdue=False) is None
    there.advertised.record(KEY, END, 150, HERE, 2.0)
    assert there.done_by_now(KEY, HERE, is_overdue=False) == 150
    assert not there.knows_more([KEY], HERE, RETRIES_MS)
    there.advertised.record(KEY, END, 200, HERE, 3.0)
    assert not there.knows_more([KEY], HERE, RETRIES_MS - 1)
    assert there.knows_more([KEY], HERE, RETRIES_MS)
    assert not there.knows_more([KEY], ELSEWHERE, RETRIES_MS)
    assert not replace(there, waited_ms=1.0).knows_more([KEY], HERE, RETRIES_MS)
