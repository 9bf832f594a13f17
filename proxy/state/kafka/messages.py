"""What stands in the topic: a message for each record, and one for the proxy that owns the state.

A record's key is the message's key, its JSON the value, readable with any consumer. Two headers
hold numbers in decimal: `form`, of what this module writes, and `version`, of the record's value.
A message without value says that the record was deleted.
"""

import json
import os
import socket
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeAlias

from aiokafka.record.default_records import DefaultRecordBatch

from proxy.state.store import Record, StateError
from proxy.state.unpacking import GZIP_WBITS, unpack_at_most
from proxy.wire.layout import VARINT_MORE, VARINT_PAYLOAD, VARINT_PAYLOAD_BITS
from proxy.wire.produce import BATCH_HEAD, BATCH_MAGIC, BATCH_PREFIX_BYTES, MIN_BATCH_BYTES

MESSAGES_SCHEMA = 1
"""Number of this form. Whoever changes it counts on, and reads the older ones still."""

FORM_HEADER = "form"
VERSION_HEADER = "version"
WRITER_HEADER = "writer"
"""The transactional id under which the message was written; not in older ones of a single proxy."""

OWNER_KEY = "owner"
"""Key of the owner's message; no record's, as it has no namespace."""

NO_CODE, GZIP_CODE = 0, 1

MAX_UNPACKED_BYTES = 16 * 2**20
"""Of a batch: whoever may write must not fill our memory. A record has half of it at most."""

MAX_BATCH_MESSAGES = 100_000
"""Five times what fits the batches that are written here."""

MAX_HEADERS = 8
"""Further ones of a message, which has three, are not read."""

_COUNT_AT = 57  # in the head of a batch, behind what BATCH_HEAD has
_CONTROL_TYPE, _ABORT = slice(2, 4), bytes(2)  # in the key of a control record, behind its version
_MAX_VARINT_BITS = 63


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


class ReadMessage(NamedTuple):
    """A message as it is read."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


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
            marker = next(messages, None)  # compaction may have left nothing of it
            if marker and (marker.key or b"")[_CONTROL_TYPE] == _ABORT:
                failing.discard(batch.producer_id)
        elif not (batch.is_transactional and batch.producer_id in failing):
            for message in messages:
                if message.offset >= positions[slot]:
                    yield read_message(topic, slot, message)
        positions[slot] = batch.next_offset


def decode_batches(
    topic: str, part: Any, most_bytes: int = MAX_UNPACKED_BYTES
) -> Iterator[tuple[Any, Iterator[ReadMessage]]]:
    """Yield the batches of a fetched partition, with their messages; both raise StateError.

    A batch has `most_bytes` at most when it is unpacked.
    """
    left = memoryview(bytes(part.records or b""))
    while len(left) >= MIN_BATCH_BYTES:
        offset, length, magic, _ = BATCH_HEAD.unpack_from(left)
        if (end := BATCH_PREFIX_BYTES + length) > len(left):
            return
        place = f"the batch at offset {offset} of topic {topic} (partition {part.partition_index})"
        if end < MIN_BATCH_BYTES or magic != BATCH_MAGIC:
            raise damaged_error(place, "it is no record batch")
        batch, data = DefaultRecordBatch(bytes(left[:end])), bytes(left[MIN_BATCH_BYTES:end])
        count = int.from_bytes(left[_COUNT_AT:MIN_BATCH_BYTES], signed=True)
        left = left[end:]
        if not batch.validate_crc():
            raise damaged_error(place, "its checksum is wrong")
        if count > MAX_BATCH_MESSAGES:
            raise damaged_error(place, f"it has more than {MAX_BATCH_MESSAGES} messages")
        if batch.compression_type == GZIP_CODE:
            try:
                data = unpack_at_most(data, most_bytes, GZIP_WBITS)
            except ValueError as error:
                finding = f"it unpacks to more than {most_bytes} bytes"
                raise damaged_error(place, finding) from error
        elif batch.compression_type != NO_CODE:
            raise damaged_error(place, "it is compressed otherwise than with gzip")
        yield batch, _messages(batch.base_offset, data, count, place)


def _messages(base: int, data: bytes, count: int, place: str) -> Iterator[ReadMessage]:
    """Yield the messages of a batch; raises StateError.

    A library in C would let nobody else run until it has read all headers that a message names.
    """
    pos = 0
    try:
        for _ in range(count):
            length, start = _read_varint(data, pos)
            _, at = _read_varint(data, start + 1)  # behind the attributes, when it was made
            delta, at = _read_varint(data, at)
            key, at = _read_sized(data, at)
            value, at = _read_sized(data, at)
            named, at = _read_varint(data, at)
            headers = []
            for _ in range(min(named, MAX_HEADERS)):
                name, at = _read_sized(data, at)
                content, at = _read_sized(data, at)
                headers.append(((name or b"").decode(), content))
            pos = start + length
            if not at <= pos <= len(data):
                raise ValueError("a message runs over its end")
            yield ReadMessage(base + delta, key, value, headers)
    except (IndexError, ValueError) as error:
        raise damaged_error(place, str(error)) from error


def _read_varint(data: bytes, pos: int) -> tuple[int, int]:
    """Read a number as records have them: of 64 bits, the lowest of which is its sign."""
    byte = data[pos]
    if byte < VARINT_MORE:
        return (byte >> 1) ^ -(byte & 1), pos + 1
    value = bits = 0
    while (byte := data[pos]) >= VARINT_MORE:
        value |= (byte & VARINT_PAYLOAD) << bits
        bits += VARINT_PAYLOAD_BITS
        pos += 1
        if bits > _MAX_VARINT_BITS:
            raise ValueError("a varint has more than 64 bits")
    value |= byte << bits
    return (value >> 1) ^ -(value & 1), pos + 1


def _read_sized(data: bytes, pos: int) -> tuple[bytes | None, int]:
    """Read bytes, None for null, which may be cut off by the end of the data."""
    size, pos = _read_varint(data, pos)
    return (None, pos) if size < 0 else (data[pos : pos + size], pos + size)


def damaged_error(place: str, finding: str) -> StateError:
    """Return the error for what stands in the topic and cannot be trusted."""
    return StateError(
        f"{place} is damaged: {finding}",
        "write a message without value under its key, or name another topic as state.topic to "
        "start without the overrides and positions that this one holds",
    )
