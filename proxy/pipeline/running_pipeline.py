"""One pipeline at work: its parts, who its clients are, and what its stages have written."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from random import SystemRandom

from structlog import get_logger

from metrics.clock import MS_PER_SECOND
from proxy.progress.query import QueryProgress
from proxy.progress.query_registry import QueryRegistry
from proxy.progress.report import BatchReport
from proxy.progress.report_handler import AcceptedReport
from proxy.state import Json, Record
from proxy.wire.topic_partition import TopicPartition

from .batch_limit import BatchLimit, BoundedQuery
from .completion import Completion
from .deferred import StageBatch
from .edges import MAX_OFFSET, TopicRange
from .flow_control import PipelineFlow, RateChange
from .graph import PipelineGraph, PipelineSettings, StageSettings, find_endless

MAX_OUTPUTS = 10_000
"""Ranges that a stage has written since its last report; of more the oldest belong to no batch."""

FULL_BATCH = 0.5
"""Of its interval: a batch that takes less does not say how fast its stage can process."""

LATE_MS = 60_000.0
"""The response to what is in the log at the start has passed by then: no client waits longer."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """A range that a client of a stage has written, and when."""

    range: TopicRange
    at_ms: float


@dataclass(frozen=True, slots=True)
class StageCeiling:
    """What a stage is held to at the moment."""

    rate: float
    """Records/s; 0 lets no batch begin."""
    limit: BatchLimit | None
    """What it waits for; None: a request of a stage after it."""


class Recovery:
    """Finds what only an earlier process saw being written, by batches under way when it ended.

    The records behind those that are known are taken for the output of the batch that a stage
    reports first, if it began before this process took up the state, at `loaded_ms`. Some may be of
    its next batch, or of others: that makes a root wait longer, and never too short.
    """

    def __init__(self, loaded_ms: float = -math.inf) -> None:
        self._loaded_ms = loaded_ms
        self._done: set[str] = set()
        """Stages that have reported a batch since."""
        self._counted: dict[TopicPartition, int] = {}
        """Up to where records are counted as output although nobody saw who wrote them."""

    def concerns(self, stage: StageSettings, started_ms: float) -> bool:
        """Return whether a batch that began then may have written what was not seen here."""
        return started_ms < self._loaded_ms and stage.name not in self._done

    def recover(
        self,
        stage: StageSettings,
        starts: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
        later: Iterable[TopicRange],
    ) -> tuple[TopicRange, ...]:
        """Return what the first batch of a stage is taken to have written.

        Up to `starts` it is known who wrote; `later` was seen since that batch.
        """
        self._done.add(stage.name)
        ends = dict(ends)
        for one in later:
            key = (one.topic, one.partition)
            ends[key] = min(ends.get(key, one.start), one.start)
        found = tuple(
            TopicRange(*key, starts[key], ends[key])
            for key in sorted(starts.keys() & ends.keys())
            if key[0] in stage.produces and starts[key] < ends[key]
        )
        self._counted |= {(one.topic, one.partition): one.end for one in found}
        return found

    def left_of(self, written: TopicRange, now_ms: float) -> TopicRange:
        """Return what of a range was not counted by `recover`; its response may come late."""
        if not self._counted or now_ms > self._loaded_ms + LATE_MS:
            return written
        counted = self._counted.get((written.topic, written.partition), 0)
        return replace(written, start=min(max(written.start, counted), written.end))


class RunningPipeline:
    """One pipeline at work. Raises ValueError when its settings are not sound."""

    def __init__(
        self, settings: PipelineSettings, registry: QueryRegistry, now_ms: float, now_s: float
    ) -> None:
        self._registry = registry
        self.name = settings.name
        self.graph = PipelineGraph(settings)
        self.flow = PipelineFlow(self.graph, now_ms, now_s)
        self.completion = Completion(self.graph, random=SystemRandom(), now_ms=now_ms, now_s=now_s)
        self.outputs: dict[str, list[WrittenRange]] = defaultdict(list)
        """By stage, since its last report."""
        self.unread: dict[TopicPartition, tuple[int, int]] = {}
        """Offsets between which stages have written, and nobody who reads there has completed."""
        self.limits: dict[str, BatchLimit | None] = {}
        """By client of a stage: the limit of its latest plan."""
        self.ceilings: dict[str, StageCeiling] = {}
        """By stage, where there is one below its normal rate."""
        self.out_of_reach: set[str] = set()
        """Nodes that are to be held and cannot be."""
        self.loaded_ms = -math.inf
        """When this process took up the state; long ago if it did not."""
        self._recovery = Recovery()
        self._crowded: set[str] = set()
        """Stages that have written more since their last report than is kept."""
        self._follow(settings)

    def update(self, settings: PipelineSettings, now_ms: float) -> None:
        """Follow a reload. Raises ValueError when it is not sound; then nothing changed."""
        self.graph = PipelineGraph(settings)
        self._follow(settings)
        self.log(self.flow.update(self.graph, now_ms))
        self.completion.update(self.graph, now_ms)

    def load(
        self,
        flow: Iterable[Record],
        ledger: Iterable[Record],
        now_ms: float,
        *,
        is_handed_over: bool = False,
    ) -> list[str]:
        """Load the records of an earlier process, or of the member that had it before.

        Return what was not taken up, and why.
        """
        self.loaded_ms = now_ms
        if (kept := list(ledger)) or is_handed_over:
            self._recovery = Recovery(now_ms)
        return self.completion.load(kept, now_ms) + self.load_flow(flow, now_ms)

    def load_flow(self, records: Iterable[Record], now_ms: float) -> list[str]:
        """Load the records of the flow, at any time; return what was not taken up, and why."""
        before = {node: self.flow.state_of(node) for node in self.graph.nodes}
        refused = self.flow.load(records, now_ms)
        for node, old in before.items():
            state = self.flow.state_of(node)
            if state is not None and (old is None or old.rate != state.rate):
                self.log([RateChange(node, state.rate, state.why)])
        return refused

    def log(self, changes: Iterable[RateChange]) -> None:
        """Log rates that changed."""
        for each in changes:
            _log.info("pipeline", pipeline=self.name, **asdict(each))

    def stage_of(self, client_id: str) -> StageSettings | None:
        """Return the stage that a client belongs to; None when to none."""
        stage = self._stages_by_member.get(client_id)
        if stage is None:
            query = self._registry.query_of(client_id)
            stage = self._stages_by_member.get(query.name) if query is not None else None
        return stage

    def clients_of(self, stage: StageSettings) -> set[str]:
        """Return the client ids of a stage, as far as its queries are known."""
        registry = self._registry
        look_ups = (registry.query_of, registry.query_named)
        found = (look_up(member) for member in stage.members for look_up in look_ups)
        return {*stage.client_ids, *(query.client_id for query in found if query is not None)}

    def completed(self, key: TopicPartition, offset: int) -> None:
        """Record how far a reader has completed what stages have written."""
        if key in self.unread:
            start, end = self.unread[key]
            self.unread[key] = max(start, offset), max(end, offset)

    def wrote(self, stage: str, written: TopicRange, now_ms: float) -> None:
        """Keep what a stage has written until its batch is reported."""
        key = (written.topic, written.partition)
        start, end = self.unread.get(key, (written.start, 0))
        if written.start < start:  # the topic was made anew
            start, end = written.start, 0
        self.unread[key] = start, max(end, written.end)
        outputs = self.outputs[stage]
        outputs.append(WrittenRange(self._recovery.left_of(written, now_ms), now_ms))
        if len(outputs) > MAX_OUTPUTS:
            del outputs[0]
            if stage not in self._crowded:  # once, not for each
                self._crowded.add(stage)
                _log.warning("more is written than can be kept", stage=stage)

    def lost_ends(self, members: Iterable[str], started_ms: float) -> set[TopicPartition]:
        """Return the partitions whose log ends say what a batch may have written unseen."""
        stage = next(filter(None, map(self._stages_by_member.get, members)), None)
        if stage is None or not self._recovery.concerns(stage, started_ms):
            return set()
        return set(self._known_ends(stage))

    def idle(self, stage: StageSettings, idle_ms: float, now_ms: float) -> None:
        """Record that a stage had nothing to do at a time."""
        # What came after that belongs to a batch that is not reported yet.
        if all(each.at_ms <= idle_ms for each in self.outputs[stage.name]):
            self.completion.idle(stage.name, now_ms)

    def add_batch(
        self,
        stage: StageSettings,
        accepted: AcceptedReport,
        bounded: Sequence[BoundedQuery],
        ends: Mapping[TopicPartition, int],
        now_ms: float,
    ) -> None:
        """Add a reported batch of a stage; for `ends` see `lost_ends`."""
        report, query = accepted.report, accepted.query
        batch = report.batch
        assert batch is not None
        ended_ms, execution_ms = now_ms - report.age_ms, float(batch.execution_ms or 0)
        started_ms = ended_ms - execution_ms
        outputs = self._take_outputs(stage.name, ended_ms)
        lost = self._lost_outputs(stage, started_ms, ends)
        size = next((each.bytes_per_record for each in bounded if each.bytes_per_record), 0.0)
        inputs = tuple(_inputs(stage, query, batch))
        written, size_bytes = (*outputs, *lost), round(batch.rows * (size or 0.0))
        done = StageBatch(stage.name, batch.batch_id, inputs, written, started_ms, size_bytes)
        self.completion.stage_batch(done, now_ms)
        if batch.rows > 0 and execution_ms > 0:
            trigger = self.flow.stages[stage.name]
            # A short batch had little to do: what it shows is Spark's own time, not the stage's.
            if all(execution_ms >= FULL_BATCH * (each.batch_interval_ms or 0) for each in bounded):
                rate = next((each.processing_rate for each in bounded if each.processing_rate), 0.0)
                trigger.processed(rate or batch.rows / execution_ms * MS_PER_SECOND, now_ms)
            made: dict[str, int] = dict.fromkeys(stage.produces, 0)
            for each in outputs:
                made[each.topic] += each.end - each.start
            trigger.converted(batch.rows, made)

    def measure(
        self, arrived: Mapping[str, int], lags: Mapping[tuple[str, str], int], now_ms: float
    ) -> None:
        """Give the flow what is measured, see `Arrivals`."""
        for source in self.graph.settings.sources:
            for topic in source.produces:
                if topic in arrived:
                    self.flow.arrived(topic, arrived[topic], now_ms)
        for stage in self.stages.values():
            trigger = self.flow.stages[stage.name]
            if all(topic in arrived for topic in stage.consumes):
                trigger.sample(sum(arrived[topic] for topic in stage.consumes), now_ms)
            waiting = lags.keys() & product(self.clients_of(stage), stage.consumes)
            if waiting:
                trigger.lag(sum(lags[key] for key in waiting))

    def document(self, now_ms: float) -> dict[str, Json]:
        """Return it as the API shows it."""
        document = self.flow.document(now_ms)
        stages = document["stages"]
        assert isinstance(stages, list)
        for stage in stages:
            ceiling = self.ceilings.get(stage["name"])
            limit = ceiling.limit if ceiling is not None else None
            stage["waits"] = limit and {
                "for": limit.waits_for,
                "records": limit.records,
                "reason": limit.why,
            }
        return {**document, "completion": self.completion.document(now_ms)}

    def _follow(self, settings: PipelineSettings) -> None:
        for problem in find_endless(settings):
            _log.warning("a hold may never end", problem=problem)
        self.stages = self.graph.stages
        self._stages_by_member = {
            member: stage for stage in self.stages.values() for member in stage.members
        }
        self.sources = frozenset(source.client_id for source in settings.sources)
        for name, outputs in list(self.outputs.items()):
            produces = self.stages[name].produces if name in self.stages else ()
            self.outputs[name] = [each for each in outputs if each.range.topic in produces]

    def _take_outputs(self, stage: str, until_ms: float) -> tuple[TopicRange, ...]:
        """Return what a stage wrote up to then, and forget it."""
        written = self.outputs.pop(stage, [])
        self._crowded.discard(stage)
        self.outputs[stage] = [each for each in written if each.at_ms > until_ms]
        return tuple(each.range for each in written if each.at_ms <= until_ms)

    def _lost_outputs(
        self, stage: StageSettings, started_ms: float, ends: Mapping[TopicPartition, int]
    ) -> tuple[TopicRange, ...]:
        """Return what only an earlier process can have seen a batch write."""
        if not self._recovery.concerns(stage, started_ms):
            return ()
        later = [each.range for each in self.outputs[stage.name]]
        lost = self._recovery.recover(stage, self._known_ends(stage), ends, later)
        if lost:
            records = sum(each.end - each.start for each in lost)
            _log.info("counted what an earlier process saw", stage=stage.name, records=records)
        return lost

    def _known_ends(self, stage: StageSettings) -> dict[TopicPartition, int]:
        """Return up to where it is known who wrote what of a stage's topics."""
        known: dict[TopicPartition, int] = {}  # at least what readers have completed
        for query in self._registry.queries:
            for key, partition in query.partitions.items():
                if partition.committed_to is not None:
                    known[key] = min(known.get(key, MAX_OFFSET), partition.committed_to)
        known |= self.completion.edges.known_ends()
        return {key: end for key, end in known.items() if key[0] in stage.produces}


def _inputs(stage: StageSettings, query: QueryProgress, batch: BatchReport) -> Iterator[TopicRange]:
    """Yield what a batch has completed of the topics of its stage."""
    for (topic, partition), span in batch.ranges.items():
        if topic not in stage.consumes:
            continue
        start = span.start
        if start is None:  # the first batch of a query
            kept = query.partitions.get((topic, partition))
            start = min(span.end, (kept.log.log_start_offset if kept else None) or 0)
        if start < span.end:
            yield TopicRange(topic, partition, start, span.end)
