"""The rate of one node: how requests change it, and how it is kept in the state.

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
"""

import math
from collections.abc import Callable, Collection, Set
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from metrics.clock import MS_PER_SECOND
from proxy.state import Json, Record
from proxy.state.journal import RecordFormat

from .graph import MIN_RATE, Node

IDLE_SHARE = 0.1
"""Share of its normal rate that a node is taken to send at least while it is not held: what sends
little at the moment must not be held to next to nothing when it begins."""

MAX_NUMBER = 1e15
"""No number in a record is larger; well within what a float holds exactly."""

NOBODY_LEFT = "no stage that asked to hold it back is alive"


class Direction(StrEnum):
    """What a stage asks for."""

    DECREASE = "decrease"
    INCREASE = "increase"


def delay_ms(tps_up: float, tps_down: float, adjust_ms: float = 0.0) -> float:
    """Return by how much a record of the node upstream, of above 0 records/s, is to be delayed."""
    if tps_down <= 0:
        return math.inf
    return max(0.0, MS_PER_SECOND / tps_down - MS_PER_SECOND / tps_up) + adjust_ms


def slowed(tps_up: float, t_delay_ms: float) -> float:
    """Return the records/s of a node whose records are delayed so much more."""
    return MS_PER_SECOND / (MS_PER_SECOND / tps_up + t_delay_ms)


@dataclass(frozen=True, slots=True)
class NodeState:
    """Whether a node is held, and by whose request and why the rate changed last."""

    rate: float | None = None
    """Records/s that it is held to: reduced. None: uncontrolled."""
    since_s: float = 0.0
    """Wall clock."""
    why: str = ""
    by: str = ""
    """A stage; empty when none asked."""
    direction: Direction | None = None
    holders: tuple[str, ...] = ()
    """Stages that asked to decrease since control began, sorted."""
    revision: int = 0
    """Counts the changes. Of two states of a node the one with more is the later one."""


class FlowRequest(NamedTuple):
    """What a stage asks of a node: the rate that it would have then, of one period the lowest."""

    rate: float
    stage: str
    direction: Direction
    reason: str


