"""How a completion ledger is kept in the state: what changed becomes records, and back.

Under `ledger/PIPELINE/`, each part quoted:

- `root/ID`: its value, its owner, when it began and was first heard of. The value is the xor of all
  in `at`, of which earlier programs wrote one for each stage that the root waits at;
- `group/NUMBER`: the roots of an anchor;
- `edge/STAGE/TOPIC/PARTITION/START`: an edge that waits, and the number of its anchor;
- `lane/STAGE/TOPIC/PARTITION`: what is known of the offsets there that are no edges;
- `stage/STAGE`: up to when its reports are complete;
- `early/NUMBER`: a batch that waits for the one that feeds it.

Ids are hexadecimal, times wall-clock seconds.
"""

from collections.abc import Collection, Iterable
from dataclasses import asdict
from functools import reduce
from operator import xor
from typing import Annotated
from urllib.parse import quote, unquote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proxy.state import Json, Record, StateError

from .deferred import DeferredBatch, DeferredBatches, StageBatch
from .edges import MAX_OFFSET, Anchor, EdgeTable, TopicRange
from .ledger import Ledger, Root, SourceBatch
from .wall_time import WallTime

NAMESPACE = "ledger"
RECORD_VERSION = 1

KINDS = ("root", "group", "edge", "lane", "stage", "early")
"""In the order in which they are read: each refers to earlier ones only."""

_Id = Annotated[str, Field(pattern="^[0-9a-f]{1,16}$")]
_Offset = Annotated[int, Field(ge=0, le=MAX_OFFSET)]
_Seconds = Annotated[float, Field(allow_inf_nan=False)]
_Pair = Annotated[list[_Offset], Field(min_length=2, max_length=2)]


