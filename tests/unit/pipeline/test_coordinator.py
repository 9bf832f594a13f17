"""Which of several requests is applied, and who has a say."""

import math

import pytest
from pipeline_parts import SECOND_MS, source, stage

from proxy.pipeline.controller import FlowRequest, to_record
from proxy.pipeline.coordinator import NOBODY_LEFT, Coordinator
from proxy.pipeline.graph import PipelineGraph, PipelineSettings, StageSettings
from proxy.pipeline.trigger import Direction
from proxy.state import Record

LESS, MORE = Direction.DECREASE, Direction.INCREASE
PERIOD_MS = 4 * SECOND_MS


def graph(*consumers: StageSettings) -> PipelineGraph:
    stages = (stage("up", "a", "b"), *consumers)
    return PipelineGraph(PipelineSettings(name="p", stages=stages, sources=(source("app", "a"),)))


TWO = graph(stage("one", "b"), stage("two", "b"))


class Run:
    """A coordinator, period after period."""

    def __init__(self, pipeline: PipelineGraph = TWO) -> None:
        self.coordinator = Coordinator(pipeline, 0.0)
        self.up = self.coordinator.controllers["up"]
        self.now_ms = 0.0
        self.dead: set[str] = set()

    def period(self, *asked: tuple[str, Direction, float]):
        for name, direction, rate in asked:
            self.coordinator.gather(FlowRequest(name, "up", direction, rate, 1.0, name))
        self.now_ms += PERIOD_MS
        return self.coordinator.tick(self.now_ms, 0.0, lambda name: name not in self.dead)

    @property
    def rate(self) -> float | None:
        return self.up.state.rate


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
    assert len(run.period(*asked)) == 1
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
    run.coordinator.gather(FlowRequest("one", "up", LESS, 400, 1.0, ""))
    assert run.coordinator.tick(PERIOD_MS - 1, 0.0, lambda _: True) == []
    assert run.rate is None
    assert len(run.period()) == 1
    assert run.period() == []
    assert run.rate == pytest.approx(400)


def test_the_rate_goes_up_when_all_that_hold_the_node_ask_for_it():
    run = Run()
    run.period(("one", LESS, 400), ("two", LESS, 300))
    assert run.period(("one", MORE, math.inf)) == []
    run.period(("one", MORE, math.inf), ("two", MORE, 350))
    assert run.rate == pytest.approx(350)  # the smaller step
    run.dead.add("two")
    run.period(("one", MORE, math.inf))
    assert run.rate == pytest.approx(450)


def test_at_the_end_of_control_nobody_holds_the_node():
    run = Run()
    run.period(("one", LESS, 950), ("two", LESS, 960))
    assert run.period(("one", MORE, math.inf), ("two", MORE, math.inf)) == ["up"]
    assert (run.rate, run.up.state.holders) == (None, ())


def test_a_node_that_only_the_dead_hold_is_released_step_by_step():
    run = Run()
    run.period(("one", LESS, 400))
    run.dead.add("one")
    rates = []
    while run.rate is not None:
        assert len(run.period()) == 1
        rates.append(run.rate)
        assert run.up.state.why == NOBODY_LEFT
    assert rates == [*(pytest.approx(rate) for rate in range(500, 1_000, 100)), None]
    assert run.period() == []


def test_who_never_held_the_node_cannot_raise_it():
    run = Run()
    run.period(("one", LESS, 400))
    assert run.period(("two", MORE, math.inf)) == []
    assert run.rate == pytest.approx(400)


def test_the_period_of_a_node_is_the_longest_of_its_consumers():
    run = Run(graph(stage("one", "b"), stage("two", "b", period_ms=2 * PERIOD_MS)))
    assert run.period(("one", LESS, 400)) == []
    assert len(run.period(("one", LESS, 300))) == 1
    assert run.rate == pytest.approx(300)


def test_a_late_tick_leaves_out_the_periods_that_it_missed():
    run = Run()
    run.now_ms = 10 * PERIOD_MS + 1
    run.period(("one", LESS, 400))
    run.now_ms -= 1
    assert run.period() == []
    assert len(run.period(("one", LESS, 400))) == 1


def test_a_changed_pipeline_keeps_what_remains():
    run = Run()
    run.period(("one", LESS, 400), ("two", LESS, 500))
    changed, gone = run.coordinator.update(graph(stage("one", "b")), run.now_ms)
    assert (changed, [each.node.name for each in gone]) == ({"up"}, ["two"])
    assert run.coordinator.controllers["up"] is run.up
    assert run.up.state.holders == ("one",)
    assert run.rate == pytest.approx(400)


def test_a_node_whose_consumers_are_gone_is_released():
    run = Run()
    run.period(("one", LESS, 900))
    run.coordinator.update(graph(), run.now_ms)
    assert run.rate == pytest.approx(900)
    assert len(run.period()) == 1
    assert run.rate is None


def keys_of(coordinator: Coordinator) -> tuple[list[str], list[str]]:
    records, deletes = coordinator.journal.take()
    return [record.key for record in records], deletes


def test_loading_takes_what_is_later_and_writes_what_is_not():
    first, second = Run(), Run()
    first.period(("one", LESS, 400))
    early = to_record("p", "up", first.up.state)
    first.period(("one", LESS, 300))
    late = to_record("p", "up", first.up.state)
    for record in (early, late):
        assert second.coordinator.load([record]) == []
        assert keys_of(second.coordinator) == ([], [])
    assert second.up.state == first.up.state
    for records in ([early], []):
        assert second.coordinator.load(records) == []
        assert keys_of(second.coordinator) == (["flow/p/up"], [])
    assert second.up.state == first.up.state


def test_loading_tells_what_it_refuses():
    run = Run()
    run.period(("one", LESS, 400))
    state = to_record("p", "up", run.up.state)
    gone = Record.of("flow/p/gone", 1)
    damaged = Record(state.key, "{", 1)
    newer = Record(state.key, state.text, 2)
    other = Run().coordinator
    refused = other.load([gone, damaged])
    assert keys_of(other) == ([], ["flow/p/gone", "flow/p/up"])
    assert [text.partition(":")[0] for text in refused] == ["flow/p/gone", "flow/p/up"]
    keys_of(run.coordinator)
    assert len(run.coordinator.load([newer])) == 1
    assert keys_of(run.coordinator) == ([], [])


def test_a_record_of_an_earlier_program_is_taken_up():
    value = {
        "pipeline": "p",
        "node": "up",
        "rate": 400.0,
        "t_delay_ms": 1.5,
        "since_s": 1700000000.25,
        "why": "one asks for less",
        "by": "one",
        "direction": "decrease",
        "holders": ["one"],
        "revision": 3,
    }
    run = Run()
    assert run.coordinator.load([Record.of("flow/p/up", value)]) == []
    state = run.up.state
    assert (state.rate, state.since_s, state.holders, state.revision) == (
        *(400.0, 1700000000.25, ("one",), 3),
    )
    assert keys_of(run.coordinator) == ([], [])
    assert to_record("p", "up", state).value == value