class Controller:
    """The state of one node, and the largest request of each stage in its present period."""

    def __init__(self, settings: Node) -> None:
        self.settings = settings
        self.state = NodeState()
        self.measured_rate: float | None = None
        """Records/s that it takes (a stage) or sends (a source), over the last period."""
        self._requests: dict[str, FlowRequest] = {}
        self._period_ms = self._period_end_ms = 0.0

    @property
    def rate(self) -> float:
        """Records/s in force: held to, else measured (IDLE_SHARE), else normal. Above 0."""
        if self.state.rate is not None:
            return self.state.rate
        if self.measured_rate is None:
            return self.settings.normal_rate
        return max(self.measured_rate, self.settings.normal_rate * IDLE_SHARE)

    @property
    def scale(self) -> float:
        """How far it is held, as a share of its normal rate above 0; 1 when it is not."""
        return 1.0 if self.state.rate is None else self.state.rate / self.settings.normal_rate

    def ask(
        self, stage: str, direction: Direction, rate: float, adjust_ms: float, reason: str
    ) -> None:
        """Add a request of a stage; of two of a stage in one period the larger one counts.

        `rate` is what the stage processes, in records/s of the node. To increase: no more than
        this, may be infinite. `adjust_ms` is its `t_min_adjust`.
        """
        now, state = self.rate, self.state
        if direction is Direction.DECREASE:
            is_again = state.direction is direction and stage in state.holders
            new = slowed(now, delay_ms(now, rate, adjust_ms if is_again else 0.0))
        else:
            new = max(now, min(now + self.settings.step, rate))
        new = max(MIN_RATE, min(new, self.settings.normal_rate))
        earlier = self._requests.get(stage)
        if earlier is None or earlier.rate >= new:
            self._requests[stage] = FlowRequest(new, stage, direction, reason)

    def tick(self, now_ms: float, now_s: float, is_alive: Callable[[str], bool]) -> bool:
        """Apply a request if the period is over; return whether the state is different now."""
        if (late_ms := now_ms - self._period_end_ms) < 0:
            return False
        self._period_end_ms += self._period_ms * (1 + late_ms // self._period_ms)
        asked = self._requests
        less = {name: each for name, each in asked.items() if each.direction is Direction.DECREASE}
        if not less:
            voices = {holder for holder in self.state.holders if is_alive(holder)}
            if self.state.rate is None or not voices <= asked.keys():
                asked.clear()
                return False
            if not asked:  # nor is anybody left who might ask
                self.ask("", Direction.INCREASE, math.inf, 0.0, NOBODY_LEFT)
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

    def load(self, state: NodeState, consumers: Collection[str]) -> bool:
        """Take up a state; return whether it is different in this pipeline."""
        self.state = state
        if state.rate is None:
            return False
        rate = min(state.rate, self.settings.normal_rate)
        holders = tuple(name for name in state.holders if name in consumers)
        if (rate, holders) == (state.rate, state.holders):
            return False
        self.state = replace(state, rate=rate, holders=holders, revision=state.revision + 1)
        return True

    def document(self) -> dict[str, Json]:
        """Return the node as the API shows it."""
        state, normal_rate = self.state, self.settings.normal_rate
        last: dict[str, Json] = {"direction": state.direction, "by": state.by, "reason": state.why}
        return {
            "name": self.settings.name,
            "state": "uncontrolled" if state.rate is None else "reduced",
            "rate": state.rate,
            "normal_rate": normal_rate,
            "measured_rate": self.measured_rate,
            "t_delay_ms": 0.0 if state.rate is None else delay_ms(normal_rate, state.rate),
            "held_by": state.holders,
            "last_change": {"at_s": state.since_s, **last} if state.revision else None,
        }

    def _apply(self, chosen: FlowRequest, asking: Set[str], now_s: float) -> bool:
        """Apply a request; `asking` ask to decrease, also those whose request was dropped."""
        old, direction = self.state, chosen.direction
        rate: float | None = chosen.rate
        holders = tuple(sorted({*asking, *old.holders}))
        if direction is Direction.INCREASE and chosen.rate >= self.settings.normal_rate:
            rate, holders = None, ()
        elif rate == old.rate and (
            direction is Direction.INCREASE or (holders, direction) == (old.holders, old.direction)
        ):
            return False
        why, by, revision = chosen.reason, chosen.stage, old.revision + 1
        self.state = NodeState(rate, now_s, why, by, direction, holders, revision)
        return True


class _NodeForm(BaseModel):
    """What is read of a record; earlier programs wrote the delay, too, that follows of the rate."""

    model_config = ConfigDict(strict=True)

    pipeline: str
    node: str
    rate: Annotated[float, Field(ge=MIN_RATE, le=MAX_NUMBER)]
    since_s: Annotated[float, Field(ge=0, le=MAX_NUMBER)]
    why: str
    by: str
    direction: Direction
    holders: tuple[str, ...]
    revision: Annotated[int, Field(ge=1, le=MAX_NUMBER)]


FLOW_RECORDS = RecordFormat("flow", 1, _NodeForm)
"""Keyed by pipeline and node: that of a node that is held. One that is not has no record."""


def to_record(pipeline: str, node: str, state: NodeState) -> Record:
    """Return the record of a node that is held."""
    value: dict[str, Json] = {"pipeline": pipeline, "node": node, **asdict(state)}
    return FLOW_RECORDS.record((pipeline, node), value)


def from_record(record: Record, pipeline: str, node: Node) -> NodeState:
    """Return what `to_record` wrote. Raises ValueError with what is wrong, for people."""
    form = FLOW_RECORDS.read(record)
    if (form.pipeline, form.node) != (pipeline, node.name):
        raise ValueError("it belongs to another node than its key says")
    rate, holders = min(form.rate, node.normal_rate), tuple(sorted(form.holders))
    return NodeState(rate, form.since_s, form.why, form.by, form.direction, holders, form.revision)
