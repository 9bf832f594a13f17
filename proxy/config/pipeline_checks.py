"""What `proxy.pipeline.graph` finds wrong with the pipelines of a document, with its places.

So that a bad value does not hide what is wrong elsewhere, what cannot be read is replaced here by
something that no complaint follows from: the models complain of it already.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final, TypeVar, cast

from pydantic import StrictBool, TypeAdapter, ValidationError

from proxy.config.document import ConfigProblem, Loc, YamlDocument, key_path
from proxy.config.fields import RecordRate, Share, Text
from proxy.config.pipeline_models import Band, Client, Topic
from proxy.pipeline import graph
from proxy.quota.values import shown

_Value = TypeVar("_Value")

_ANY_BAND: Final = (0.0, 1.0)
_ANY_RATIO: Final = 0.0
_ANY_MS: Final = 1.0
"""Durations are checked by the model, which speaks of them as they are written."""

_UNREADABLE: Final[Mapping[str, object]] = {"produces": None}
"""In the place of a stage or source that is no mapping: whatever it produces."""

_KEYS: Final = {"client_id": "client-id"}
"""Keys of the file where they differ from the graph's."""


def find_pipeline_problems(document: YamlDocument) -> Iterator[ConfigProblem]:
    """Yield what is wrong with each pipeline as a whole, then between them; not of equal names."""
    written = document.data.get("pipelines")
    read: list[tuple[Loc, graph.PipelineSettings]] = []
    for index, item in enumerate(written if isinstance(written, list) else ()):
        if isinstance(item, dict):
            reader = _PipelineReader(("pipelines", index))
            pipeline = reader.pipeline(item)
            read.append((reader.loc, pipeline))
            for loc, name in reader.repeated:
                first = reader.names[name]
                place = f"{key_path(first)} on line {document.line(first)}"
                message = f"{shown(name)} is also the name of {place}"
                yield document.problem(loc, message, "give each stage and source a name of its own")
            for problem in dict.fromkeys(graph.find_problems(pipeline)):
                yield _placed(document, reader.loc, problem)
    # A query that is named twice in a stage is a mistake once.
    for position, problem in dict.fromkeys(graph.find_conflicts(made for _, made in read)):
        yield _placed(document, read[position][0], problem)


def _placed(document: YamlDocument, loc: Loc, problem: graph.PipelineProblem) -> ConfigProblem:
    keys = (_KEYS.get(part, part) if isinstance(part, str) else part for part in problem.path)
    return document.problem((*loc, *keys), problem.message, problem.fix)


_adapter = cache(TypeAdapter)


def _read(kind: object, value: object, otherwise: _Value) -> _Value:
    """Return a value as its type in the model reads it, or another one if that finds it bad."""
    try:
        return cast(_Value, _adapter(kind).validate_python(value))
    except ValidationError:
        return otherwise


@dataclass(slots=True)
class _PipelineReader:
    """Reads one pipeline. What has no name of its own, or is no topic, is named by its place."""

    loc: Loc
    unread_consumed: set[str] = field(default_factory=set)
    """What stands for topics that are consumed and cannot be read."""
    unread_produced: set[str] = field(default_factory=set)
    names: dict[str, Loc] = field(default_factory=dict)
    """The stages and sources by name."""
    repeated: list[tuple[Loc, str]] = field(default_factory=list)
    """Where a name stands for a second time."""

    def pipeline(self, item: Mapping[str, object]) -> graph.PipelineSettings:
        sources = enumerate(_items(item.get("sources", [])))
        stages = enumerate(_items(item.get("stages")))
        settings = graph.PipelineSettings(
            name=_read(Text, item.get("name"), key_path(self.loc)),
            sources=tuple(self._source((*self.loc, "sources", i), source) for i, source in sources),
            stages=tuple(self._stage((*self.loc, "stages", i), stage) for i, stage in stages),
            hold_producers=_read(StrictBool, item.get("hold_producers"), otherwise=False),
        )
        return self._with_unread(settings)

    def _stage(self, loc: Loc, item: Mapping[str, object]) -> graph.StageSettings:
        place = key_path(loc)
        return graph.StageSettings(
            name=self._name(Text, loc, item, "name"),
            # Without any member a stage would be the query of its name.
            queries=_read(tuple[Text, ...], item.get("queries", []), (f"{place}.queries",)),
            client_ids=_read(tuple[Client, ...], item.get("client-ids", []), (f"{place}.ids",)),
            consumes=_topics((*loc, "consumes"), item.get("consumes"), self.unread_consumed),
            produces=_topics((*loc, "produces"), item.get("produces", []), self.unread_produced),
            band=_read(Band, item.get("band"), _ANY_BAND),
            sampling_interval_ms=_ANY_MS,
            period_ms=_ANY_MS,
            ratio=_read(Share, item.get("ratio"), _ANY_RATIO),
            **_rates(item),
        )

    def _source(self, loc: Loc, item: Mapping[str, object]) -> graph.SourceSettings:
        return graph.SourceSettings(
            client_id=self._name(Client, loc, item, "client-id"),
            produces=_topics((*loc, "produces"), item.get("produces"), self.unread_produced),
            **_rates(item),
        )

    def _name(self, kind: object, loc: Loc, item: Mapping[str, object], key: str) -> str:
        name = _read(kind, item.get(key), key_path(loc))
        if self.names.setdefault(name, loc) == loc:
            return name
        self.repeated.append(((*loc, key), name))
        return key_path(loc)

    def _with_unread(self, pipeline: graph.PipelineSettings) -> graph.PipelineSettings:
        """Add a source and a stage for the topics whose other end may be what cannot be read."""
        consumed = {topic for stage in pipeline.stages for topic in stage.consumes}
        of_sources = {topic for source in pipeline.sources for topic in source.produces}
        produced = {topic for stage in pipeline.stages for topic in stage.produces} | of_sources
        no_producer, no_consumer = consumed - produced, of_sources - consumed
        if not self.unread_produced:
            no_producer &= self.unread_consumed
        if not self.unread_consumed:
            no_consumer &= self.unread_produced
        sources, stages = pipeline.sources, pipeline.stages
        if no_producer:
            source = self._source((*self.loc, "?", 0), {})
            sources = (*sources, replace(source, produces=tuple(no_producer)))
        if no_consumer:
            stage = self._stage((*self.loc, "?", 1), {})
            stages = (*stages, replace(stage, consumes=tuple(no_consumer)))
        return replace(pipeline, sources=sources, stages=stages)


def _items(value: object) -> list[Mapping[str, object]]:
    if not isinstance(value, list):
        return [_UNREADABLE]
    return [item if isinstance(item, dict) else _UNREADABLE for item in value]


def _rates(item: Mapping[str, object]) -> dict[str, Any]:
    return {
        key: _read(RecordRate, item.get(key), graph.MIN_RATE) for key in ("normal_rate", "step")
    }


def _topics(loc: Loc, value: object, unread: set[str]) -> tuple[str, ...]:
    """Read topics, and note what stands for those that cannot be read; no topic is named so."""
    topics = [key_path(loc)]
    if isinstance(value, list):
        topics = [_read(Topic, topic, key_path((*loc, index))) for index, topic in enumerate(value)]
    unread.update(topic for topic in topics if "[" in topic)
    return tuple(topics)
