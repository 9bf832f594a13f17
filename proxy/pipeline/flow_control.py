"""Flow control of one pipeline: readings come in, rates of nodes and records of state come out.

A stage that is itself held processes no more than it may, so a hold goes on up the pipeline, one
stage in a period, and its band shrinks with its rate. A stage that has ended, or gives no sign of
life for SILENT_MS, asks nothing more; what was held before a restart stays so for SILENT_MS.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from proxy.state import Json, Record

from .controller import FLOW_RECORDS, Controller, FlowRequest, NodeState
from .coordinator import Coordinator
from .fair_rates import UpstreamRate, fair_rates, raised_rates
from .graph import Node, PipelineGraph
from .trigger import Direction, RateMeter, Trigger, Verdict
from .wall_time import WallTime

MAX_EVENTS = 100


@dataclass(frozen=True, slots=True)
class RateChange:
    """A rate of a node from now on."""

    node: str
    """Name of a stage, or client id of a source."""
    rate: float | None
    """Records/s; None: uncontrolled."""
    reason: str


class PipelineFlow:
    """Triggers, controllers and coordinator of one pipeline, and their state.

    The readings of each stage go to its trigger in `stages`, as often as they are known.
    """

    def __init__(self, graph: PipelineGraph, now_ms: float, now_s: float) -> None:
        self._graph = graph
        self._wall = WallTime.at(now_ms, now_s)
        self._coordinator = Coordinator(graph, now_ms)
        self.stages: dict[str, Trigger] = {}
        self._topics: dict[str, RateMeter] = {}
        self._events: deque[dict[str, Json]] = deque(maxlen=MAX_EVENTS)
        self._follow_graph(now_ms)

    @property
    def prefix(self) -> str:
        """What the keys of its records begin with."""
        return f"{FLOW_RECORDS.key(self._graph.settings.name)}/"

    def arrived(self, topic: str, records_total: float, now_ms: float) -> None:
        """Add a reading of the records that arrived in a topic of a source so far."""
        if topic in self._topics:
            self._topics[topic].read(records_total, now_ms)

    def state_of(self, node: str) -> NodeState | None:
        """Return how a node is held; None when it is not."""
        controller = self._coordinator.controllers.get(node)
        return None if controller is None or controller.state.rate is None else controller.state

    def tick(self, now_ms: float) -> list[RateChange]:
        """End the periods that are due, at least once in the shortest; return changed rates."""
        self._measure()
        controllers = self._coordinator.controllers
        verdicts: dict[str, Verdict] = {}
        for name, trigger in self.stages.items():
            if now_ms < trigger.due_ms:
                continue
            verdict = trigger.close(now_ms)
            controllers[name].measured_rate = trigger.last.received_rate
            if verdict is not None and trigger.may_ask(now_ms):
                verdicts[name] = verdict
        for name, verdict in verdicts.items():  # with all rates as they are measured now
            self._ask(name, verdict, now_ms)
        before = {name: item.state.rate for name, item in controllers.items()}
        decided = self._coordinator.tick(
            now_ms, self._wall.to_s(now_ms), lambda name: self.stages[name].is_alive(now_ms)
        )
        if decided:
            self._follow_controllers()
        changes = []
        for name in decided:
            state = controllers[name].state
            change = RateChange(name, state.rate, state.why)
            self._event(change, now_ms)
            if state.rate != before[name]:
                changes.append(change)
        return changes

    def changes(self) -> tuple[list[Record], list[str]]:
        """Return the records to write and the keys to delete since the last call."""
        return self._coordinator.journal.take()

    def load(self, records: Iterable[Record], now_ms: float) -> list[str]:
        """Load all records under `prefix`, at any time; return what was not taken, and why.

        Records newer than what is in force count; older and missing ones are written again. Those
        of nodes that are gone and damaged ones are deleted, those of a newer program left alone.
        """
        refused = self._coordinator.load(records)
        self._follow_controllers()
        for message in refused:
            self._event(RateChange("", None, message), now_ms)
        return refused

    def update(self, graph: PipelineGraph, now_ms: float) -> list[RateChange]:
        """Follow a reload; nodes that remain keep their state. Return the rates that changed."""
        self._graph = graph
        changed, gone = self._coordinator.update(graph, now_ms)
        self._follow_graph(now_ms)
        why = "it is no longer held in this pipeline"
        held = (each for each in gone if each.state.rate is not None)
        changes = [RateChange(each.node.name, None, why) for each in held]
        for name in sorted(changed):
            rate = self._coordinator.controllers[name].state.rate
            changes.append(RateChange(name, rate, "the pipeline's settings changed"))
        for change in changes:
            self._event(change, now_ms)
        return changes

    def document(self, now_ms: float) -> dict[str, Json]:
        """Return the pipeline as the API shows it: JSON, times in wall-clock seconds."""
        graph, controllers = self._graph, self._coordinator.controllers
        return {
            "name": graph.settings.name,
            "at_s": self._wall.to_s(now_ms),
            "hold_producers": graph.settings.hold_producers,
            "max_lag": graph.settings.max_lag,
            "stages": [
                controllers[name].document()
                | {"upstream": list(graph.upstream_of(name))}
                | self.stages[name].document(now_ms)
                for name in graph.order
            ],
            "sources": [
                (
                    controllers.get(each.client_id)
                    or Controller(Node(each.client_id, True, each.normal_rate, each.step))
                ).document()
                for each in graph.settings.sources
            ],
            "refused_readings": 0,  # of earlier versions, for those who read the fields
            "unknown": [],
            "events": list(self._events),
        }

    def _follow_graph(self, now_ms: float) -> None:
        """Make what the graph asks for: triggers and meters; those that remain are kept."""
        graph, max_lag = self._graph, self._graph.settings.max_lag
        old, self.stages = self.stages, {}
        for name, settings in graph.stages.items():
            trigger = self.stages[name] = old.get(name) or Trigger(settings, max_lag, now_ms)
            trigger.update(settings, max_lag, now_ms)
        self._follow_controllers()
        meters, self._topics = self._topics, {}
        for source in graph.settings.sources:
            stages = graph.downstream_of(source.client_id)
            period_ms = max(graph.stages[name].period_ms for name in stages)
            for topic in source.produces:
                meter = meters.get(topic)
                if meter is None or meter.interval_ms != period_ms:
                    meter = RateMeter(period_ms)
                self._topics[topic] = meter

    def _follow_controllers(self) -> None:
        """Set for each stage which nodes are held for it, and how far it is held itself."""
        controllers = self._coordinator.controllers
        held: dict[str, set[str]] = {name: set() for name in self.stages}
        for name, controller in controllers.items():
            for holder in controller.state.holders:
                held[holder].add(name)
        for name, trigger in self.stages.items():
            rate, normal_rate = controllers[name].state.rate, controllers[name].node.normal_rate
            trigger.control(frozenset(held[name]), 1.0 if rate is None else rate / normal_rate)

    def _measure(self) -> None:
        for source in self._graph.settings.sources:
            if controller := self._coordinator.controllers.get(source.client_id):
                rates = [self._topics[topic].rate for topic in source.produces]
                known = [rate for rate in rates if rate is not None]
                controller.measured_rate = sum(known) if known else None

    def _upstream_rate(self, node: Controller, stage: str) -> UpstreamRate:
        topics = self._graph.topics_between(node.node.name, stage)
        if not node.node.is_source:
            share = self.stages[node.node.name].records_out(topics)
        elif node.measured_rate:
            share = sum(self._topics[topic].rate or 0.0 for topic in topics) / node.measured_rate
        else:
            share = 1.0
        return UpstreamRate(node.node.name, node.rate, node.node.normal_rate, share)

    def _ask(self, name: str, verdict: Verdict, now_ms: float) -> None:
        """Make a request to each node upstream that can be held and is to blame."""
        controllers, trigger = self._coordinator.controllers, self.stages[name]
        own_rate = controllers[name].state.rate or math.inf
        processing_rate = trigger.processing_rate or trigger.settings.band[1] * trigger.scale
        upstream = [
            self._upstream_rate(controllers[node], name)
            for node in self._graph.upstream_of(name)
            if node in controllers
        ]
        if verdict.direction is Direction.DECREASE:
            more, rates = "less", fair_rates(upstream, min(own_rate, processing_rate))
            if verdict.is_of_lag:
                # Stages are not let plan more than there is room for; sources cannot be stopped.
                rates = {node: rates[node] for node in rates if controllers[node].node.is_source}
        else:
            more, rates = "more", raised_rates(upstream, own_rate, trigger.held_nodes)
        if not rates:
            return
        reason = f"{name} asks for {more}: {verdict.reason}; it processes {processing_rate:,.1f}/s"
        adjust_ms, direction = trigger.settings.t_min_adjust_ms, verdict.direction
        for node, rate in rates.items():
            self._coordinator.gather(FlowRequest(name, node, direction, rate, adjust_ms, reason))
        trigger.request = {
            "at_s": self._wall.to_s(now_ms),
            "direction": verdict.direction,
            "processing_rate": processing_rate,
            "reason": verdict.reason,
            "asked": list(rates),
        }

    def _event(self, change: RateChange, now_ms: float) -> None:
        self._events.append({"at_s": self._wall.to_s(now_ms), **asdict(change)})
