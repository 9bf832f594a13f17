"""What the file says of Structured Streaming queries: who they are, and their backpressure."""

from typing import Final, Literal

from pydantic import Field, ValidationInfo, field_validator

from metrics.clock import MS_PER_SECOND
from proxy.config.fields import (
    BatchInterval,
    Duration,
    Gain,
    QueryClient,
    RecordRate,
    Seconds,
    Section,
    Text,
    format_duration,
    format_number,
)
from proxy.progress.query import QuerySettings
from proxy.quota.rules import AdaptiveBound
from proxy.quota.values import BadValueError

DEFAULT_HOLD_S: Final = 30.0

HOLD_INTERVALS: Final = 2
"""The default hold is at least so many batch intervals: reports come one per batch, and a batch
may take longer than its interval."""


GAINS: Final = ("proportional", "integral", "derivative")
"""Keys that only the estimator pid has."""

Estimator = Literal["cost", "pid"]


class AdaptiveSection(Section):
    """How a rule's `consumer_byte_rate` follows the rate at which a query processes.

    Rates are records per second; None is no limit. `estimator` is `cost`, or `pid` where a gain is
    given: `proportional`, `integral` and `derivative` are those of Spark Streaming's
    PIDRateEstimator; None is its default. `batch_interval` is the query's trigger interval; None:
    it is learnt. With `initial_rate` a query's batches are bounded before its first report. `hold`:
    for how long a bound stays when reports stop; by default 30 s, or two batch intervals where that
    is longer. Durations are seconds.
    """

    min_rate: RecordRate = 100.0
    max_rate: RecordRate | None = None
    proportional: Gain | None = None
    integral: Gain | None = None
    derivative: Gain | None = None
    estimator: Estimator = Field(default=None, validate_default=True)
    batch_interval: BatchInterval | None = None
    initial_rate: RecordRate | None = None
    hold: Duration = Field(default=None, validate_default=True)

    @field_validator("max_rate", "initial_rate")
    @classmethod
    def _within(cls, rate: float | None, info: ValidationInfo) -> float | None:
        low, high = info.data.get("min_rate"), info.data.get("max_rate")
        if rate is not None and low is not None and rate < low:
            own, other = format_number(rate), format_number(low)
            raise BadValueError(
                f"{own} is below min_rate, {other}",
                f"write at least {other}, or a min_rate of at most {own}",
            )
        if rate is not None and high is not None and rate > high:
            own, other = format_number(rate), format_number(high)
            raise BadValueError(
                f"{own} is above max_rate, {other}",
                f"write at most {other}, or a max_rate of at least {own}",
            )
        return rate

    @field_validator("estimator", mode="before")
    @classmethod
    def _by_gains(cls, estimator: object, info: ValidationInfo) -> object:
        given = [name for name in GAINS if info.data.get(name) is not None]
        if estimator == "cost" and given:
            raise BadValueError(
                f"cost has no {given[0]}: that is of pid",
                f"write pid, or leave {' and '.join(given)} out",
            )
        if estimator is None:
            return "pid" if given else "cost"
        return estimator

    @field_validator("hold", mode="before")
    @classmethod
    def _by_default(cls, hold: object, info: ValidationInfo) -> object:
        if hold is None:
            interval: Seconds = info.data.get("batch_interval") or 0.0
            return format_duration(max(DEFAULT_HOLD_S, HOLD_INTERVALS * interval))
        return hold

    @field_validator("hold")
    @classmethod
    def _outlasts_a_batch(cls, hold: Seconds, info: ValidationInfo) -> Seconds:
        interval: Seconds = info.data.get("batch_interval") or 0.0
        if hold <= interval:
            enough = format_duration(HOLD_INTERVALS * interval)
            raise BadValueError(
                f"{format_duration(hold)} is not longer than batch_interval, "
                f"{format_duration(interval)}: each report would come too late",
                f"write {enough} or more, or leave it out",
            )
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


class QuerySection(Section):
    """A Structured Streaming query whose progress is followed.

    `name` is Spark's queryName, and the label in metrics. `client_id` is its `kafka.client.id`,
    by default the name. What its batches have completed is committed to the consumer group
    `commit_group`, None: to none. After `stuck_after` seconds without progress on a partition
    that has more to read there is an alarm.
    """

    name: Text = Field(examples=["name: orders"])
    client_id: QueryClient = Field(default=None, alias="client-id", validate_default=True)
    commit_group: Text | None = None
    stuck_after: Duration = 300.0

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
