"""What a pipeline is: stages and sources joined by topics, and what can be wrong with that.

A topic has exactly one node that produces it: what arrives in the topic is then what this node
sends, and a request to slow down has one address.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Annotated

from pydantic import BeforeValidator, Field, StrictBool

from proxy.quota import fields
from proxy.quota.fields import OTHER_PLACE, Loc, SectionProblem, required_with_example
from proxy.quota.values import BadValueError, format_ms, shown

MIN_RATE = 1.0
"""Records/s: no request holds a node below this, so that a hold never becomes a standstill."""


def _two_numbers(value: object) -> list[object]:
    if not isinstance(value, list) or len(value) != 2:  # noqa: PLR2004 - low and high
        found = f"a list of {len(value)}" if isinstance(value, list) else shown(value)
        fix = "write [low, high] in records per second, such as [0, 1000]"
        raise BadValueError(f"must be two numbers, not {found}", fix)
    return value


Band = Annotated[
    tuple[fields.RecordRateOrZero, fields.RecordRateOrZero], BeforeValidator(_two_numbers)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings(fields.SettingsBase):
    """A stage: a Structured Streaming query, or the clients that together do one step."""

    name: Annotated[fields.Text, required_with_example("name: enrich")]
    queries: tuple[fields.Text, ...] = ()
    """Names of the queries that are this stage; without any, and client ids, that of its name."""
    client_ids: tuple[fields.Client, ...] = ()
    consumes: Annotated[tuple[fields.Topic, ...], required_with_example("consumes: [orders]")]
    produces: tuple[fields.Topic, ...] = ()
    band: Annotated[Band, required_with_example("band: [0, 1000]")]
    """From low to high: how many records/s it is to be sent at its normal rate."""
    sampling_interval_ms: fields.Milliseconds = 1000.0
    """Should cover a batch of the node upstream, or bursts are taken for rates."""
    period_ms: fields.Milliseconds = 10_000.0
    """How often it is decided whether to ask; at least one sampling interval. Should cover the
    time until a change upstream is seen here, or the stage asks again too early."""
    ratio: fields.Share = 0.5
    """From 0 to below 1: a larger share of samples out of the band makes a request."""
    normal_rate: Annotated[fields.RecordRate, required_with_example("normal_rate: 1000")]
    """Records/s that it reads while nobody holds it, and the most that it is held to."""
    step: Annotated[fields.RecordRate, required_with_example("step: 100")]
    """Records/s by which its rate is raised in one period."""
    t_min_adjust_ms: fields.Milliseconds = 1.0
    """What a record is delayed more when this stage asks again. It weighs the more the faster the
    node upstream is: 1 ms turns 100 records/s into 91, and 10,000 into 909."""

    def find_section_problems(self) -> Iterator[SectionProblem]:  # noqa: D102
        interval, period = map(format_ms, (self.sampling_interval_ms, self.period_ms))
        if self.sampling_interval_ms < fields.MIN_INTERVAL_MS:
            message = f"{interval} is shorter than a millisecond"
            yield SectionProblem(("sampling_interval",), message, "write 1ms or more")
        if self.period_ms < self.sampling_interval_ms:
            fix = f"write {interval} or more, or a sampling_interval of at most {period}"
            message = f"{period} is shorter than sampling_interval, {interval}"
            yield SectionProblem(("period",), message, fix)

    @property
    def members(self) -> tuple[str, ...]:
        """Queries and client ids that are this stage; its own name when it names none."""
        return (*self.queries, *self.client_ids) or (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProducerSettings(fields.SettingsBase):
    """A producer of topics that no stage produces; its name is its client id."""

    client_id: Annotated[fields.Client, required_with_example("client-id: feed")]
    produces: Annotated[tuple[fields.Topic, ...], required_with_example("produces: [orders]")]
    normal_rate: Annotated[fields.RecordRate, required_with_example("normal_rate: 1000")]
    """Records/s over all its topics while nobody holds it, and the most that it is held to."""
    step: Annotated[fields.RecordRate, required_with_example("step: 100")]

    @property
    def name(self) -> str:
        """Its client id."""
        return self.client_id

    @property
    def members(self) -> tuple[str, ...]:
        """Its client id, as that of a stage's clients."""
        return (self.client_id,)