class _LedgerForm(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _OwnerForm(_LedgerForm):
    stage: str
    batch: int
    size_bytes: Annotated[int, Field(ge=0)]


class _RootForm(_LedgerForm):
    at: dict[str, _Id]
    owner: _OwnerForm | None
    started_s: _Seconds
    heard_s: _Seconds
    failed: str | None


class _AnchorForm(_LedgerForm):
    roots: list[_Id]


class _EdgeForm(_LedgerForm):
    end: _Offset
    id: _Id
    group: int


class _PartitionForm(_LedgerForm):
    known_to: Annotated[int, Field(ge=-1, le=MAX_OFFSET)]
    done: list[_Pair]


class _StageForm(_LedgerForm):
    settled_s: _Seconds


class _RangeForm(_LedgerForm):
    topic: str
    partition: int
    start: _Offset
    end: _Offset


class _DeferredForm(_LedgerForm):
    stage: str
    batch: int
    inputs: list[_RangeForm]
    outputs: list[_RangeForm]
    started_s: _Seconds
    at_s: _Seconds
    size_bytes: Annotated[int, Field(ge=0)]


_FORMS: dict[str, type[_LedgerForm]] = dict(
    zip(
        KINDS,
        (_RootForm, _AnchorForm, _EdgeForm, _PartitionForm, _StageForm, _DeferredForm),
        strict=True,
    )
)

_Found = tuple[tuple[str, ...], Record, _LedgerForm]
"""The parts of a key behind the kind, the record, and what it says."""


class CompletionRecords:
    """Writes and reads the parts of one ledger."""

    def __init__(
        self,
        pipeline: str,
        wall: WallTime,
        ledger: Ledger,
        edges: EdgeTable,
        deferred: DeferredBatches,
    ) -> None:
        self.prefix = f"{NAMESPACE}/{quote(pipeline, safe='')}/"
        self._wall = wall
        self._ledger = ledger
        self._edges = edges
        self._deferred = deferred
        self._deletes: set[str] = set()
        """Damaged records."""

    def changes(self) -> tuple[list[Record], list[str]]:
        """Return what to write and what to delete since the last call."""
        ledger, edges, deferred = self._ledger, self._edges, self._deferred
        values = self._values(
            ledger.dirty,
            edges.dirty_anchors.values(),
            edges.dirty_edges,
            edges.dirty_partitions,
            deferred.dirty_stages,
            deferred.dirty,
        )
        deletes = self._deletes.union(key for key, value in values.items() if value is None)
        for dirty in (
            *(ledger.dirty, edges.dirty_anchors, edges.dirty_edges, edges.dirty_partitions),
            *(deferred.dirty_stages, deferred.dirty, self._deletes),
        ):
            dirty.clear()
        return self._records(values), sorted(deletes)

    def snapshot(self) -> list[Record]:
        """Return all there is."""
        partitions = self._edges.partitions
        starts = [(key, start) for key, edges in partitions.items() for start in edges.starts]
        return self._records(
            self._values(
                self._ledger.roots(),
                self._edges.anchors(),
                starts,
                partitions,
                self._deferred.settled,
                self._deferred.waiting(),
            )
        )

    def load(self, records: Iterable[Record], stages: Collection[str], now_ms: float) -> list[str]:
        """Take up what was written, of a pipeline of these stages; return what was not, and why.

        Nothing may have happened before.
        """
        refused: list[str] = []
        found: dict[str, list[_Found]] = {kind: [] for kind in KINDS}
        for record in records:
            kind, *parts = record.key.removeprefix(self.prefix).split("/")
            if record.version > RECORD_VERSION:
                text = "it is of a newer program; start that one to use it"
                refused.append(f"{record.key}: {text}")
                continue
            try:
                if kind not in KINDS:
                    raise ValueError("there is nothing of that name")
                form = _FORMS[kind].model_validate(record.value)
                found[kind].append((tuple(map(unquote, parts)), record, form))
            except (ValueError, StateError) as error:
                self._refuse(record, error, refused)
        anchors: dict[int, Anchor] = {}
        found["root"].sort(key=_heard_s)
        for kind in KINDS[1:]:
            found[kind].sort(key=_order)
        for parts_of_key, record, form in (each for kind in KINDS for each in found[kind]):
            try:
                self._restore(form, parts_of_key, anchors, stages, now_ms)
            except ValueError as error:
                self._refuse(record, error, refused)
        self._deletes |= {self._key("group", n) for n, each in anchors.items() if not each.edges}
        # Taking up marks these as changed; they are as they were written.
        self._edges.dirty_anchors.clear()
        self._deferred.dirty_stages.clear()
        return refused

    def _restore(
        self,
        form: _LedgerForm,
        parts: tuple[str, ...],
        anchors: dict[int, Anchor],
        stages: Collection[str],
        now_ms: float,
    ) -> None:
        """Take up one record. Raises ValueError with what is wrong."""
        to_ms = self._wall.to_ms
        match form, parts:
            case _RootForm(), (root,):
                value = reduce(xor, map(_id, form.at.values()), 0)
                owner = None if form.owner is None else SourceBatch(**form.owner.model_dump())
                entry = Root(value, owner, to_ms(form.started_s), form.failed)
                self._ledger.restore(int(root, 16), entry, to_ms(form.heard_s), now_ms)
            case _AnchorForm(), (number,):
                roots = tuple(int(root, 16) for root in form.roots)
                anchors[int(number)] = self._edges.anchor(roots, int(number))
            case _EdgeForm(), (stage, topic, partition, start):
                read = TopicRange(topic, int(partition), int(start), form.end)
                if form.group not in anchors or read.start == read.end:
                    raise ValueError("its group is missing, or it is empty")
                edge = (read.start, read.end, _id(form.id), anchors[form.group])
                self._edges.restore((stage, topic, read.partition), edge)
            case _PartitionForm(), (stage, topic, partition):
                edges = self._edges.at((stage, topic, int(partition)))
                edges.known_to = form.known_to
                for low, high in form.done:
                    edges.complete(low, high)
            case _StageForm(), (stage,) if stage in stages:
                self._deferred.settle(stage, to_ms(form.settled_s))
            case _DeferredForm(), (number,) if form.stage in stages:
                batch = StageBatch(
                    form.stage,
                    form.batch,
                    tuple(TopicRange(**one.model_dump()) for one in form.inputs),
                    tuple(TopicRange(**one.model_dump()) for one in form.outputs),
                    to_ms(form.started_s),
                    form.size_bytes,
                )
                self._deferred.restore(DeferredBatch(int(number), batch, to_ms(form.at_s)))
            case _StageForm() | _DeferredForm(), (_,):
                raise ValueError("its stage is not in the pipeline any more")
            case _:
                raise ValueError("its key has another form")

    def _refuse(self, record: Record, error: ValueError | StateError, refused: list[str]) -> None:
        why = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        refused.append(f"{record.key}: {why}")
        self._deletes.add(record.key)

    def _key(self, *parts: object) -> str:
        return self.prefix + "/".join(quote(str(part), safe="") for part in parts)

    def _records(self, values: dict[str, Json]) -> list[Record]:
        return [
            Record.of(key, value, RECORD_VERSION)
            for key, value in sorted(values.items())
            if value is not None
        ]

    def _values(
        self,
        roots: Iterable[int],
        anchors: Iterable[Anchor],
        starts: Iterable[tuple[tuple[str, str, int], int]],
        partitions: Iterable[tuple[str, str, int]],
        stages: Iterable[str],
        numbers: Iterable[int],
    ) -> dict[str, Json]:
        """Return by key what to write; None where there is nothing any more."""
        deferred = self._deferred.waiting()
        return (
            {self._key("root", f"{root:016x}"): self._root(root) for root in roots}
            | {self._key("group", each.number): _anchor(each) for each in anchors}
            | {self._key("edge", *key, start): self._edge(key, start) for key, start in starts}
            | {self._key("lane", *key): self._partition(key) for key in partitions}
            | {self._key("stage", stage): self._stage(stage) for stage in stages}
            | {self._key("early", n): self._waiting(deferred.get(n)) for n in numbers}
        )

    def _root(self, root: int) -> Json:
        entry = self._ledger.get(root)
        if entry is None:
            return None
        stage = "" if entry.owner is None else entry.owner.stage
        return {
            "at": {stage: f"{entry.value:016x}"} if entry.value else {},
            "owner": None if entry.owner is None else asdict(entry.owner),
            "started_s": self._wall.to_s(entry.started_ms),
            "heard_s": self._wall.to_s(self._ledger.heard_ms(entry)),
            "failed": entry.failed,
        }

    def _edge(self, key: tuple[str, str, int], start: int) -> Json:
        edges = self._edges.partitions.get(key)
        edge = None if edges is None else edges.find(start)
        if edge is None:
            return None
        _, end, number, anchor = edge
        return {"end": end, "id": f"{number:016x}", "group": anchor.number}

    def _partition(self, key: tuple[str, str, int]) -> Json:
        edges = self._edges.partitions.get(key)
        return None if edges is None else {"known_to": edges.known_to, "done": list(edges.done)}

    def _stage(self, stage: str) -> Json:
        settled_ms = self._deferred.settled.get(stage)
        return None if settled_ms is None else {"settled_s": self._wall.to_s(settled_ms)}

    def _waiting(self, deferred: DeferredBatch | None) -> Json:
        if deferred is None:
            return None
        batch = deferred.batch
        return {
            "stage": batch.stage,
            "batch": batch.batch,
            "inputs": [asdict(one) for one in batch.inputs],
            "outputs": [asdict(one) for one in batch.outputs],
            "started_s": self._wall.to_s(batch.started_ms),
            "at_s": self._wall.to_s(deferred.at_ms),
            "size_bytes": batch.size_bytes,
        }


def _anchor(anchor: Anchor) -> Json:
    """Write down an anchor; None when it has no edge any more."""
    return {"roots": [f"{root:016x}" for root in anchor.roots]} if anchor.edges else None


def _id(text: str) -> int:
    number = int(text, 16)
    if not number:
        raise ValueError("an id is 0")
    return number


def _heard_s(found: _Found) -> float:
    """Order roots by when they were heard of: they go into buckets in turn."""
    form = found[2]
    assert isinstance(form, _RootForm)
    return form.heard_s


def _order(found: _Found) -> list[tuple[int, str]]:
    """Order numbers by their value, so that edges come in the order of their offsets."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in found[0]]
