"""What a batch does to the edges: it completes those that it read, and makes new ones.

What it appends belongs to the roots of what it read, and to its own when it read of a source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .early import StageBatch
from .edges import EdgeTable
from .graph import StageSettings
from .lane import NOTHING_KNOWN, Group, LaneKey, merged
from .ledger import Ledger


@dataclass(slots=True)
class CompletionCounts:
    """What came of the reports, since the start."""

    late_acks: int = 0
    """Acks for roots that had ended."""
    repeated_records: int = 0
    """Records of input that the stage had completed before."""
    foreign_records: int = 0
    """Records of input from a stage's topic that no stage is known to have produced."""
    unanchored_ranges: int = 0
    """Ranges of output of batches that read nothing of a pending root."""
    unknown_stages: int = 0
    """Batches of stages that are not in the pipeline."""
    unknown_topics: int = 0
    """Ranges of topics that the stage does not consume or produce."""


@dataclass(frozen=True, slots=True)
class Read:
    """What the input of a batch was."""

    acks: dict[Group, int]
    """By group what is acked, as the ledger counts it."""
    of_source: bool
    """Whether something came from a source."""
    repeated: int
    """How many records were completed before."""
    is_again: bool
    """Whether all of it was completed before: the same report, or the same batch once more."""


class Anchoring:
    """The stages of a pipeline by what they read and write, over its ledger and edges.

    Raises ValueError when a stage consumes what a later one produces.
    """

    def __init__(self, stages: Sequence[StageSettings], ledger: Ledger, edges: EdgeTable) -> None:
        self._ledger = ledger
        self._edges = edges
        self.counts = CompletionCounts()
        check_order(stages)
        self.follow(stages)

    def follow(self, stages: Sequence[StageSettings]) -> None:
        """Take other stages, in topological order; see `check_order`."""
        self._consumes = {stage.name: frozenset(stage.consumes) for stage in stages}
        self._produces = {stage.name: frozenset(stage.produces) for stage in stages}
        self._produced = frozenset[str]().union(*self._produces.values())
        self._consumers: dict[str, list[str]] = {}
        for stage in stages:
            for topic in dict.fromkeys(stage.consumes):
                self._consumers.setdefault(topic, []).append(stage.name)

    def is_stage(self, name: str) -> bool:
        """Say whether there is a stage of that name."""
        return name in self._consumes

    def gone(self) -> list[LaneKey]:
        """Return the lanes where no stage reads any more."""
        return [key for key in self._edges.lanes if key[1] not in self._consumes.get(key[0], ())]

    def known_to(self, key: LaneKey) -> int:
        """Return up to which offset it is known who produced what waits in a lane."""
        lane = self._edges.lanes.get(key)
        return NOTHING_KNOWN if lane is None else lane.known_to

    def complete(self, batch: StageBatch) -> Read:
        """Take the input of a batch out of what waits."""
        stage, acks = batch.stage, dict[Group, int]()
        of_source = False
        repeated = foreign = records = 0
        for read in merged(batch.inputs):
            if read.topic not in self._consumes[stage]:
                self.counts.unknown_topics += 1
                continue
            key = (stage, read.topic, read.partition)
            if read.topic not in self._produced:
                of_source = True
                if key not in self._edges.lanes:
                    continue
            covered = self._edges.completed(key, read.start, read.end)
            for group, value in covered.acks:
                acks[group] = acks.get(group, 0) ^ self._ledger.at(stage, value)
            records += covered.records
            if read.topic in self._produced:
                repeated += covered.repeated
                foreign += covered.foreign
        self.counts.foreign_records += foreign
        self.counts.repeated_records += repeated
        return Read(
            acks, of_source, repeated, repeated > 0 and not (of_source or records + foreign)
        )

    def _group(self, roots: tuple[int, ...], acks: Mapping[Group, int]) -> Group | None:
        """Return the group of a batch's output; what was read of one group may go on with it."""
        if not roots:
            return None
        only = next(iter(acks)) if len(acks) == 1 else None
        return only if only is not None and only.roots == roots else self._edges.group(roots)

    def produce(
        self, batch: StageBatch, roots: tuple[int, ...], read: Read
    ) -> tuple[int, set[int]]:
        """Add the output of a batch as edges.

        Args:
            batch: the batch.
            roots: whose they are.
            read: what `complete` said of the batch.

        Returns:
            What they add to the value of each root, and the roots of edges whose offsets they took.

        """
        made, replaced = 0, set[int]()
        group = self._group(roots, read.acks)
        for written in merged(batch.outputs):
            if written.topic not in self._produces[batch.stage]:
                self.counts.unknown_topics += 1
                continue
            self.counts.unanchored_ranges += group is None
            for stage in self._consumers.get(written.topic, ()):
                key = (stage, written.topic, written.partition)
                # What a batch is said to have written again was added the first time.
                start = max(written.start, self.known_to(key)) if read.is_again else written.start
                if start >= written.end:
                    continue
                edge, groups = self._edges.produced(key, start, written.end, group)
                made ^= self._ledger.at(stage, edge)
                replaced.update(root for old in groups for root in old.roots)
        return made, replaced


def check_order(stages: Sequence[StageSettings]) -> None:
    """Raise ValueError when a stage consumes what it or a later one produces."""
    seen: set[str] = set()
    for stage in reversed(stages):
        seen.update(stage.produces)
        if not seen.isdisjoint(stage.consumes):
            raise ValueError(f"{stage.name!r} comes before a stage that feeds it")
