"""What is kept in the state of each partition: one record each, written when it changes."""

import re
from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from proxy.state import Json, Record
from proxy.state.due import Due
from proxy.state.form import quoted, read_form
from proxy.wire.topic_partition import TopicPartition

from .partition import PartitionProgress
from .query import QueryProgress
from .report import MAX_INT32, MAX_INT64, Name, Topic, Uuid

NAMESPACE = "progress/"
"""Where the records are; the rest of a key is LABEL/TOPIC/PARTITION, the first two quoted."""

FORM = 1
"""Version of what is written there."""

MAX_LABEL_CHARS = 1024
"""A name and a client id."""

_TOPIC_ID = re.compile("[0-9a-f]{32}")

Offset = Annotated[int, Field(ge=0, le=MAX_INT64)]
Int32 = Annotated[int, Field(ge=0, le=MAX_INT32)]

_Kept: TypeAlias = tuple[QueryProgress, TopicPartition]
"""Which partition of which query."""


class ProgressRecord(BaseModel):
    """What a record says."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    label: Annotated[str, StringConstraints(min_length=1, max_length=MAX_LABEL_CHARS)]
    client_id: Annotated[str, StringConstraints(min_length=1)]
    query_id: Uuid
    run_id: Uuid
    """Of the run that completed it."""
    name: Name | None
    """As the query reports it."""
    topic: Topic
    topic_id: Annotated[str, StringConstraints(pattern=_TOPIC_ID)] | None
    partition: Int32
    leader: Int32 | None
    """The broker's id."""
    completed: Offset
    delivered: Offset
    """As it was when the record was written; not below `completed`."""
    backwards: bool
    """Whether the commit group is still to be moved back."""
    at_s: Annotated[float, Field(ge=0)]
    """When it was reported, in seconds of the Unix epoch."""


def key_of(label: str, topic: str, partition: int) -> str:
    """Return the key of a partition's record."""
    return f"{NAMESPACE}{quoted(label)}/{quoted(topic)}/{partition}"


def read_record(record: Record) -> ProgressRecord:
    """Read a record. Raises ValueError with what is wrong with it."""
    kept = read_form(record, FORM, ProgressRecord)
    if record.key != key_of(kept.label, kept.topic, kept.partition):
        raise ValueError(
            f"it is about {kept.label!r}, {kept.topic}-{kept.partition}, which is not its key"
        )
    if kept.delivered < kept.completed:
        raise ValueError(f"delivered {kept.delivered} is below completed {kept.completed}")
    return kept


class Journal:
    """Which records are out of date."""

    def __init__(self) -> None:
        self._due = Due[_Kept](_record_of, _key_of)

    def changed(self, query: QueryProgress, partition: PartitionProgress) -> None:
        """Take note that a partition's record is to be written."""
        self._due.changed((query, partition.key))

    def removed(self, query: QueryProgress, partition: PartitionProgress) -> None:
        """Take note that a partition's record is to be deleted."""
        self._due.removed((query, partition.key))

    def forget_keys(self, query: QueryProgress) -> None:
        """Take note that the query's records are not to stay under its present label."""
        for partition in query.partitions.values():
            self._due.delete(key_of(query.name, *partition.key))

    def keep_all(self, query: QueryProgress) -> None:
        """Take note that all records of a query are to be written."""
        for partition in query.partitions.values():
            self.changed(query, partition)

    def delete(self, key: str) -> None:
        """Take note that a record is to be deleted."""
        self._due.delete(key)

    def take(self) -> tuple[list[Record], list[str]]:
        """Return what to write and which keys to delete, since the last call."""
        return self._due.take()

    def give_back(self) -> None:
        """Put back what the last `take` returned: it could not be written."""
        self._due.give_back()


def _key_of(kept: _Kept) -> str:
    query, key = kept
    return key_of(query.name, *key)


def _record_of(kept: _Kept) -> Record | None:
    query, key = kept
    partition = query.partitions.get(key)
    return _record(query, partition) if partition is not None else None


def _record(query: QueryProgress, partition: PartitionProgress) -> Record | None:
    """Return the record of a partition; None while nothing of it is completed."""
    completed = partition.committed_to
    if completed is None or query.progress_id is None or partition.run_id is None:
        return None
    topic_id = partition.topic_id
    # As ProgressRecord has it, but made without it: there may be thousands.
    value: Json = {
        "label": query.name,
        "client_id": query.client_id,
        "query_id": query.progress_id,
        "run_id": partition.run_id,
        "name": query.reported_name,
        "topic": partition.topic,
        "topic_id": topic_id.hex() if topic_id is not None else None,
        "partition": partition.partition,
        "leader": partition.leader,
        "completed": completed,
        "delivered": max(partition.position or 0, completed),
        "backwards": partition.may_go_back,
        "at_s": partition.committed_at_s,
    }
    return Record.of(key_of(query.name, *partition.key), value, FORM)
