"""How a completion ledger is kept in the state: what changed becomes records, and back.

Under `ledger/PIPELINE/`, each part quoted:

- `root/ID`: the lanes of its value, its owner, when it began and was first heard of;
- `group/NUMBER`: the roots of a group of edges;
- `edge/STAGE/TOPIC/PARTITION/START`: an edge that waits;
- `lane/STAGE/TOPIC/PARTITION`: what is known of the offsets there that are no edges;
- `stage/STAGE`: up to when its reports are complete;
- `early/NUMBER`: a batch that waits for the one that feeds it.

Ids are hexadecimal, times wall-clock seconds.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Annotated
from urllib.parse import quote, unquote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proxy.state import Json, Record, StateError

from .early import Early, EarlyBatches, StageBatch
from .edges import EdgeTable
from .lane import MAX_OFFSET, Group, LaneKey, TopicRange
from .ledger import Entry, Ledger, Owner
from .walltime import WallTime

NAMESPACE = "ledger"
RECORD_VERSION = 1

KINDS = ("root", "group", "edge", "lane", "stage", "early")
"""In the order in which they are read: each refers to earlier ones only."""

_Id = Annotated[str, Field(pattern="^[0-9a-f]{1,16}$")]
_Offset = Annotated[int, Field(ge=0, le=MAX_OFFSET)]
_Seconds = Annotated[float, Field(allow_inf_nan=False)]
_Pair = Annotated[list[_Offset], Field(min_length=2, max_length=2)]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _OwnerForm(_Form):
    stage: str
    batch: int
    size_bytes: Annotated[int, Field(ge=0)]


class _RootForm(_Form):
    at: dict[str, _Id]
    owner: _OwnerForm | None
    started_s: _Seconds
    heard_s: _Seconds
    failed: str | None


class _GroupForm(_Form):
    roots: list[_Id]


class _EdgeForm(_Form):
    end: _Offset
    id: _Id
    group: int


class _LaneForm(_Form):
    known_to: Annotated[int, Field(ge=-1, le=MAX_OFFSET)]
    done: list[_Pair]


class _StageForm(_Form):
    settled_s: _Seconds


class _RangeForm(_Form):
    topic: str
    partition: int
    start: _Offset
    end: _Offset


class _EarlyForm(_Form):
    stage: str
    batch: int
    inputs: list[_RangeForm]
    outputs: list[_RangeForm]
    started_s: _Seconds
    at_s: _Seconds
    size_bytes: Annotated[int, Field(ge=0)]


@dataclass(slots=True)
class Loaded:
    """What came of records that were read."""

    refused: list[str] = field(default_factory=list)
    """Which were not taken, and why."""
    stranded: list[int] = field(default_factory=list)
    """Roots that wait at stages that are gone."""


class CompletionState:
    """Writes and reads the parts of one ledger."""

    def __init__(
        self,
        pipeline: str,
        wall: WallTime,
        ledger: Ledger,
        edges: EdgeTable,
        early: EarlyBatches,
    ) -> None:
        self.prefix = f"{NAMESPACE}/{quote(pipeline, safe='')}/"
        self._wall = wall
        self._ledger = ledger
        self._edges = edges
        self._early = early
        self._deletes: set[str] = set()
        """Damaged records."""

    def changes(self) -> tuple[list[Record], list[str]]:
        """Return what to write and what to delete since the last call."""
        ledger, edges, early = self._ledger, self._edges, self._early
        values = (
            self._roots(ledger.dirty)
            | {self._key("group", n): _group(group) for n, group in edges.dirty_groups.items()}
            | self._edge_values(edges.dirty_edges)
            | {self._key("lane", *key): self._lane(key) for key in edges.dirty_lanes}
            | {self._key("stage", stage): self._stage(stage) for stage in early.dirty_stages}
            | self._early_values(early.dirty)
        )
        deletes = self._deletes.union(key for key, value in values.items() if value is None)
        for dirty in (
            *(ledger.dirty, edges.dirty_groups, edges.dirty_edges, edges.dirty_lanes),
            *(early.dirty_stages, early.dirty, self._deletes),
        ):
            dirty.clear()
        return self._records(values), sorted(deletes)

    def snapshot(self) -> list[Record]:
        """Return all there is."""
        lanes = self._edges.lanes
        starts = {(key, edge[0]) for key, lane in lanes.items() for edge in lane.edges()}
        return self._records(
            self._roots({root for root, _ in self._ledger.items()})
            | {self._key("group", each.number): _group(each) for each in self._edges.groups()}
            | self._edge_values(starts)
            | {self._key("lane", *key): self._lane(key) for key in lanes}
            | {self._key("stage", stage): self._stage(stage) for stage in self._early.settled}
            | self._early_values(set(self._early.waiting()))
        )

    def load(self, records: Iterable[Record], now_ms: float) -> Loaded:
        """Take up what was written; nothing may have happened before."""
        loaded = Loaded()
        groups: dict[int, Group] = {}
        by_kind: dict[str, list[tuple[tuple[str, ...], Record]]] = {kind: [] for kind in KINDS}
        for record in records:
            kind, *parts = record.key.removeprefix(self.prefix).split("/")
            if record.version > RECORD_VERSION:
                text = "it is of a newer program; start that one to use it"
                loaded.refused.append(f"{record.key}: {text}")
            elif kind in by_kind:
                by_kind[kind].append((tuple(map(unquote, parts)), record))
            else:
                self._refuse(record, "there is nothing of that name", loaded)
        for kind, found in by_kind.items():
            for of_key, record in sorted(found, key=lambda one: _order(one[0])):
                try:
                    self._read(kind, of_key, record, groups, loaded, now_ms)
                except ValidationError as error:
                    first = error.errors()[0]
                    place = ".".join(map(str, first["loc"]))
                    self._refuse(record, f"{place}: {first['msg']}", loaded)
                except (ValueError, StateError) as error:
                    self._refuse(record, str(error), loaded)
        self._deletes |= {self._key("group", n) for n, group in groups.items() if not group.edges}
        # Taking up marks these as changed; they are as they were written.
        for as_written in (self._edges.dirty_groups, self._early.dirty_stages):
            as_written.clear()
        return loaded

    def _read(
        self,
        kind: str,
        parts: tuple[str, ...],
        record: Record,
        groups: dict[int, Group],
        loaded: Loaded,
        now_ms: float,
    ) -> None:
        """Take up one record. Raises ValueError and StateError with what is wrong."""
        match kind, parts:
            case "root", (root,):
                self._read_root(int(root, 16), record, loaded, now_ms)
            case "group", (number,):
                form = _GroupForm.model_validate(record.value)
                roots = tuple(int(each, 16) for each in form.roots)
                groups[int(number)] = self._edges.restore_group(int(number), roots)
            case "edge", (stage, topic, partition, start):
                edge = _EdgeForm.model_validate(record.value)
                read = TopicRange(topic, int(partition), int(start), edge.end)
                if edge.group not in groups or read.start == read.end:
                    raise ValueError("its group is missing, or it is empty")
                key = (stage, topic, read.partition)
                self._edges.restore_edge(
                    key, read.start, read.end, _id(edge.id), groups[edge.group]
                )
            case "lane", (stage, topic, partition):
                lane_form = _LaneForm.model_validate(record.value)
                lane = self._edges.lane((stage, topic, int(partition)))
                lane.known_to = lane_form.known_to
                for low, high in lane_form.done:
                    lane.mark_done(low, high)
            case "stage", (stage,):
                time_s = _StageForm.model_validate(record.value).settled_s
                if stage not in self._ledger.stages:
                    raise ValueError("it is not in the pipeline any more")
                self._early.settle(stage, self._wall.to_ms(time_s))
            case "early", (number,):
                early = _EarlyForm.model_validate(record.value)
                self._early.restore(self._as_early(int(number), early))
            case _:
                raise ValueError("its key has another form")

    def _read_root(self, root: int, record: Record, loaded: Loaded, now_ms: float) -> None:
        form = _RootForm.model_validate(record.value)
        if root in self._ledger:
            raise ValueError("the root is there already")
        parts = {stage: _id(part) for stage, part in form.at.items()}
        here = {stage: part for stage, part in parts.items() if stage in self._ledger.stages}
        owner = None if form.owner is None else Owner(**form.owner.model_dump())
        started_ms = self._wall.to_ms(form.started_s)
        entry = Entry(self._ledger.whole(here), owner, started_ms, form.failed)
        self._ledger.restore(root, entry, self._wall.to_ms(form.heard_s), now_ms)
        if len(here) < len(parts):
            loaded.stranded.append(root)

    def _as_early(self, number: int, form: _EarlyForm) -> Early:
        if form.stage not in self._ledger.stages:
            raise ValueError("its stage is not in the pipeline any more")
        batch = StageBatch(
            form.stage,
            form.batch,
            tuple(TopicRange(**one.model_dump()) for one in form.inputs),
            tuple(TopicRange(**one.model_dump()) for one in form.outputs),
            self._wall.to_ms(form.started_s),
            form.size_bytes,
        )
        return Early(number, batch, self._wall.to_ms(form.at_s))

    def _refuse(self, record: Record, why: str, loaded: Loaded) -> None:
        loaded.refused.append(f"{record.key}: {why}")
        self._deletes.add(record.key)

    def _key(self, *parts: object) -> str:
        return self.prefix + "/".join(quote(str(part), safe="") for part in parts)

    def _records(self, values: dict[str, Json]) -> list[Record]:
        return [
            Record.of(key, value, RECORD_VERSION)
            for key, value in sorted(values.items())
            if value is not None
        ]

    def _roots(self, roots: Iterable[int]) -> dict[str, Json]:
        values: dict[str, Json] = {}
        for root in roots:
            entry = self._ledger.get(root)
            value: Json = None
            if entry is not None:
                parts = self._ledger.parts(entry.value)
                value = {
                    "at": {stage: f"{part:016x}" for stage, part in parts.items()},
                    "owner": None if entry.owner is None else asdict(entry.owner),
                    "started_s": self._wall.to_s(entry.started_ms),
                    "heard_s": self._wall.to_s(self._ledger.heard_ms(root)),
                    "failed": entry.failed,
                }
            values[self._key("root", f"{root:016x}")] = value
        return values

    def _edge_values(self, starts: Iterable[tuple[LaneKey, int]]) -> dict[str, Json]:
        values: dict[str, Json] = {}
        for key, start in starts:
            lane = self._edges.lanes.get(key)
            index = None if lane is None else lane.index_of(start)
            value: Json = None
            if lane is not None and index is not None:
                value = {
                    "end": lane.ends[index],
                    "id": f"{lane.ids[index]:016x}",
                    "group": lane.groups[index].number,
                }
            values[self._key("edge", *key, start)] = value
        return values

    def _lane(self, key: LaneKey) -> Json:
        lane = self._edges.lanes.get(key)
        return None if lane is None else {"known_to": lane.known_to, "done": lane.done}

    def _stage(self, stage: str) -> Json:
        settled_ms = self._early.settled.get(stage)
        return None if settled_ms is None else {"settled_s": self._wall.to_s(settled_ms)}

    def _early_values(self, numbers: Iterable[int]) -> dict[str, Json]:
        waiting = self._early.waiting()
        values: dict[str, Json] = {}
        for number in numbers:
            early = waiting.get(number)
            value: Json = None
            if early is not None:
                batch = early.batch
                value = {
                    "stage": batch.stage,
                    "batch": batch.batch,
                    "inputs": [asdict(one) for one in batch.inputs],
                    "outputs": [asdict(one) for one in batch.outputs],
                    "started_s": self._wall.to_s(batch.started_ms),
                    "at_s": self._wall.to_s(early.at_ms),
                    "size_bytes": batch.size_bytes,
                }
            values[self._key("early", number)] = value
        return values


def _group(group: Group) -> Json:
    """Write down a group; None when it has no edge any more."""
    return {"roots": [f"{root:016x}" for root in group.roots]} if group.edges else None


def _id(text: str) -> int:
    number = int(text, 16)
    if not number:
        raise ValueError("an id is 0")
    return number


def _order(parts: tuple[str, ...]) -> list[tuple[int, str]]:
    """Order numbers by their value, so that edges come in the order of their offsets."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
