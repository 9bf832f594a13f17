"""Frames are shown soon, but never for long at a time, nor kept without a bound."""

import pytest

from proxy.relay.intercept_queue import (
    LOOK_EVERY_MS,
    MOST_MS,
    MOST_UNSHOWN_BYTES,
    SHOW_AFTER_MS,
    InterceptQueue,
)


class World:
    """A loop with one timer at most, and connections that take a while to be shown."""

    def __init__(self) -> None:
        self.now_ms, self.shown, self.timer = 0.0, [], None
        self.unshown = InterceptQueue(self.call_later, lambda: self.now_ms)

    def call_later(self, delay_s, callback) -> None:
        assert self.timer is None
        self.timer = self.now_ms + delay_s * 1000, callback

    def add(self, name, took_ms=0.0, size=1) -> None:
        def show() -> None:
            self.now_ms += took_ms
            self.shown.append(name)
            self.unshown.cells[0] -= size

        self.unshown.cells[0] += size
        self.unshown.add(self.now_ms, show)

    def tick(self) -> None:
        """Go on to when the timer is due, and call it."""
        (at_ms, callback), self.timer = self.timer, None
        self.now_ms = max(self.now_ms, at_ms)
        callback()


def test_each_is_shown_after_a_while_in_order():
    world = World()
    world.add("a")
    world.now_ms = SHOW_AFTER_MS / 2
    world.add("b")
    while not world.shown:
        world.tick()
    assert world.shown == ["a"]
    assert SHOW_AFTER_MS <= world.now_ms <= SHOW_AFTER_MS + LOOK_EVERY_MS
    while world.timer:
        world.tick()
    assert world.shown == ["a", "b"]


def test_they_are_shown_for_a_short_time_in_each_round():
    world = World()
    for name in range(10):
        world.add(name, took_ms=MOST_MS)
    while not world.shown:
        world.tick()
    assert len(world.shown) == 2
    world.tick()
    assert len(world.shown) == 4
    while world.timer:
        world.tick()
    assert world.shown == list(range(10))


def test_what_is_too_much_waits_no_longer():
    world = World()
    for name in range(10):
        world.add(name, took_ms=MOST_MS, size=MOST_UNSHOWN_BYTES // 4)
    world.tick()
    assert world.shown == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("more", [[], [3]])
def test_all_that_wait_are_shown_step_by_step_on_demand(more):
    world = World()
    for name in range(3):
        world.add(name)
    steps = world.unshown.showing()
    for count in range(3):
        assert len(world.shown) == count
        next(steps)
    for name in more:
        world.add(name)
    assert list(steps) == []
    assert world.shown == [0, 1, 2]
    while world.timer:
        world.tick()
    assert world.shown == [0, 1, 2, *more]
