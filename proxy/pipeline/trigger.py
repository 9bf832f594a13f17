"""What is known of a stage, and when it asks the nodes upstream for less or for more.

A stage samples how many records/s it is sent. At the end of each period, if more than `ratio` of
the samples were out of its band, it asks: to decrease when they were too high, to increase when
they were too low. Samples on both sides count together, the side with more of them decides, and a
tie asks for less.

A Kafka stage pulls: when it slows down it is not sent more, its topic fills. Stages before it plan
no more than `max_lag` has room for, see `room`. A source is no query and plans nothing. So lag asks
as well, within the band too:

- lag above `max_lag` that is not falling asks sources to decrease;
- lag above EASED_SHARE of it keeps the stage from asking to increase, and so does growing lag;
- less lag than that, not growing, asks to increase while the stage holds somebody back.

Lag is the least that was seen in the period, since a stage that works in batches has the most of
it right before a batch ends. A stage without a bound on lag that has begun to ask to increase goes
on within the band, or the last part of a hold would stay for ever.

Only a stage that holds somebody back asks to increase; when it is told that control has ended it
keeps sampling and sends no more of these.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from metrics.clock import MS_PER_SECOND
from proxy.state import Json

from .graph import StageSettings

EASED_SHARE = 0.5
"""Share of `max_lag`: with more lag than this a stage does not ask for more."""

SILENT_MS = 300_000.0
"""A stage without a sign of life for so long is taken for dead."""

YIELD_DECAY = 0.8
"""What the earlier batches of a stage weigh against the latest one, for records out per in."""


class Direction(StrEnum):
    """What a stage asks for."""

    DECREASE = "decrease"
    INCREASE = "increase"


class RateMeter:
    """Turns a count that only grows into rates over an interval."""

    __slots__ = ("_start_ms", "_start_total", "interval_ms", "rate")

    def __init__(self, interval_ms: float) -> None:
        self.interval_ms = interval_ms
        self.rate: float | None = None
        """Per second, over the last whole interval; None before the first."""
        self._start_total = math.nan
        self._start_ms = 0.0

    def read(self, total: float, now_ms: float) -> float | None:
        """Take a reading; return the rate when it completes an interval, else None.

        A count that went back has been started anew, and so is the interval.
        """
        elapsed_ms = now_ms - self._start_ms
        if not total >= self._start_total:  # also true for the first one
            self._start_total, self._start_ms = total, now_ms
            return None
        if elapsed_ms < self.interval_ms:
            return None
        self.rate = (total - self._start_total) / elapsed_ms * MS_PER_SECOND
        self._start_total, self._start_ms = total, now_ms
        return self.rate


@dataclass(frozen=True, slots=True)
class Period:
    """What a stage saw in one period."""

    samples: int = 0
    above: int = 0
    """Samples above the band."""
    below: int = 0
    """Samples below the band."""
    received_rate: float | None = None
    """Mean of the samples, records/s; None without any."""
    lag: int | None = None
    """The least, in records; None when nobody said."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the stage asks for, and why; `reason` is a part of a sentence."""

    direction: Direction
    reason: str
    is_of_lag: bool = False
    """Whether it is asked for lag above `max_lag` alone: of sources then."""


