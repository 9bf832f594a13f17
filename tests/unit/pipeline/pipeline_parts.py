"""Stages and sources for the tests of pipelines."""

from itertools import starmap
from operator import attrgetter

from proxy.pipeline.completion import CompletionTracker
from proxy.pipeline.graph import (
    PipelineGraph,
    PipelineSettings,
    SourceProducerSettings,
    StageSettings,
)
from proxy.state import Record

SECOND_MS = 1_000.0


def stage(name: str, consumes: str, produces: str = "", **changes) -> StageSettings:
    """Make a stage that is sound on its own; topics are parted by spaces."""
    values = {
        "band": (500.0, 1_200.0),
        "sampling_interval_ms": SECOND_MS,
        "period_ms": 4 * SECOND_MS,
        "ratio": 0.5,
        "normal_rate": 1_000.0,
        "step": 100.0,
    } | changes
    topics = {"consumes": tuple(consumes.split()), "produces": tuple(produces.split())}
    return StageSettings(name=name, **topics, **values)


def source(client_id: str, produces: str, **changes) -> SourceProducerSettings:
    """Make a source that is sound on its own; topics are parted by spaces."""
    values = {"normal_rate": 1_000.0, "step": 100.0} | changes
    return SourceProducerSettings(client_id=client_id, produces=tuple(produces.split()), **values)


def graph(stages, name="p", **settings) -> PipelineGraph:
    """Make a pipeline of stages; what none of them produces comes of a source."""
    produced = {topic for each in stages for topic in each.produces}
    topics = [topic for each in stages for topic in each.consumes if topic not in produced]
    sources = tuple(source(f"feed-{topic}", topic) for topic in dict.fromkeys(topics))
    return PipelineGraph(
        PipelineSettings(name=name, stages=tuple(stages), sources=sources, **settings)
    )


def snapshot(completion: CompletionTracker) -> list[Record]:
    """Return the records of all that there is, by their keys."""
    edges = completion.edges
    items: list[tuple[object, ...]] = [("root", root) for root in completion.ledger.roots]
    items += [("group", number) for number in edges.anchors]
    for key, waiting in edges.partitions.items():
        items += [("lane", *key), *(("edge", *key, start) for start in waiting.starts)]
    items += [("stage", name) for name in completion.reports]
    items += [("early", number) for number in completion.early]
    records = filter(None, starmap(completion.record, items))
    return sorted(records, key=attrgetter("key"))
