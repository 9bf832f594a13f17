"""What stands in the topic: a message for each record, and one for the proxy that owns the state.

A record's key is the message's key, its JSON the value, readable with any consumer. Two headers
hold numbers in decimal: `form`, of what this module writes, and `version`, of the record's value.
A message without value says that the record was deleted.
"""

import json
import os
import socket
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from aiokafka.errors import KafkaError
from aiokafka.record.control_record import ABORT_MARKER, ControlRecord
from aiokafka.record.memory_records import MemoryRecords

from proxy.state.store import Record, StateError

MESSAGES_SCHEMA = 1
"""Number of this form. Whoever changes it counts on, and reads the older ones still."""

FORM_HEADER = "form"
VERSION_HEADER = "version"
WRITER_HEADER = "writer"
"""The transactional id under which the message was written; not in older ones of a single proxy."""

OWNER_KEY = "owner"
"""Key of the owner's message; no record's, as it has no namespace."""

GZIP_CODE = 1

MAX_UNPACKED_BYTES = 16 * 2**20
"""Of a batch: whoever may write must not fill our memory. A record has half of it at most."""

_LENGTH_END, _HEAD_BYTES = 12, 61  # of a batch; behind its head is what may be compressed
_GZIP_WBITS = 16 + zlib.MAX_WBITS


@dataclass(frozen=True, slots=True)
class StateOwner:
    """The proxy that has the state: a new one with each start."""

    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


Message: TypeAlias = tuple[bytes, bytes | None, list[tuple[str, bytes]]]
"""Key, value and headers to write."""

Content: TypeAlias = Record | StateOwner | None
"""What stands under a key; None: nothing any more."""

Place: TypeAlias = tuple[int, str]
"""Slot and key: where a record stands."""


def size_of(content: Content) -> int:
    """Return how many bytes a record's key and value have; 0 for anything else."""
    if not isinstance(content, Record):
        return 0
    return len(content.key.encode()) + len(content.text.encode())


def to_message(key: str, content: Content, writer: str) -> Message:
    """Return the message to write."""
    value: bytes | None = None
    headers: list[tuple[str, bytes]] = []
    if content is not None:
        headers.append((FORM_HEADER, b"%d" % MESSAGES_SCHEMA))
    if isinstance(content, Record):
        value = content.text.encode()
        headers.append((VERSION_HEADER, b"%d" % content.version))
    elif content is not None:
        value = json.dumps(asdict(content)).encode()
    headers.append((WRITER_HEADER, writer.encode()))
    return key.encode(), value, headers


def read_message(topic: str, slot: int, message: Any) -> tuple[Place, Content]:
    """Return the place that a message (of aiokafka) is for, and what stands there from now on.

    Raises StateError: it is none of ours, of a newer program, or damaged.
    """
    where = f"the message at offset {message.offset} of topic {topic} (partition {slot})"
    try:
        key = (message.key or b"").decode()
        if message.value is None:
            return (slot, key), None
        headers = dict(message.headers)
        if FORM_HEADER not in headers:
            raise StateError(
                f"{where} was not written by quota-proxy: it has no header {FORM_HEADER!r}",
                "name another topic as state.topic, to which nothing else writes",
            )
        form = int(headers[FORM_HEADER])
        if form != MESSAGES_SCHEMA:
            raise StateError(
                f"{where} was written by a newer version of quota-proxy: its form is {form}, "
                f"this version knows {MESSAGES_SCHEMA}",
                "start that version, or name another topic as state.topic",
            )
        text = message.value.decode()
        if key == OWNER_KEY:
            return (slot, key), StateOwner(**json.loads(text))
        return (slot, key), Record(key, text, int(headers[VERSION_HEADER]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged_error(where, f"{type(error).__name__}, {error}") from error


def committed_messages(
    topic: str, part: Any, positions: dict[int, int]
) -> Iterator[tuple[Place, Content]]:
    """Yield what a fetched partition has from its position on, which goes along; nothing aborted.

    Raises StateError.
    """
    slot = part.partition_index
    aborted = part.aborted_transactions or ()
    failed = sorted(((each.first_offset, each.producer_id) for each in aborted), reverse=True)
    failing: set[int] = set()
    for batch, messages in decode_batches(topic, part):
        while failed and failed[-1][0] <= batch.base_offset:
            failing.add(failed.pop()[1])
        if batch.is_control_batch:
            # Compaction may have left nothing of it.
            if messages and ControlRecord.parse(messages[0].key).type_ == ABORT_MARKER.type_:
                failing.discard(batch.producer_id)
        elif not (batch.is_transactional and batch.producer_id in failing):
            for message in messages:
                if message.offset >= positions[slot]:
                    yield read_message(topic, slot, message)
        positions[slot] = batch.next_offset


def decode_batches(topic: str, part: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the batches of a fetched partition, with their messages; raises StateError."""
    records = bytes(part.records or b"")
    read, left = MemoryRecords(records), memoryview(records)
    while read.has_next():
        batch = read.next_batch()
        end = _LENGTH_END + int.from_bytes(left[_LENGTH_END - 4 : _LENGTH_END])
        packed, left = left[_HEAD_BYTES:end], left[end:]
        place = f"the batch at offset {batch.base_offset} of topic {topic} "
        place += f"(partition {part.partition_index})"
        if not batch.validate_crc():
            raise damaged_error(place, "its checksum is wrong")
        if getattr(batch, "compression_type", None) == GZIP_CODE and _unpacks_to_more(packed):
            raise damaged_error(place, f"it unpacks to more than {MAX_UNPACKED_BYTES} bytes")
        try:
            yield batch, list(batch)
        except KafkaError as error:
            raise damaged_error(place, str(error)) from error


def _unpacks_to_more(packed: memoryview) -> bool:
    """Return whether this is more than MAX_UNPACKED_BYTES, or cut off, or no gzip."""
    unpacking = zlib.decompressobj(wbits=_GZIP_WBITS)
    try:
        unpacking.decompress(packed, MAX_UNPACKED_BYTES)
    except zlib.error:
        return True
    return not unpacking.eof or bool(unpacking.unused_data)


def damaged_error(place: str, finding: str) -> StateError:
    """Return the error for what stands in the topic and cannot be trusted."""
    return StateError(
        f"{place} is damaged: {finding}",
        "write a message without value under its key, or name another topic as state.topic to "
        "start without the overrides and positions that this one holds",
    )
