"""Which source batches of a pipeline are finished, told from the batches of its stages.

A batch of a first stage with input from a source is a root. What a stage's batch appends is an edge
for each stage that consumes the topic, and belongs to the roots of what the batch read; completing
a range acks its edges. A root ends when nothing of it waits any more, in time.

What cannot be known is never taken for done: what a batch read without its report being seen, or
appended unseen, keeps its roots waiting until they time out.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from random import Random

from proxy.state import Json, Record

from .anchoring import Anchoring, check_order
from .completion_state import CompletionState
from .early import EarlyBatches, StageBatch
from .edges import MAX_EDGES, EdgeTable
from .graph import StageSettings
from .inflight import MaxPending
from .lane import NOTHING_KNOWN
from .ledger import PIPELINE_CHANGED, Ended, Ledger, Outcome, Owner
from .walltime import WallTime

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

    Args:
        pipeline: its name.
        stages: in topological order (`PipelineGraph.order`).
        timeout_ms: a root fails when it is older, by up to a half of it; see Ledger.
        random: makes ids.
        now_ms: the time.
        now_s: the same on the wall clock.
        max_pending: the limits on what is in flight.
        max_edges: edges that wait and roots of their groups; beyond it the oldest roots fail.

    Raises ValueError when a stage consumes what a later one produces, and as Ledger does.

    """

    def __init__(
        self,
        pipeline: str,
        stages: Sequence[StageSettings],
        *,
        timeout_ms: float,
        random: Random,
        now_ms: float,
        now_s: float,
        max_pending: MaxPending | None = None,
        max_edges: int = MAX_EDGES,
    ) -> None:
        self._wall = WallTime.at(now_ms, now_s)
        self._max_edges = max_edges
        self.ledger = Ledger([stage.name for stage in stages], timeout_ms, random, self._wall)
        self.edges = EdgeTable(self.ledger.new_id)
        self._anchoring = Anchoring(stages, self.ledger, self.edges)
        self._early = EarlyBatches(stages, self._anchoring.known_to, timeout_ms)
        self.max_pending = max_pending or MaxPending()
        self._state = CompletionState(pipeline, self._wall, self.ledger, self.edges, self._early)
        self._ended: list[Ended] = []
        self._unswept = 0
        self.counts = self._anchoring.counts
        self.outcomes: Counter[tuple[Outcome, str]] = Counter()
        """How many roots ended how, and why."""
        self.notes: deque[tuple[float, str]] = deque(maxlen=MAX_NOTES)
        """What was unusual lately: wall clock, text."""

    def stage_batch(self, batch: StageBatch, now_ms: float) -> None:
        """Take a finished batch of a stage; see `take_ended` for what it ends.

        A batch of an unknown stage changes nothing; it is counted and noted. So does one whose
        whole input was completed before. But of a first stage each report is a new root, as after
        a restart from an older checkpoint; who knows that it is the same report must not pass it
        on.
        """
        if not self._anchoring.is_stage(batch.stage):
            self.counts.unknown_stages += 1
            self._note(f"batch {batch.batch} of {batch.stage!r}: there is no such stage", now_ms)
            return
        self._early.add(batch, now_ms)
        self._take_ready(now_ms)

    def idle(self, stage: str, now_ms: float) -> None:
        """Hear that a stage has nothing to do; what others read of it need wait no longer."""
        self._early.idle(stage, now_ms)
        self._take_ready(now_ms)

    def fail(self, root: int, reason: str, now_ms: float) -> None:
        """End a root as failed; one that has ended stays as it is."""
        self._end(self.ledger.fail(root, reason, now_ms))

    def tick(self, now_ms: float) -> None:
        """End the roots whose time is over; call it at least a few times in a timeout."""
        self._take_ready(now_ms)
        for ended in self.ledger.tick(now_ms):
            self._end(ended)
        if self._unswept >= max(SWEEP_AT, len(self.ledger)):
            self._sweep()

    def take_ended(self) -> list[Ended]:
        """Return the roots that ended since the last call, in that order."""
        ended, self._ended = self._ended, []
        return ended

    def known_ends(self) -> dict[tuple[str, int], int]:
        """Return up to where it is known who produced what, where anything is. O(partitions)."""
        ends: dict[tuple[str, int], int] = {}
        for (_, topic, partition), lane in self.edges.lanes.items():
            if lane.known_to != NOTHING_KNOWN:
                ends[topic, partition] = max(ends.get((topic, partition), 0), lane.known_to)
        return ends

    def waiting(self, stage: str) -> int:
        """Return how many batches of a stage are reported and wait to be taken; see `early`."""
        return self._early.waiting_of(stage)

    def holder(self) -> str:
        """Return the stage at which the oldest pending root waits; empty when there is none."""
        oldest = next((root for root, entry in self.ledger.items() if entry.owner), None)
        return "" if oldest is None else self.ledger.holder(oldest) or ""

    def update(self, stages: Sequence[StageSettings], timeout_ms: float, now_ms: float) -> None:
        """Follow a reload.

        Roots that wait at a stage that is gone, or for a topic that it no longer consumes, fail
        with the reason PIPELINE_CHANGED. The rest stays. Limits: see `max_pending.limit`.
        Raises ValueError as at the start; then nothing changed.
        """
        check_order(stages)
        stranded = self.ledger.update([stage.name for stage in stages], timeout_ms, now_ms)
        self._early.update(stages, timeout_ms)
        self._anchoring.follow(stages)
        for ended in stranded:
            self._end(ended)
        self._leave_lanes(now_ms)
        if stranded:
            self._note(f"{len(stranded)} roots waited at stages that are gone", now_ms)
        self._take_ready(now_ms)

    def changes(self) -> tuple[list[Record], list[str]]:
        """Return the records to write and the keys to delete since the last call, O(changed).

        They belong together: write them in one transaction. Call it also when nothing is kept,
        for what changed is remembered until then.
        """
        return self._state.changes()

    def snapshot(self) -> list[Record]:
        """Return all records as they are now; `changes` goes on regardless."""
        return self._state.snapshot()

    @property
    def prefix(self) -> str:
        """What the keys of its records begin with."""
        return self._state.prefix

    def load(self, records: Iterable[Record], now_ms: float) -> list[str]:
        """Take up all records under `prefix`, once and before anything else.

        Returns what was not taken, and why. Damaged records are deleted with the next `changes`;
        those of a newer program are left alone. What was lost with them keeps its roots waiting
        until they time out. Roots at stages that are gone fail as in `update`.
        """
        loaded = self._state.load(records, now_ms)
        for _, entry in self.ledger.items():
            if entry.owner is not None:
                self.max_pending.add(entry.owner.size_bytes)
        for root in loaded.stranded:
            self.fail(root, PIPELINE_CHANGED, now_ms)
        self._leave_lanes(now_ms)
        for message in loaded.refused:
            self._note(message, now_ms)
        return loaded.refused

    def document(self, now_ms: float) -> dict[str, Json]:
        """Return it as the API shows it: JSON, times in wall-clock seconds."""
        pending = self.max_pending
        failed = {
            reason: count
            for (outcome, reason), count in self.outcomes.items()
            if outcome is Outcome.FAILED
        }
        shown = (
            {
                "root": f"{root:016x}",
                "stage": entry.owner.stage,
                "batch": entry.owner.batch,
                "size_bytes": entry.owner.size_bytes,
                "started_s": self._wall.to_s(entry.started_ms),
                "age_s": self._wall.to_s(now_ms) - self._wall.to_s(entry.started_ms),
                "waits_at": self.ledger.holder(root),
            }
            for root, entry in self.ledger.items()
            if entry.owner is not None
        )
        return {
            "pending": {
                "batches": pending.batches,
                "size_bytes": pending.size_bytes,
                "max_batches": pending.max_batches,
                "max_bytes": pending.max_bytes,
                "full": pending.full(),
                "first": list(islice(shown, MAX_SHOWN)),
            },
            "completed": self.outcomes[Outcome.COMPLETED, ""],
            "timed_out": self.outcomes[Outcome.TIMED_OUT, ""],
            "failed": failed,
            "edges": self.edges.size,
            "max_edges": self._max_edges,
            "early_batches": len(self._early),
            "forced_batches": self._early.forced,
            "dropped_batches": self._early.dropped,
            "counts": asdict(self.counts) | asdict(self.ledger.counts),
            "notes": [{"at_s": at_s, "text": text} for at_s, text in self.notes],
        }

    def _take_ready(self, now_ms: float) -> None:
        for batch, is_known in self._early.ready(now_ms):
            if not is_known:
                text = "is taken although it is not known who produced what it read"
                self._note(f"batch {batch.batch} of {batch.stage!r} {text}", now_ms)
            self._apply(batch, now_ms)
            if self.edges.size > self._max_edges:
                self._make_room(now_ms)

    def _apply(self, batch: StageBatch, now_ms: float) -> None:
        read = self._anchoring.complete(batch)
        if read.repeated:
            text = f"completed {read.repeated} records a second time"
            self._note(f"batch {batch.batch} of {batch.stage!r} {text}", now_ms)
        values: dict[int, int] = {}
        for group, value in read.acks.items():
            for root in group.roots:
                if root in self.ledger:
                    values[root] = values.get(root, 0) ^ value
                else:
                    self.counts.late_acks += 1
        begun = self.ledger.new_root() if read.of_source else None
        roots = tuple(values) if begun is None else (*values, begun)
        made, replaced = self._anchoring.produce(batch, roots, read)
        for root, value in values.items():
            self._end(self.ledger.ack(root, value ^ made, now_ms))
        if begun is not None:
            owner = Owner(batch.stage, batch.batch, batch.size_bytes)
            self.max_pending.add(owner.size_bytes)
            self._end(self.ledger.init(begun, made, owner, batch.started_ms, now_ms))
        reused = sorted(root for root in replaced if root in self.ledger)
        for root in reused:
            self.fail(root, OFFSETS_REUSED, now_ms)
        if reused:
            text = f"appended at offsets that {len(reused)} roots waited for"
            self._note(f"batch {batch.batch} of {batch.stage!r} {text}", now_ms)

    def _sweep(self) -> None:
        self.edges.sweep(self.ledger.roots())
        self._unswept = 0

    def _make_room(self, now_ms: float) -> None:
        self._sweep()
        bound = int(self._max_edges * (1 - ROOM_SHARE))
        if self.edges.size <= bound:
            return
        by_age = sorted((entry.started_ms, root) for root, entry in self.ledger.items())
        going = self.edges.excess([root for _, root in by_age], bound)
        for root in going:
            self.fail(root, TOO_MANY_EDGES, now_ms)
        self._sweep()
        self._note(f"{len(going)} roots failed: more than {self._max_edges} edges waited", now_ms)

    def _leave_lanes(self, now_ms: float) -> None:
        """Fail what waits where no stage of the pipeline reads any more."""
        waited = self.edges.remove(self._anchoring.gone())
        roots = sorted(root for root in waited if root in self.ledger)
        for root in roots:
            self.fail(root, PIPELINE_CHANGED, now_ms)
        if roots:
            self._note(f"{len(roots)} roots waited for topics that are not read any more", now_ms)

    def _end(self, ended: Ended | None) -> None:
        if ended is not None:
            self.max_pending.remove(ended.owner.size_bytes)
            self._unswept += ended.outcome is not Outcome.COMPLETED
            self.outcomes[ended.outcome, ended.reason] += 1
            self._ended.append(ended)

    def _note(self, text: str, now_ms: float) -> None:
        self.notes.append((self._wall.to_s(now_ms), text))
