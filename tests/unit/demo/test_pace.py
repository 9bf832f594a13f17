"""Looks are a second apart, and one that takes too long is followed by the next one at once."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from examples.demo.frame import LOOK_INTERVAL_S, Pace

TICK_S = 1e-6
"""How far the clock goes on whenever it is asked, as a real one does."""


class Time:
    """Time that passes when it is looked at, and while somebody sleeps or works."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def clock_s(self) -> float:
        self.now_s += TICK_S
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)
        self.now_s += duration_s


@given(st.lists(st.floats(0.0, 3.0), max_size=20))
@example([0.1, 1.5, 0.1])
def test_looks_start_a_second_apart_or_at_once(looks_s: list[float]):
    time = Time()
    pace = Pace(time.clock_s, time.sleep)
    started_s = time.now_s
    for look_s in looks_s:
        time.now_s += look_s
        pace.wait()
        assert time.slept[-1] >= 0, "time.sleep refuses less"
        assert time.now_s - started_s == pytest.approx(max(look_s, LOOK_INTERVAL_S), abs=4 * TICK_S)
        started_s = time.now_s
