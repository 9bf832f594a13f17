"""Which source batches of a pipeline are finished, told from the batches of its stages.

A batch of a first stage with input from a source is a root. What a stage's batch appends is an edge
for each stage that consumes the topic, anchored to the roots of what the batch read, and to its own
root when it read of a source; completing a range acks its edges. What was read or appended unseen
keeps its roots waiting until they time out.

A stage that reads while the stage before it still writes may report its batch first. It waits until
the ranges that it read have been reported, or the stage before reports a batch that began after
this one was reported, or says that it is idle. What was not claimed then is nobody's.

What a stage writes between two reports is the output of the batch that is reported next. A restart
forgets it. The records behind those that are known are then taken for the output of the batch that
a stage reports first, if it began before this process took up the state. Some may be of its next
batch, or of others: that makes a root wait longer, and never too short. A handover knows what was
written, and hands it over.
"""

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial, reduce
from itertools import islice
from operator import xor
from random import Random
from typing import Any

from structlog import get_logger

from metrics.clock import MS_PER_SECOND
from proxy.state import Json, Record
from proxy.state.state_records import UnwrittenRecords, key_parts
from proxy.state.store import UnknownSchemaError
from proxy.wire.topic_partition import TopicPartition

from .graph import PendingLimit, PipelineGraph, PipelineSettings
from .ledger import (
    LEDGER_RECORDS,
    MAX_EDGES,
    Anchor,
    Ledger,
    PendingEdges,
    Root,
    SourceBatch,
    TopicRange,
    WallClockOffset,
    merge_ranges,
)

PIPELINE_CHANGED = "pipeline_changed"
"""Reason: it waited at a stage, or for a topic, that is no longer in the pipeline."""

TOO_MANY_EDGES = "too_many_edges"
"""Reason: it was the oldest one when more edges waited than are kept."""

OFFSETS_REUSED = "offsets_reused"
"""Reason: others were appended at offsets of its edges. The topic was made anew, or cut."""

ROOM_SHARE = 1 / 16
"""Share of the edges that are kept for which room is made at once: it costs a look at all."""

SWEEP_AT = 1_000
"""When so many roots have failed or timed out, and more than are left, their edges are removed."""

MAX_WAIT_MS = 60_000.0
"""And half of the ledger's timeout: the most that a batch waits. The stage before may be dead."""

MAX_DEFERRED = 1_000
"""Batches of one stage that wait at most; beyond it the first is taken as it is."""

MAX_OUTPUTS = 10_000
"""Ranges that a stage has written since its last report; of more the oldest belong to no batch."""

LATE_MS = 60_000.0
"""The response to what is in the log at the start has passed by then: no client waits longer."""

MAX_NOTES = 100

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StageBatch:
    """One batch of a stage, finished."""

    stage: str
    batch: int
    inputs: tuple[TopicRange, ...]
    outputs: tuple[TopicRange, ...]
    """What its clients have appended since the batch before."""
    started_ms: float
    """When it began, monotonic: all that was appended before was reported before."""
    size_bytes: int = 0
    """What it has read; counts against `max_pending` when it is a source batch."""
    number: int = 0
    """Its place among those that wait, kept over a restart; 0: none yet."""
    at_ms: float = 0.0
    """When it was reported, if it has a number."""


@dataclass(slots=True)
class StageReportState:
    """What is known of the reports of one stage."""

    waiting: deque[StageBatch] = field(default_factory=deque)
    settled_ms: float = -math.inf
    """All that it appended before then is reported, monotonic."""
    written: list[tuple[TopicRange, float]] = field(default_factory=list)
    """What its clients have written since its last report, and when."""
    has_reported: bool = False
    """A batch, since this process lost sight of stages. What it wrote while a reload had left it
    out was not seen either."""
    is_crowded: bool = False
    """Whether it has written more since its last report than is kept."""


