"""The arithmetic of requests, which of several is applied and who has a say; records of nodes."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_parts import source

from proxy.admin import pipeline_documents
from proxy.admin.document_models import RowContext
from proxy.pipeline.graph import MIN_RATE
from proxy.pipeline.nodes import (
    IDLE_SHARE,
    NOBODY_LEFT,
    NodeController,
    NodeHold,
    RateChangeDirection,
    delay_ms,
    rate_with_added_delay,
)
from proxy.state import Record

NODE = source("up", "a", step=50.0)
SLOWER = source("up", "a", normal_rate=300.0, step=50.0)
LESS, MORE = RateChangeDirection.DECREASE, RateChangeDirection.INCREASE

DELAYS = {
    "first request": (1_000, 400, 0, 1.5, 400),
    "asked again, against the first rate": (1_000, 400, 1, 2.5, 1_000 / 3.5),
    "asked again, against the rate in force": (400, 400, 1, 1.0, 1_000 / 3.5),
    "the stage is the faster one": (400, 1_000, 0, 0, 400),
    "the stage is the faster one, asked again": (400, 1_000, 1, 1.0, 1_000 / 3.5),
    "the stage stands still": (1_000, 0, 0, math.inf, 0),
    "slow ones": (100, 40, 1, 16, 1_000 / 26),
}


@pytest.mark.parametrize(("up", "down", "adjust", "delay", "rate"), DELAYS.values(), ids=DELAYS)
def test_worked_figures(up, down, adjust, delay, rate):
    assert delay_ms(up, down, adjust) == pytest.approx(delay)
    assert rate_with_added_delay(up, delay_ms(up, down, adjust)) == pytest.approx(rate)


PERIOD_MS = 4_000.0


class Run:
    """A controller, period after period."""

    def __init__(self, period_ms: float = PERIOD_MS) -> None:
        self.up = NodeController(NODE, "p/1")
        self.up.follow(NODE, (), period_ms, 0.0)
        self.now_ms = 0.0
        self.dead: set[str] = set()

    def ask(self, name: str, direction: RateChangeDirection, rate: float) -> None:
        self.up.ask(name, direction, rate, 1.0, name)

    def period(self, *asked: tuple[str, RateChangeDirection, float]) -> bool:
        for each in asked:
            self.ask(*each)
        self.now_ms += PERIOD_MS
        return self.up.tick(self.now_ms, 7.0, lambda name: name not in self.dead)

    @property
    def rate(self) -> float | None:
        return self.up.state.rate

    @property
    def delay_ms(self) -> float:
        return pipeline_documents.NODE.document(self.up, RowContext(0.0))["t_delay_ms"]


def test_a_request_a_second_one_and_the_way_back():
    run = Run()
    assert run.period(("down", LESS, 400))
    assert run.up.state == NodeHold(400, 7.0, "down", "down", LESS, ("down",), 1)
    assert run.period(("down", LESS, 400))
    assert run.rate == pytest.approx(285.714, abs=0.001)
    assert run.delay_ms == pytest.approx(2.5)
    delays = []
    while run.rate is not None:
        assert run.period(("down", MORE, math.inf))
        delays.append(run.delay_ms)
    assert len(delays) == 15  # 714.3 records/s in steps of 50
    assert delays == sorted(delays, reverse=True)
    assert delays[-1] == 0
    assert run.up.state.holders == ()
    assert not run.period(("down", MORE, math.inf))


def test_after_an_increase_a_decrease_is_the_first_one_again():
    run = Run()
    for direction, rate in ((LESS, 400), (MORE, math.inf), (LESS, 400)):
        run.period(("down", direction, rate))
    assert run.rate == pytest.approx(400)


def test_the_adjustment_is_for_the_stage_that_asks_again():
    run = Run()
    run.period(("one", LESS, 400))
    run.period(("two", LESS, 300))
    assert run.rate == pytest.approx(300)
    assert run.up.state.holders == ("one", "two")


def test_a_third_request_still_slows_down():
    run, rates = Run(), []
    for _ in range(4):
        run.period(("down", LESS, 400))
        rates.append(run.rate)
    assert rates == pytest.approx([400, 1_000 / 3.5, 1_000 / 4.5, 1_000 / 5.5])


def test_a_standstill_is_held_to_the_minimum_and_comes_back_from_there():
    run = Run()
    assert run.period(("down", LESS, 0))
    assert run.rate == MIN_RATE
    assert not run.period(("down", LESS, 0))
    assert run.period(("down", MORE, math.inf))
    assert run.rate == MIN_RATE + NODE.step


def test_an_increase_stops_at_what_the_stage_can_take():
    run = Run()
    run.period(("down", LESS, 400))
    assert run.period(("down", MORE, 410))
    assert run.rate == pytest.approx(410)
    assert not run.period(("down", MORE, 410))
    assert not run.period(("down", MORE, 300))


REQUESTS = {
    "one": ([("one", LESS, 400)], 400),
    "the larger change": ([("one", LESS, 400), ("two", LESS, 300)], 300),
    "in any order": ([("one", LESS, 300), ("two", LESS, 400)], 300),
    "the larger one of a stage": ([("one", LESS, 300), ("one", LESS, 400)], 300),
    "less beats more": ([("one", MORE, math.inf), ("two", LESS, 400)], 400),
    "less beats more of one stage": ([("one", LESS, 400), ("one", MORE, math.inf)], 400),
    "less that keeps the rate beats more": ([("one", MORE, math.inf), ("two", LESS, 2_000)], 1_000),
}


@pytest.mark.parametrize(("asked", "rate"), REQUESTS.values(), ids=REQUESTS.keys())
def test_one_request_is_applied_in_a_period(asked, rate):
    run = Run()
    assert run.period(*asked)
    assert run.rate == pytest.approx(rate)
    assert run.up.state.revision == 1


def test_a_stage_whose_request_was_dropped_holds_the_node_too_and_is_asked_again():
    run = Run()
    run.period(("one", LESS, 400), ("two", LESS, 300))
    assert run.up.state.holders == ("one", "two")
    run.period(("one", LESS, 300))
    assert run.rate == pytest.approx(1_000 / (1_000 / 300 + 1))


def test_a_request_is_applied_at_the_end_of_the_period_and_not_twice():
    run = Run()
    run.ask("one", LESS, 400)
    assert not run.up.tick(PERIOD_MS - 1, 0.0, lambda _: True)
    assert run.rate is None
    assert run.period()
    assert not run.period()
    assert run.rate == pytest.approx(400)


def test_the_rate_goes_up_when_all_that_hold_the_node_ask_for_it():
    run = Run()
    run.period(("one", LESS, 400), ("two", LESS, 300))
    assert not run.period(("one", MORE, math.inf))
    run.period(("one", MORE, math.inf), ("two", MORE, 350))
    assert run.rate == pytest.approx(350)  # the smaller step
    run.dead.add("two")
    run.period(("one", MORE, math.inf))
    assert run.rate == pytest.approx(400)


def test_at_the_end_of_control_nobody_holds_the_node():
    run = Run()
    run.period(("one", LESS, 950), ("two", LESS, 960))
    assert run.period(("one", MORE, math.inf), ("two", MORE, math.inf))
    assert (run.rate, run.up.state.holders) == (None, ())


def test_a_node_that_only_the_dead_hold_is_released_step_by_step():
    run = Run()
    run.period(("one", LESS, 400))
    run.dead.add("one")
    rates = []
    while run.rate is not None:
        assert run.period()
        rates.append(run.rate)
        assert run.up.state.why == NOBODY_LEFT
    assert rates == [*(pytest.approx(rate) for rate in range(450, 1_000, 50)), None]
    assert not run.period()


def test_who_never_held_the_node_cannot_raise_it():
    run = Run()
    run.period(("one", LESS, 400))
    assert not run.period(("two", MORE, math.inf))
    assert run.rate == pytest.approx(400)


def test_a_late_tick_leaves_out_the_periods_that_it_missed():
    run = Run()
    run.now_ms = 10 * PERIOD_MS + 1
    run.period(("one", LESS, 400))
    run.now_ms -= 1
    assert not run.period()
    assert run.period(("one", LESS, 400))


MEASURED = {
    "unknown": (None, 1_000),
    "busy": (700, 700),
    "above normal": (1_500, 1_500),
    "idle": (0, 1_000 * IDLE_SHARE),
}


@pytest.mark.parametrize(("measured", "rate"), MEASURED.values(), ids=MEASURED.keys())
def test_the_rate_in_force_of_a_node_that_is_not_held(measured, rate):
    controller = NodeController(NODE)
    controller.measured_rate = measured
    assert controller.rate == rate


def test_a_node_faster_than_normal_is_held_to_normal_at_most():
    run = Run()
    run.up.measured_rate = 1_500
    assert run.period(("down", LESS, 1_200))
    assert run.rate == NODE.normal_rate


def test_changed_settings_bound_the_rate_and_leave_out_stages_that_are_gone():
    run = Run()
    run.period(("down", LESS, 400))
    assert not run.up.follow(NODE, ("down",), PERIOD_MS, run.now_ms)
    assert run.up.follow(SLOWER, (), PERIOD_MS, run.now_ms)
    assert (run.rate, run.up.state.holders) == (300, ())
    assert run.delay_ms == 0
    run.period(("down", MORE, math.inf))
    assert run.rate is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(RateChangeDirection),
            st.floats(0, 1e18) | st.just(math.inf),
            st.sampled_from(["one", "two"]),
        ),
        max_size=30,
    ),
    st.none() | st.floats(0, 1e18),
)
def test_the_rate_is_always_from_the_minimum_to_normal(requests, measured):
    run = Run()
    run.up.measured_rate = measured
    for direction, rate, stage in requests:
        before = run.up.rate
        run.period((stage, direction, rate))
        state = run.up.state
        if state.rate is None:
            assert (run.delay_ms, state.holders) == (0, ())
            continue
        assert MIN_RATE <= state.rate <= NODE.normal_rate
        assert run.delay_ms >= 0
        if direction is LESS:
            assert state.rate <= max(before, MIN_RATE) * (1 + 1e-9)
        assert run.up.read(run.up.record()) == state


def held() -> NodeController:
    run = Run()
    run.period(("down", LESS, 400))
    return run.up


def test_a_record_brings_the_state_back():
    record = held().record()
    assert record.key == held().key() == "flow/p%2F1/up"
    assert NodeController(NODE, "p/1").read(record) == held().state


DAMAGED = {
    "no mapping": lambda value: [value],
    "other node": lambda value: value | {"node": "x"},
    "other pipeline": lambda value: value | {"pipeline": "x"},
    "no rate": lambda value: value | {"rate": None},
    "rate true": lambda value: value | {"rate": True},
    "rate of 0": lambda value: value | {"rate": 0},
    "rate beyond numbers": lambda value: value | {"rate": 10**400},
    "time NaN": lambda value: value | {"since_s": math.nan},
    "no direction": lambda value: value | {"direction": "sideways"},
    "no reason": lambda value: value | {"why": 3},
    "holders": lambda value: value | {"holders": [1]},
    "no revision": lambda value: value | {"revision": 0},
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_record_is_refused(damage):
    good = held().record()
    record = Record(good.key, json.dumps(damage(good.value)), 1)
    with pytest.raises(ValueError, match=r"."):
        held().read(record)


def test_a_rate_above_normal_is_read_as_normal():
    assert NodeController(SLOWER, "p/1").read(held().record()).rate == 300
