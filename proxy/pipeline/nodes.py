"""What is known of a node, and its rate: what stages ask of it, and how it is kept in the state.

The arithmetic, in milliseconds of delay per record:

- decrease: `t_delay = 1/tps_down - 1/tps_up`, at least 0, plus `t_min_adjust` when the stage asks
  again although the last decrease is in force, and `tps_up' = 1/(1/tps_up + t_delay)`;
- increase: the rate goes up by a step, and with it t_delay down, until the normal rate is back.

A first request of a stage that processes 400 records/s makes 1,000 into 400 with a delay of 1.5 ms,
and asking again makes it 285.7 with 2.5 ms in all. Of several requests in a period the one that
changes the rate most is applied:

| at the end of a period | uncontrolled | reduced |
|---|---|---|
| a stage asks for less | reduced, by the largest delay asked for | the same |
| all living stages that hold it ask for more | - | raised, by the smallest step asked for |
| no stage that holds it is alive | - | raised by a step |
| anything else | - | - |

Raised to its normal rate a node is uncontrolled. Whoever asked for less holds it until then.

A stage samples how many records/s it is sent. At the end of each period, if more than `ratio` of
the samples were out of its band, the side with more of them decides; a tie asks for less.

A Kafka stage pulls: when it slows down its topic fills. So lag asks as well, within the band too:
above `max_lag` and not falling for less, of sources, since stages plan no more than there is room
for (see `batch_limit`); at most EASED_SHARE of it and not growing for more.

Only a stage that holds somebody back asks for more. Without a bound on lag one that has begun to do
so goes on within the band, or the last part of a hold would stay for ever.

The nodes that feed one stage share what it processes by max-min fairness, weighted with their
normal rates: nobody may send a larger part of its normal rate than the level at which all together
send as much as the stage processes, and who sends less than that is left alone. In proportion to
what they send now, a node that another stage holds already would be held twice.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from operator import attrgetter
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from metrics.clock import MS_PER_SECOND
from proxy.quota.shares import Claim, divide_fairly
from proxy.state import Json, Record
from proxy.state.state_records import RecordFormat
from proxy.wire.topic_partition import TopicPartition

from .batch_limit import BatchLimit, UnreportedBatchCounter
from .graph import MIN_RATE, Node, SourceProducerSettings, StageSettings

IDLE_SHARE = 0.1
"""Share of its normal rate that a node is taken to send at least while it is not held: what sends
little at the moment must not be held to next to nothing when it begins."""

MAX_NUMBER = 1e15
"""No number in a record is larger; well within what a float holds exactly."""

EASED_SHARE = 0.5
"""Share of `max_lag`: with more lag than this a stage does not ask for more."""

SILENT_MS = 300_000.0
"""A stage without a sign of life for so long is taken for dead."""

SIZE_DECAY = 0.9
"""Weight of what a source sent before in the size of its records, for each request."""

YIELD_DECAY = 0.8
"""What the earlier batches of a stage weigh against the latest one, for records out per in."""

SAME_LEVEL = 1e-6
"""Parts of the normal rate that differ by less than this share are the same."""

ROOM_SHARE = 0.01
"""Share of its rate by which what a held stage is sent must be less before it asks for more."""

NOBODY_LEFT = "no stage that asked to hold it back is alive"


class RateChangeDirection(StrEnum):
    """What a stage asks for."""

    DECREASE = "decrease"
    INCREASE = "increase"


def delay_ms(tps_up: float, tps_down: float, adjust_ms: float = 0.0) -> float:
    """Return by how much a record of the node upstream, of above 0 records/s, is to be delayed."""
    if tps_down <= 0:
        return math.inf
    return max(0.0, MS_PER_SECOND / tps_down - MS_PER_SECOND / tps_up) + adjust_ms


def rate_with_added_delay(tps_up: float, t_delay_ms: float) -> float:
    """Return the records/s of a node whose records are delayed so much more."""
    return MS_PER_SECOND / (MS_PER_SECOND / tps_up + t_delay_ms)


@dataclass(frozen=True, slots=True)
class NodeHold:
    """Whether a node is held, and by whose request and why the rate changed last; or is to be."""

    rate: float | None = None
    """Records/s that it is held to: reduced. None: uncontrolled."""
    since_s: float = 0.0
    """Wall clock."""
    why: str = ""
    by: str = ""
    """A stage; empty when none asked."""
    direction: RateChangeDirection | None = None
    holders: tuple[str, ...] = ()
    """Stages that asked to decrease since control began, sorted."""
    revision: int = 0
    """Counts the changes. Of two states of a node the one with more is the later one."""


class _NodeForm(BaseModel):
    """What is read of a record; earlier programs wrote the delay, too, that follows of the rate."""

    model_config = ConfigDict(strict=True)

    pipeline: str
    node: str
    rate: Annotated[float, Field(ge=MIN_RATE, le=MAX_NUMBER)]
    since_s: Annotated[float, Field(ge=0, le=MAX_NUMBER)]
    why: str
    by: str
    direction: RateChangeDirection
    holders: tuple[str, ...]
    revision: Annotated[int, Field(ge=1, le=MAX_NUMBER)]


FLOW_RECORDS = RecordFormat("flow", 1, _NodeForm)
"""Keyed by pipeline and node: that of a node that is held. One that is not has no record."""


class NodeController:
    """The state of one node, and the largest request of each stage in its present period."""

    def __init__(self, settings: Node, pipeline: str = "") -> None:
        self.settings = settings
        self.pipeline, self.name = pipeline, settings.name
        self.measured_rate: float | None = None
        """Records/s that it takes (a stage) or sends (a source), over the last period."""
        self.ceiling: float | None = None
        """Records/s when its batches are held to less than its normal rate; 0 lets none begin."""
        self._requests: dict[str, NodeHold] = {}
        """What it would be by the largest request of each stage in this period."""
        self.begin()

    def begin(self) -> None:
        """Begin uncontrolled, with a period from the next `follow` on."""
        self.state = NodeHold()
        self._period_ms = self._period_end_ms = 0.0

    @property
    def normal_rate(self) -> float:
        """Records/s while nobody holds it."""
        return self.settings.normal_rate

    @property
    def held(self) -> list[float]:
        """What it is held to, by requests and by what waits, in records/s; empty when it is not."""
        return [each for each in (self.state.rate, self.ceiling) if each is not None]

    @property
    def level(self) -> float:
        """Which part of its normal rate it has."""
        return self.rate / self.normal_rate

    @property
    def rate(self) -> float:
        """Records/s in force: held to, else measured (IDLE_SHARE), else normal. Above 0."""
        if self.state.rate is not None:
            return self.state.rate
        if self.measured_rate is None:
            return self.normal_rate
        return max(self.measured_rate, self.normal_rate * IDLE_SHARE)

    @property
    def scale(self) -> float:
        """How far it is held, as a share of its normal rate above 0; 1 when it is not."""
        return 1.0 if self.state.rate is None else self.state.rate / self.normal_rate

    def ask(
        self, stage: str, direction: RateChangeDirection, rate: float, adjust_ms: float, reason: str
    ) -> None:
        """Add a request of a stage; of two of a stage in one period the larger one counts.

        `rate` is what the stage processes, in records/s of the node. To increase: no more than
        this, may be infinite. `adjust_ms` is its `t_min_adjust`.
        """
        now, state = self.rate, self.state
        if direction is RateChangeDirection.DECREASE:
            is_again = state.direction is direction and stage in state.holders
            new = rate_with_added_delay(now, delay_ms(now, rate, adjust_ms if is_again else 0.0))
        else:
            new = max(now, min(now + self.settings.step, rate))
        new = max(MIN_RATE, min(new, self.normal_rate))
        asked = NodeHold(new, 0.0, reason, stage, direction)
        pair = asked, self._requests.get(stage, asked)
        self._requests[stage] = min(pair, key=attrgetter("rate"))

    def tick(self, now_ms: float, now_s: float, is_alive: Callable[[str], bool]) -> bool:
        """Apply a request if the period is over; return whether the state is different now."""
        if (late_ms := now_ms - self._period_end_ms) < 0:
            return False
        self._period_end_ms += self._period_ms * (1 + late_ms // self._period_ms)
        asked = self._requests
        less = {
            name: each
            for name, each in asked.items()
            if each.direction is RateChangeDirection.DECREASE
        }
        if not less:
            voices = {holder for holder in self.state.holders if is_alive(holder)}
            if self.state.rate is None or not voices <= asked.keys():
                asked.clear()
                return False
            if not asked:  # nor is anybody left who might ask
                self.ask("", RateChangeDirection.INCREASE, math.inf, 0.0, NOBODY_LEFT)
        is_changed = self._apply(
            min((less or asked).values(), key=attrgetter("rate")), less.keys(), now_s
        )
        asked.clear()
        return is_changed

    def follow(
        self, settings: Node, consumers: Collection[str], period_ms: float, now_ms: float
    ) -> bool:
        """Follow changed settings; return whether the state is different now.

        `period_ms` is the longest one of the stages that consume from it. What was asked for in
        the present period is forgotten.
        """
        self.settings = settings
        self._requests.clear()
        if self._period_ms != period_ms:
            self._period_ms, self._period_end_ms = period_ms, now_ms + period_ms
        return self.load(self.state, consumers)

    def load(self, state: NodeHold, consumers: Collection[str]) -> bool:
        """Take up a state; return whether it is different in this pipeline."""
        self.state = state
        if state.rate is None:
            return False
        rate = min(state.rate, self.normal_rate)
        holders = tuple(name for name in state.holders if name in consumers)
        if (rate, holders) == (state.rate, state.holders):
            return False
        self.state = replace(state, rate=rate, holders=holders, revision=state.revision + 1)
        return True

    def key(self) -> str:
        """Return the key of its record."""
        return FLOW_RECORDS.key(self.pipeline, self.name)

    def record(self) -> Record | None:
        """Return its record; None when it is not held."""
        if self.state.rate is None:
            return None
        whose = {"pipeline": self.pipeline, "node": self.name}
        return FLOW_RECORDS.record(tuple(whose.values()), {**whose, **asdict(self.state)})

    def read(self, record: Record) -> NodeHold:
        """Return what a record of it says. Raises ValueError with what is wrong, for people."""
        form = dict(FLOW_RECORDS.read(record))
        if (form.pop("pipeline"), form.pop("node")) != (self.pipeline, self.name):
            raise ValueError("it belongs to another node than its key says")
        rate, holders = min(form["rate"], self.normal_rate), tuple(sorted(form["holders"]))
        return NodeHold(**form | {"rate": rate, "holders": holders})

    def _apply(self, chosen: NodeHold, asking: Set[str], now_s: float) -> bool:
        """Apply a request; `asking` ask to decrease, also those whose request was dropped."""
        old, direction = self.state, chosen.direction
        rate, holders = chosen.rate, tuple(sorted({*asking, *old.holders}))
        # It is never above.
        if direction is RateChangeDirection.INCREASE and rate == self.normal_rate:
            rate, holders = None, ()
        elif rate == old.rate and (
            direction is RateChangeDirection.INCREASE
            or (holders, direction) == (old.holders, old.direction)
        ):
            return False
        number = old.revision + 1
        self.state = replace(chosen, rate=rate, holders=holders, since_s=now_s, revision=number)
        return True


@dataclass(slots=True, eq=False)
class RateMeter:
    """Turns a count that only grows into rates over an interval."""

    interval_ms: float
    rate: float | None = None
    """Per second, over the last whole interval; None before the first."""
    _start_total: float = math.nan
    _start_ms: float = 0.0

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
class BandSamples:
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
class RateChangeRequest:
    """What the stage asks for, and why; `reason` is a part of a sentence."""

    direction: RateChangeDirection
    reason: str
    is_of_lag: bool = False
    """Whether it is asked for lag above `max_lag` alone: of sources then."""


class SourceProducer(NodeController):
    """A producer: what arrives in its topics is what it sends."""

    settings: SourceProducerSettings

    def __init__(self, settings: SourceProducerSettings, pipeline: str = "") -> None:
        super().__init__(settings, pipeline)
        self._meters: dict[str, RateMeter] = {}
        """By topic."""
        self._bytes = self._records = 0.0
        """What it has sent, what is long ago with less weight."""
        self.entities: set[str] = set()
        """Those whose produce quota is lowered."""

    def follow(
        self, settings: Node, consumers: Collection[str], period_ms: float, now_ms: float
    ) -> bool:
        """Follow changed settings as any node; other topics are measured anew."""
        is_changed = super().follow(settings, consumers, period_ms, now_ms)
        kept = {t: each for t, each in self._meters.items() if each.interval_ms == period_ms}
        self._meters = {t: kept.get(t) or RateMeter(period_ms) for t in settings.produces}
        return is_changed

    @property
    def record_bytes(self) -> float | None:
        """Size of its records lately; None until known."""
        return self._bytes / self._records if self._records else None

    def sent(self, count: int, records: int) -> None:
        """Record that it has sent so many bytes for so many records, 1 or more."""
        self._bytes = self._bytes * SIZE_DECAY + count
        self._records = self._records * SIZE_DECAY + records

    def arrived(self, totals: Mapping[str, float], now_ms: float) -> None:
        """Add readings of the records that arrived so far, by topic."""
        for topic in self._meters.keys() & totals.keys():
            self._meters[topic].read(totals[topic], now_ms)
        known = [each.rate for each in self._meters.values() if each.rate is not None]
        self.measured_rate = sum(known) if known else None

    def records_out(self, topics: Iterable[str]) -> float:
        """Return which share of its records it sends to these topics; 1 until known."""
        if not self.measured_rate:
            return 1.0
        return sum(self._meters[topic].rate or 0.0 for topic in topics) / self.measured_rate


class Stage(NodeController):
    """A stage: its readings and requests. Readings are finite numbers of 0 or more."""

    settings: StageSettings

    def __init__(
        self, settings: StageSettings, max_lag: int | None, now_ms: float, pipeline: str = ""
    ) -> None:
        super().__init__(settings, pipeline)
        self.processing_rate: float | None = None
        """Records/s in its latest batch with rows; above 0."""
        self.last_request: dict[str, Json] | None = None
        self.plans: dict[str, UnreportedBatchCounter] = defaultdict(UnreportedBatchCounter)
        """By client."""
        self.waits: BatchLimit | None = None
        """What its `ceiling` is for; None: a request of a stage after it, or it has none."""
        self.was_seen, self._alive_until_ms = False, now_ms + SILENT_MS
        self.unread: dict[TopicPartition, tuple[int, int]] = {}
        """Offsets between which stages have written, and it is not known to have completed."""
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
        self.last, self._period = BandSamples(), BandSamples()
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
        self.was_seen, self._alive_until_ms = True, now_ms + SILENT_MS

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

    def converted(self, records_in: int, records_out: Mapping[str, int]) -> None:
        """Record what a batch with rows read, and wrote to each topic."""
        self._read = self._read * YIELD_DECAY + records_in
        for topic in self.settings.produces:
            earlier = self._written.get(topic, 0.0)
            self._written[topic] = earlier * YIELD_DECAY + records_out.get(topic, 0)

    def records_out(self, topics: Iterable[str]) -> float:
        """Return how many records it writes to these topics per record read; 1 until known."""
        if not self._read:
            return 1.0
        return sum(self._written.get(topic, 0.0) for topic in topics) / self._read

    def close(self, now_ms: float, *, holds: bool) -> RateChangeRequest | None:
        """End the period, and those that went by since; return what to ask for, if anything.

        `holds`: whether a node upstream is held because this stage asked.
        """
        before, self.last, self._period = self.last, self._period, BandSamples()
        period_ms = self.settings.period_ms
        self.due_ms += period_ms * (1 + max(0, (now_ms - self.due_ms) // period_ms))
        self.measured_rate = self.last.received_rate
        self._easing &= holds
        request = self._judge(self.last, before.lag, holds=holds)
        if request is not None:
            self._easing = request.direction is RateChangeDirection.INCREASE
        return request

    def _judge(
        self, period: BandSamples, lag_before: int | None, *, holds: bool
    ) -> RateChangeRequest | None:
        out = period.above + period.below
        is_out = period.samples > 0 and out / period.samples > self.settings.ratio
        if is_out and period.above >= period.below:
            return RateChangeRequest(
                RateChangeDirection.DECREASE, _band_reason("above", period.above, period)
            )
        lag, max_lag, eased = period.lag, self._max_lag, ""
        if lag is not None and max_lag is not None:
            if lag > max_lag and (lag_before is None or lag >= lag_before):
                reason = f"{lag:,} records wait for it, above max_lag {max_lag:,}, and not fewer"
                return RateChangeRequest(RateChangeDirection.DECREASE, reason, is_of_lag=True)
            is_growing = lag_before is not None and lag > lag_before
            if is_growing or lag > max_lag * EASED_SHARE:
                return None
            eased = f"only {lag:,} records wait for it"
        if not holds:
            return None
        if is_out:
            return RateChangeRequest(
                RateChangeDirection.INCREASE, _band_reason("below", period.below, period)
            )
        if eased:
            return RateChangeRequest(RateChangeDirection.INCREASE, eased)
        if self._easing and period.samples:
            return RateChangeRequest(
                RateChangeDirection.INCREASE, "it is sent no more than its band allows"
            )
        return None


def _band_reason(side: str, count: int, period: BandSamples) -> str:
    received = period.received_rate or 0.0
    share = f"{count} of {period.samples} samples are {side} its band"
    return f"{share}, {received:,.1f}/s on average"


Upstream = Sequence[tuple[NodeController, float]]
"""Nodes that feed a stage, each with how many records the stage is sent for one of the node."""


def lowered_rates(upstream: Upstream, capacity: float) -> dict[str, float]:
    """Return to which rates nodes are to slow down so that the stage gets `capacity`.

    When all together send less already, those at the highest level are asked for what they send.
    """
    # Who sends nothing to the stage is to blame only when nobody is known to send anything.
    sending = [(node, records) for node, records in upstream if records > 0]
    if not sending:
        return {node.name: capacity for node, _ in upstream}
    claims = [Claim(node.normal_rate * n, most=node.rate * n) for node, n in sending]
    shares = divide_fairly(capacity, claims)
    level = max(share / each.weight for share, each in zip(shares, claims, strict=True))
    return {
        node.name: share / records
        for (node, records), share in zip(sending, shares, strict=True)
        if node.level >= level * (1 - SAME_LEVEL)
    }


def raised_rates(upstream: Upstream, capacity: float, held: Collection[str]) -> dict[str, float]:
    """Return up to which rates the held nodes may speed up; `capacity` may be infinite."""
    sent = sum(node.rate * records for node, records in upstream)
    if sent >= capacity * (1 - ROOM_SHARE):
        return {}
    more = capacity / sent if sent else math.inf
    return {node.name: node.rate * more for node, _ in upstream if node.name in held}
