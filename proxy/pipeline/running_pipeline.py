"""One pipeline at work: its parts, who its clients are, and what its stages have written."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import SystemRandom

from structlog import get_logger

from metrics.clock import MS_PER_SECOND
from proxy.progress.query import QueryProgress
from proxy.progress.query_registry import QueryRegistry
from proxy.progress.report import BatchReport
from proxy.progress.report_handler import AcceptedReport
from proxy.state import Json, Record
from proxy.wire.topic_partition import TopicPartition

from .batch_limit import BatchLimit
from .bounded_query import BoundedQuery
from .completion import Completion
from .deferred import StageBatch
from .edges import MAX_OFFSET, TopicRange
from .flow_control import PipelineFlow, RateChange
from .graph import PipelineGraph, PipelineSettings, StageSettings, find_endless
from .recovery import Recovery

MAX_OUTPUTS = 10_000
"""Ranges that a stage has written since its last report; of more the oldest belong to no batch."""

FULL_BATCH = 0.5
"""Of its interval: a batch that takes less does not say how fast its stage can process."""

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
    """Records per second; 0 lets no batch begin."""
    limit: BatchLimit | None
    """What it waits for; None: a request of a stage after it."""


class RunningPipeline:
    """One pipeline at work.

    Args:
        settings: what it is. Raises ValueError when it is not sound.
        registry: knows which client a query reads with, and how far.
        now_s: the same on the wall clock.

    """

    def __init__(
        self, settings: PipelineSettings, registry: QueryRegistry, now_ms: float, now_s: float
    ) -> None:
        self._registry = registry
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

    @property
    def name(self) -> str:
        """The pipeline's name."""
        return self.graph.settings.name

    @property
    def stages(self) -> Mapping[str, StageSettings]:
        """The stages by name."""
        return self.graph.stages

    def update(self, settings: PipelineSettings, now_ms: float) -> None:
        """Follow a reload. Raises ValueError when it is not sound; then nothing changed."""
        self.graph = PipelineGraph(settings)
        self._follow(settings)
        self.log(self.flow.update(self.graph, now_ms))
        self.completion.update(self.graph, now_ms)

    def load(self, flow: Iterable[Record], ledger: Iterable[Record], now_ms: float) -> list[str]:
        """Load the records of an earlier process; return what was not taken up, and why."""
        self.loaded_ms = now_ms
        kept = list(ledger)
        if kept:
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
            _log.info(
                "pipeline", pipeline=self.name, node=each.node, rate=each.rate, reason=each.reason
            )

    # Who belongs to it

    def stage_of(self, client_id: str) -> StageSettings | None:
        """Return the stage that a client belongs to; None when to none."""
        stage = self._stages_by_member.get(client_id)
        if stage is None:
            query = self._registry.query_of(client_id)
            stage = self._stages_by_member.get(query.name) if query is not None else None
        return stage

    def clients_of(self, stage: StageSettings) -> set[str]:
        """Return the client ids of a stage, as far as its queries are known."""
        clients = set(stage.client_ids)
        for member in stage.members:
            if self._registry.query_of(member) is not None:
                clients.add(member)
            query = self._registry.query_named(member)
            if query is not None:
                clients.add(query.client_id)
        return clients

    # What its stages write and complete

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
        """Return the partitions whose log ends say what a batch may have written unseen.

        Args:
            members: query name and client id of the batch.
            started_ms: when it began.

        """
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
        ended_ms = now_ms - report.age_ms
        execution_ms = float(batch.execution_ms or 0)
        started_ms = ended_ms - execution_ms
        outputs = self._take_outputs(stage.name, ended_ms)
        lost = self._lost_outputs(stage, started_ms, ends)
        size = next((each.bytes_per_record for each in bounded if each.bytes_per_record), 0.0)
        self.completion.stage_batch(
            StageBatch(
                stage=stage.name,
                batch=batch.batch_id,
                inputs=tuple(_inputs(stage, query, batch)),
                outputs=(*outputs, *lost),
                started_ms=started_ms,
                size_bytes=round(batch.rows * (size or 0.0)),
            ),
            now_ms,
        )
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
        """Give the flow what is measured.

        Args:
            arrived: by topic, how many records have arrived so far.
            lags: by client and topic, how many records wait.
            now_ms: the time.

        """
        for source in self.graph.settings.sources:
            for topic in source.produces:
                if topic in arrived:
                    self.flow.arrived(topic, arrived[topic], now_ms)
        for stage in self.stages.values():
            trigger = self.flow.stages[stage.name]
            if all(topic in arrived for topic in stage.consumes):
                trigger.sample(sum(arrived[topic] for topic in stage.consumes), now_ms)
            known = [
                lags[client, topic]
                for client in self.clients_of(stage)
                for topic in stage.consumes
                if (client, topic) in lags
            ]
            if known:
                trigger.lag(sum(known))

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
        """Return up to where it is known who wrote what of a stage's topics.

        Where nothing was written yet it is what the readers have completed, if there are any.
        """
        known: dict[TopicPartition, int] = {}
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
