"""A world with pipelines: real flow control and real ledgers, fed with what a proxy would see."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from admin_world import HOSTILE
from parts.lone_pipeline import lone_pipeline
from spark_world import SparkWorld

from proxy.pipeline.completion import CompletionTracker, StageBatch
from proxy.pipeline.graph import (
    PendingLimit,
    PipelineSettings,
    SourceProducerSettings,
    StageSettings,
)
from proxy.pipeline.ledger import TopicRange
from proxy.pipeline.running_pipeline import RunningPipeline
from proxy.state import UnwrittenRecords

NOW_S = 1_790_000_000.0
PERIOD_MS = 10_000.0
TIMEOUT_MS = 300_000.0
NORMAL_RATE = 2000.0
RECORD_BYTES = 200


def stage(name: str, consumes: str, produces: str | None = None, **changes: Any) -> StageSettings:
    return StageSettings(
        name=name,
        consumes=(consumes,),
        produces=() if produces is None else (produces,),
        **{
            "band": (200.0, 1200.0),
            "sampling_interval_ms": 1000.0,
            "period_ms": PERIOD_MS,
            "ratio": 0.5,
            "normal_rate": NORMAL_RATE,
            "step": 200.0,
        }
        | changes,
    )


def chain(name: str, *stages: str, **changes: Any) -> PipelineSettings:
    """Return a pipeline of stages one after the other, each with a topic of its name."""
    first = f"feed-{name}"
    topics = [first, *stages[:-1]]
    return PipelineSettings(
        name=name,
        sources=(
            SourceProducerSettings(
                client_id=first, produces=(first,), normal_rate=NORMAL_RATE, step=200.0
            ),
        ),
        stages=tuple(
            stage(each, topics[number], each if number < len(stages) - 1 else None)
            for number, each in enumerate(stages)
        ),
        timeout_ms=TIMEOUT_MS,
        **changes,
    )


@dataclass
class Line:
    """One pipeline."""

    settings: PipelineSettings
    flow: RunningPipeline
    sent: dict[str, float] = field(default_factory=dict)
    """Records that each stage was sent."""
    batches: dict[str, int] = field(default_factory=dict)
    """How many batches each stage has reported."""

    @classmethod
    def of(cls, settings: PipelineSettings, now_ms: float) -> "Line":
        flow = lone_pipeline(settings, now_ms, NOW_S)
        flow.completion = CompletionTracker(
            flow.graph, UnwrittenRecords(), random=Random(1), now_ms=now_ms, now_s=NOW_S
        )
        return cls(settings, flow)

    def run(self, stage: str, received: float, processing: float, lag: int, now_ms: float) -> None:
        """Tell how a stage did in the second before."""
        self.sent[stage] = self.sent.get(stage, 0.0) + received
        trigger = self.flow.stages[stage]
        trigger.sample(self.sent[stage], now_ms)
        trigger.processed(processing, now_ms)
        trigger.lag(lag)

    def batch(self, stage: StageSettings, records: int, now_ms: float) -> None:
        """Let a stage finish a batch: it reads so many records, and writes as many."""
        number = self.batches.get(stage.name, -1) + 1
        self.batches[stage.name] = number

        def ranges(topics: Sequence[str]) -> tuple[TopicRange, ...]:
            return tuple(
                TopicRange(topic, 0, number * records, (number + 1) * records) for topic in topics
            )

        made = ranges(stage.consumes), ranges(stage.produces)
        size = records * RECORD_BYTES
        self.flow.completion.stage_batch(
            StageBatch(stage.name, number, *made, now_ms - 2000.0, size), now_ms
        )


class PipelineWorld(SparkWorld):
    """Everything behind the server, with pipelines."""

    def __init__(self, *pipelines: PipelineSettings) -> None:
        super().__init__(())
        self.lines: dict[str, Line] = {}
        for each in pipelines:
            self.begin(each)

    def begin(self, settings: PipelineSettings) -> None:
        self.lines[settings.name] = Line.of(settings, self.now_ms)

    def pipelines(self) -> Iterable[RunningPipeline]:
        return [line.flow for line in self.lines.values()]

    def run(self, seconds: int, rates: Mapping[str, tuple[float, float, int]]) -> None:
        """Let time pass; by stage what it receives and processes in a second, and its lag."""
        for _ in range(seconds):
            self.now_ms += 1000.0
            for line in self.lines.values():
                for each in line.settings.stages:
                    if each.name in rates:
                        line.run(each.name, *rates[each.name], self.now_ms)
                line.flow.completion.tick(self.now_ms)
                line.flow.tick(self.now_ms)


SLOW_STORE = {
    "enrich": (1500.0, 900.0, 900),
    "store": (1500.0, 400.0, 9000),
    "count": (300.0, 2500.0, 0),
    "store-counts": (300.0, 2400.0, 12),
    HOSTILE: (300.0, 700.0, 0),
    "after": (1500.0, 700.0, 5),
}
"""Of `scene`."""
LATER = {**SLOW_STORE, "enrich": (1400.0, 400.0, 20_000), "store": (400.0, 410.0, 9000)}


def scene() -> PipelineWorld:
    """Return a world with a pipeline whose last stage is slow and whose ledger is full, one that
    goes on, and one with hostile names.
    """
    world = PipelineWorld(
        chain(
            "orders", "enrich", "store", hold_producers=True, max_pending=PendingLimit(batches=5)
        ),
        chain("clicks", "count", "store-counts"),
        chain(f"p {HOSTILE}", HOSTILE, "after", hold_producers=True),
    )
    orders, clicks = world.lines["orders"], world.lines["clicks"]
    enrich, store = orders.settings.stages
    # What came of the first batch is never reported: it times out.
    orders.batch(enrich, 500, world.now_ms)
    world.run(int(2 * TIMEOUT_MS / 1000), {})
    orders.batches[store.name] = 0
    for turn in range(12):
        orders.batch(enrich, 500, world.now_ms)
        for each in clicks.settings.stages:
            clicks.batch(each, 300, world.now_ms)
        if turn < 7:
            orders.batch(store, 500, world.now_ms)
        world.run(2, SLOW_STORE)
    world.run(20, LATER)
    return world
