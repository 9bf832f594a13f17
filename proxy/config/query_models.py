"""What the file says of Structured Streaming queries, and their backpressure."""

from collections.abc import Iterator
from typing import Any, Final, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from proxy.progress.query import STUCK_AFTER_MS, QuerySettings
from proxy.quota import fields
from proxy.quota.fields import Conflict, example
from proxy.quota.rules import AdaptiveBound
from proxy.quota.values import format_ms, format_number

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
    batch_interval_ms: fields.BatchInterval | None = None
    initial_rate: fields.RecordRate | None = None
    hold_ms: fields.Milliseconds = Field(default_factory=_default_hold_ms)

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

    name: fields.Text = example("name: orders")
    client_id: fields.QueryClient = Field(
        default_factory=lambda data: data["name"], validate_default=True
    )
    commit_group: fields.Text | None = Field(default=None)
    stuck_after_ms: fields.Milliseconds = Field(default=STUCK_AFTER_MS)
