"""Which source batches of a pipeline are finished, told from the batches of its stages.

A batch of a first stage with input from a source is a root. What a stage's batch appends is an edge
for each stage that consumes the topic, anchored to the roots of what the batch read, and to its own
root when it read of a source; completing a range acks its edges. What was read or appended unseen
keeps its roots waiting until they time out.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from itertools import islice
from random import Random

from proxy.state import Json, Record
from proxy.state.journal import Journal

from .completion_records import CompletionRecords
from .deferred import DeferredBatches, StageBatch
from .edges import MAX_EDGES, Anchor, EdgeTable, merged
from .graph import PipelineGraph
from .ledger import EndedRoot, Ledger, LedgerItem, RootOutcome, SourceBatch, WallTime
from .outputs import StageOutputs

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

MAX_NOTES = 100
MAX_SHOWN = 100
"""Pending roots in the document, those that came first."""


class Completion:
    """The ledger of one pipeline, its edges, and how much is in flight.

    When more than `max_edges` edges wait, with the roots of their anchors, the oldest roots fail.
    Raises ValueError as Ledger does.
    """

    def __init__(
        self,
        graph: PipelineGraph,
        *,
        random: Random,
        now_ms: float,
        now_s: float,
        max_edges: int = MAX_EDGES,
    ) -> None:
        self._graph = graph
        self._wall = wall = WallTime.at(now_ms, now_s)
        self._max_edges = max_edges
        self._journal = Journal[LedgerItem](
            lambda item: self.records.record(item),  # noqa: PLW0108 - these are made of what marks
            lambda item: self.records.key(item),  # noqa: PLW0108
        )
        mark = self._journal.mark_changed
        self.ledger = Ledger(graph.settings.timeout_ms, random, wall, mark)
        self.edges = EdgeTable(self.ledger.new_id, mark)
        self.deferred = DeferredBatches(graph, self.edges.known_to, mark)
        self.outputs = StageOutputs()
        self.records = CompletionRecords(
            graph.settings.name, wall, self.ledger, self.edges, self.deferred, self.outputs
        )
        self._ended: list[EndedRoot] = []
        self._unswept = 0
        self.counts = self.ledger.counts
        self.outcomes: Counter[tuple[RootOutcome, str]] = Counter()
        self.notes: deque[tuple[float, str]] = deque(maxlen=MAX_NOTES)
        """What was unusual lately: wall clock, text."""

    def is_full(self, planned: int = 0, planned_bytes: float = 0.0) -> bool:
        """Return whether the source is to wait; `planned` batches are not known as roots yet."""
        settings, ledger = self._graph.settings, self.ledger
        most, most_bytes = settings.max_pending_batches, settings.max_pending_bytes
        return (most is not None and ledger.pending_batches + planned >= most) or (
            most_bytes is not None and ledger.pending_bytes + planned_bytes >= most_bytes
        )

    def stage_batch(self, batch: StageBatch, now_ms: float) -> None:
        """Add a finished batch of a stage; see `take_ended` for what it ends.

        A batch of an unknown stage, or whose whole input was completed before, is only noted. But
        of a first stage each report is a new root: the same one must not be passed on twice.
        """
        if batch.stage not in self._graph.stages:
            self.counts.unknown_stages += 1
            self._note_batch(batch, "is of no stage of the pipeline", now_ms)
            return
        self.deferred.add(batch, now_ms)
        self._apply_ready(now_ms)

    def idle(self, stage: str, now_ms: float) -> None:
        """Record that a stage has nothing to do; what others read of it need wait no longer."""
        self.deferred.idle(stage, now_ms)
        self._apply_ready(now_ms)

    def fail(self, root: int, reason: str, now_ms: float) -> None:
        """End a root as failed; one that has ended stays as it is."""
        self._end(self.ledger.fail(root, reason, now_ms))

    def tick(self, now_ms: float) -> None:
        """End the roots whose time is over; call it at least a few times in a timeout."""
        self._apply_ready(now_ms)
        for ended in self.ledger.tick(now_ms):
            self._end(ended)
        if self._unswept >= max(SWEEP_AT, len(self.ledger.roots)):
            self._sweep()

    def take_ended(self) -> list[EndedRoot]:
        """Return the roots that ended since the last call, in that order."""
        ended, self._ended = self._ended, []
        return ended

    def oldest_waits_at(self) -> str:
        """Return the stage at which the oldest pending root waits; empty when there is none."""
        oldest = [root for root, *_ in islice(self.ledger.pending(), 1)]
        return next(iter(self.waits_at(oldest).values()), "")

    def waits_at(self, roots: Iterable[int]) -> dict[int, str]:
        """Return by root the first stage in topological order that it waits at."""
        return self.edges.first_stages(roots, self._graph.order)

    def update(self, graph: PipelineGraph, now_ms: float) -> None:
        """Follow a reload; roots that wait at a stage or for a topic that is gone fail."""
        self.ledger.set_timeout(graph.settings.timeout_ms)
        self._graph = graph
        self.deferred.update(graph)
        self.outputs.follow(graph.stages)
        self._fail_stranded(now_ms)
        self._apply_ready(now_ms)

    def changes(self, *, hands_over: bool = False) -> tuple[list[Record], list[str]]:
        """Return the records to write and the keys to delete, O(changed); in one transaction.

        What the stages have written since their last reports has records for a handover only.
        """
        for stage, written in self.outputs.ranges.items():
            if hands_over and written:
                self._journal.mark_changed(("written", stage))
        return self._journal.take()

    def load(
        self, records: Collection[Record], now_ms: float, *, is_handed_over: bool = False
    ) -> list[str]:
        """Load the records of an earlier process, first of all; return what was not taken, and why.

        Damaged records are deleted with the next `changes`, and their roots wait until they time
        out; those of a newer program are left alone. Roots at stages that are gone fail.
        """
        if records or is_handed_over:
            self.outputs.take_up(now_ms)
        refused, deletes = self.records.load(records, self._graph.stages, now_ms)
        self._journal.take()  # what was taken up is as it was written
        for key in deletes:
            self._journal.mark_deleted(key)
        self._fail_stranded(now_ms)
        for message in refused:
            self._note(message, now_ms)
        return refused

    def document(self, now_ms: float) -> dict[str, Json]:
        """Return it as the API shows it: JSON, times in wall-clock seconds."""
        settings, to_s, outcomes = self._graph.settings, self._wall.to_s, self.outcomes
        first = list(islice(self.ledger.pending(), MAX_SHOWN))
        waits_at = self.waits_at(root for root, *_ in first)
        return {
            "pending": {
                "batches": self.ledger.pending_batches,
                "size_bytes": self.ledger.pending_bytes,
                "max_batches": settings.max_pending_batches,
                "max_bytes": settings.max_pending_bytes,
                "full": self.is_full(),
                "first": [
                    {
                        "root": f"{root:016x}",
                        **asdict(owner),
                        "started_s": to_s(entry.started_ms),
                        "age_s": to_s(now_ms) - to_s(entry.started_ms),
                        "waits_at": waits_at.get(root),
                    }
                    for root, entry, owner in first
                ],
            },
            "completed": outcomes[RootOutcome.COMPLETED, ""],
            "timed_out": outcomes[RootOutcome.TIMED_OUT, ""],
            "failed": {why: n for (how, why), n in outcomes.items() if how is RootOutcome.FAILED},
            "edges": self.edges.size,
            "max_edges": self._max_edges,
            "early_batches": len(self.deferred.waiting),
            "forced_batches": self.deferred.forced,
            "dropped_batches": self.deferred.dropped,
            "counts": asdict(self.counts),
            "notes": [{"at_s": at_s, "text": text} for at_s, text in self.notes],
        }

    def _apply_ready(self, now_ms: float) -> None:
        for batch, is_known in self.deferred.ready(now_ms):
            if not is_known:
                text = "is taken although it is not known who produced what it read"
                self._note_batch(batch, text, now_ms)
            self._apply(batch, now_ms)
            if self.edges.size > self._max_edges:
                self._make_room(now_ms)

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
            self._end(self.ledger.ack(root, value ^ made, now_ms))
        if begun is not None:
            owner = SourceBatch(batch.stage, batch.batch, batch.size_bytes)
            self._end(self.ledger.init(begun, made, owner, batch.started_ms, now_ms))
        if reused := self._fail_all(replaced, OFFSETS_REUSED, now_ms):
            self._note_batch(batch, f"appended at offsets that {reused} roots waited for", now_ms)

    def _complete(self, batch: StageBatch, now_ms: float) -> tuple[dict[Anchor, int], bool, bool]:
        """Remove the input of a batch from what waits.

        Return by anchor what is acked, whether any is of a source, and whether all was completed.
        """
        graph, of_source = self._graph, False
        acks: dict[Anchor, int] = defaultdict(int)
        repeated = foreign = records = 0
        for read in merged(batch.inputs):
            if read.topic not in graph.stages[batch.stage].consumes:
                self.counts.unknown_topics += 1
                continue
            key = (batch.stage, read.topic, read.partition)
            is_of_stage = graph.feeder(batch.stage, read.topic) is not None
            if not is_of_stage:
                of_source = True
                if key not in self.edges.partitions:
                    continue
            completed = self.edges.complete(key, read.start, read.end)
            for anchor, value in completed.acks:
                acks[anchor] ^= value
            records += completed.records
            if is_of_stage:
                repeated += completed.repeated
                foreign += completed.foreign
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
        for written in merged(batch.outputs):
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
        self._unswept = 0

    def _make_room(self, now_ms: float) -> None:
        self._sweep()
        bound = int(self._max_edges * (1 - ROOM_SHARE))
        if self.edges.size <= bound:
            return
        going = self.edges.excess(self.ledger.oldest_first(), bound)
        for root in going:
            self.fail(root, TOO_MANY_EDGES, now_ms)
        self._sweep()
        self._note(f"{len(going)} roots failed: more than {self._max_edges} edges waited", now_ms)

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
            self.fail(root, reason, now_ms)
        return len(here)

    def _end(self, ended: EndedRoot | None) -> None:
        if ended is not None:
            self._unswept += ended.outcome is not RootOutcome.COMPLETED
            self.outcomes[ended.outcome, ended.reason] += 1
            self._ended.append(ended)

    def _note_batch(self, batch: StageBatch, text: str, now_ms: float) -> None:
        self._note(f"batch {batch.batch} of {batch.stage!r} {text}", now_ms)

    def _note(self, text: str, now_ms: float) -> None:
        self.notes.append((self._wall.to_s(now_ms), text))
