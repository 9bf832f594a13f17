"""What the file says of pipelines. `pipeline_checks` checks what concerns one as a whole."""

import re
from typing import Annotated, Final, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    field_validator,
    model_validator,
)
from pydantic import ValidationInfo as Info

from metrics.clock import MS_PER_SECOND
from proxy.config import fields
from proxy.pipeline.graph import PipelineSettings, SourceSettings, StageSettings
from proxy.quota.entities import DEFAULT
from proxy.quota.values import BadValueError, shown

_BAND_ENDS: Final = 2

TOPIC_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")
"""Kafka's own rule (its class `Topic`), which also forbids the names of directories."""


def _topic(name: str) -> str:
    if not TOPIC_NAME.fullmatch(name) or name in (".", ".."):
        fix = "write 1 to 249 letters, digits and characters of ._-"
        raise BadValueError(f"{shown(name)} is no name of a topic", fix)
    return name


def _client(name: str) -> str:
    if name == DEFAULT:
        raise BadValueError(f"{DEFAULT} stands for many clients", "write the client id of one")
    return name


def _two_numbers(value: object) -> list[object]:
    if not isinstance(value, list) or len(value) != _BAND_ENDS:
        found = f"a list of {len(value)}" if isinstance(value, list) else shown(value)
        fix = "write [low, high] in records per second, such as [0, 1000]"
        raise BadValueError(f"must be two numbers, not {found}", fix)
    return value


def _interval(seconds: fields.Seconds) -> fields.Seconds:
    if seconds < fields.MIN_INTERVAL_S:
        message = f"{fields.format_duration(seconds)} is shorter than a millisecond"
        raise BadValueError(message, "write 1ms or more")
    return seconds


Topic = Annotated[fields.Text, AfterValidator(_topic)]
Client = Annotated[fields.Text, AfterValidator(_client)]
Band = Annotated[
    tuple[fields.RecordRateOrZero, fields.RecordRateOrZero], BeforeValidator(_two_numbers)
]
Interval = Annotated[fields.Duration, AfterValidator(_interval)]
"""Seconds, at least `MIN_INTERVAL_S`."""


class PipelineSource(fields.Section):
    """A producer, by its client id, of topics that no stage produces. Rates are records/s."""

    client_id: Client = Field(alias="client-id", examples=["client-id: feed"])
    produces: tuple[Topic, ...] = Field(examples=["produces: [orders]"])
    normal_rate: fields.RecordRate = Field(examples=["normal_rate: 1000"])
    step: fields.RecordRate = Field(examples=["step: 100"])

    @property
    def settings(self) -> SourceSettings:
        """What the flow takes."""
        return SourceSettings(**self.model_dump())


class PipelineStage(fields.Section):
    """A Structured Streaming query, or the clients that together do one step.

    `queries` are Spark's queryNames; a stage without these and without `client_ids` is the query
    of its own name. Rates and the `band` are records/s, durations seconds. The meaning of all is
    that of StageSettings.
    """

    name: fields.Text = Field(examples=["name: enrich"])
    queries: tuple[fields.Text, ...] = ()
    client_ids: tuple[Client, ...] = Field(default=(), alias="client-ids")
    consumes: tuple[Topic, ...] = Field(examples=["consumes: [orders]"])
    produces: tuple[Topic, ...] = ()
    band: Band = Field(examples=["band: [0, 1000]"])
    sampling_interval: Interval = 1.0
    period: fields.Duration = Field(default="10s", validate_default=True)
    ratio: fields.Share = 0.5
    normal_rate: fields.RecordRate = Field(examples=["normal_rate: 1000"])
    step: fields.RecordRate = Field(examples=["step: 100"])
    t_min_adjust: fields.Duration = 0.001

    @field_validator("period")
    @classmethod
    def _covers_a_sample(cls, period: fields.Seconds, info: Info) -> fields.Seconds:
        interval: fields.Seconds = info.data.get("sampling_interval", 0.0)
        if period < interval:
            own, other = fields.format_duration(period), fields.format_duration(interval)
            fix = f"write {other} or more, or a sampling_interval of at most {own}"
            raise BadValueError(f"{own} is shorter than sampling_interval, {other}", fix)
        return period

    @property
    def settings(self) -> StageSettings:
        """What the flow takes."""
        durations = ("sampling_interval", "period", "t_min_adjust")
        return StageSettings(
            **self.model_dump(exclude=set(durations)),
            **{f"{name}_ms": getattr(self, name) * MS_PER_SECOND for name in durations},
        )


class PendingLimit(fields.Section):
    """How many source batches, and how many bytes of them, may be unfinished; None: no limit."""

    batches: fields.Count | None = None
    size_bytes: fields.Size | None = Field(default=None, alias="bytes")

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if self.batches is None and self.size_bytes is None:
            raise BadValueError("sets no limit", "add batches or bytes, or remove it")
        return self


class PipelineSection(fields.Section):
    """Stages and sources that are joined by topics.

    With `hold_producers` sources are slowed as well, by their produce quota. Above `max_lag`
    records before a stage it asks for less, whatever its band says. `timeout`: seconds after
    which a source batch that is not finished has failed.
    """

    name: fields.Text = Field(examples=["name: orders"])
    hold_producers: StrictBool = False
    max_lag: fields.Count | None = None
    max_pending: PendingLimit | None = None
    timeout: fields.Duration = 600.0
    sources: tuple[PipelineSource, ...] = ()
    stages: tuple[PipelineStage, ...] = Field(
        examples=[
            "stages: [{name: enrich, consumes: [orders], band: [0, 1000], "
            "normal_rate: 1000, step: 100}]"
        ]
    )

    @property
    def settings(self) -> PipelineSettings:
        """What the flow takes; of a loaded configuration it is sound."""
        pending = self.max_pending
        return PipelineSettings(
            name=self.name,
            stages=tuple(stage.settings for stage in self.stages),
            sources=tuple(source.settings for source in self.sources),
            hold_producers=self.hold_producers,
            max_lag=self.max_lag,
            max_pending_batches=pending.batches if pending else None,
            max_pending_bytes=pending.size_bytes if pending else None,
            timeout_ms=self.timeout * MS_PER_SECOND,
        )
