"""What is kept in the state of each partition: one record each, written when it changes."""

import re
from collections.abc import Iterable
from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from proxy.state import Record, RecordFormat

from .report import MAX_INT32, Figure, Name, Topic, Uuid

MAX_LABEL_CHARS = 1024
"""A name and a client id."""

_TOPIC_ID = re.compile("[0-9a-f]{32}")

Int32 = Annotated[int, Field(ge=0, le=MAX_INT32)]


class PartitionProgressRecord(BaseModel):
    """What a record says."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    label: Annotated[str, StringConstraints(min_length=1, max_length=MAX_LABEL_CHARS)]
    client_id: Annotated[str, StringConstraints(min_length=1)]
    query_id: Uuid
    run_id: Uuid
    """Of the run that completed it."""
    name: Name | None
    topic: Topic
    topic_id: Annotated[str, StringConstraints(pattern=_TOPIC_ID)] | None
    partition: Int32
    leader: Int32 | None
    completed: Figure
    delivered: Figure
    """As it was when the record was written; not below `completed`."""
    backwards: bool
    """Whether the commit group is still to be moved back."""
    at_s: Annotated[float, Field(ge=0)]
    """When it was reported, in seconds of the Unix epoch."""


ReadRecords: TypeAlias = dict[str, PartitionProgressRecord | str]
"""By key what a record says, or why it could not be read."""

FORMAT = RecordFormat("progress", 1, PartitionProgressRecord)
"""Keys are `progress/CLIENT_ID/TOPIC/PARTITION`: who has the client has its records."""


def read_progress_records(records: Iterable[Record]) -> ReadRecords:
    """Read records; some 20 µs each."""
    read: ReadRecords = {}
    for record in records:
        try:
            read[record.key] = _read(record)
        except ValueError as error:
            read[record.key] = str(error)
    return read


def _read(record: Record) -> PartitionProgressRecord:
    """Read a record. Raises ValueError with what is wrong with it.

    Earlier programs wrote the label in the place of the client id.
    """
    entry = FORMAT.read(record)
    keys = {
        FORMAT.key(owner, entry.topic, entry.partition) for owner in (entry.client_id, entry.label)
    }
    if record.key not in keys:
        what = f"{entry.client_id!r}, {entry.topic}-{entry.partition}"
        raise ValueError(f"it is about {what}, which is not its key")
    if entry.delivered < entry.completed:
        raise ValueError(f"delivered {entry.delivered} is below completed {entry.completed}")
    return entry
