"""The delay queue against a sorted list, and its timer against one that is moved by hand."""

import gc

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from proxy.quota.delay_queue import (
    MAX_RELEASED,
    SHORTEST_PAUSE_MS,
    DelayedResponse,
    DelayQueue,
)


class Timers:
    """A clock that stands still until it is moved, with the timers set on it."""

    class Handle:
        def __init__(self, timers, at_ms, call):
            self.timers, self.at_ms, self.call = timers, at_ms, call

        def cancel(self):
            self.timers.armed.remove(self)

    def __init__(self):
        self.now_ms = 0.0
        self.armed: list[Timers.Handle] = []
        self.set = 0
        self.late: list[float] = []

    def clock_ms(self):
        return self.now_ms

    def call_at(self, at_ms, call):
        handle = Timers.Handle(self, at_ms, call)
        self.armed.append(handle)
        self.set += 1
        return handle.cancel

    def advance_to(self, now_ms):
        self.now_ms = now_ms
        while due := [handle for handle in self.armed if handle.at_ms <= now_ms]:
            self.armed.remove(due[0])
            due[0].call()

    @property
    def times(self):
        return [handle.at_ms for handle in self.armed]


def make_queue(timers: Timers | None = None) -> DelayQueue:
    timers = timers or Timers()
    return DelayQueue("fetch", timers.clock_ms, timers.call_at, timers.late.append)


