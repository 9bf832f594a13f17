"""One pipeline as its user sees it: readings in, rates, records and documents out."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parts.lone_pipeline import lone_pipeline
from pipeline_parts import SECOND_MS, source, stage

from proxy.admin.document_models import RowContext
from proxy.admin.pipeline_documents import PIPELINE_ROW
from proxy.pipeline.graph import MIN_RATE, PipelineGraph, PipelineSettings
from proxy.pipeline.nodes import SILENT_MS, RateChangeDirection
from proxy.pipeline.running_pipeline import RunningPipeline
from proxy.state import Document, MemoryStore, Record

START_S = 1_700_000_000.0

CHAIN = PipelineSettings(
    name="p",
    stages=(stage("one", "a", "b"), stage("two", "b", band=(100.0, 500.0))),
    sources=(source("app", "a"),),
    hold_producers=True,
)


def tick(flow: RunningPipeline, now_ms: float) -> dict[str, float | None]:
    """Let time pass; return the rates that are different then."""
    before = {name: node.state.rate for name, node in flow.nodes.items()}
    flow.tick(now_ms)
    rates = {name: node.state.rate for name, node in flow.nodes.items()}
    return {name: rate for name, rate in rates.items() if rate != before[name]}


def arrived(flow: RunningPipeline, totals: dict[str, float], now_ms: float) -> None:
    for each in flow.sources.values():
        each.arrived(totals, now_ms)


def document_of(flow: RunningPipeline, now_ms: float) -> Document:
    return PIPELINE_ROW.document(flow, RowContext(0.0, now_ms))


class Run:
    """A pipeline that is fed rates second by second."""

    def __init__(self, pipeline: PipelineSettings = CHAIN) -> None:
        self.flow = lone_pipeline(pipeline, 0.0, START_S)
        self.now_ms = 0.0
        self.totals: dict[str, float] = {}
        self.processing = {"one": 2_000.0, "two": 400.0}
        self.feed({})

    def feed(self, rates: dict[str, float]) -> None:
        for name in ("app", *(item.name for item in CHAIN.stages)):
            total = self.totals[name] = self.totals.get(name, 0.0) + rates.get(name, 0.0)
            if name == "app":
                arrived(self.flow, {"a": total}, self.now_ms)
            elif name in self.flow.stages:
                self.flow.stages[name].sample(total, self.now_ms)

    def period(self, lag: dict[str, int] | None = None, **rates: float):
        for name, rate in self.processing.items():
            self.flow.stages[name].processed(rate, self.now_ms)
        changes = {}
        for _ in range(4):
            self.now_ms += SECOND_MS
            self.feed(rates)
            for name, records in (lag or {}).items():
                self.flow.stages[name].lag(records)
            changes |= tick(self.flow, self.now_ms)
        return changes


def test_a_stage_that_is_sent_too_much_holds_back_the_one_before_it():
    run = Run()
    assert run.period(app=1_000, one=1_000, two=1_000) == {"one": pytest.approx(400)}
    # Now `one` is held itself: its band is 200 to 480, and it takes no more than 400.
    assert run.period(app=1_000, one=1_000, two=400) == {"app": pytest.approx(400)}
    assert run.period(app=400, one=400, two=400) == {}


def test_the_reason_has_the_figures():
    run = Run()
    run.period(app=1_000, one=1_000, two=1_000)
    assert run.flow.nodes["one"].state.why == (
        "two asks for less: 4 of 4 samples are above its band, 1,000.0/s on average; "
        "it processes 400.0/s"
    )


def test_asked_again_and_back_to_the_end_of_control():
    run = Run()
    run.period(app=1_000, one=1_000, two=1_000)
    assert run.period(app=300, one=300, two=1_000) == {"one": pytest.approx(1_000 / 3.5)}
    run.processing["two"] = 2_000.0
    rates = [run.period(app=300, one=300, two=50).get("one") for _ in range(8)]
    assert rates == [*(pytest.approx(1_000 / 3.5 + 100 * n) for n in range(1, 8)), None]
    assert run.period(app=300, one=300, two=50) == {}


def test_a_stage_out_of_its_band_for_fewer_samples_than_the_ratio_asks_nothing():
    assert Run().period(app=1_000, one=1_000, two=500) == {}


def test_lag_above_its_bound_asks_sources_within_the_band():
    run = Run(replace(CHAIN, max_lag=2_000))
    run.processing["one"] = 400.0
    assert run.period({"one": 2_001}, app=700, one=700) == {"app": pytest.approx(400)}
    assert run.period({"one": 1_900}, app=600, one=600) == {}
    assert run.period({"one": 900}, app=600, one=600) == {"app": pytest.approx(500)}


def test_lag_above_its_bound_asks_nothing_of_stages():
    """They plan no more than there is room for."""
    run = Run(replace(CHAIN, max_lag=2_000))
    assert run.period({"two": 2_001}, app=450, one=450, two=450) == {}
    assert document_of(run.flow, run.now_ms)["stages"][1]["last_request"] is None


def test_without_a_batch_report_the_upper_edge_of_the_band_is_what_a_stage_processes():
    run = Run()
    run.processing = {}
    run.flow.stages["two"].seen(0.0)
    assert run.period(app=1_000, one=1_000, two=1_000) == {"one": pytest.approx(500)}


def test_a_stage_that_was_never_seen_asks_nothing():
    run = Run()
    run.processing = {}
    assert run.period(app=1_000, one=1_000, two=1_000) == {}


def test_sources_are_left_alone_unless_producers_are_held():
    run = Run(replace(CHAIN, hold_producers=False))
    run.period(app=1_000, one=1_000, two=1_000)
    assert run.period(app=1_000, one=1_000, two=400) == {}


def test_nodes_that_feed_one_stage_share_what_it_processes():
    stages = (stage("one", "a", "b"), stage("two", "b z", band=(100.0, 800.0)))
    sources = (source("app", "a"), source("other", "z"))
    run = Run(replace(CHAIN, stages=stages, sources=sources))
    total = 0.0
    run.processing["two"] = 500.0
    for _ in range(4):
        run.flow.stages["two"].processed(500.0, run.now_ms)
        run.now_ms += SECOND_MS
        run.feed({"app": 600, "one": 600, "two": 1_000})
        arrived(run.flow, {"z": total}, run.now_ms)
        total += 400
        changes = tick(run.flow, run.now_ms)
    assert changes == {
        "one": pytest.approx(250),
        "other": pytest.approx(250),
    }


def test_what_a_stage_writes_is_converted_to_what_it_reads():
    run = Run()
    run.flow.stages["one"].converted(1_000, {"b": 2_000})
    assert run.period(app=1_000, one=1_000, two=2_000) == {"one": pytest.approx(200)}


@pytest.mark.parametrize("how", ["silent", "ended"])
def test_what_a_dead_stage_holds_is_released_step_by_step(how):
    run = Run()
    run.period(app=1_000, one=1_000, two=1_000)
    del run.processing["two"]
    if how == "ended":
        run.flow.stages["two"].ended()
    else:
        last_ms = run.now_ms - 4 * SECOND_MS
        while run.now_ms + 4 * SECOND_MS <= last_ms + SILENT_MS:
            assert "one" not in run.period(app=400, one=400, two=400)
    rates = [run.period(app=400, one=400, two=1_000)["one"] for _ in range(6)]
    assert rates == [*(pytest.approx(rate) for rate in range(500, 1_000, 100)), None]
    assert "one" not in run.period(app=1_000, one=1_000, two=1_000)
    run.processing["two"] = 400.0
    assert run.period(app=400, one=400, two=1_000)["one"] == pytest.approx(400)


def test_a_batch_without_rows_says_nothing_about_the_speed():
    run = Run()
    run.processing = {"two": 0.0}
    run.flow.stages["two"].processed(250.0, 0.0)
    assert run.period(app=1_000, one=1_000, two=1_000) == {"one": pytest.approx(250)}


def rates_of(flow: RunningPipeline) -> dict[str, float | None]:
    rates = {name: node.state.rate for name, node in flow.nodes.items()}
    return {name: rate for name, rate in rates.items() if rate is not None}


def write(flow: RunningPipeline, store: MemoryStore) -> None:
    records, deletes = flow.unwritten.take()
    store.put_many(records, delete=deletes)


def test_after_a_restart_the_same_nodes_are_held():
    run, store = Run(), MemoryStore()
    run.period(app=1_000, one=1_000, two=1_000)
    write(run.flow, store)
    assert run.flow.unwritten.take() == ([], [])
    again = Run()
    assert again.flow.load(store.items(again.flow.prefix), 0.0) == []
    assert rates_of(again.flow) == {"one": 400.0}
    assert again.period(app=300, one=300, two=1_000) == {"one": pytest.approx(1_000 / 3.5)}
    for _ in range(8):
        again.period(app=300, one=300, two=50)
    write(again.flow, store)
    assert store.items("flow/") == []


def test_a_stage_that_does_not_come_back_after_a_restart_holds_nothing_for_ever():
    run, store = Run(), MemoryStore()
    run.period(app=1_000, one=1_000, two=1_000)
    write(run.flow, store)
    again = Run()
    again.processing = {}
    again.flow.load(store.items(again.flow.prefix), 0.0)
    while again.now_ms + 4 * SECOND_MS <= SILENT_MS:
        assert again.period() == {}
    for _ in range(6):
        changes = again.period()
    assert changes == {"one": None}


def test_state_that_is_read_again_keeps_what_is_in_force():
    run, store = Run(), MemoryStore()
    run.period(app=1_000, one=1_000, two=1_000)
    write(run.flow, store)
    run.flow.load(store.items("flow/"), run.now_ms)
    assert run.flow.unwritten.take() == ([], [])
    run.flow.load([], run.now_ms)  # somebody removed it
    assert [record.key for record in run.flow.unwritten.take()[0]] == ["flow/p/one"]


def test_reading_again_does_not_interrupt_the_way_back():
    run, store = Run(), MemoryStore()
    run.period(app=1_000, one=1_000, two=1_000)
    run.period(app=300, one=300, two=50)
    write(run.flow, store)
    run.flow.load(store.items("flow/"), run.now_ms)
    assert run.period(app=300, one=300, two=300) == {"one": pytest.approx(600)}


def test_records_of_what_is_gone_are_told_and_deleted():
    run = Run()
    records = [Record.of("flow/p/gone", 1), Record.of("flow/p/one", 1)]
    refused = run.flow.load(records, 0.0)
    assert len(refused) == 2
    assert run.flow.unwritten.take() == ([], ["flow/p/gone", "flow/p/one"])
    assert [event["reason"] for event in document_of(run.flow, 0.0)["events"]] == refused


def test_the_period_of_a_node_is_the_longest_of_its_consumers():
    slow = stage("three", "b", period_ms=8 * SECOND_MS)
    run = Run(replace(CHAIN, stages=(*CHAIN.stages, slow)))
    assert run.period(app=1_000, one=1_000, two=1_000) == {}
    assert run.period(app=1_000, one=1_000, two=1_000) == {"one": pytest.approx(400)}


def keys_of(flow: RunningPipeline) -> tuple[list[str], list[str]]:
    records, deletes = flow.unwritten.take()
    return [record.key for record in records], deletes


def test_loading_takes_what_is_later_and_writes_what_is_not():
    first, second = Run(), Run()
    written = []
    for rate in (1_000, 300):
        first.period(app=rate, one=rate, two=1_000)
        written.append(first.flow.nodes["one"].record())
    for record in written:
        assert second.flow.load([record], 0.0) == []
        assert keys_of(second.flow) == ([], [])
    assert second.flow.nodes["one"].state == first.flow.nodes["one"].state
    for records in (written[:1], []):
        assert second.flow.load(records, 0.0) == []
        assert keys_of(second.flow) == (["flow/p/one"], [])
    assert second.flow.nodes["one"].state == first.flow.nodes["one"].state


def test_a_record_of_a_newer_program_is_left_alone():
    run = Run()
    run.period(app=1_000, one=1_000, two=1_000)
    (record,), _ = run.flow.unwritten.take()
    assert len(run.flow.load([replace(record, version=2)], 0.0)) == 1
    assert keys_of(run.flow) == ([], [])


def test_a_record_of_an_earlier_program_is_taken_up():
    value = {
        "pipeline": "p",
        "node": "one",
        "rate": 400.0,
        "t_delay_ms": 1.5,
        "since_s": 1700000000.25,
        "why": "two asks for less",
        "by": "two",
        "direction": "decrease",
        "holders": ["two"],
        "revision": 3,
    }
    flow = Run().flow
    assert flow.load([Record.of("flow/p/one", value)], 0.0) == []
    state = flow.nodes["one"].state
    assert (state.rate, state.since_s, state.holders, state.revision) == (
        *(400.0, 1700000000.25, ("two",), 3),
    )
    assert keys_of(flow) == ([], [])
    assert flow.nodes["one"].record().value | {"t_delay_ms": 1.5} == value


def test_a_reload_keeps_what_remains_and_lets_go_what_is_gone():
    run = Run()
    run.period(app=1_000, one=1_000, two=1_000)
    run.period(app=1_000, one=1_000, two=400)
    run.flow.unwritten.take()
    slower = replace(CHAIN.stages[0], normal_rate=300.0)
    changed = replace(CHAIN, stages=(slower, CHAIN.stages[1]), hold_producers=False)
    run.flow.reload(PipelineGraph(changed), run.now_ms)
    events = document_of(run.flow, run.now_ms)["events"][-2:]
    assert {event["node"]: event["rate"] for event in events} == {"app": None, "one": 300.0}
    records, deletes = run.flow.unwritten.take()
    assert [record.key for record in records] == ["flow/p/one"]
    assert deletes == ["flow/p/app"]


def test_a_source_was_measured_before_a_reload_has_it_held():
    run = Run(replace(CHAIN, hold_producers=False))
    run.processing["one"] = 400.0
    run.period(app=600, one=600)
    run.flow.reload(PipelineGraph(CHAIN), run.now_ms)
    assert run.flow.nodes["app"].rate == pytest.approx(600)
    run.flow.reload(PipelineGraph(replace(CHAIN, hold_producers=False)), run.now_ms)
    assert "app" not in run.flow.nodes


def test_the_period_of_a_source_begins_when_it_can_be_held():
    run = Run(replace(CHAIN, hold_producers=False))
    for start_ms in (5 * SECOND_MS, 11 * SECOND_MS):
        run.flow.reload(PipelineGraph(CHAIN), start_ms)
        run.flow.nodes["app"].ask("one", RateChangeDirection.DECREASE, 400.0, 0.0, "slow")
        assert tick(run.flow, start_ms + 4 * SECOND_MS - 1) == {}
        assert tick(run.flow, start_ms + 4 * SECOND_MS) == {"app": pytest.approx(400)}
        run.flow.reload(PipelineGraph(replace(CHAIN, hold_producers=False)), start_ms + 5_000)
        assert "app" not in run.flow.nodes


def test_a_reload_that_takes_a_stage_away_releases_what_it_held():
    run = Run()
    run.period(app=1_000, one=1_000, two=1_000)
    run.flow.reload(PipelineGraph(replace(CHAIN, stages=CHAIN.stages[:1])), run.now_ms)
    del run.processing["two"]
    assert run.period(app=300, one=300)["one"] == pytest.approx(500)


def test_the_document_tells_the_whole_story():
    run = Run()
    run.period({"two": 70}, app=1_000, one=1_000, two=1_000)
    document = json.loads(json.dumps(document_of(run.flow, run.now_ms), allow_nan=False))
    one, two = document["stages"]
    assert (one["state"], one["rate"], one["t_delay_ms"]) == ("reduced", 400, 1.5)
    assert (one["upstream"], two["upstream"]) == (["app"], ["one"])
    assert (one["held_by"], one["last_change"]["by"]) == (["two"], "two")
    assert one["last_change"]["at_s"] == START_S + 4
    assert (one["band"], one["band_in_force"]) == ([500, 1_200], [200, 480])
    assert (two["state"], two["rate"], two["last_change"]) == ("uncontrolled", None, None)
    assert (two["received_rate"], two["processing_rate"], two["lag"]) == (1_000, 400, 70)
    assert two["samples"] == {"count": 4, "above": 4, "below": 0}
    assert (two["last_request"]["direction"], two["last_request"]["asked"]) == ("decrease", ["one"])
    assert [item["name"] for item in document["sources"]] == ["app"]
    assert [event["node"] for event in document["events"]] == ["one"]


DIAMOND = replace(
    CHAIN,
    stages=(
        stage("left", "a", "b"),
        stage("right", "a", "c", period_ms=2 * SECOND_MS),
        stage("join", "b c", period_ms=3 * SECOND_MS),
    ),
    max_lag=1_000,
)
NAMES = st.sampled_from(["left", "right", "join"])
NUMBERS = st.floats(0, 2.0**63) | st.floats(0, 5_000) | st.integers(0, 10_000)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("sample"), NAMES, NUMBERS),
        st.tuples(st.just("rate"), NAMES, NUMBERS),
        st.tuples(st.just("lag"), NAMES, st.integers(0, 3_000)),
        st.tuples(st.just("ended"), NAMES, st.none()),
        st.tuples(st.just("pass"), st.none(), st.floats(0, 5_000)),
        st.tuples(st.just("pass"), st.none(), st.just(SECOND_MS)),
        st.tuples(st.just("load"), st.none(), st.none()),
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_whatever_comes_rates_stay_in_range_and_a_node_changes_once_in_a_period(steps):
    flow, store = lone_pipeline(DIAMOND, 0.0, START_S), MemoryStore()
    longest = {"app": 4 * SECOND_MS, "left": 3 * SECOND_MS, "right": 3 * SECOND_MS}
    changed: dict[tuple[str, float], int] = {}
    now_ms = 0.0
    for what, name, value in steps:
        match what:
            case "sample":
                flow.stages[name].sample(value, now_ms)
            case "rate":
                flow.stages[name].processed(value, now_ms)
            case "lag":
                flow.stages[name].lag(value)
            case "ended":
                flow.stages[name].ended()
            case "load":
                write(flow, store)
                assert flow.load(store.items(flow.prefix), now_ms) == []
                assert flow.unwritten.take() == ([], [])
            case "pass":
                now_ms += value
                for node, rate in tick(flow, now_ms).items():
                    # What is applied now belongs to the period that ended last.
                    window = now_ms // longest[node]
                    changed[node, window] = changed.get((node, window), 0) + 1
                    assert rate is None or MIN_RATE <= rate <= 1_000
        json.dumps(document_of(flow, now_ms), allow_nan=False)
    assert all(count == 1 for count in changed.values())
    write(flow, store)
    again = lone_pipeline(DIAMOND, 0.0, START_S)
    assert again.load(store.items(again.prefix), 0.0) == []
    assert rates_of(again) == rates_of(flow)
