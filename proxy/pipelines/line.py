"""One pipeline at work: its parts, what its stages have written, and what is said of its nodes."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from structlog import get_logger

from proxy.config import PipelineSection
from proxy.pipeline.completion import Completion
from proxy.pipeline.flow import PipelineFlow, RateChange
from proxy.pipeline.graph import PipelineGraph, StageSettings
from proxy.pipeline.lane import TopicRange
from proxy.pipeline.room import Room
from proxy.state import Json
from proxy.wire.topic_partition import TopicPartition

from .recovery import Recovery

MAX_OUTPUTS = 10_000
"""Ranges that a stage has written since its last report; of more the oldest belong to no batch."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Output:
    """A range that a client of a stage has written, and when."""

    range: TopicRange
    at_ms: float


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a stage is held to at the moment."""

    rate: float
    """Records per second; 0 lets no batch begin."""
    room: Room | None
    """What it waits for; None: a request of a stage after it, see `Line.held`."""


@dataclass(slots=True)
class Line:
    """One pipeline at work."""

    settings: PipelineSection
    graph: PipelineGraph
    flow: PipelineFlow
    completion: Completion
    outputs: dict[str, list[Output]] = field(default_factory=lambda: defaultdict(list))
    """By stage, since its last report."""
    crowded: set[str] = field(default_factory=set)
    """Stages that have written more since their last report than is kept."""
    held: dict[str, RateChange] = field(default_factory=dict)
    """By node: what the flow last said of it, where that is a rate."""
    ceilings: dict[str, Ceiling] = field(default_factory=dict)
    """By stage, where there is one below its normal rate."""
    rooms: dict[str, Room | None] = field(default_factory=dict)
    """By client of a stage: the room for its latest plan."""
    written: dict[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    """Offsets between which stages have written, and nobody who reads there has completed."""
    loaded_ms: float = -math.inf
    """When this process took up the state; long ago if it did not."""
    loose: set[str] = field(default_factory=set)
    """Nodes that are to be held and cannot be."""
    recovery: Recovery = field(default_factory=Recovery)
    members: dict[str, StageSettings] = field(default_factory=dict)
    """By query name and client id."""
    sources: frozenset[str] = frozenset()
    """Their client ids."""

    def __post_init__(self) -> None:
        self.follow(self.settings, self.graph)

    @property
    def name(self) -> str:
        """The pipeline's name."""
        return self.settings.name

    @property
    def stages(self) -> Mapping[str, StageSettings]:
        """The stages by name."""
        return self.graph.stages

    def follow(self, settings: PipelineSection, graph: PipelineGraph) -> None:
        """Go on as the configuration says now."""
        self.settings, self.graph = settings, graph
        self.members = {
            member: stage for stage in graph.stages.values() for member in stage.members
        }
        self.sources = frozenset(source.client_id for source in graph.settings.sources)
        for name, outputs in list(self.outputs.items()):
            produces = self.stages[name].produces if name in self.stages else ()
            self.outputs[name] = [each for each in outputs if each.range.topic in produces]

    def completed(self, key: TopicPartition, offset: int) -> None:
        """Take note of how far a reader has completed what stages have written."""
        if key in self.written:
            start, end = self.written[key]
            self.written[key] = max(start, offset), max(end, offset)

    def wrote(self, stage: str, output: Output) -> None:
        """Keep what a stage has written until its batch is reported."""
        key = (output.range.topic, output.range.partition)
        start, end = self.written.get(key, (output.range.start, 0))
        if output.range.start < start:  # the topic was made anew
            start, end = output.range.start, 0
        self.written[key] = start, max(end, output.range.end)
        output = replace(output, range=self.recovery.left_of(output.range, output.at_ms))
        outputs = self.outputs[stage]
        outputs.append(output)
        if len(outputs) > MAX_OUTPUTS:
            del outputs[0]
            if stage not in self.crowded:  # once, not for each
                self.crowded.add(stage)
                _log.warning("more is written than can be kept", stage=stage)

    def take_outputs(self, stage: str, until_ms: float) -> tuple[TopicRange, ...]:
        """Return what a stage wrote up to then, and forget it."""
        written = self.outputs.pop(stage, [])
        self.crowded.discard(stage)
        self.outputs[stage] = [each for each in written if each.at_ms > until_ms]
        return tuple(each.range for each in written if each.at_ms <= until_ms)

    def describe(self, document: dict[str, Json]) -> dict[str, Json]:
        """Add to the flow's document what each stage waits for."""
        stages = document["stages"]
        assert isinstance(stages, list)
        for stage in stages:
            assert isinstance(stage, dict)
            ceiling = self.ceilings.get(str(stage["name"]))
            room = ceiling.room if ceiling is not None else None
            stage["waits"] = room and {
                "for": room.waits_for,
                "records": room.records,
                "reason": room.why,
            }
        return document

    def apply(self, changes: Iterable[RateChange]) -> None:
        """Take over what the flow says of nodes; log what is new."""
        for change in changes:
            before = self.held.get(change.node)
            if (before.rate if before else None) != change.rate:
                _log.info(
                    "pipeline",
                    pipeline=self.name,
                    node=change.node,
                    rate=change.rate,
                    reason=change.reason,
                )
            if change.rate is None:
                self.held.pop(change.node, None)
            else:
                self.held[change.node] = change
