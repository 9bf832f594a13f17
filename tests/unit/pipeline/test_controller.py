"""The arithmetic of a request, and the record of a node."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.pipeline.controller import (
    FLOW_RECORDS,
    IDLE_SHARE,
    Controller,
    FlowRequest,
    NodeState,
    delay_ms,
    from_record,
    slowed,
    to_record,
)
from proxy.pipeline.graph import MIN_RATE, Node
from proxy.pipeline.trigger import Direction
from proxy.state import Record

NODE = Node("up", is_source=False, normal_rate=1_000.0, step=50.0)
LESS, MORE = Direction.DECREASE, Direction.INCREASE

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
    assert slowed(up, delay_ms(up, down, adjust)) == pytest.approx(rate)


def ask(controller: Controller, direction: Direction, rate: float, stage: str = "down") -> bool:
    request = FlowRequest(stage, "up", direction, rate, 1.0, "because")
    asking = frozenset({stage}) if direction is LESS else frozenset()
    return controller.apply(controller.weigh(request), asking, 7.0)


def test_a_request_a_second_one_and_the_way_back():
    controller = Controller(NODE)
    assert ask(controller, LESS, 400)
    assert controller.state == NodeState(400, 1.5, 7.0, "because", "down", LESS, ("down",), 1)
    assert ask(controller, LESS, 400)
    assert controller.state.rate == pytest.approx(285.714, abs=0.001)
    assert controller.state.t_delay_ms == pytest.approx(2.5)
    delays = []
    while controller.state.rate is not None:
        assert ask(controller, MORE, math.inf)
        delays.append(controller.state.t_delay_ms)
    assert len(delays) == 15  # 714.3 records/s in steps of 50
    assert delays == sorted(delays, reverse=True)
    assert delays[-1] == 0
    assert controller.state.holders == ()
    assert not ask(controller, MORE, math.inf)


def test_after_an_increase_a_decrease_is_the_first_one_again():
    controller = Controller(NODE)
    for direction, rate in ((LESS, 400), (MORE, math.inf), (LESS, 400)):
        ask(controller, direction, rate)
    assert controller.state.rate == pytest.approx(400)


def test_the_adjustment_is_for_the_stage_that_asks_again():
    controller = Controller(NODE)
    ask(controller, LESS, 400, "one")
    ask(controller, LESS, 300, "two")
    assert controller.state.rate == pytest.approx(300)
    assert controller.state.holders == ("one", "two")


def test_a_third_request_still_slows_down():
    controller = Controller(NODE)
    rates = []
    for _ in range(4):
        ask(controller, LESS, 400)
        rates.append(controller.state.rate)
    assert rates == pytest.approx([400, 1_000 / 3.5, 1_000 / 4.5, 1_000 / 5.5])


def test_a_standstill_is_held_to_the_minimum_and_comes_back_from_there():
    controller = Controller(NODE)
    assert ask(controller, LESS, 0)
    assert controller.state.rate == MIN_RATE
    assert not ask(controller, LESS, 0)
    assert ask(controller, MORE, math.inf)
    assert controller.state.rate == MIN_RATE + NODE.step


def test_an_increase_stops_at_what_the_stage_can_take():
    controller = Controller(NODE)
    ask(controller, LESS, 400)
    assert ask(controller, MORE, 410)
    assert controller.state.rate == pytest.approx(410)
    assert not ask(controller, MORE, 410)
    assert not ask(controller, MORE, 300)


MEASURED = {
    "unknown": (None, 1_000),
    "busy": (700, 700),
    "above normal": (1_500, 1_500),
    "idle": (0, 1_000 * IDLE_SHARE),
}


@pytest.mark.parametrize(("measured", "rate"), MEASURED.values(), ids=MEASURED.keys())
def test_the_rate_in_force_of_a_node_that_is_not_held(measured, rate):
    controller = Controller(NODE)
    controller.measured_rate = measured
    assert controller.rate == rate


def test_a_node_faster_than_normal_is_held_to_normal_at_most():
    controller = Controller(NODE)
    controller.measured_rate = 1_500
    assert ask(controller, LESS, 1_200)
    assert controller.state.rate == NODE.normal_rate


def test_changed_settings_bound_the_rate_and_leave_out_stages_that_are_gone():
    controller = Controller(NODE)
    ask(controller, LESS, 400)
    assert not controller.adjust(NODE, ("down",))
    assert controller.adjust(Node("up", False, 300.0, 50.0), ())
    assert (controller.state.rate, controller.state.holders) == (300, ())
    assert controller.state.t_delay_ms == 0
    ask(controller, MORE, math.inf)
    assert controller.state.rate is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(Direction),
            st.floats(0, 1e18) | st.just(math.inf),
            st.sampled_from(["one", "two"]),
        ),
        max_size=30,
    ),
    st.none() | st.floats(0, 1e18),
)
def test_the_rate_is_always_from_the_minimum_to_normal(requests, measured):
    controller = Controller(NODE)
    controller.measured_rate = measured
    for direction, rate, stage in requests:
        before = controller.rate
        ask(controller, direction, rate, stage)
        state = controller.state
        if state.rate is None:
            assert (state.t_delay_ms, state.holders) == (0, ())
            continue
        assert MIN_RATE <= state.rate <= NODE.normal_rate
        assert state.t_delay_ms >= 0
        if direction is LESS:
            assert state.rate <= max(before, MIN_RATE) * (1 + 1e-9)
        assert from_record(to_record("p", "up", state), "p", NODE) == state


def held() -> NodeState:
    controller = Controller(NODE)
    ask(controller, LESS, 400)
    return controller.state


def test_a_record_brings_the_state_back():
    record = to_record("p/1", "up", held())
    assert record.key == "flow/p%2F1/up"
    assert from_record(record, "p/1", NODE) == held()


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
    good = to_record("p", "up", held())
    record = Record(FLOW_RECORDS.key("p", "up"), json.dumps(damage(good.value)), 1)
    with pytest.raises(ValueError, match=r"."):
        from_record(record, "p", NODE)


def test_a_rate_above_normal_is_read_as_normal():
    slower = Node("up", False, 300.0, 50.0)
    state = from_record(to_record("p", "up", held()), "p", slower)
    assert (state.rate, state.t_delay_ms) == (300, 0)
