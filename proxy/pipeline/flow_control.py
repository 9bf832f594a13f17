"""Flow control of one pipeline: readings come in, rates of nodes and records of state come out.

A stage that is itself held processes no more than it may, so a hold goes on up the pipeline, one
stage in a period, and its band shrinks with its rate. A stage that has ended, or gives no sign of
life for SILENT_MS, asks nothing more; what was held before a restart stays so for SILENT_MS.

The nodes that feed one stage share what it processes by max-min fairness, weighted with their
normal rates: nobody may send a larger part of its normal rate than the level at which all together
send as much as the stage processes, and who sends less than that is left alone. In proportion to
what they send now, a node that another stage holds already would be held twice.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from structlog import get_logger

from proxy.state import Json, Record
from proxy.state.journal import Journal

from .graph import PipelineGraph, StageSettings
from .ledger import WallTime
from .nodes import (
    FLOW_RECORDS,
    Controller,
    Direction,
    NodeState,
    Source,
    Stage,
    Verdict,
    from_record,
    to_record,
)

MAX_EVENTS = 100

SAME_LEVEL = 1e-6
"""Parts of the normal rate that differ by less than this share are the same."""

ROOM_SHARE = 0.01
"""Share of its rate by which what a held stage is sent must be less before it asks for more."""

_log = get_logger(__name__)

Upstream = Sequence[tuple[Controller, float]]
"""Nodes that feed a stage, each with how many records the stage is sent for one of the node."""


class PipelineFlow:
    """The nodes of one pipeline, and their records.

    The readings of each stage go to it in `stages`, as often as they are known.
    """

    def __init__(self, graph: PipelineGraph, now_ms: float, now_s: float) -> None:
        self.name = graph.settings.name
        self._wall = WallTime.at(now_ms, now_s)
        self.journal = Journal(self._record, self._key)
        self.nodes: Mapping[str, Stage | Source] = {}
        """What can be held, by name."""
        self.stages: Mapping[str, Stage] = {}
        self.sources: Mapping[str, Source] = {}
        """Those that can be held."""
        self._events: deque[dict[str, Json]] = deque(maxlen=MAX_EVENTS)
        self.update(graph, now_ms)

    @property
    def prefix(self) -> str:
        """What the keys of its records begin with."""
        return f"{FLOW_RECORDS.key(self.name)}/"

    def arrived(self, totals: Mapping[str, float], now_ms: float) -> None:
        """Add readings of the records that arrived so far, by topic: those of sources count."""
        for source in self.sources.values():
            source.arrived(totals, now_ms)

    def state_of(self, node: str) -> NodeState | None:
        """Return how a node is held; None when it is not."""
        controller = self.nodes.get(node)
        return None if controller is None or controller.state.rate is None else controller.state

    def tick(self, now_ms: float) -> None:
        """End the periods that are due; call it at least once in the shortest."""
        now_s = self._wall.to_s(now_ms)
        verdicts: dict[str, Verdict] = {}
        for name, stage in self.stages.items():
            if now_ms < stage.due_ms:
                continue
            verdict = stage.close(now_ms, holds=bool(self._held_for(name)))
            if verdict is not None and stage.may_ask(now_ms):
                verdicts[name] = verdict
        for name, verdict in verdicts.items():  # with all rates as they are measured now
            self._ask(name, verdict, now_ms)
        for name, node in self.nodes.items():
            before = node.state.rate
            if node.tick(now_ms, now_s, lambda name: self.stages[name].is_alive(now_ms)):
                self.journal.mark_changed(name)
                self._event(name, node.state.rate, node.state.why, now_ms)
                if node.state.rate != before:
                    self._log_rate(name, node.state.rate, node.state.why)

    def changes(self) -> tuple[list[Record], list[str]]:
        """Return the records to write and the keys to delete since the last call."""
        return self.journal.take()

    def load(self, records: Iterable[Record], now_ms: float) -> list[str]:
        """Load all records under `prefix`, at any time; return what was not taken, and why.

        Records newer than what is in force count; older and missing ones are written again. Those
        of nodes that are gone and damaged ones are deleted, those of a newer program left alone.
        """
        refused = []
        names = {self._key(name): name for name in self.nodes}
        changed = {name for name in self.nodes if self.state_of(name) is not None}
        for record in records:
            name = names.get(record.key)
            if name is None:
                refused.append(f"{record.key}: the pipeline has no such node; deleted")
                self.journal.mark_deleted(record.key)
            elif record.version != FLOW_RECORDS.version:
                refused.append(f"{record.key}: version {record.version} is not known here")
                changed.discard(name)
            else:
                try:
                    is_same = self._load_node(name, record)
                except ValueError as error:
                    refused.append(f"{record.key}: {error}; deleted")
                    is_same = False
                (changed.discard if is_same else changed.add)(name)
        for name in sorted(changed):
            self.journal.mark_changed(name)
        for message in refused:
            self._event("", None, message, now_ms)
        return refused

    def update(self, graph: PipelineGraph, now_ms: float) -> None:
        """Follow a reload; nodes that remain keep their state."""
        self.graph, max_lag = graph, graph.settings.max_lag
        gone = dict(self.nodes)
        nodes: dict[str, Stage | Source] = {}
        changed: list[str] = []
        for name, settings in graph.nodes.items():
            controller = gone.get(name)
            if controller is not None and type(controller.settings) is type(settings):
                del gone[name]
            elif isinstance(settings, StageSettings):
                controller = Stage(settings, max_lag, now_ms)
            else:
                controller = Source(settings)
            if controller.follow(settings, graph.downstream[name], self._period_ms(name), now_ms):
                changed.append(name)
                self.journal.mark_changed(name)
            nodes[name] = controller
            if isinstance(controller, Stage):
                controller.sample_for(graph.stages[name], max_lag, now_ms)
        self.nodes = nodes
        self.stages = {n: each for n, each in nodes.items() if isinstance(each, Stage)}
        self.sources = {n: each for n, each in nodes.items() if isinstance(each, Source)}
        changes: list[tuple[str, float | None, str]] = []
        for name, controller in gone.items():
            self.journal.mark_removed(name)
            if controller.state.rate is not None:
                changes.append((name, None, "it is no longer held in this pipeline"))
        for name in sorted(changed):
            changes.append((name, nodes[name].state.rate, "the pipeline's settings changed"))
        for change in changes:
            self._event(*change, now_ms)
            self._log_rate(*change)

    def document(self, now_ms: float) -> dict[str, Json]:
        """Return the pipeline as the API shows it: JSON, times in wall-clock seconds."""
        graph = self.graph
        return {
            "name": self.name,
            "at_s": self._wall.to_s(now_ms),
            "hold_producers": graph.settings.hold_producers,
            "max_lag": graph.settings.max_lag,
            "stages": [
                self.stages[name].stage_document(graph.upstream[name], now_ms)
                for name in graph.order
            ],
            "sources": [
                (self.nodes.get(each.name) or Controller(each)).document()
                for each in graph.settings.sources
            ],
            "refused_readings": 0,  # of earlier versions, for those who read the fields
            "unknown": [],
            "events": list(self._events),
        }

    def _key(self, node: str) -> str:
        return FLOW_RECORDS.key(self.name, node)

    def _record(self, node: str) -> Record | None:
        state = self.state_of(node)
        return None if state is None else to_record(self.name, node, state)

    def _load_node(self, name: str, record: Record) -> bool:
        """Load a later state; return whether the record says what is in force then."""
        controller = self.nodes[name]
        state = from_record(record, self.name, controller.settings)
        if state.revision <= controller.state.revision:
            return state.revision == controller.state.revision
        before = controller.state.rate
        is_same = not controller.load(state, self.graph.downstream[name])
        if controller.state.rate != before:
            self._log_rate(name, controller.state.rate, controller.state.why)
        return is_same

    def _period_ms(self, node: str) -> float:
        # A stage that nobody consumes from any more may still have to be released.
        consumers = self.graph.downstream[node] or (node,)
        return max(self.graph.stages[name].period_ms for name in consumers)

    def _held_for(self, stage: str) -> list[str]:
        """Return the nodes upstream that are held because a stage asked."""
        nodes, controllers = self.graph.upstream[stage], self.nodes
        return [n for n in nodes if n in controllers and stage in controllers[n].state.holders]

    def _ask(self, name: str, verdict: Verdict, now_ms: float) -> None:
        """Make a request to each node upstream that can be held and is to blame."""
        controllers, stage = self.nodes, self.stages[name]
        own_rate = stage.state.rate or math.inf
        processing_rate = stage.processing_rate or stage.settings.band[1] * stage.scale
        upstream = [
            (node, node.records_out(self.graph.topics_between(node.name, name)))
            for node in map(controllers.get, self.graph.upstream[name])
            if node is not None
        ]
        if verdict.direction is Direction.DECREASE:
            more, rates = "less", fair_rates(upstream, min(own_rate, processing_rate))
            if verdict.is_of_lag:
                # Stages are not let plan more than there is room for; sources cannot be stopped.
                rates = {node: rates[node] for node in rates if node not in self.stages}
        else:
            more, rates = "more", raised_rates(upstream, own_rate, self._held_for(name))
        if not rates:
            return
        reason = f"{name} asks for {more}: {verdict.reason}; it processes {processing_rate:,.1f}/s"
        for node, rate in rates.items():
            adjust_ms = stage.settings.t_min_adjust_ms
            controllers[node].ask(name, verdict.direction, rate, adjust_ms, reason)
        stage.request = {
            "at_s": self._wall.to_s(now_ms),
            "direction": verdict.direction,
            "processing_rate": processing_rate,
            "reason": verdict.reason,
            "asked": list(rates),
        }

    def _event(self, node: str, rate: float | None, reason: str, now_ms: float) -> None:
        at_s = self._wall.to_s(now_ms)
        self._events.append({"at_s": at_s, "node": node, "rate": rate, "reason": reason})

    def _log_rate(self, node: str, rate: float | None, reason: str) -> None:
        _log.info("pipeline", pipeline=self.name, node=node, rate=rate, reason=reason)


def fair_rates(upstream: Upstream, capacity: float) -> dict[str, float]:
    """Return to which rates nodes are to slow down so that the stage gets `capacity`.

    When all together send less already, those at the highest level are asked for what they send.
    """
    # Who sends nothing to the stage is to blame only when nobody is known to send anything.
    sending = [(node, records) for node, records in upstream if records > 0]
    if not sending:
        return {node.name: capacity for node, _ in upstream}
    sending.sort(key=lambda each: each[0].level)
    weight = sum(node.normal_rate * records for node, records in sending)
    left = capacity
    for index, (node, records) in enumerate(sending):
        level = left / weight
        if node.level > level * (1 - SAME_LEVEL):
            return {each.name: each.normal_rate * level for each, _ in sending[index:]}
        left -= node.rate * records
        weight -= node.normal_rate * records
    highest = sending[-1][0].level * (1 - SAME_LEVEL)
    return {node.name: node.rate for node, _ in sending if node.level >= highest}


def raised_rates(upstream: Upstream, capacity: float, held: Collection[str]) -> dict[str, float]:
    """Return up to which rates the held nodes may speed up; `capacity` may be infinite."""
    sent = sum(node.rate * records for node, records in upstream)
    if sent >= capacity * (1 - ROOM_SHARE):
        return {}
    more = capacity / sent if sent else math.inf
    return {node.name: node.rate * more for node, _ in upstream if node.name in held}
