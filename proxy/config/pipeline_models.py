"""What the file says of pipelines; `proxy.pipeline.graph` finds what is wrong with one."""

from collections.abc import Iterator
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, StrictBool, model_validator
from pydantic.dataclasses import dataclass

from proxy.config import fields
from proxy.config.fields import Conflict, format_ms
from proxy.pipeline.graph import (
    PendingLimit,
    PipelineSettings,
    SourceSettings,
    StageSettings,
    find_problems,
)
from proxy.quota.values import BadValueError, shown

_BAND_ENDS: Final = 2


def _two_numbers(value: object) -> list[object]:
    if not isinstance(value, list) or len(value) != _BAND_ENDS:
        found = f"a list of {len(value)}" if isinstance(value, list) else shown(value)
        fix = "write [low, high] in records per second, such as [0, 1000]"
        raise BadValueError(f"must be two numbers, not {found}", fix)
    return value


Band = Annotated[
    tuple[fields.RecordRateOrZero, fields.RecordRateOrZero], BeforeValidator(_two_numbers)
]


@dataclass(frozen=True, kw_only=True, config=fields.ONLY_KNOWN_KEYS)
class PipelineSource(SourceSettings):
    """A producer, by its client id, of topics that no stage produces."""

    client_id: fields.Client = Field(alias="client-id", examples=["client-id: feed"])
    produces: tuple[fields.Topic, ...] = Field(examples=["produces: [orders]"])
    normal_rate: fields.RecordRate = Field(examples=["normal_rate: 1000"])
    step: fields.RecordRate = Field(examples=["step: 100"])


@dataclass(frozen=True, kw_only=True, config=fields.ONLY_KNOWN_KEYS)
class PipelineStage(StageSettings):
    """A Structured Streaming query, or the clients that together do one step."""

    name: fields.Text = Field(examples=["name: enrich"])
    queries: tuple[fields.Text, ...] = Field(default=())
    client_ids: tuple[fields.Client, ...] = Field(default=(), alias="client-ids")
    consumes: tuple[fields.Topic, ...] = Field(examples=["consumes: [orders]"])
    produces: tuple[fields.Topic, ...] = Field(default=())
    band: Band = Field(examples=["band: [0, 1000]"])
    sampling_interval_ms: fields.Milliseconds = Field(default=1000.0, alias="sampling_interval")
    period_ms: fields.Milliseconds = Field(default=10_000.0, alias="period")
    ratio: fields.Share = Field(default=0.5)
    normal_rate: fields.RecordRate = Field(examples=["normal_rate: 1000"])
    step: fields.RecordRate = Field(examples=["step: 100"])
    t_min_adjust_ms: fields.Milliseconds = Field(default=1.0, alias="t_min_adjust")

    _agree = model_validator(mode="after")(fields.agree)

    def find_conflicts(self) -> Iterator[Conflict]:  # noqa: D102
        interval, period = map(format_ms, (self.sampling_interval_ms, self.period_ms))
        if self.sampling_interval_ms < fields.MIN_INTERVAL_MS:
            message = f"{interval} is shorter than a millisecond"
            yield Conflict(("sampling_interval",), message, "write 1ms or more")
        if self.period_ms < self.sampling_interval_ms:
            fix = f"write {interval} or more, or a sampling_interval of at most {period}"
            message = f"{period} is shorter than sampling_interval, {interval}"
            yield Conflict(("period",), message, fix)


@dataclass(frozen=True, kw_only=True, config=fields.ONLY_KNOWN_KEYS)
class PendingSection(PendingLimit):
    """How many source batches, and how many bytes of them, may be unfinished; None: no limit."""

    batches: fields.Count | None = Field(default=None)
    size_bytes: fields.Size | None = Field(default=None, alias="bytes")

    _agree = model_validator(mode="after")(fields.agree)

    def find_conflicts(self) -> Iterator[Conflict]:  # noqa: D102
        if self.batches is None and self.size_bytes is None:
            yield Conflict((), "sets no limit", "add batches or bytes, or remove it")


@dataclass(frozen=True, kw_only=True, config=fields.ONLY_KNOWN_KEYS)
class PipelineSection(PipelineSettings):
    """Stages and sources that are joined by topics."""

    name: fields.Text = Field(examples=["name: orders"])
    hold_producers: StrictBool = Field(default=False)
    max_lag: fields.Count | None = Field(default=None)
    max_pending: PendingSection | None = Field(default=None)
    timeout_ms: fields.Milliseconds = Field(default=600_000.0, alias="timeout")
    sources: tuple[PipelineSource, ...] = Field(default=())
    stages: tuple[PipelineStage, ...] = Field(
        examples=[
            "stages: [{name: enrich, consumes: [orders], band: [0, 1000], "
            "normal_rate: 1000, step: 100}]"
        ]
    )

    _agree = model_validator(mode="after")(fields.agree)

    def find_conflicts(self) -> Iterator[Conflict]:
        """Yield names that are there twice; without such what else is wrong with the pipeline."""
        named = [(("sources", at), each.client_id) for at, each in enumerate(self.sources)]
        named += [(("stages", at), each.name) for at, each in enumerate(self.stages)]
        repeated = list(fields.find_repeated(named))
        for loc, name, earlier in repeated:
            key = "client-id" if loc[0] == "sources" else "name"
            message = f"{shown(name)} is also the name of {fields.OTHER_PLACE}"
            fix = "give each stage and source a name of its own"
            yield Conflict((*loc, key), message, fix, earlier)
        if not repeated:
            yield from (Conflict(*problem) for problem in find_problems(self))
