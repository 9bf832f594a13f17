"""What is known of a stage, and when it asks the nodes upstream for less or for more.

A stage samples how many records/s it is sent. At the end of each period, if more than `ratio` of
the samples were out of its band, the side with more of them decides; a tie asks for less.

A Kafka stage pulls: when it slows down its topic fills. So lag asks as well, within the band too:
above `max_lag` and not falling for less, of sources, since stages plan no more than there is room
for (see `batch_limit`); at most EASED_SHARE of it and not growing for more.

Only a stage that holds somebody back asks for more. Without a bound on lag one that has begun to do
so goes on within the band, or the last part of a hold would stay for ever.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from metrics.clock import MS_PER_SECOND
from proxy.state import Json

from .controller import Controller, Direction
from .graph import StageSettings

EASED_SHARE = 0.5
"""Share of `max_lag`: with more lag than this a stage does not ask for more."""

SILENT_MS = 300_000.0
"""A stage without a sign of life for so long is taken for dead."""

YIELD_DECAY = 0.8
"""What the earlier batches of a stage weigh against the latest one, for records out per in."""


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
        """Add a reading; return the rate when it completes an interval, else None."""
        elapsed_ms = now_ms - self._start_ms
        if not total >= self._start_total:  # the first one, or the count began anew
            self._start_total, self._start_ms = total, now_ms
            return None
        if elapsed_ms < self.interval_ms:
            return None
        self.rate = (total - self._start_total) / elapsed_ms * MS_PER_SECOND
        self._start_total, self._start_ms = total, now_ms
        return self.rate


@dataclass(slots=True)
class TriggerPeriod:
    """What a stage saw in one period: samples, and how many of them were outside its band."""

    samples: int = 0
    above: int = 0
    below: int = 0
    sum: float = 0.0
    """Of the samples, records/s."""
    lag: int | None = None
    """The least, in records: right before a batch ends there is most. None when nobody said."""

    @property
    def received_rate(self) -> float | None:
        """Mean of the samples, records/s; None without any."""
        return self.sum / self.samples if self.samples else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the stage asks for, and why; `reason` is a part of a sentence."""

    direction: Direction
    reason: str
    is_of_lag: bool = False
    """Whether it is asked for lag above `max_lag` alone: of sources then."""