class QueueMachine(RuleBasedStateMachine):
    """Adds, cancels and time in any order; the model is a list that is sorted when asked."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.queue = make_queue()
        self.model: list[tuple[float, int]] = []
        self.released: list[int] = []
        self.expected: list[int] = []
        self.arrivals = 0
        self.now_ms = 0.0

    @rule(target=held, delay_ms=st.integers(-5, 20))
    def add(self, delay_ms):
        number = self.arrivals
        self.arrivals += 1
        due_ms = self.now_ms + delay_ms
        self.model.append((due_ms, number))
        return number, self.queue.add(due_ms, lambda: self.released.append(number))

    @rule(count=st.integers(1, 80))
    def add_many_and_cancel_them(self, count):
        for delayed in [self.queue.add(self.now_ms + 1, self.fail) for _ in range(count)]:
            assert delayed.cancel()

    @rule(entry=consumes(held))
    def cancel(self, entry):
        number, delayed = entry
        here = [item for item in self.model if item[1] == number]
        assert delayed.waiting is bool(here)
        assert bool(delayed.cancel()) is bool(here)
        assert not delayed.cancel()
        self.model = [item for item in self.model if item[1] != number]

    @rule(step_ms=st.integers(0, 10))
    def advance(self, step_ms):
        self.now_ms += step_ms
        due = sorted(item for item in self.model if item[0] <= self.now_ms)
        self.model = [item for item in self.model if item[0] > self.now_ms]
        self.expected += [number for _, number in due]
        assert self.queue.release_due(self.now_ms) == len(due)

    @invariant()
    def agrees(self):
        assert self.released == self.expected
        assert len(self.queue) == len(self.model)
        assert self.queue.next_due_ms == min((due for due, _ in self.model), default=None)

    def fail(self):
        raise AssertionError("a cancelled entry was released")


TestQueueEqualsSortedList = QueueMachine.TestCase


def test_entries_due_together_leave_in_order_of_arrival():
    queue = make_queue()
    order: list[str] = []
    for name, due_ms in (("b", 5), ("c", 7), ("a", 3), ("b2", 5)):
        queue.add(due_ms, lambda name=name: order.append(name))
    assert queue.release_due(6) == 3
    assert order == ["a", "b", "b2"]
    assert queue.next_due_ms == 7


def test_lateness_is_told_in_seconds():
    timers = Timers()
    queue = make_queue(timers)
    queue.add(1000, lambda: None)
    queue.add(2500, lambda: None)
    queue.release_due(3000)
    assert timers.late == [2.0, 0.5]


def test_a_failing_callback_does_not_keep_the_others_and_all_failures_are_raised_at_the_end():
    queue = make_queue()
    order: list[int] = []
    queue.add(1, lambda: 1 / 0)
    queue.add(2, lambda: order.append(2))
    queue.add(3, lambda: {}[0])
    with pytest.raises(ExceptionGroup) as caught:
        queue.release_due(3)
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError, KeyError]
    assert order == [2]


def test_a_callback_may_cancel_another_entry_and_add_one():
    queue = make_queue()
    order: list[str] = []

    def first():
        order.append("first")
        second.cancel()
        assert len(queue) == 0
        queue.add(0, lambda: order.append("added"))

    queue.add(1, first)
    second = queue.add(2, lambda: order.append("second"))
    assert queue.release_due(2) == 1
    assert order == ["first"]
    assert len(queue) == 1
    assert queue.release_due(2) == 1
    assert order == ["first", "added"]


def alive(kind):
    gc.collect()
    return sum(isinstance(each, kind) for each in gc.get_objects())


def test_cancelled_entries_are_not_kept():
    queue = make_queue()
    others = alive(DelayedResponse)
    entries = [queue.add(i, lambda: None) for i in range(1000)]
    while len(entries) > 1:
        entries.pop().cancel()
    assert len(queue) == 1
    assert alive(DelayedResponse) - others < 128
    assert queue.next_due_ms == 0


def test_the_reaper_keeps_one_timer_for_the_earliest_entry():
    timers = Timers()
    reaper = make_queue(timers)
    order: list[float] = []
    for due_ms in (50.0, 70.0, 30.0, 30.0, 60.0):
        reaper.add(due_ms, lambda due_ms=due_ms: order.append(due_ms))
        assert len(timers.armed) == 1
    assert timers.times == [30.0]
    assert timers.set == 2
    timers.advance_to(29.0)
    assert order == []
    timers.advance_to(30.0)
    assert order == [30.0, 30.0]
    assert timers.times == [50.0]
    timers.advance_to(65.0)
    assert order == [30.0, 30.0, 50.0, 60.0]
    timers.advance_to(70.0)
    assert timers.times == []
    assert timers.late == pytest.approx([0.0, 0.0, 0.015, 0.005, 0.0])


def test_of_many_that_are_due_a_few_go_in_each_round():
    timers = Timers()
    reaper = make_queue(timers)
    order: list[int] = []
    for number in range(2 * MAX_RELEASED + 1):
        reaper.add(10.0, lambda number=number: order.append(number))
    timers.now_ms = 10.0
    for released in (MAX_RELEASED, 2 * MAX_RELEASED, 2 * MAX_RELEASED + 1):
        (at_ms,) = timers.times
        assert at_ms <= timers.now_ms, "without a pause between them"
        timers.armed.pop().call()
        assert order == list(range(released))
    assert timers.times == []


def test_the_reaper_sleeps_on_when_its_timer_finds_only_cancelled_entries():
    timers = Timers()
    reaper = make_queue(timers)
    order: list[str] = []
    dead = reaper.add(10.0, lambda: order.append("dead"))
    reaper.add(90.0, lambda: order.append("alive"))
    assert dead.cancel()
    timers.advance_to(10.0)
    assert order == []
    assert timers.times == [90.0]


def test_a_timer_that_fires_early_is_set_again():
    timers = Timers()
    reaper = make_queue(timers)
    order: list[int] = []
    reaper.add(10.0, lambda: order.append(1))
    early = timers.armed.pop()
    timers.now_ms = 9.9
    early.call()
    assert order == []
    assert timers.times == [10.0]


def test_what_a_callback_adds_gets_its_own_timer():
    timers = Timers()
    reaper = make_queue(timers)
    order: list[float] = []
    reaper.add(10.0, lambda: reaper.add(10.0, lambda: order.append(timers.now_ms)))
    timers.advance_to(10.0)
    assert order == [10.0]
    assert timers.armed == []


def test_what_comes_due_right_after_a_release_goes_out_together():
    timers = Timers()
    reaper = make_queue(timers)
    order: list[float] = []
    for due_ms in (10.0, 10.2, 10.4, 11.5):
        reaper.add(due_ms, lambda: order.append(timers.now_ms))
    timers.advance_to(10.0)
    assert timers.times == [10.0 + SHORTEST_PAUSE_MS]
    timers.advance_to(11.0)
    assert order == [10.0, 11.0, 11.0]
    assert timers.times == [12.0]


def test_a_turn_that_a_release_gives_waits_for_no_pause():
    timers = Timers()
    reaper = make_queue(timers)
    order: list[float] = []

    def admitted() -> None:
        """Give the next turn, as a gate does, some time after this release began."""
        timers.now_ms += 0.1
        order.append(timers.now_ms)
        if len(order) < 3:
            reaper.add(timers.now_ms, admitted)

    reaper.add(10.0, admitted)
    timers.now_ms = 10.0
    while timers.armed:
        assert timers.times[0] <= timers.now_ms
        timers.armed.pop().call()
    assert order == pytest.approx([10.1, 10.2, 10.3])


def test_a_failing_callback_does_not_stop_the_reaper():
    timers = Timers()
    reaper = make_queue(timers)
    order: list[int] = []
    reaper.add(10.0, lambda: 1 / 0)
    reaper.add(20.0, lambda: order.append(20))
    with pytest.raises(ExceptionGroup):
        timers.advance_to(10.0)
    timers.advance_to(20.0)
    assert order == [20]


def test_release_all_lets_everything_go_at_once_in_order_and_counts_nothing_as_late():
    timers = Timers()
    reaper = make_queue(timers)
    order: list[float] = []
    for due_ms in (50.0, 20.0):
        reaper.add(due_ms, lambda due_ms=due_ms: order.append(due_ms))
    reaper.release_all()
    assert order == [20.0, 50.0]
    assert timers.armed == []
    assert timers.late == []
