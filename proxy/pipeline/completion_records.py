"""How a completion ledger is kept in the state: what changed becomes records, and back.

Under `ledger/PIPELINE/`, each part quoted, with hexadecimal ids and times in wall-clock seconds:

- `root/ID`: its value is the xor of all in `at`; earlier programs wrote one for each stage there;
- `group/NUMBER`: the roots of an anchor;
- `edge/STAGE/TOPIC/PARTITION/START`: an edge that waits, and the number of its anchor;
- `lane/STAGE/TOPIC/PARTITION`: what is known of the offsets there that are no edges;
- `stage/STAGE`: up to when its reports are complete;
- `early/NUMBER`: a batch that waits for the one that feeds it.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from functools import lru_cache, partial, reduce
from operator import xor
from typing import Annotated, Any
from urllib.parse import quote, unquote

from pydantic import BaseModel, ConfigDict, Field

from proxy.state import Json, Record
from proxy.state.journal import RecordFormat

from .deferred import DeferredBatch, DeferredBatches, StageBatch
from .edges import MAX_OFFSET, Anchor, EdgeTable, TopicRange
from .ledger import Ledger, LedgerItem, Root, SourceBatch
from .wall_time import WallTime

_Id = Annotated[str, Field(pattern="^[0-9a-f]{1,16}$")]
_Offset = Annotated[int, Field(ge=0, le=MAX_OFFSET)]
_Seconds = Annotated[float, Field(allow_inf_nan=False)]
_Pair = Annotated[list[_Offset], Field(min_length=2, max_length=2)]

_quoted = lru_cache(partial(quote, safe=""))
"""Of kinds, stages and topics: few, and in each key."""


class _LedgerForm(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _RootForm(_LedgerForm):
    at: dict[str, _Id]
    owner: SourceBatch | None
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


class _DeferredForm(_LedgerForm):
    stage: str
    batch: int
    inputs: tuple[TopicRange, ...]
    outputs: tuple[TopicRange, ...]
    started_s: _Seconds
    at_s: _Seconds
    size_bytes: Annotated[int, Field(ge=0)]


LEDGER_RECORDS: dict[str, RecordFormat[Any]] = {
    kind: RecordFormat("ledger", 1, form)
    for kind, form in (
        ("root", _RootForm),
        ("group", _AnchorForm),
        ("edge", _EdgeForm),
        ("lane", _PartitionForm),
        ("stage", _StageForm),
        ("early", _DeferredForm),
    )
}
"""By kind, in the order in which they are read: each refers to earlier ones only."""


class CompletionRecords:
    """Writes and reads the parts of one ledger; a part is a kind and what its key says."""

    def __init__(
        self,
        pipeline: str,
        wall: WallTime,
        ledger: Ledger,
        edges: EdgeTable,
        deferred: DeferredBatches,
    ) -> None:
        self.prefix = f"{LEDGER_RECORDS['root'].key(pipeline)}/"
        self._wall = wall
        self._ledger = ledger
        self._edges = edges
        self._deferred = deferred

    def items(self) -> Iterator[LedgerItem]:
        """Return all parts that have a record."""
        partitions = self._edges.partitions
        yield from (("root", root) for root in self._ledger.roots)
        yield from (("group", number) for number in self._edges.anchors)
        for key, edges in partitions.items():
            yield ("lane", *key)
            yield from (("edge", *key, start) for start in edges.starts)
        yield from (("stage", stage) for stage in self._deferred.settled)
        yield from (("early", number) for number in self._deferred.waiting)

    def key(self, item: LedgerItem) -> str:
        """Return the key of a part's record."""
        if item[0] == "root":
            return f"{self.prefix}root/{item[1]:016x}"
        parts = [_quoted(part) if isinstance(part, str) else str(part) for part in item]
        return self.prefix + "/".join(parts)

    def record(self, item: LedgerItem) -> Record | None:
        """Return the record of a part; None when it is not there any more."""
        value = self._value(item)
        return None if value is None else Record.of(self.key(item), value)

    def load(
        self, records: Iterable[Record], stages: Collection[str], now_ms: float
    ) -> tuple[list[str], list[str]]:
        """Load them before anything happens; return why some were refused, and keys to delete."""
        refused: list[str] = []
        deletes: list[str] = []
        found: dict[str, list[tuple[list[str], Record, Any]]] = {}

        def refuse(record: Record, why: object) -> None:
            refused.append(f"{record.key}: {why}")
            deletes.append(record.key)

        for record in records:
            kind, *parts = map(unquote, record.key.removeprefix(self.prefix).split("/"))
            form = LEDGER_RECORDS.get(kind)
            try:
                if form is None:
                    refuse(record, "there is nothing of that name")
                elif record.version > form.version:
                    refused.append(
                        f"{record.key}: it is of a newer program; start that one to use it"
                    )
                else:
                    found.setdefault(kind, []).append((parts, record, form.read(record)))
            except ValueError as error:
                refuse(record, error)
        anchors: dict[int, Anchor] = {}
        for kind in LEDGER_RECORDS:
            for parts, record, read in sorted(found.get(kind, ()), key=_order):
                try:
                    self._restore(read, parts, anchors, stages, now_ms)
                except ValueError as error:
                    refuse(record, error)
        deletes += [self.key(("group", n)) for n, each in anchors.items() if not each.edges]
        return refused, deletes

    def _restore(
        self,
        form: _LedgerForm,
        parts: list[str],
        anchors: dict[int, Anchor],
        stages: Collection[str],
        now_ms: float,
    ) -> None:
        """Load one record. Raises ValueError with what is wrong."""
        to_ms = self._wall.to_ms
        match form, parts:
            case _RootForm(), [root]:
                value = reduce(xor, map(_id, form.at.values()), 0)
                entry = Root(value, form.owner, to_ms(form.started_s), form.failed)
                self._ledger.restore(int(root, 16), entry, to_ms(form.heard_s), now_ms)
            case _AnchorForm(), [number]:
                roots = tuple(int(root, 16) for root in form.roots)
                anchors[int(number)] = self._edges.anchor(roots, int(number))
            case _EdgeForm(), [stage, topic, partition, start]:
                read = TopicRange(topic, int(partition), int(start), form.end)
                if form.group not in anchors or read.start == read.end:
                    raise ValueError("its group is missing, or it is empty")
                edge = (read.start, read.end, _id(form.id), anchors[form.group])
                self._edges.restore((stage, topic, read.partition), edge)
            case _PartitionForm(), [stage, topic, partition]:
                edges = self._edges.partitions[stage, topic, int(partition)]
                edges.known_to = form.known_to
                for low, high in form.done:
                    edges.done.add(low, high)
            case _StageForm(), [stage] if stage in stages:
                self._deferred.settle(stage, to_ms(form.settled_s))
            case _DeferredForm(), [number] if form.stage in stages:
                batch = StageBatch(
                    *(form.stage, form.batch, form.inputs, form.outputs),
                    *(to_ms(form.started_s), form.size_bytes),
                )
                self._deferred.restore(DeferredBatch(int(number), batch, to_ms(form.at_s)))
            case _StageForm() | _DeferredForm(), [_]:
                raise ValueError("its stage is not in the pipeline any more")
            case _:
                raise ValueError("its key has another form")

    def _value(self, item: LedgerItem) -> Json:
        to_s = self._wall.to_s
        match item:
            case ("edge", str(stage), str(topic), int(partition), int(start)):
                edge = self._edges.find((stage, topic, partition), start)
                if edge is not None:
                    _, end, number, anchor = edge
                    return {"end": end, "id": f"{number:016x}", "group": anchor.number}
            case ("lane", str(stage), str(topic), int(partition)):
                edges = self._edges.partitions.get((stage, topic, partition))
                if edges is not None:
                    return {"known_to": edges.known_to, "done": list(edges.done)}
            case ("root", int(root)) if (entry := self._ledger.roots.get(root)) is not None:
                stage = "" if entry.owner is None else entry.owner.stage
                return {
                    "at": {stage: f"{entry.value:016x}"} if entry.value else {},
                    "owner": None if entry.owner is None else asdict(entry.owner),
                    "started_s": to_s(entry.started_ms),
                    "heard_s": to_s(self._ledger.heard_ms(entry)),
                    "failed": entry.failed,
                }
            case ("group", int(number)) if number in self._edges.anchors:
                return {"roots": [f"{root:016x}" for root in self._edges.anchors[number].roots]}
            case ("stage", str(stage)) if stage in self._deferred.settled:
                return {"settled_s": to_s(self._deferred.settled[stage])}
            case ("early", int(number)) if number in self._deferred.waiting:
                deferred = self._deferred.waiting[number]
                batch = asdict(deferred.batch)
                size_bytes, started_ms = batch.pop("size_bytes"), batch.pop("started_ms")
                times_s = {"started_s": to_s(started_ms), "at_s": to_s(deferred.at_ms)}
                return {**batch, **times_s, "size_bytes": size_bytes}
        return None


def _id(text: str) -> int:
    number = int(text, 16)
    if not number:
        raise ValueError("an id is 0")
    return number


def _order(found: tuple[list[str], Record, Any]) -> tuple[float, list[tuple[int, str]]]:
    """Order roots by when they were heard of, edges by their offsets, batches by their numbers."""
    parts, _, form = found
    heard_s = form.heard_s if isinstance(form, _RootForm) else 0.0
    return heard_s, [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
