"""What a batch that was under way when a process ended is taken to have written."""

from dataclasses import replace
from random import Random

import pytest

from proxy.pipeline.completion import LATE_MS, CompletionTracker
from proxy.pipeline.graph import (
    PipelineGraph,
    PipelineSettings,
    SourceProducerSettings,
    StageSettings,
)
from proxy.pipeline.ledger import TopicRange
from proxy.state import UnwrittenRecords

LOADED_MS = 1000.0
STAGE = StageSettings(
    name="one",
    consumes=("a",),
    produces=("b", "c"),
    band=(0, 1),
    sampling_interval_ms=1,
    period_ms=1,
    ratio=0.5,
    normal_rate=1,
    step=1,
)
B0, B1, C0 = ("b", 0), ("b", 1), ("c", 0)


def graph(*stages: StageSettings) -> PipelineGraph:
    source = SourceProducerSettings(client_id="app", produces=("a",), normal_rate=1, step=1)
    return PipelineGraph(PipelineSettings(name="p", stages=stages, sources=(source,)))


def reports() -> CompletionTracker:
    return CompletionTracker(
        graph(STAGE), UnwrittenRecords(), random=Random(1), now_ms=0.0, now_s=0.0
    )


def taken_up() -> CompletionTracker:
    outputs = reports()
    outputs.loaded_ms = LOADED_MS
    return outputs


@pytest.mark.parametrize(
    ("starts", "ends", "later", "found"),
    [
        pytest.param({B0: 3}, {B0: 5}, [], [(*B0, 3, 5)], id="what is behind the known"),
        pytest.param({B0: 5}, {B0: 5}, [], [], id="nothing is behind it"),
        pytest.param({B0: 5}, {B0: 3}, [], [], id="the log was cut"),
        pytest.param({B0: 3}, {}, [], [], id="its end is not known"),
        pytest.param({}, {B0: 5}, [], [], id="its start is not known"),
        pytest.param(
            {B0: 0, B1: 0, C0: 0}, {B0: 1, B1: 2, C0: 3}, [],
            [(*B0, 0, 1), (*B1, 0, 2), (*C0, 0, 3)], id="several partitions",
        ),
        pytest.param({("a", 0): 0}, {("a", 0): 5}, [], [], id="not a topic of the stage"),
        pytest.param({B0: 3}, {B0: 9}, [(7, 9), (5, 7)], [(*B0, 3, 5)], id="but what came later"),
        pytest.param({B0: 3}, {B0: 9}, [(2, 7)], [], id="all came later"),
    ],
)  # fmt: skip
def test_it_is_all_that_nobody_else_is_known_to_have_written(starts, ends, later, found):
    outputs = taken_up()
    for each in later:
        outputs.wrote("one", TopicRange(*B0, *each), LOADED_MS)
    assert outputs.recover("one", starts, ends) == tuple(TopicRange(*f) for f in found)


def test_it_concerns_the_first_batch_if_that_began_before():
    outputs = taken_up()
    assert outputs.is_recovering("one", LOADED_MS - 1)
    assert not outputs.is_recovering("one", LOADED_MS)
    outputs.recover("one", {}, {})
    assert not outputs.is_recovering("one", LOADED_MS - 1)


def test_it_concerns_the_first_batch_after_others_may_have_seen_what_was_written():
    outputs = reports()
    outputs.lost_sight(LOADED_MS)
    assert outputs.is_recovering("one", LOADED_MS - 1)
    outputs.recover("one", {}, {})
    assert not outputs.is_recovering("one", LOADED_MS - 1)
    outputs.lost_sight(2 * LOADED_MS)
    assert outputs.is_recovering("one", 2 * LOADED_MS - 1)


def test_what_a_stage_wrote_while_it_was_left_out_was_not_seen_either():
    outputs = taken_up()
    outputs.recover("one", {}, {})
    outputs.update(graph(replace(STAGE, name="other")), LOADED_MS)
    outputs.update(graph(STAGE), LOADED_MS)
    assert outputs.is_recovering("one", LOADED_MS - 1)
    assert not outputs.is_recovering("one", LOADED_MS)


def test_without_the_state_of_an_earlier_process_there_is_nothing_to_recover():
    assert not reports().is_recovering("one", 0.0)


@pytest.mark.parametrize(
    ("written", "at_ms", "left"),
    [
        pytest.param((3, 5), 0.0, (5, 5), id="counted"),
        pytest.param((3, 8), 0.0, (5, 8), id="its start is counted"),
        pytest.param((5, 8), 0.0, (5, 8), id="behind"),
        pytest.param((3, 5), LATE_MS + 1, (3, 5), id="too late to be the same: the log is new"),
    ],
)
def test_what_is_counted_is_not_counted_again(written, at_ms, left):
    outputs = taken_up()
    before = TopicRange(*B0, *written)
    outputs.wrote("one", before, LOADED_MS)
    assert outputs.take_written("one", LOADED_MS) == (before,)
    outputs.recover("one", {B0: 1}, {B0: 5})
    outputs.wrote("one", before, LOADED_MS + at_ms)
    outputs.wrote("one", TopicRange(*B1, 0, 3), LOADED_MS)
    assert outputs.take_written("one", LOADED_MS + at_ms) == (
        TopicRange(*B0, *left),
        TopicRange(*B1, 0, 3),
    )
