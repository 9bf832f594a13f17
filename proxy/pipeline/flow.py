"""Flow control of one pipeline: readings come in, rates of nodes and records of state come out.

What to feed, each as often as it is known:

- `sample`: how many records were sent to a stage so far, best the log ends of the partitions that
  it consumes added up. Not what it fetched: a Kafka stage pulls, so that says how fast it is.
- `arrived`: the log ends of a topic added up. What a source sends is measured from this.
- `processing_rate`: of each batch report with rows. `lag`: records that wait, from its progress.
- `converted`: how many records a batch read and wrote, for stages that do not write one for one.
- `alive` and `ended`: a sign of life without figures, such as an idle report; the query's end.

Then `tick`, at least once in the shortest period, gives the rates that changed.

How what a stage processes becomes the rate of a node upstream: a stage that is itself held
processes no more than it may, so a hold goes on up the pipeline, one stage in a period; and its
band shrinks with its rate. Several nodes upstream share what it processes, see `shares`, and what
a node reads is converted to what it writes.

When a stage dies: after SILENT_MS without a sign of life (at once when told that it ended) it asks
nothing more, and the nodes that only it held are released step by step. A stage that was never
seen asks nothing. What it held before a restart stays held for SILENT_MS.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.state import Json, Record

from .controller import Controller, Request, record_key, record_prefix, to_record
from .coordinator import Coordinator, Decision
from .graph import Node, PipelineGraph, PipelineSettings, Source
from .shares import Feed, fair_rates, room_for
from .trigger import Direction, RateMeter, Stage, Trigger, Verdict
from .wall_time import WallTime

REAPPLY_MS = 5_000.0
"""How often the state is read and applied again."""

MAX_EVENTS = 100
MAX_UNKNOWN = 100
"""Unknown names that are kept to be shown."""

MAX_READING = 2.0**63
"""An offset is no larger."""


@dataclass(frozen=True, slots=True)
class RateChange:
    """A rate to apply to a node from now on; the same one again changes nothing."""

    node: str
    """Name of a stage, or client id of a source."""
    rate: float | None
    """Records/s; None: uncontrolled."""
    reason: str


class PipelineFlow:
    """Triggers, controllers and coordinator of one pipeline, and their state.

    A reading of an unknown stage or topic, or one that is no finite number of 0 or more, changes
    nothing and is counted; see `documents`. Raises ValueError when the pipeline is not sound.
    """

    def __init__(self, settings: PipelineSettings, now_ms: float, now_s: float) -> None:
        self._graph = PipelineGraph(settings)
        self._wall = WallTime.at(now_ms, now_s)
        self._coordinator = Coordinator(self._graph, now_ms)
        self._stages: dict[str, Stage] = {}
        self._topics: dict[str, RateMeter] = {}
        self._follow_graph(now_ms)
        self._dirty: set[str] = set()
        self._deletes: set[str] = set()
        self._events: deque[dict[str, Json]] = deque(maxlen=MAX_EVENTS)
        self._unknown: set[str] = set()
        self._refused = 0
        self._reapply_ms = now_ms + REAPPLY_MS

    @property
    def name(self) -> str:
        """The pipeline's name."""
        return self._graph.settings.name

    @property
    def prefix(self) -> str:
        """What the keys of its records begin with."""
        return record_prefix(self.name)

    def sample(self, stage: str, received_records_total: float, now_ms: float) -> None:
        """Take how many records were sent to a stage so far; rates are made of it here."""
        state = self._stage(stage)
        if state is None or not self._is_sane(received_records_total):
            return
        state.trigger.sample(received_records_total, now_ms, self._scale(stage))

    def arrived(self, topic: str, records_total: float, now_ms: float) -> None:
        """Take how many records arrived in a topic so far; of use for the topics of sources."""
        if topic not in self._graph.producer_of:
            self._note_unknown(f"topic {topic}")
        elif topic in self._topics and self._is_sane(records_total):
            self._topics[topic].read(records_total, now_ms)

    def processing_rate(self, stage: str, records_per_s: float, now_ms: float) -> None:
        """Take how fast a stage worked in its latest batch.

        A batch without rows says nothing about that: a rate of 0 is only a sign of life.
        """
        state = self._stage(stage)
        if state is None or not self._is_sane(records_per_s):
            return
        state.seen(now_ms)
        if records_per_s > 0:
            state.processing_rate = records_per_s

    def converted(self, stage: str, records_in: int, records_out: Mapping[str, int]) -> None:
        """Take how many records a batch of a stage read, and wrote to each topic."""
        state = self._stage(stage)
        if state is None or not all(map(self._is_sane, (records_in, *records_out.values()))):
            return
        state.converted(records_in, records_out)

    def lag(self, stage: str, records: int) -> None:
        """Take how many records wait for a stage."""
        state = self._stage(stage)
        if state is not None and self._is_sane(records):
            state.trigger.lag(records)

    def alive(self, stage: str, now_ms: float) -> None:
        """Take a sign of life of a stage."""
        state = self._stage(stage)
        if state is not None:
            state.seen(now_ms)

    def ended(self, stage: str) -> None:
        """Hear that a stage has ended and says nothing more, until the next sign of life."""
        state = self._stage(stage)
        if state is not None:
            state.ended()

    def is_alive(self, stage: str, now_ms: float) -> bool:
        """Return whether a stage has a say. Raises KeyError when there is no such stage."""
        return self._stages[stage].is_alive(now_ms)

    def records_out(self, stage: str, topics: Iterable[str]) -> float:
        """Return how many records a stage writes to topics for one that it reads; 1 until known.

        Raises KeyError when there is no such stage.
        """
        return self._stages[stage].records_out(topics)

    def tick(self, now_ms: float) -> list[RateChange]:
        """End the periods that are due; return the rates to apply, each once."""
        self._measure()
        verdicts: list[tuple[str, Stage, Verdict]] = []
        for name, stage in self._stages.items():
            trigger = stage.trigger
            if now_ms < trigger.due_ms:
                continue
            verdict = trigger.close(now_ms)
            self._coordinator.controllers[name].measured_rate = trigger.last.received_rate
            if verdict is not None and stage.may_ask(now_ms):
                verdicts.append((name, stage, verdict))
        for name, stage, verdict in verdicts:
            self._ask(name, stage, verdict, now_ms)
        now_s = self._wall.to_s(now_ms)
        decisions = self._coordinator.tick(
            now_ms, now_s, lambda name: self._stages[name].is_alive(now_ms)
        )
        return [self._follow(decision, now_s) for decision in decisions]

    def changes(self) -> tuple[list[Record], list[str]]:
        """Return the records to write and the keys to delete since the last call."""
        records, deletes = [], sorted(self._deletes)
        for name in sorted(self._dirty):
            controller = self._coordinator.controllers[name]
            if controller.state.rate is None:
                deletes.append(record_key(self.name, name))
            else:
                records.append(to_record(self.name, name, controller.state))
        self._dirty.clear()
        self._deletes.clear()
        return records, deletes

    def load(self, records: Iterable[Record], now_ms: float) -> list[str]:
        """Take up the state from all records under `prefix`; return what was not taken, and why.

        At any time: a record older than what is in force here is written again, and so is one
        that is missing; a newer one counts. Records of nodes that are gone and records that are
        damaged are deleted, those of a newer program are left alone. Call `reapply` afterwards.
        """
        loaded = self._coordinator.load(self.name, records, self._graph)
        self._dirty |= loaded.to_write
        self._deletes.update(loaded.to_delete)
        self._follow_holders()
        for message in loaded.refused:
            self._event(self._wall.to_s(now_ms), "", None, message)
        return loaded.refused

    def reapply_due(self, now_ms: float) -> bool:
        """Return whether it is time to `load` the records again and to `reapply`."""
        return now_ms >= self._reapply_ms

    def reapply(self, now_ms: float) -> list[RateChange]:
        """Return what is in force for every node, to be applied whether it changed or not."""
        self._reapply_ms = now_ms + REAPPLY_MS
        return [
            RateChange(name, controller.state.rate, controller.state.why)
            for name, controller in self._coordinator.controllers.items()
        ]

    def update(self, settings: PipelineSettings, now_ms: float) -> list[RateChange]:
        """Follow a reload; nodes that remain keep their state. Returns the rates to apply.

        A node that is gone is uncontrolled from now on, and one whose normal rate is lower now is
        held to that at most. Raises ValueError when the pipeline is not sound or has another name;
        then nothing changed.
        """
        if settings.name != self.name:
            raise ValueError(f"{settings.name!r} is another pipeline than {self.name!r}")
        self._graph = PipelineGraph(settings)
        changed, gone = self._coordinator.update(self._graph, now_ms)
        self._follow_graph(now_ms)
        self._dirty = (self._dirty - gone.keys()) | changed
        changes = []
        for name, controller in gone.items():
            self._deletes.add(record_key(self.name, name))
            if controller.state.rate is not None:
                changes.append(RateChange(name, None, "it is no longer held in this pipeline"))
        for name in sorted(changed):
            rate = self._coordinator.controllers[name].state.rate
            changes.append(RateChange(name, rate, "the pipeline's settings changed"))
        for change in changes:
            self._event(self._wall.to_s(now_ms), change.node, change.rate, change.reason)
        return changes

    def documents(self, now_ms: float) -> dict[str, Json]:
        """Return the pipeline as the API shows it: JSON, times in wall-clock seconds."""
        controllers = self._coordinator.controllers
        return {
            "name": self.name,
            "at_s": self._wall.to_s(now_ms),
            "hold_producers": self._graph.settings.hold_producers,
            "max_lag": self._graph.settings.max_lag,
            "stages": [
                controllers[name].document()
                | {"upstream": list(self._graph.upstream_of(name))}
                | self._stages[name].document(now_ms, self._scale(name))
                for name in self._graph.order
            ],
            "sources": [
                (controllers.get(source.client_id) or _unheld(source)).document()
                for source in self._graph.settings.sources
            ],
            "refused_readings": self._refused,
            "unknown": sorted(self._unknown),
            "events": list(self._events),
        }

    def _follow_graph(self, now_ms: float) -> None:
        """Make what the graph asks for: stages and meters; those that remain are kept."""
        graph, max_lag = self._graph, self._graph.settings.max_lag
        old, self._stages = self._stages, {}
        for name, settings in graph.stages.items():
            stage = old.get(name)
            if stage is None:
                stage = Stage(Trigger(settings, max_lag, now_ms), now_ms)
            elif (stage.trigger.settings, stage.trigger.max_lag) != (settings, max_lag):
                stage.trigger = Trigger(settings, max_lag, now_ms)
            self._stages[name] = stage
        self._follow_holders()
        meters, self._topics = self._topics, {}
        for source in graph.settings.sources:
            stages = graph.downstream_of(source.client_id)
            period_ms = max(graph.stages[name].period_ms for name in stages)
            for topic in source.produces:
                meter = meters.get(topic)
                if meter is None or meter.interval_ms != period_ms:
                    meter = RateMeter(period_ms)
                self._topics[topic] = meter

    def _follow_holders(self) -> None:
        """Tell each stage which nodes are held for it."""
        holds: dict[str, set[str]] = {name: set() for name in self._stages}
        for name, controller in self._coordinator.controllers.items():
            for holder in controller.state.holders:
                holds[holder].add(name)
        for name, stage in self._stages.items():
            stage.trigger.control_began(*holds[name])
            stage.trigger.control_ended(*stage.trigger.holds.difference(holds[name]))

    def _measure(self) -> None:
        for source in self._graph.settings.sources:
            controller = self._coordinator.controllers.get(source.client_id)
            if controller is not None:
                rates = [self._topics[topic].rate for topic in source.produces]
                known = [rate for rate in rates if rate is not None]
                controller.measured_rate = sum(known) if known else None

    def _scale(self, stage: str) -> float:
        """Return what the band of a stage is multiplied with: how far it is held."""
        controller = self._coordinator.controllers[stage]
        rate = controller.state.rate
        return 1.0 if rate is None else rate / controller.node.normal_rate

    def _feed(self, node: Controller, stage: str) -> Feed:
        """Return what a node sends to a stage at its rate in force."""
        topics = self._graph.topics_between(node.node.name, stage)
        if not node.node.is_source:
            share = self._stages[node.node.name].records_out(topics)
        elif node.measured_rate:
            share = sum(self._topics[topic].rate or 0.0 for topic in topics) / node.measured_rate
        else:
            share = 1.0
        return Feed(node.node.name, node.rate, node.node.normal_rate, share)

    def _ask(self, name: str, stage: Stage, verdict: Verdict, now_ms: float) -> None:
        """Make a request to each node upstream that can be held and is to blame."""
        controllers, scale = self._coordinator.controllers, self._scale(name)
        own_rate = controllers[name].state.rate or math.inf
        processing_rate = stage.processing_rate or stage.trigger.settings.band[1] * scale
        feeds = [
            self._feed(controllers[node], name)
            for node in self._graph.upstream_of(name)
            if node in controllers
        ]
        if verdict.direction is Direction.DECREASE:
            more, rates = "less", fair_rates(feeds, min(own_rate, processing_rate))
            if verdict.is_of_lag:
                # Stages are not let plan more than there is room for; sources cannot be stopped.
                rates = {node: rate for node, rate in rates.items() if self._is_source(node)}
        else:
            more, rates = "more", room_for(feeds, own_rate, stage.trigger.holds)
        if not rates:
            return
        reason = f"{name} asks for {more}: {verdict.reason}; it processes {processing_rate:,.1f}/s"
        t_min_adjust_ms = stage.trigger.settings.t_min_adjust_ms
        for node, rate in rates.items():
            self._coordinator.gather(
                Request(
                    name, node, verdict.direction, processing_rate, rate, t_min_adjust_ms, reason
                )
            )
        stage.request = {
            "at_s": self._wall.to_s(now_ms),
            "direction": verdict.direction,
            "processing_rate": processing_rate,
            "reason": verdict.reason,
            "asked": list(rates),
        }

    def _is_source(self, node: str) -> bool:
        return self._coordinator.controllers[node].node.is_source

    def _follow(self, decision: Decision, now_s: float) -> RateChange:
        """Tell the stages and the state what was decided."""
        name = decision.node
        state = self._coordinator.controllers[name].state
        self._dirty.add(name)
        for stage in state.holders:
            self._stages[stage].trigger.control_began(name)
        for stage in decision.ended_for:
            self._stages[stage].trigger.control_ended(name)
        self._event(now_s, name, state.rate, state.why)
        return RateChange(name, state.rate, state.why)

    def _stage(self, name: str) -> Stage | None:
        stage = self._stages.get(name)
        if stage is None:
            self._note_unknown(f"stage {name}")
        return stage

    def _note_unknown(self, what: str) -> None:
        self._refused += 1
        if len(self._unknown) < MAX_UNKNOWN:
            self._unknown.add(what)

    def _is_sane(self, value: float) -> bool:
        if 0 <= value <= MAX_READING:
            return True
        self._refused += 1
        return False

    def _event(self, at_s: float, node: str, rate: float | None, reason: str) -> None:
        self._events.append({"at_s": at_s, "node": node, "rate": rate, "reason": reason})


def _unheld(source: Source) -> Controller:
    """Return what shows a source that is never held."""
    return Controller(Node(source.client_id, True, source.normal_rate, source.step))
