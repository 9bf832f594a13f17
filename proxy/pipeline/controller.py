"""The rate of one node: how requests change it, and how it is kept in the state.

The arithmetic, in milliseconds of delay per record:

- decrease: `t_delay = 1/tps_down - 1/tps_up`, at least 0, plus `t_min_adjust` when the stage asks
  again although the last decrease is in force, and `tps_up' = 1/(1/tps_up + t_delay)`;
- increase: the rate goes up by a step, and with it t_delay down, until the normal rate is back.

A first request of a stage that processes 400 records/s makes 1,000 into 400 with a delay of 1.5 ms,
and asking again makes it 285.7 with 2.5 ms in all.
"""

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from metrics.clock import MS_PER_SECOND
from proxy.state import Json, Record
from proxy.state.journal import RecordFormat

from .graph import MIN_RATE, Node
from .trigger import Direction

IDLE_SHARE = 0.1
"""Share of its normal rate that a node is taken to send at least while it is not held: what sends
little at the moment must not be held to next to nothing when it begins."""

MAX_NUMBER = 1e15
"""No number in a record is larger; well within what a float holds exactly."""


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
    t_delay_ms: float = 0.0
    """Delay per record in force, against the normal rate."""
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


@dataclass(frozen=True, slots=True)
class FlowRequest:
    """What a stage asks of one node upstream."""

    stage: str
    node: str
    direction: Direction
    rate: float
    """What the stage processes, in records/s of the node. To increase: no more than this, may be
    infinite."""
    t_min_adjust_ms: float
    reason: str


@dataclass(frozen=True, slots=True)
class ProposedRate:
    """What a request would make of a node."""

    request: FlowRequest
    rate: float
    """Records/s, from MIN_RATE to the normal rate."""
    t_delay_ms: float
    """What a record is delayed more than now; negative when it is less."""


class Controller:
    """The state of one node, and the largest request of each stage in its present period."""

    __slots__ = ("due_ms", "measured_rate", "node", "period_ms", "requests", "state")

    def __init__(self, node: Node, now_ms: float = 0.0) -> None:
        self.node = node
        self.period_ms = 0.0
        self.due_ms = now_ms
        """When the period ends."""
        self.requests: dict[str, ProposedRate] = {}
        self.measured_rate: float | None = None
        """Records/s that it takes (a stage) or sends (a source), over the last period."""
        self.state = NodeState()

    @property
    def rate(self) -> float:
        """Records/s in force: held to, else measured (IDLE_SHARE), else normal. Above 0."""
        if self.state.rate is not None:
            return self.state.rate
        if self.measured_rate is None:
            return self.node.normal_rate
        return max(self.measured_rate, self.node.normal_rate * IDLE_SHARE)

    def weigh(self, request: FlowRequest) -> ProposedRate:
        """Return what a request would change."""
        rate = self.rate
        if request.direction is Direction.DECREASE:
            state = self.state
            is_again = state.direction is Direction.DECREASE and request.stage in state.holders
            t_delay_ms = delay_ms(rate, request.rate, request.t_min_adjust_ms if is_again else 0.0)
            return ProposedRate(request, self._bounded(slowed(rate, t_delay_ms)), t_delay_ms)
        raised = self._bounded(max(rate, min(rate + self.node.step, request.rate)))
        return ProposedRate(request, raised, MS_PER_SECOND / raised - MS_PER_SECOND / rate)

    def release(self, reason: str) -> ProposedRate:
        """Return what a step up would change that no stage asks for."""
        request = FlowRequest("", self.node.name, Direction.INCREASE, math.inf, 0.0, reason)
        return self.weigh(request)

    def apply(self, change: ProposedRate, asking: frozenset[str], now_s: float) -> bool:
        """Apply a change; return whether the state is different now, and to be stored.

        `asking`: the stages that ask to decrease, also those whose request was dropped for this.
        """
        old, request = self.state, change.request
        rate: float | None = change.rate
        holders = tuple(sorted(asking.union(old.holders)))
        if request.direction is Direction.INCREASE:
            if old.rate is None:
                return False
            if change.rate >= self.node.normal_rate:
                rate, holders = None, ()
            elif rate == old.rate:
                return False
        elif (rate, holders, request.direction) == (old.rate, old.holders, old.direction):
            return False
        t_delay_ms = 0.0 if rate is None else delay_ms(self.node.normal_rate, rate)
        why, by, revision = request.reason, request.stage, old.revision + 1
        self.state = NodeState(
            rate, t_delay_ms, now_s, why, by, request.direction, holders, revision
        )
        return True

    def adjust(self, node: Node, consumers: Collection[str]) -> bool:
        """Follow changed settings; return whether the state is different now."""
        self.node = node
        old = self.state
        if old.rate is None:
            return False
        rate = min(old.rate, node.normal_rate)
        holders = tuple(name for name in old.holders if name in consumers)
        t_delay_ms = delay_ms(node.normal_rate, rate)
        new = replace(old, rate=rate, t_delay_ms=t_delay_ms, holders=holders)
        if new == old:
            return False
        self.state = replace(new, revision=old.revision + 1)
        return True

    def document(self) -> dict[str, Json]:
        """Return the node as the API shows it."""
        state = self.state
        last: dict[str, Json] = {"direction": state.direction, "by": state.by, "reason": state.why}
        return {
            "name": self.node.name,
            "state": "uncontrolled" if state.rate is None else "reduced",
            "rate": state.rate,
            "normal_rate": self.node.normal_rate,
            "measured_rate": self.measured_rate,
            "t_delay_ms": state.t_delay_ms,
            "held_by": state.holders,
            "last_change": {"at_s": state.since_s, **last} if state.revision else None,
        }

    def _bounded(self, rate: float) -> float:
        return max(MIN_RATE, min(rate, self.node.normal_rate))


class _NodeForm(BaseModel):
    """What is read of a record: the delay follows from the rate."""

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
    t_delay_ms = delay_ms(node.normal_rate, rate)
    return NodeState(
        rate, t_delay_ms, form.since_s, form.why, form.by, form.direction, holders, form.revision
    )
