"""How a completion ledger is kept in the state: what changed becomes records, and back.

Under `ledger/PIPELINE/`, each part quoted, with hexadecimal ids and times in wall-clock seconds:

- `root/ID`: its value is the xor of all in `at`; earlier programs wrote one for each stage there;
- `group/NUMBER`: the roots of an anchor;
- `edge/STAGE/TOPIC/PARTITION/START`: an edge that waits, and the number of its anchor;
- `lane/STAGE/TOPIC/PARTITION`: what is known of the offsets there that are no edges;
- `stage/STAGE`: up to when its reports are complete;
- `early/NUMBER`: a batch that waits for the one that feeds it;
- `written/STAGE`: what it has written since its last report; of a handover, until it is taken up.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from operator import xor
from typing import Annotated, Any
from urllib.parse import unquote

from pydantic import ConfigDict, Field, create_model

from proxy.state import Json, Record
from proxy.state.journal import RecordFormat
from proxy.state.store import SEPARATOR

from .deferred import DeferredBatch, DeferredBatches, StageBatch
from .edges import MAX_OFFSET, Anchor, EdgeTable, TopicRange
from .graph import StageSettings
from .ledger import Ledger, LedgerItem, Root, SourceBatch, WallTime
from .outputs import StageOutputs, WrittenRange

_Id = Annotated[str, Field(pattern="^[0-9a-f]{1,16}$")]
_Offset = Annotated[int, Field(ge=0, le=MAX_OFFSET)]
_Known = Annotated[int, Field(ge=-1, le=MAX_OFFSET)]
_Seconds = Annotated[float, Field(allow_inf_nan=False)]
_Pair = Annotated[list[_Offset], Field(min_length=2, max_length=2)]
_Ranges = tuple[TopicRange, ...]
_Size = Annotated[int, Field(ge=0)]


def _format(**fields: Any) -> RecordFormat[Any]:
    strict = ConfigDict(strict=True, extra="forbid", frozen=True)
    required: dict[str, Any] = {name: (kind, ...) for name, kind in fields.items()}
    return RecordFormat("ledger", 1, create_model("LedgerForm", __config__=strict, **required))


_BATCH = {"stage": str, "batch": int, "inputs": _Ranges, "outputs": _Ranges}
_ROOT_TIMES = {"started_s": _Seconds, "heard_s": _Seconds}
LEDGER_RECORDS: Mapping[str, RecordFormat[Any]] = {
    "root": _format(at=dict[str, _Id], owner=SourceBatch | None, **_ROOT_TIMES, failed=str | None),
    "group": _format(roots=list[_Id]),
    "edge": _format(end=_Offset, id=_Id, group=int),
    "lane": _format(known_to=_Known, done=list[_Pair]),
    "stage": _format(settled_s=_Seconds),
    "early": _format(**_BATCH, started_s=_Seconds, at_s=_Seconds, size_bytes=_Size),
    "written": _format(stage=str, ranges=tuple[tuple[TopicRange, _Seconds], ...]),
}
"""By kind, in the order in which they are read: each refers to earlier ones only."""


@dataclass(frozen=True, slots=True)
class CompletionRecords:
    """Writes and reads the parts of one ledger; a part is a kind and what its key says."""

    pipeline: str
    wall: WallTime
    ledger: Ledger
    edges: EdgeTable
    deferred: DeferredBatches
    outputs: StageOutputs

    @property
    def prefix(self) -> str:
        """What the keys of its records begin with."""
        return LEDGER_RECORDS["root"].key(self.pipeline) + SEPARATOR

    def items(self) -> Iterator[LedgerItem]:
        """Yield all parts that have a record."""
        for key, edges in self.edges.partitions.items():
            yield ("lane", *key)
            yield from (("edge", *key, start) for start in edges.starts)
        yield from (("root", root) for root in self.ledger.roots)
        yield from (("group", number) for number in self.edges.anchors)
        yield from (("stage", stage) for stage in self.deferred.settled)
        yield from (("early", number) for number in self.deferred.waiting)

    def key(self, item: LedgerItem) -> str:
        """Return the key of a part's record."""
        kind, *where = item
        parts = [f"{where[0]:016x}"] if kind == "root" else where
        return LEDGER_RECORDS[kind].key(self.pipeline, kind, *parts)

    def record(self, item: LedgerItem) -> Record | None:
        """Return the record of a part; None when it is not there any more."""
        value = self._value(item)
        return None if value is None else Record.of(self.key(item), value)

    def load(
        self, records: Iterable[Record], stages: Mapping[str, StageSettings], now_ms: float
    ) -> tuple[list[str], list[str]]:
        """Load them before anything happens; return why some were refused, and keys to delete."""
        refused: list[str] = []
        deletes: list[str] = []
        prefix = self.prefix
        found: dict[str, list[tuple[list[str], Record, Any]]] = {
            kind: [] for kind in LEDGER_RECORDS
        }

        def refuse(record: Record, why: object) -> None:
            refused.append(f"{record.key}: {why}")
            deletes.append(record.key)

        for record in records:
            kind, *parts = map(unquote, record.key.removeprefix(prefix).split(SEPARATOR))
            form = LEDGER_RECORDS.get(kind)
            if form is None:
                refuse(record, "there is nothing of that name")
            elif record.version > form.version:
                refused.append(f"{record.key}: it is of a newer program; start that one to use it")
            else:
                try:
                    found[kind].append((parts, record, form.read(record)))
                except ValueError as error:
                    refuse(record, error)
        anchors: dict[int, Anchor] = {}
        for kind, forms in found.items():
            for parts, record, form in sorted(forms, key=_order):
                try:
                    self._restore((kind, *parts), form, anchors, stages, now_ms)
                except ValueError as error:
                    refuse(record, error)
        deletes += [self.key(("group", n)) for n, each in anchors.items() if not each.edges]
        deletes += [record.key for _, record, _ in found["written"]]
        return refused, deletes

    def _restore(
        self,
        item: tuple[str, ...],
        form: Any,
        anchors: dict[int, Anchor],
        stages: Mapping[str, StageSettings],
        now_ms: float,
    ) -> None:
        """Load one record. Raises ValueError with what is wrong."""
        to_ms = self.wall.to_ms
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
                self.deferred.settle(stage, to_ms(form.settled_s))
            case "early", number if form.stage in stages:
                batch = StageBatch(
                    *(form.stage, form.batch, form.inputs, form.outputs),
                    *(to_ms(form.started_s), form.size_bytes),
                )
                waits = DeferredBatch(int(number), batch, to_ms(form.at_s), is_kept=True)
                self.deferred.restore(waits)
            case "written", _ if form.stage in stages:
                self.outputs.ranges[form.stage] = [
                    WrittenRange(each, to_ms(at_s))
                    for each, at_s in form.ranges
                    if each.topic in stages[form.stage].produces
                ]
            case (("stage" | "early"), _):
                raise ValueError("its stage is not in the pipeline any more")
            case (("root" | "group" | "edge" | "lane" | "stage" | "early"), *_):
                raise ValueError("its key has another form")

    def _value(self, item: LedgerItem) -> Json:
        kind, *where = item
        to_s, deferred = self.wall.to_s, self.deferred
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
            case "stage", stage if stage in deferred.settled:
                return {"settled_s": to_s(deferred.settled[stage])}
            case "early", number if waits := deferred.waiting.get(number):
                batch = asdict(waits.batch)
                size_bytes, started_s = batch.pop("size_bytes"), to_s(batch.pop("started_ms"))
                times = {"started_s": started_s, "at_s": to_s(waits.at_ms)}
                return {**batch, **times, "size_bytes": size_bytes}
            case "written", stage:
                written = (
                    each for each in self.outputs.ranges[stage] if each.range.start < each.range.end
                )
                ranges = [(asdict(each.range), to_s(each.at_ms)) for each in written]
                return {"stage": stage, "ranges": ranges}
        return None


def _id(text: str) -> int:
    number = int(text, 16)
    if not number:
        raise ValueError("an id is 0")
    return number


def _order(found: tuple[list[str], Record, Any]) -> tuple[float, list[tuple[int, str]]]:
    """Order roots by when they were heard of, edges by their offsets, batches by their numbers."""
    parts, _, form = found
    heard_s = getattr(form, "heard_s", 0.0)
    return heard_s, [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