class Trigger(Controller):
    """A stage: its readings and requests. Readings are finite numbers of 0 or more."""

    settings: StageSettings

    def __init__(self, settings: StageSettings, max_lag: int | None, now_ms: float) -> None:
        super().__init__(settings)
        self.processing_rate: float | None = None
        """Records/s in its latest batch with rows; above 0."""
        self.request: dict[str, Json] | None = None
        self._was_seen, self._alive_until_ms = False, now_ms + SILENT_MS
        self._read = 0.0
        self._written: dict[str, float] = {}
        self._sampled: tuple[StageSettings, int | None] | None = None
        self.sample_for(settings, max_lag, now_ms)

    def sample_for(self, settings: StageSettings, max_lag: int | None, now_ms: float) -> None:
        """Begin to sample, anew when the settings are different."""
        if self._sampled == (settings, max_lag):
            return
        self._sampled, self._max_lag = (settings, max_lag), max_lag
        self._meter = RateMeter(settings.sampling_interval_ms)
        self.due_ms = now_ms + settings.period_ms
        """When the period ends."""
        self._last, self._period = TriggerPeriod(), TriggerPeriod()
        self._easing = False

    def sample(self, total: float, now_ms: float) -> None:
        """Add a reading of the records sent so far: the log ends, not what the stage fetched."""
        rate = self._meter.read(total, now_ms)
        if rate is not None:
            period, (low, high) = self._period, self.settings.band
            period.samples += 1
            period.sum += rate
            period.above += rate > high * self.scale
            period.below += rate < low * self.scale

    def lag(self, records: int) -> None:
        """Add a reading of the records that wait for the stage."""
        lag = self._period.lag
        self._period.lag = records if lag is None else min(lag, records)

    def seen(self, now_ms: float) -> None:
        """Record a sign of life."""
        self._was_seen, self._alive_until_ms = True, now_ms + SILENT_MS

    def processed(self, records_per_s: float, now_ms: float) -> None:
        """Record how fast the stage worked in its latest batch; 0 is only a sign of life."""
        self.seen(now_ms)
        if records_per_s > 0:
            self.processing_rate = records_per_s

    def ended(self) -> None:
        """Record that the stage has ended and says nothing more, until the next sign of life."""
        self._alive_until_ms = -math.inf

    def is_alive(self, now_ms: float) -> bool:
        """Return whether it has a say. One that was not seen yet has it for SILENT_MS as well."""
        return now_ms <= self._alive_until_ms

    def may_ask(self, now_ms: float) -> bool:
        """Return whether it is alive and was seen."""
        return self._was_seen and self.is_alive(now_ms)

    def converted(self, records_in: int, records_out: Mapping[str, int]) -> None:
        """Record what a batch read, and wrote to each topic."""
        if not records_in:
            return
        self._read = self._read * YIELD_DECAY + records_in
        for topic in self.settings.produces:
            earlier = self._written.get(topic, 0.0)
            self._written[topic] = earlier * YIELD_DECAY + records_out.get(topic, 0)

    def records_out(self, topics: Iterable[str]) -> float:
        """Return how many records it writes to these topics per record read; 1 until known."""
        if not self._read:
            return 1.0
        return sum(self._written.get(topic, 0.0) for topic in topics) / self._read

    def close(self, now_ms: float, *, holds: bool) -> Verdict | None:
        """End the period, and those that went by since; return what to ask for, if anything.

        `holds`: whether a node upstream is held because this stage asked.
        """
        before, self._last, self._period = self._last, self._period, TriggerPeriod()
        period_ms = self.settings.period_ms
        self.due_ms += period_ms * (1 + max(0, (now_ms - self.due_ms) // period_ms))
        self.measured_rate = self._last.received_rate
        self._easing &= holds
        verdict = self._judge(self._last, before.lag, holds=holds)
        if verdict is not None:
            self._easing = verdict.direction is Direction.INCREASE
        return verdict

    def stage_document(self, upstream: Sequence[str], now_ms: float) -> dict[str, Json]:
        """Return the stage as the API shows it."""
        last = self._last
        low, high = self.settings.band
        return self.document() | {
            "upstream": upstream,
            "alive": self.is_alive(now_ms),
            "received_rate": last.received_rate,
            "processing_rate": self.processing_rate,
            "band": [low, high],
            "band_in_force": [low * self.scale, high * self.scale],
            "samples": {"count": last.samples, "above": last.above, "below": last.below},
            "lag": last.lag,
            "last_request": self.request,
        }

    def _judge(
        self, period: TriggerPeriod, lag_before: int | None, *, holds: bool
    ) -> Verdict | None:
        out = period.above + period.below
        is_out = period.samples > 0 and out / period.samples > self.settings.ratio
        if is_out and period.above >= period.below:
            return Verdict(Direction.DECREASE, _band_reason("above", period.above, period))
        lag, max_lag, eased = period.lag, self._max_lag, ""
        if lag is not None and max_lag is not None:
            if lag > max_lag and (lag_before is None or lag >= lag_before):
                reason = f"{lag:,} records wait for it, above max_lag {max_lag:,}, and not fewer"
                return Verdict(Direction.DECREASE, reason, is_of_lag=True)
            is_growing = lag_before is not None and lag > lag_before
            if is_growing or lag > max_lag * EASED_SHARE:
                return None
            eased = f"only {lag:,} records wait for it"
        if not holds:
            return None
        if is_out:
            return Verdict(Direction.INCREASE, _band_reason("below", period.below, period))
        if eased:
            return Verdict(Direction.INCREASE, eased)
        if self._easing and period.samples:
            return Verdict(Direction.INCREASE, "it is sent no more than its band allows")
        return None


def _band_reason(side: str, count: int, period: TriggerPeriod) -> str:
    received = period.received_rate or 0.0
    share = f"{count} of {period.samples} samples are {side} its band"
    return f"{share}, {received:,.1f}/s on average"