Node = StageSettings | SourceProducerSettings
"""Something that can be held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingLimit(fields.SettingsBase):
    """How many source batches, and how many bytes of them, may be unfinished; None: no limit."""

    batches: fields.Count | None = None
    size_bytes: Annotated[fields.Size | None, Field(alias="bytes")] = None

    def find_section_problems(self) -> Iterator[SectionProblem]:  # noqa: D102
        if self.batches is None and self.size_bytes is None:
            yield SectionProblem((), "sets no limit", "add batches or bytes, or remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings(fields.SettingsBase):
    """Stages and sources that belong together."""

    name: Annotated[fields.Text, required_with_example("name: orders")]
    hold_producers: StrictBool = False
    """Whether sources are held as well; else the first stages can ask nobody."""
    max_lag: fields.Count | None = None
    """Records that may wait before a stage; those before it plan no more, sources are asked for
    less."""
    max_pending: PendingLimit | None = None
    timeout_ms: fields.Milliseconds = 600_000.0
    """A source batch that is not finished by then has failed."""
    sources: tuple[SourceProducerSettings, ...] = ()
    stages: Annotated[
        tuple[StageSettings, ...],
        required_with_example(
            "stages: [{name: enrich, consumes: [orders], band: [0, 1000], "
            "normal_rate: 1000, step: 100}]"
        ),
    ]

    @property
    def bounds_batches(self) -> bool:
        """Whether there is anything that a batch may have no room for."""
        return self.max_lag is not None or self.max_pending is not None

    def find_section_problems(self) -> Iterator[SectionProblem]:
        """Yield names that are there twice; without such what else is wrong with the pipeline."""
        named = [(_named(path), node.name) for path, node in _nodes(self)]
        repeated = list(fields.find_repeated(named))
        for loc, name, earlier in repeated:
            message = f"{shown(name)} is also the name of {OTHER_PLACE}"
            fix = "give each stage and source a name of its own"
            yield SectionProblem(loc, message, fix, earlier[:-1])
        if not repeated:
            yield from find_pipeline_problems(self)


def find_shared_members(pipelines: Iterable[PipelineSettings]) -> Iterator[SectionProblem]:
    """Yield which pipelines hold the same query or client as an earlier one."""
    owners: dict[str, str] = {}
    for position, pipeline in enumerate(pipelines):
        for path, node in _nodes(pipeline):
            if isinstance(node, SourceProducerSettings) and not pipeline.hold_producers:
                continue
            for member in node.members:
                owner = owners.setdefault(member, pipeline.name)
                if owner != pipeline.name:
                    message = f'"{member}" belongs to the pipeline "{owner}" already'
                    fix = "let each query and client belong to one pipeline"
                    yield SectionProblem(("pipelines", position, *_named(path)), message, fix)


class PipelineGraph:
    """Who is before whom in a pipeline without problems; the configuration lets in no other."""

    def __init__(self, settings: PipelineSettings) -> None:
        self.settings = settings
        sources = {source.name for source in settings.sources}
        self.stages = {stage.name: stage for stage in settings.stages}
        self.producer_of = {
            topic: node.name for _, node in _nodes(settings) for topic in node.produces
        }
        self.upstream: dict[str, tuple[str, ...]] = {}
        """By stage: the stages and sources whose topics it consumes."""
        downstream: dict[str, list[str]] = defaultdict(list)
        for stage in settings.stages:
            owners = tuple(dict.fromkeys(self.producer_of[topic] for topic in stage.consumes))
            self.upstream[stage.name] = owners
            for owner in owners:
                downstream[owner].append(stage.name)
        self.downstream = {name: tuple(downstream[name]) for name in (*self.stages, *sources)}
        """By stage or source: the stages that consume what it produces."""
        self.order = tuple(_topological(settings))
        """Names of the stages: each one after those that feed it."""
        self.consumers: dict[str, list[str]] = {topic: [] for topic in self.producer_of}
        """By topic: the stages that consume it, in topological order."""
        for name in self.order:
            for topic in self.stages[name].consumes:
                self.consumers[topic].append(name)
        self.first = tuple(
            name for name in self.order if not sources.isdisjoint(self.upstream[name])
        )
        """Stages that read a source: where its batches come in."""

    def feeder(self, stage: str, topic: str) -> str | None:
        """Return the stage that produces what a stage consumes there; None: a source, or nobody."""
        producer = self.producer_of.get(topic)
        is_fed = producer in self.stages and topic in self.stages[stage].consumes
        return producer if is_fed else None

    def topics_between(self, node: str, stage: str) -> tuple[str, ...]:
        """Return the topics that the node produces and the stage consumes."""
        consumed = self.stages[stage].consumes
        return tuple(topic for topic in consumed if self.producer_of[topic] == node)


def find_permanent_holds(graph: PipelineGraph) -> Iterator[str]:
    """Yield a line for each stage that has nothing to tell by that a hold for it may end."""
    for stage in graph.stages.values():
        is_fed_by_stages = not graph.stages.keys().isdisjoint(graph.upstream[stage.name])
        can_hold = graph.settings.hold_producers or is_fed_by_stages
        if can_hold and stage.band[0] == 0 and graph.settings.max_lag is None:
            yield (
                f"pipeline {graph.settings.name!r}: stage {stage.name!r} never asks for more "
                "again, its band begins at 0: write a max_lag, or a band from above 0"
            )


def _nodes(settings: PipelineSettings) -> Iterator[tuple[Loc, Node]]:
    yield from ((("sources", index), source) for index, source in enumerate(settings.sources))
    yield from ((("stages", index), stage) for index, stage in enumerate(settings.stages))


def _named(path: Loc) -> Loc:
    """Return where a stage or source has its name."""
    return (*path, "client-id" if path[0] == "sources" else "name")


def find_pipeline_problems(settings: PipelineSettings) -> Iterator[SectionProblem]:
    """Yield all that is wrong with a pipeline whose nodes have names of their own, in order."""
    if not settings.stages:
        message = "the pipeline has no stage"
        yield SectionProblem(("stages",), message, "write at least one stage")
    owners: dict[str, str] = {}
    for path, node in _nodes(settings):
        for member in node.members:
            if (owner := owners.setdefault(member, node.name)) != node.name:
                message = f'"{member}" belongs to "{owner}" already'
                fix = "let each query and client belong to one of them"
                yield SectionProblem(_named(path), message, fix)
    producers: dict[str, str] = {}
    for path, node in _nodes(settings):
        yield from _values(path, node)
        for index, topic in enumerate(node.produces):
            if (owner := producers.setdefault(topic, node.name)) != node.name:
                fix = "let each topic have one producer in the pipeline"
                message = f'"{topic}" is produced by "{owner}" already'
                yield SectionProblem((*path, "produces", index), message, fix)
    consumed = {topic for stage in settings.stages for topic in stage.consumes}
    for path, node in _nodes(settings):
        if isinstance(node, StageSettings):
            for index, topic in enumerate(node.consumes):
                if topic not in producers:
                    fix = "name it in a stage's produces, or write a source that produces it"
                    message = f'nobody produces "{topic}"'
                    yield SectionProblem((*path, "consumes", index), message, fix)
        elif node.produces and consumed.isdisjoint(node.produces):
            message = f'no stage consumes what "{node.name}" produces'
            fix = "name one of its topics in a stage's consumes, or remove the source"
            yield SectionProblem((*path, "produces"), message, fix)
    if cycle := _cycle(settings):
        index = next(i for i, stage in enumerate(settings.stages) if stage.name == cycle[0])
        message = f"the stages feed each other in a circle: {' -> '.join((*cycle, cycle[0]))}"
        fix = "take one of the topics out of the circle"
        yield SectionProblem(("stages", index, "consumes"), message, fix)


def _values(path: Loc, node: Node) -> Iterator[SectionProblem]:
    """Yield what is wrong with the values of a stage or source by itself."""
    needed: dict[str, tuple[str, ...]] = {"produces": node.produces}
    if isinstance(node, StageSettings):
        low, high = node.band
        if not (0 <= low < high < math.inf):
            fix = "write [low, high] with 0 <= low < high"
            yield SectionProblem((*path, "band"), f"{low:g} to {high:g} is no band", fix)
        if not 0 <= node.ratio < 1:
            message = f"must be from 0 to below 1, not {node.ratio:g}"
            fix = "write the share of samples that may be out of the band, such as 0.5"
            yield SectionProblem((*path, "ratio"), message, fix)
        needed = {"consumes": node.consumes}
        for key, topics in (("consumes", node.consumes), ("produces", node.produces)):
            for topic in (topic for topic, count in Counter(topics).items() if count > 1):
                message = f'"{topic}" is named twice'
                yield SectionProblem((*path, key), message, "name it once")
    if not MIN_RATE <= node.normal_rate < math.inf:
        bound = f"at least {MIN_RATE:g}"
        message = f"must be {bound}, not {node.normal_rate:g}"
        yield SectionProblem((*path, "normal_rate"), message, f"write a number {bound}")
    for key in (key for key, topics in needed.items() if not topics):
        yield SectionProblem((*path, key), "is empty", f"name the topics that it {key}")


def _topological(settings: PipelineSettings) -> list[str]:
    """Return the stages, each after those that feed it. Raises CycleError."""
    producer = {topic: stage.name for stage in settings.stages for topic in stage.produces}
    sorter = TopologicalSorter[str]({stage.name: () for stage in settings.stages})
    for stage in settings.stages:
        sorter.add(stage.name, *(producer[topic] for topic in stage.consumes if topic in producer))
    return list(sorter.static_order())


def _cycle(settings: PipelineSettings) -> list[str]:
    """Return the stages of one cycle in the order in which they feed; empty when there is none."""
    try:
        _topological(settings)
    except CycleError as error:
        cycle: list[str] = error.args[1][1:]
        last = next(stage.name for stage in settings.stages if stage.name in cycle)
        at = cycle.index(last) + 1
        return cycle[at:] + cycle[:at]
    return []