class CompletionTracker:
    """The ledger of one pipeline, its edges, and how much is in flight.

    When more than `max_edges` edges wait, with the roots of their anchors, the oldest roots fail.
    Raises ValueError as Ledger does.
    """

    def __init__(
        self,
        graph: PipelineGraph,
        unwritten: UnwrittenRecords,
        *,
        random: Random,
        now_ms: float,
        now_s: float,
        max_edges: int = MAX_EDGES,
    ) -> None:
        self._graph = graph
        self.wall = wall = WallClockOffset(now_s * MS_PER_SECOND - now_ms)
        self.max_edges = max_edges
        self.unwritten = unwritten
        """What is taken of it at once is to be written in one transaction."""
        self._mark = mark = partial(unwritten.mark_changed, self)
        self.ledger = Ledger(graph.settings.timeout_ms, random, wall, mark)
        self.edges = PendingEdges(self.ledger.new_id, mark)
        self.reports = {name: StageReportState() for name in graph.stages}
        """By stage."""
        self.early: dict[int, StageBatch] = {}
        """By number, those that have a record: most need not wait."""
        self.forced_batches = 0
        """Batches that were taken although it was not known what they had read."""
        self.dropped_batches = 0
        """Batches whose stage went while they waited."""
        self.loaded_ms = -math.inf
        """When the state was taken up of an earlier process, whose batches may be under way, or
        others have served our clients."""
        self._counted: dict[TopicPartition, int] = {}
        """Up to where records are counted as output although nobody saw who wrote them."""
        self._swept = 0
        """How many roots had failed or timed out when edges were swept last."""
        self.counts = self.ledger.counts
        self.notes: deque[tuple[float, str]] = deque(maxlen=MAX_NOTES)
        """What was unusual lately: wall clock, text."""

    def is_full(self, planned: int = 0, planned_bytes: float = 0.0) -> bool:
        """Return whether the source is to wait; `planned` batches are not known as roots yet."""
        limit, ledger = self.limit, self.ledger
        batches, size_bytes = ledger.pending_batches + planned, ledger.pending_bytes + planned_bytes
        return (limit.batches is not None and batches >= limit.batches) or (
            limit.size_bytes is not None and size_bytes >= limit.size_bytes
        )

    def stage_batch(self, batch: StageBatch, now_ms: float) -> None:
        """Add a finished batch of a stage; see `Ledger.take_ended` for what it ends.

        A batch whose whole input was completed before is only noted. But of a first stage each
        report is a new root: the same one must not be passed on twice.
        """
        number = next(reversed(self.early), 0) + 1
        numbered = replace(batch, number=number, at_ms=now_ms)
        self.reports[batch.stage].waiting.append(numbered)
        self._apply_ready(now_ms)

    def idle(self, stage: str, now_ms: float) -> None:
        """Record that a stage has nothing to do; what others read of it need wait no longer."""
        if stage in self.reports and not self.reports[stage].waiting:
            self._settle(stage, now_ms)
        self._apply_ready(now_ms)

    def wrote(self, stage: str, written: TopicRange, now_ms: float) -> None:
        """Keep what a stage has written until its batch is reported, but for what is counted."""
        counted = self._counted.get((written.topic, written.partition))
        if counted is not None and now_ms <= self.loaded_ms + LATE_MS:
            written = replace(written, start=min(max(written.start, counted), written.end))
        reports = self.reports[stage]
        reports.written.append((written, now_ms))
        if len(reports.written) > MAX_OUTPUTS:
            del reports.written[0]
            if not reports.is_crowded:  # once, not for each
                reports.is_crowded = True
                _log.warning("more is written than can be kept", stage=stage)

    def take_written(self, stage: str, until_ms: float) -> tuple[TopicRange, ...]:
        """Return what a stage wrote up to then, and forget it."""
        reports = self.reports[stage]
        written, reports.is_crowded = reports.written, False
        reports.written = [(each, at_ms) for each, at_ms in written if at_ms > until_ms]
        return tuple(each for each, at_ms in written if at_ms <= until_ms)

    def lost_sight(self, now_ms: float) -> None:
        """Record that others may have seen what stages wrote up to now; see `recover`."""
        self.loaded_ms = now_ms
        for reports in self.reports.values():
            reports.has_reported = False

    def is_recovering(self, stage: str, started_ms: float) -> bool:
        """Return whether a batch that began then may have written what was not seen here."""
        return started_ms < self.loaded_ms and not self.reports[stage].has_reported

    def recover(
        self, stage: str, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
    ) -> tuple[TopicRange, ...]:
        """Return what only an earlier process can have seen the first batch of a stage write.

        Up to `starts` it is known who wrote; `ends` are those of the logs. What is left of the
        stage here was written since that batch.
        """
        reports, ends = self.reports[stage], dict(ends)
        produces = self._graph.stages[stage].produces
        reports.has_reported = True
        for later, _ in reports.written:
            key = (later.topic, later.partition)
            ends[key] = min(ends.get(key, later.start), later.start)
        found = tuple(
            TopicRange(*key, starts[key], ends[key])
            for key in sorted(starts.keys() & ends.keys())
            if key[0] in produces and starts[key] < ends[key]
        )
        self._counted |= {(one.topic, one.partition): one.end for one in found}
        if found:
            records = sum(each.end - each.start for each in found)
            _log.info("counted what an earlier process saw", stage=stage, records=records)
        return found

    def tick(self, now_ms: float) -> None:
        """End the roots whose time is over; call it at least a few times in a timeout."""
        self._apply_ready(now_ms)
        self.ledger.tick(now_ms)
        if self.ledger.failures - self._swept >= max(SWEEP_AT, len(self.ledger.roots)):
            self._sweep()

    def oldest_waits_at(self) -> str:
        """Return the stage at which the oldest pending root waits; empty when there is none."""
        oldest = [root for root, *_ in islice(self.ledger.pending(), 1)]
        return next(iter(self.waits_at(oldest).values()), "")

    def waits_at(self, roots: Iterable[int]) -> dict[int, str]:
        """Return by root the first stage in topological order that it waits at."""
        return self.edges.first_stages(roots, self._graph.order)

    def update(self, graph: PipelineGraph, now_ms: float) -> None:
        """Follow a reload; roots that wait at a stage or for a topic that is gone fail.

        Batches of stages that are gone are dropped.
        """
        self.ledger.set_timeout(graph.settings.timeout_ms)
        before, self._graph = self.reports, graph
        self.reports = {name: before.get(name) or StageReportState() for name in graph.stages}
        for name in before.keys() - graph.stages:
            self._mark("stage", name)
            for batch in before[name].waiting:
                self.dropped_batches += 1
                self._forget(batch)
        for name, reports in self.reports.items():
            produces = graph.stages[name].produces
            reports.written = [each for each in reports.written if each[0].topic in produces]
        self._fail_stranded(now_ms)
        self._apply_ready(now_ms)

    def clear(self, now_ms: float) -> None:
        """Fail and drop everything, so that its records are deleted."""
        empty = PipelineSettings(name=self._graph.settings.name, stages=())
        self.update(PipelineGraph(empty), now_ms)
        for root in self.ledger.roots:  # without an edge: of damaged records
            self._mark("root", root)
        self.ledger.roots.clear()

    def hand_over(self) -> None:
        """Have records of what the stages have written since their last reports, too."""
        for stage, reports in self.reports.items():
            if reports.written:
                self._mark("written", stage)

    def load(
        self, records: Collection[Record], now_ms: float, *, is_handed_over: bool = False
    ) -> list[str]:
        """Load the records of an earlier process, first of all; return what was not taken, and why.

        Damaged records are deleted with the next `changes`, and their roots wait until they time
        out; those of a newer program are left alone. Roots at stages that are gone fail.
        """
        if records or is_handed_over:
            self.lost_sight(now_ms)
        refused: list[str] = []
        anchors: dict[int, Anchor] = {}
        found: list[tuple[list[str], Any, str]] = []

        def refuse(key: str, why: object) -> None:
            refused.append(f"{key}: {why}")
            self.unwritten.mark_deleted(key)

        for record in records:
            try:
                item = key_parts(record.key)[2:]
                if not item or item[0] not in LEDGER_RECORDS:
                    raise ValueError("there is nothing of that name")
                found.append((item, LEDGER_RECORDS[item[0]].read(record), record.key))
            except UnknownSchemaError:
                refused.append(f"{record.key}: it is of a newer program; start that one to use it")
            except ValueError as error:
                refuse(record.key, error)
        for item, form, key in sorted(found, key=_order):
            try:
                self._restore(item, form, anchors, now_ms)
            except ValueError as error:
                refuse(key, error)
        self.unwritten.forget({self})  # what was taken up is as it was written
        gone = [self.key("group", number) for number, each in anchors.items() if not each.edges]
        for key in (*gone, *(key for item, _, key in found if item[0] == "written")):
            self.unwritten.mark_deleted(key)
        self._fail_stranded(now_ms)
        for message in refused:
            self._note(message, now_ms)
        return refused

    def key(self, kind: str, *where: Any) -> str:
        """Return the key of a part's record."""
        parts = [f"{where[0]:016x}"] if kind == "root" else where
        return LEDGER_RECORDS[kind].key(self._graph.settings.name, kind, *parts)

    def record(self, kind: str, *where: Any) -> Record | None:
        """Return the record of a part; None when it is not there any more."""
        value = self._value(kind, *where)
        return None if value is None else Record.of(self.key(kind, *where), value)

    @property
    def limit(self) -> PendingLimit:
        """How much may be in flight."""
        return self._graph.settings.max_pending or PendingLimit()

    def _apply_ready(self, now_ms: float) -> None:
        """Apply the batches that need not wait."""
        limit_ms = min(MAX_WAIT_MS, self._graph.settings.timeout_ms / 2)
        for stage in self._graph.order:
            queue = self.reports[stage].waiting
            while queue:
                first = queue[0]
                is_known = self._is_known(first)
                is_over = now_ms >= first.at_ms + limit_ms or len(queue) > MAX_DEFERRED
                if not (is_known or is_over):
                    break
                self._forget(queue.popleft())
                if not is_known:
                    self.forced_batches += 1
                    text = "is taken although it is not known who produced what it read"
                    self._note_batch(first, text, now_ms)
                self._apply(first, now_ms)
                if self.edges.size > self.max_edges:
                    self._make_room(now_ms)
                self._settle(stage, min(first.started_ms, first.at_ms))
            for batch in queue:
                if batch.number not in self.early:
                    self.early[batch.number] = batch
                    self._mark("early", batch.number)

    def _settle(self, stage: str, time_ms: float) -> None:
        """Record that all is reported that a stage appended before that time."""
        if time_ms > self.reports[stage].settled_ms:
            self.reports[stage].settled_ms = time_ms
            self._mark("stage", stage)

    def _forget(self, batch: StageBatch) -> None:
        if self.early.pop(batch.number, None) is not None:
            self._mark("early", batch.number)

    def _is_known(self, batch: StageBatch) -> bool:
        for read in batch.inputs:
            feeder = self._graph.feeder(batch.stage, read.topic)
            if feeder is None or read.start == read.end:
                continue
            is_settled = self.reports[feeder].settled_ms >= batch.at_ms
            key = (batch.stage, read.topic, read.partition)
            if not is_settled and read.end > self.edges.known_to(key):
                return False
        return True

    def _apply(self, batch: StageBatch, now_ms: float) -> None:
        acks, of_source, is_again = self._complete(batch, now_ms)
        values: dict[int, int] = defaultdict(int)
        for anchor, value in acks.items():
            for root in anchor.roots:
                if root in self.ledger.roots:
                    values[root] ^= value
                else:
                    self.counts.late_acks += 1
        begun = self.ledger.new_root() if of_source else None
        roots = tuple(values) if begun is None else (*values, begun)
        made, replaced = self._produce(batch, self._anchor(roots, acks), is_again=is_again)
        for root, value in values.items():
            self.ledger.ack(root, value ^ made, now_ms)
        if begun is not None:
            owner = SourceBatch(batch.stage, batch.batch, batch.size_bytes)
            self.ledger.init(begun, made, owner, batch.started_ms, now_ms)
        if reused := self._fail_all(replaced, OFFSETS_REUSED, now_ms):
            self._note_batch(batch, f"appended at offsets that {reused} roots waited for", now_ms)

    def _complete(self, batch: StageBatch, now_ms: float) -> tuple[dict[Anchor, int], bool, bool]:
        """Remove the input of a batch from what waits.

        Return by anchor what is acked, whether any is of a source, and whether all was completed.
        """
        graph, of_source = self._graph, False
        acks: dict[Anchor, int] = defaultdict(int)
        repeated = foreign = records = 0
        for read in merge_ranges(batch.inputs):
            if read.topic not in graph.stages[batch.stage].consumes:
                self.counts.unknown_topics += 1
                continue
            key = (batch.stage, read.topic, read.partition)
            is_of_stage = graph.feeder(batch.stage, read.topic) is not None
            if not is_of_stage:
                of_source = True
                if key not in self.edges.partitions:
                    continue
            acked, waited, again, unknown = self.edges.complete(key, read.start, read.end)
            for anchor, value in acked:
                acks[anchor] ^= value
            records += waited
            if is_of_stage:
                repeated += again
                foreign += unknown
        self.counts.foreign_records += foreign
        self.counts.repeated_records += repeated
        if repeated:
            self._note_batch(batch, f"completed {repeated} records a second time", now_ms)
        return acks, of_source, repeated > 0 and not (of_source or records + foreign)

    def _produce(
        self, batch: StageBatch, anchor: Anchor | None, *, is_again: bool
    ) -> tuple[int, set[int]]:
        """Add the output of a batch as edges of an anchor; None: they belong to no root.

        Return what they add to the value of each root, and the roots whose offsets they took.
        """
        made, replaced = 0, set[int]()
        for written in merge_ranges(batch.outputs):
            if written.topic not in self._graph.stages[batch.stage].produces:
                self.counts.unknown_topics += 1
                continue
            self.counts.unanchored_ranges += anchor is None
            for stage in self._graph.consumers[written.topic]:
                key = (stage, written.topic, written.partition)
                # What a batch wrote that is reported again was added the first time.
                start = max(written.start, self.edges.known_to(key)) if is_again else written.start
                if start < written.end:
                    edge, anchors = self.edges.produce(key, start, written.end, anchor)
                    made ^= edge
                    replaced.update(root for old in anchors for root in old.roots)
        return made, replaced

    def _anchor(self, roots: tuple[int, ...], acks: Mapping[Anchor, int]) -> Anchor | None:
        """Return the anchor of a batch's output; what was read of one anchor may go on with it."""
        if not roots:
            return None
        only = next(iter(acks)) if len(acks) == 1 else None
        return only if only is not None and only.roots == roots else self.edges.anchor(roots)

    def _sweep(self) -> None:
        self.edges.sweep(set(self.ledger.roots))
        self._swept = self.ledger.failures

    def _make_room(self, now_ms: float) -> None:
        self._sweep()
        bound = int(self.max_edges * (1 - ROOM_SHARE))
        if self.edges.size <= bound:
            return
        going = self.edges.excess(self.ledger.oldest_first(), bound)
        for root in going:
            self.ledger.fail(root, TOO_MANY_EDGES, now_ms)
        self._sweep()
        self._note(f"{len(going)} roots failed: more than {self.max_edges} edges waited", now_ms)

    def _fail_stranded(self, now_ms: float) -> None:
        """Fail what waits where no stage of the pipeline reads any more."""
        stages = self._graph.stages
        read = {(name, topic) for name, stage in stages.items() for topic in stage.consumes}
        gone = [key for key in self.edges.partitions if key[:2] not in read]
        if failed := self._fail_all(self.edges.remove(gone), PIPELINE_CHANGED, now_ms):
            self._note(f"{failed} roots waited for what is not read any more", now_ms)

    def _fail_all(self, roots: set[int], reason: str, now_ms: float) -> int:
        """Fail those of the roots that are there; return how many they are."""
        here = sorted(roots & self.ledger.roots.keys())
        for root in here:
            self.ledger.fail(root, reason, now_ms)
        return len(here)

    def _note_batch(self, batch: StageBatch, text: str, now_ms: float) -> None:
        self._note(f"batch {batch.batch} of {batch.stage!r} {text}", now_ms)

    def _note(self, text: str, now_ms: float) -> None:
        self.notes.append((self.wall.to_s(now_ms), text))

    def _restore(
        self, item: Sequence[str], form: Any, anchors: dict[int, Anchor], now_ms: float
    ) -> None:
        """Load one record. Raises ValueError with what is wrong."""
        stages, to_ms = self._graph.stages, self.wall.to_ms
        match item:
            case "root", root:
                value = reduce(xor, map(_id, form.at.values()), 0)
                entry = Root(value, form.owner, to_ms(form.started_s), form.failed)
                self.ledger.restore(int(root, 16), entry, to_ms(form.heard_s), now_ms)
            case "group", number:
                roots = tuple(int(root, 16) for root in form.roots)
                anchors[int(number)] = self.edges.anchor(roots, int(number))
            case "edge", stage, topic, partition, start:
                read = TopicRange(topic, int(partition), int(start), form.end)
                if form.group not in anchors or read.start == read.end:
                    raise ValueError("its group is missing, or it is empty")
                edge = (read.start, read.end, _id(form.id), anchors[form.group])
                self.edges.restore((stage, topic, read.partition), edge)
            case "lane", stage, topic, partition:
                edges = self.edges.partitions[stage, topic, int(partition)]
                edges.known_to = form.known_to
                for low, high in form.done:
                    edges.done.add(low, high)
            case "stage", stage if stage in stages:
                self._settle(stage, to_ms(form.settled_s))
            case "early", number if form.stage in stages:
                batch = StageBatch(
                    *(form.stage, form.batch, form.inputs, form.outputs, to_ms(form.started_s)),
                    *(form.size_bytes, int(number), to_ms(form.at_s)),
                )
                self.early[batch.number] = batch
                self.reports[batch.stage].waiting.append(batch)
            case "written", _ if form.stage in stages:
                produces = stages[form.stage].produces
                self.reports[form.stage].written = [
                    (each, to_ms(at_s)) for each, at_s in form.ranges if each.topic in produces
                ]
            case (("stage" | "early"), _):
                raise ValueError("its stage is not in the pipeline any more")
            case (("root" | "group" | "edge" | "lane" | "stage" | "early"), *_):
                raise ValueError("its key has another form")

    def _value(self, kind: str, *where: Any) -> Json:
        to_s = self.wall.to_s
        match kind, where[0]:
            case "edge", _ if edge := self.edges.find((where[0], where[1], where[2]), where[3]):
                return {"end": edge[1], "id": f"{edge[2]:016x}", "group": edge[3].number}
            case "lane", _ if edges := self.edges.partitions.get((where[0], where[1], where[2])):
                return {"known_to": edges.known_to, "done": list(edges.done)}
            case "root", root if entry := self.ledger.roots.get(root):
                stage = "" if entry.owner is None else entry.owner.stage
                return {
                    "at": {stage: f"{entry.value:016x}"} if entry.value else {},
                    "owner": None if entry.owner is None else asdict(entry.owner),
                    "started_s": to_s(entry.started_ms),
                    "heard_s": to_s(self.ledger.heard_ms(entry)),
                    "failed": entry.failed,
                }
            case "group", number if anchor := self.edges.anchors.get(number):
                return {"roots": [f"{root:016x}" for root in anchor.roots]}
            case "stage", name if known := self.reports.get(name):
                if math.isfinite(known.settled_ms):
                    return {"settled_s": to_s(known.settled_ms)}
            case "early", number if batch := self.early.get(number):
                times = {"started_s": to_s(batch.started_ms), "at_s": to_s(batch.at_ms)}
                form, value = LEDGER_RECORDS[kind].form, asdict(batch) | times
                return {name: value[name] for name in form.model_fields}
            case "written", stage:
                ranges = [
                    (asdict(each), to_s(at_ms))
                    for each, at_ms in self.reports[stage].written
                    if each.start < each.end
                ]
                return {"stage": stage, "ranges": ranges}
        return None


def _id(text: str) -> int:
    number = int(text, 16)
    if not number:
        raise ValueError("an id is 0")
    return number


def _order(found: tuple[list[str], Any, str]) -> tuple[int, float, list[tuple[int, str]]]:
    """Order by kind; roots by when they were heard of, edges by offset, batches by number."""
    (kind, *parts), form, _ = found
    heard_s = getattr(form, "heard_s", 0.0)
    numbered = [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
    return list(LEDGER_RECORDS).index(kind), heard_s, numbered