class Trigger:
    """Samples, lag and requests of one stage."""

    __slots__ = (
        "_above",
        "_below",
        "_easing",
        "_holds",
        "_lag",
        "_samples",
        "_sum",
        "due_ms",
        "last",
        "max_lag",
        "meter",
        "settings",
    )

    def __init__(self, settings: StageSettings, max_lag: int | None, now_ms: float) -> None:
        self.settings = settings
        self.max_lag = max_lag
        self.meter = RateMeter(settings.sampling_interval_ms)
        self.due_ms = now_ms + settings.period_ms
        """When the period ends."""
        self.last = Period()
        """The period before this one."""
        self._holds: set[str] = set()
        self._easing = False
        self._lag: int | None = None
        self._clear()

    @property
    def holds(self) -> frozenset[str]:
        """The nodes upstream that are held because this stage asked."""
        return frozenset(self._holds)

    def control_began(self, *nodes: str) -> None:
        """Hear that nodes upstream are held for this stage."""
        self._holds.update(nodes)

    def control_ended(self, *nodes: str) -> None:
        """Hear that nodes upstream have their normal rate again."""
        self._holds.difference_update(nodes)
        if not self._holds:
            self._easing = False

    def sample(self, total: float, now_ms: float, scale: float = 1.0) -> None:
        """Take a reading of the records that the stage was sent so far.

        Args:
            total: finite; only grows.
            now_ms: the time.
            scale: what the band is multiplied with now, above 0.

        """
        rate = self.meter.read(total, now_ms)
        if rate is None:
            return
        low, high = self.settings.band
        self._samples += 1
        self._sum += rate
        if rate > high * scale:
            self._above += 1
        elif rate < low * scale:
            self._below += 1

    def lag(self, records: int) -> None:
        """Take a reading of the records that wait for the stage; 0 or more."""
        self._lag = records if self._lag is None else min(self._lag, records)

    def close(self, now_ms: float) -> Verdict | None:
        """End the period and begin the next; return what to ask for, None for nothing.

        Periods that went by unnoticed are left out.
        """
        before, self.last = self.last, self._period()
        self._clear()
        period_ms = self.settings.period_ms
        self.due_ms += period_ms * (1 + max(0, (now_ms - self.due_ms) // period_ms))
        verdict = self._judge(self.last, before.lag)
        if verdict is not None:
            self._easing = verdict.direction is Direction.INCREASE
        return verdict

    def _clear(self) -> None:
        self._samples = self._above = self._below = 0
        self._sum = 0.0
        self._lag = None

    def _period(self) -> Period:
        mean = self._sum / self._samples if self._samples else None
        return Period(self._samples, self._above, self._below, mean, self._lag)

    def _judge(self, period: Period, lag_before: int | None) -> Verdict | None:
        out = period.above + period.below
        is_out = period.samples > 0 and out / period.samples > self.settings.ratio
        if is_out and period.above >= period.below:
            return Verdict(Direction.DECREASE, self._band_reason("above", period.above, period))
        lag, max_lag, eased = period.lag, self.max_lag, ""
        if lag is not None and max_lag is not None:
            if lag > max_lag and (lag_before is None or lag >= lag_before):
                reason = f"{lag:,} records wait for it, above max_lag {max_lag:,}, and not fewer"
                return Verdict(Direction.DECREASE, reason, is_of_lag=True)
            is_growing = lag_before is not None and lag > lag_before
            if is_growing or lag > max_lag * EASED_SHARE:
                return None
            eased = f"only {lag:,} records wait for it"
        if not self._holds:
            return None
        if is_out:
            return Verdict(Direction.INCREASE, self._band_reason("below", period.below, period))
        if eased:
            return Verdict(Direction.INCREASE, eased)
        if self._easing and period.samples:
            return Verdict(Direction.INCREASE, "it is sent no more than its band allows")
        return None

    def _band_reason(self, side: str, count: int, period: Period) -> str:
        received = period.received_rate or 0.0
        share = f"{count} of {period.samples} samples are {side} its band"
        return f"{share}, {received:,.1f}/s on average"


class Stage:
    """The readings of one stage beside those of its trigger."""

    __slots__ = (
        "_has_ended",
        "_read",
        "_seen_ms",
        "_since_ms",
        "_written",
        "processing_rate",
        "request",
        "trigger",
    )

    def __init__(self, trigger: Trigger, now_ms: float) -> None:
        self.trigger = trigger
        self.processing_rate: float | None = None
        """Records/s in its latest batch with rows; above 0."""
        self.request: dict[str, Json] | None = None
        """Its last request, as the API shows it."""
        self._since_ms = now_ms
        self._seen_ms: float | None = None
        self._has_ended = False
        self._read = 0.0
        self._written: dict[str, float] = {}

    def seen(self, now_ms: float) -> None:
        """Take a sign of life."""
        self._seen_ms, self._has_ended = now_ms, False

    def ended(self) -> None:
        """Take it for dead until the next sign of life."""
        self._has_ended = True

    def is_alive(self, now_ms: float) -> bool:
        """Return whether it has a say. One that was not seen yet has it for SILENT_MS as well."""
        seen_ms = self._since_ms if self._seen_ms is None else self._seen_ms
        return not self._has_ended and now_ms - seen_ms <= SILENT_MS

    def may_ask(self, now_ms: float) -> bool:
        """Return whether it is alive and was seen."""
        return self._seen_ms is not None and self.is_alive(now_ms)

    def converted(self, records_in: int, records_out: Mapping[str, int]) -> None:
        """Take what a batch read, and wrote to each topic; 0 or more."""
        if not records_in:
            return
        self._read = self._read * YIELD_DECAY + records_in
        for topic in self.trigger.settings.produces:
            earlier = self._written.get(topic, 0.0)
            self._written[topic] = earlier * YIELD_DECAY + records_out.get(topic, 0)

    def records_out(self, topics: Iterable[str]) -> float:
        """Return how many records it writes to these topics for one that it reads; 1 until known.

        The topics are different ones.
        """
        if not self._read:
            return 1.0
        return sum(self._written.get(topic, 0.0) for topic in topics) / self._read

    def document(self, now_ms: float, scale: float) -> dict[str, Json]:
        """Return it as the API shows it; `scale` is what its band is multiplied with now."""
        last = self.trigger.last
        low, high = self.trigger.settings.band
        return {
            "alive": self.is_alive(now_ms),
            "received_rate": last.received_rate,
            "processing_rate": self.processing_rate,
            "band": [low, high],
            "band_in_force": [low * scale, high * scale],
            "samples": {"count": last.samples, "above": last.above, "below": last.below},
            "lag": last.lag,
            "last_request": self.request,
        }
