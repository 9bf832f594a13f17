"""What the file says of Structured Streaming queries, their backpressure, and their pipelines."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, StrictBool, model_validator
from pydantic.dataclasses import dataclass

from proxy.config import fields
from proxy.config.fields import Conflict, format_ms, format_number
from proxy.pipeline.graph import (
    PendingLimit,
    PipelineSettings,
    SourceSettings,
    StageSettings,
    find_problems,
)
from proxy.progress.query import STUCK_AFTER_MS, QuerySettings
from proxy.quota.rules import AdaptiveBound
from proxy.quota.values import BadValueError, shown

DEFAULT_HOLD_MS: Final = 30_000.0

HOLD_INTERVALS: Final = 2
"""The default hold is at least so many batch intervals: a batch may take longer than one."""

GAINS: Final = ("proportional", "integral", "derivative")
"""Keys that only the estimator pid has."""


def _given_gains(data: dict[str, Any]) -> list[str]:
    return [name for name in GAINS if data[name] is not None]


def _default_hold_ms(data: dict[str, Any]) -> float:
    return max(DEFAULT_HOLD_MS, HOLD_INTERVALS * (data["batch_interval_ms"] or 0.0))


class AdaptiveSection(fields.Section):
    """How a rule's `consumer_byte_rate` follows the rate at which a query processes.

    None stands for no limit, or for the default of AdaptiveBound.
    """

    min_rate: fields.RecordRate = 100.0
    max_rate: fields.RecordRate | None = None
    proportional: fields.Gain | None = None
    integral: fields.Gain | None = None
    derivative: fields.Gain | None = None
    estimator: Literal["cost", "pid"] = Field(
        default_factory=lambda data: "pid" if _given_gains(data) else "cost"
    )
    batch_interval_ms: fields.BatchInterval | None = Field(default=None, alias="batch_interval")
    initial_rate: fields.RecordRate | None = None
    hold_ms: fields.Milliseconds = Field(default_factory=_default_hold_ms, alias="hold")

    def find_conflicts(self) -> Iterator[Conflict]:  # noqa: D102
        low, high = format_number(self.min_rate), format_number(self.max_rate or 0.0)
        for key, rate in (("max_rate", self.max_rate), ("initial_rate", self.initial_rate)):
            own = format_number(rate or 0.0)
            if rate is not None and rate < self.min_rate:
                fix = f"write at least {low}, or a min_rate of at most {own}"
                yield Conflict((key,), f"{own} is below min_rate, {low}", fix)
            elif rate is not None and self.min_rate <= (self.max_rate or 0.0) < rate:
                fix = f"write at most {high}, or a max_rate of at least {own}"
                yield Conflict((key,), f"{own} is above max_rate, {high}", fix)
        gains = _given_gains(vars(self))
        if self.estimator == "cost" and gains:
            fix = f"write pid, or leave {' and '.join(gains)} out"
            yield Conflict(("estimator",), f"cost has no {gains[0]}: that is of pid", fix)
        interval_ms = self.batch_interval_ms or 0.0
        if self.hold_ms <= interval_ms:
            own, interval, enough = map(
                format_ms, (self.hold_ms, interval_ms, HOLD_INTERVALS * interval_ms)
            )
            message = f"{own} is not longer than batch_interval, {interval}: each report would come"
            fix = f"write {enough} or more, or leave it out"
            yield Conflict(("hold",), f"{message} too late", fix)

    @property
    def bound(self) -> AdaptiveBound:
        """What the quota takes."""
        return AdaptiveBound(**self.model_dump(exclude_none=True))


@dataclass(frozen=True, kw_only=True, config=fields.ONLY_KNOWN_KEYS)
class QuerySection(QuerySettings):
    """A Structured Streaming query whose progress is followed."""

    name: fields.Text = Field(examples=["name: orders"])
    client_id: fields.QueryClient = Field(
        default_factory=lambda data: data["name"], alias="client-id", validate_default=True
    )
    commit_group: fields.Text | None = Field(default=None)
    stuck_after_ms: fields.Milliseconds = Field(default=STUCK_AFTER_MS, alias="stuck_after")


def _two_numbers(value: object) -> list[object]:
    if not isinstance(value, list) or len(value) != 2:  # noqa: PLR2004 - low and high
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
