"""What the file says of Structured Streaming queries: who they are, and their backpressure."""

from typing import Final, Literal

from pydantic import Field, ValidationInfo, field_validator

from metrics.clock import MS_PER_SECOND
from proxy.config import fields
from proxy.progress.query import QuerySettings
from proxy.quota.rules import AdaptiveBound
from proxy.quota.values import BadValueError

DEFAULT_HOLD_S: Final = 30.0

HOLD_INTERVALS: Final = 2
"""The default hold is at least so many batch intervals: a batch may take longer than one."""

GAINS: Final = ("proportional", "integral", "derivative")
"""Keys that only the estimator pid has."""


class AdaptiveSection(fields.Section):
    """How a rule's `consumer_byte_rate` follows the rate at which a query processes.

    Rates are records per second; None is no limit. `estimator` is `cost`, or `pid` where a gain is
    given: `proportional`, `integral` and `derivative` are those of Spark Streaming's
    PIDRateEstimator; None is its default. `batch_interval` is the query's trigger interval; None:
    it is learnt. `initial_rate` is that of a run's first batches; None: that of the runs before,
    else `min_rate`, under a processing-time trigger. `hold`: for how long a bound stays when
    reports stop; by default 30 s, or two batch intervals where that is longer. Durations are
    seconds.
    """

    min_rate: fields.RecordRate = 100.0
    max_rate: fields.RecordRate | None = None
    proportional: fields.Gain | None = None
    integral: fields.Gain | None = None
    derivative: fields.Gain | None = None
    estimator: Literal["cost", "pid"] = Field(default=None, validate_default=True)
    batch_interval: fields.BatchInterval | None = None
    initial_rate: fields.RecordRate | None = None
    hold: fields.Duration = Field(default=None, validate_default=True)

    @field_validator("max_rate", "initial_rate")
    @classmethod
    def _within(cls, rate: float | None, info: ValidationInfo) -> float | None:
        low, high = info.data.get("min_rate"), info.data.get("max_rate")
        if rate is None:
            return None
        own = fields.format_number(rate)
        if low is not None and rate < low:
            low = fields.format_number(low)
            fix = f"write at least {low}, or a min_rate of at most {own}"
            raise BadValueError(f"{own} is below min_rate, {low}", fix)
        if high is not None and rate > high:
            high = fields.format_number(high)
            fix = f"write at most {high}, or a max_rate of at least {own}"
            raise BadValueError(f"{own} is above max_rate, {high}", fix)
        return rate

    @field_validator("estimator", mode="before")
    @classmethod
    def _by_gains(cls, estimator: object, info: ValidationInfo) -> object:
        given = [name for name in GAINS if info.data.get(name) is not None]
        if estimator == "cost" and given:
            fix = f"write pid, or leave {' and '.join(given)} out"
            raise BadValueError(f"cost has no {given[0]}: that is of pid", fix)
        if estimator is None:
            return "pid" if given else "cost"
        return estimator

    @field_validator("hold", mode="before")
    @classmethod
    def _by_default(cls, hold: object, info: ValidationInfo) -> object:
        if hold is None:
            interval: fields.Seconds = info.data.get("batch_interval") or 0.0
            return fields.format_duration(max(DEFAULT_HOLD_S, HOLD_INTERVALS * interval))
        return hold

    @field_validator("hold")
    @classmethod
    def _outlasts_a_batch(cls, hold: fields.Seconds, info: ValidationInfo) -> fields.Seconds:
        interval: fields.Seconds = info.data.get("batch_interval") or 0.0
        if hold <= interval:
            enough = fields.format_duration(HOLD_INTERVALS * interval)
            own, other = fields.format_duration(hold), fields.format_duration(interval)
            message = (
                f"{own} is not longer than batch_interval, {other}: each report would come too"
            )
            raise BadValueError(f"{message} late", f"write {enough} or more, or leave it out")
        return hold

    @property
    def settings(self) -> AdaptiveBound:
        """What the quota takes."""
        interval, durations = self.batch_interval, {"batch_interval", "hold"}
        return AdaptiveBound(
            **self.model_dump(exclude=durations, exclude_none=True),
            batch_interval_ms=None if interval is None else interval * MS_PER_SECOND,
            hold_ms=self.hold * MS_PER_SECOND,
        )


class QuerySection(fields.Section):
    """A Structured Streaming query whose progress is followed.

    `name` is Spark's queryName, and the label in metrics. `client_id` is its `kafka.client.id`,
    by default the name. What is completed is committed to the consumer group `commit_group`, if
    any. After `stuck_after` seconds without progress where there is more to read comes an alarm.
    """

    name: fields.Text = Field(examples=["name: orders"])
    client_id: fields.QueryClient = Field(default=None, alias="client-id", validate_default=True)
    commit_group: fields.Text | None = None
    stuck_after: fields.Duration = 300.0

    @field_validator("client_id", mode="before")
    @classmethod
    def _by_default(cls, client_id: object, info: ValidationInfo) -> object:
        # Where the name is wrong, that is said of the name, and nothing here.
        return info.data.get("name", "?") if client_id is None else client_id

    @property
    def settings(self) -> QuerySettings:
        """What progress is kept by."""
        return QuerySettings(
            name=self.name,
            client_id=self.client_id,
            commit_group=self.commit_group,
            stuck_after_ms=self.stuck_after * MS_PER_SECOND,
        )
