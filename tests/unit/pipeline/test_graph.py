"""What a pipeline may look like, and what is said of one that may not."""

from dataclasses import replace

import pytest
from pipeline_parts import source, stage

from proxy.pipeline.graph import (
    PipelineGraph,
    PipelineSettings,
    StageSettings,
    find_pipeline_problems,
    find_shared_members,
)


def pipeline(*stages: StageSettings, sources=None, **changes) -> PipelineSettings:
    sources = (source("app", "a"),) if sources is None else sources
    return PipelineSettings(name="p", stages=stages, sources=sources, **changes)


DIAMOND = pipeline(
    stage("join", "b c", "d"),
    stage("right", "a", "c"),
    stage("left", "a", "b"),
    hold_producers=True,
)


def test_order_and_neighbours_of_a_diamond():
    graph = PipelineGraph(DIAMOND)
    assert graph.order == ("right", "left", "join")
    assert graph.upstream["join"] == ("left", "right")
    assert graph.upstream["left"] == ("app",)
    assert set(graph.downstream["app"]) == {"left", "right"}
    assert graph.downstream["join"] == ()
    assert set(graph.first) == {"left", "right"}
    assert graph.topics_between("left", "join") == ("b",)


def test_a_stage_that_reads_one_node_by_two_topics_has_it_upstream_once():
    graph = PipelineGraph(pipeline(stage("one", "a", "b c"), stage("two", "b c")))
    assert graph.upstream["two"] == ("one",)


BAD = {
    "no stage": (pipeline(sources=()), ("stages",), "no stage"),
    "topic without owner": (
        pipeline(stage("one", "a x")),
        ("stages", 0, "consumes", 1),
        'nobody produces "x"',
    ),
    "two producers": (
        pipeline(stage("one", "a", "b"), stage("two", "a", "b")),
        ("stages", 1, "produces", 0),
        '"b" is produced by "one" already',
    ),
    "a stage writes the topic of a source": (
        pipeline(
            stage("one", "z", "a"),
            stage("two", "a"),
            sources=(source("app", "a"), source("other", "z")),
        ),
        ("stages", 0, "produces", 0),
        '"a" is produced by "app" already',
    ),
    "useless source": (
        pipeline(stage("one", "a"), sources=(source("app", "a"), source("b", "z"))),
        ("sources", 1, "produces"),
        "no stage consumes",
    ),
    "source without topics": (
        pipeline(stage("one", "a"), sources=(source("app", "a"), source("b", ""))),
        ("sources", 1, "produces"),
        "is empty",
    ),
    "same query": (
        pipeline(stage("one", "a", queries=("q",)), stage("two", "a", queries=("q",))),
        ("stages", 1, "name"),
        '"q" belongs to "one" already',
    ),
    "nothing consumed": (
        pipeline(stage("one", "a"), stage("two", "")),
        ("stages", 1, "consumes"),
        "is empty",
    ),
    "topic twice": (pipeline(stage("one", "a a")), ("stages", 0, "consumes"), "twice"),
    "band": (pipeline(stage("one", "a", band=(9, 9))), ("stages", 0, "band"), "no band"),
    "band of NaN": (
        pipeline(stage("one", "a", band=(0, float("nan")))),
        ("stages", 0, "band"),
        "no band",
    ),
    "ratio": (pipeline(stage("one", "a", ratio=1.0)), ("stages", 0, "ratio"), "below 1"),
    "normal rate": (
        pipeline(stage("one", "a", normal_rate=0.5)),
        ("stages", 0, "normal_rate"),
        "at least 1",
    ),
    "circle": (
        pipeline(
            stage("in", "a", "b"),
            stage("one", "b d", "c"),
            stage("two", "c", "d e"),
            stage("out", "e"),
        ),
        ("stages", 2, "consumes"),
        "two -> one -> two",
    ),
    "circle of one": (
        pipeline(stage("one", "a b", "b")),
        ("stages", 0, "consumes"),
        "one -> one",
    ),
}


@pytest.mark.parametrize(("settings", "path", "message"), BAD.values(), ids=BAD.keys())
def test_a_mistake_is_told_with_its_place_and_a_fix(settings, path, message):
    problems = list(find_pipeline_problems(settings))
    assert [problem.path for problem in problems] == [path]
    assert message in problems[0].message
    assert problems[0].fix


def test_all_mistakes_are_told_at_once():
    assert len([*find_pipeline_problems(pipeline(stage("one", "x", ratio=2, normal_rate=0)))]) == 4


def test_two_pipelines_share_no_members():
    one = pipeline(stage("one", "a"))
    found = find_shared_members([one, replace(one, name="q")])
    assert [item.path for item in found] == [("pipelines", 1, "stages", 0, "name")]


def test_two_pipelines_may_read_one_source_unless_both_hold_it():
    one = pipeline(stage("one", "a"), hold_producers=True)
    two = replace(pipeline(stage("two", "a")), name="q")
    assert list(find_shared_members([one, two])) == []
    found = find_shared_members([one, replace(two, hold_producers=True)])
    assert [item.path for item in found] == [("pipelines", 1, "sources", 0, "client-id")]
