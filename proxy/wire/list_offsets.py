"""ListOffsets: what a client asks for and is answered, other offsets in an answer, a new answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from struct import Struct
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from proxy.wire.apis import APIS, LENGTH_BYTES, LIST_OFFSETS, plan_of
from proxy.wire.frames import RESPONSE_HEADER, read_partitions
from proxy.wire.layout import (
    MAX_KNOWN,
    MAX_KNOWN_MESSAGE_BYTES,
    UNREADABLE,
    Buffer,
    PartitionFields,
    RecordLayout,
    request_layout,
    request_partitions,
    response_layout,
    response_partitions,
    write_tags,
)
from proxy.wire.malformed import MalformedFrame
from proxy.wire.topic_partition import TopicPartition

LATEST = -1  # as a timestamp: the end of the log; with READ_COMMITTED its last stable offset
EARLIEST = -2  # as a timestamp: the start of the log
READ_UNCOMMITTED = 0
READ_COMMITTED = 1

_FIRST_VERSION = 1  # version 0, gone since Kafka 4.0, answers with lists; it is left alone
_is_read = range(_FIRST_VERSION, APIS[LIST_OFFSETS].max_version + 1).__contains__
_ANSWER = ("partition_index", "error_code", "offset")
_INT64 = Struct(">q")
_EMPTY_TAGS = write_tags([])
_Fields: TypeAlias = Mapping[str, Any]
_NO_MORE: _Fields = MappingProxyType({"error_code": 0, "timestamp": -1, "leader_epoch": -1})
"""What else an answer says: no error, no timestamp, and a leader epoch that is not known."""


@dataclass(slots=True)
class OffsetLookup:
    """What a ListOffsets request asks for. Not frozen, which would make it slower to make."""

    isolation_level: int
    """READ_UNCOMMITTED or READ_COMMITTED; before version 2 always the first."""
    timestamps: Mapping[TopicPartition, int]
    """Milliseconds of the Unix epoch, or LATEST, EARLIEST and others below 0. Of a partition that
    is named twice the last."""
    correlation_id: int = 0


class PartitionOffset(NamedTuple):
    """The answer for one partition: 0 for no error, -1 for no offset."""

    error_code: int
    offset: int


def read_list_offsets_request(version: int, body: Buffer, correlation_id: int = 0) -> OffsetLookup:
    """Return what a request asks for; `body` starts behind the request's header.

    Nothing for version 0 and for versions that no schema here knows. Raises MalformedFrame.
    """
    if len(body) <= MAX_KNOWN_MESSAGE_BYTES:
        asked = _read_again(version, bytes(body))
    else:
        asked = _read_request(version, body)
    return OffsetLookup(*asked, correlation_id)


def _read_request(version: int, body: Buffer) -> tuple[int, Mapping[TopicPartition, int]]:
    """Return the isolation level and the timestamps that a request asks for."""
    if not _is_read(version):
        return READ_UNCOMMITTED, {}
    head, fields = _request_form(version)
    timestamps = {}
    try:
        levels = head.unpack_from(body)
        for topic, _, (index, timestamp) in fields.read(body, 0):
            timestamps[topic, index] = timestamp
    except UNREADABLE as error:
        raise MalformedFrame("bad_body", f"a ListOffsets request: {error}") from None
    return levels[0] if levels else READ_UNCOMMITTED, MappingProxyType(timestamps)


@cache
def _request_form(version: int) -> tuple[Struct, PartitionFields]:
    """Return how to read the isolation level, if the version has it, and the partitions."""
    return (
        request_layout(LIST_OFFSETS, version).head("isolation_level"),
        request_partitions(LIST_OFFSETS, version, "partition_index", "timestamp"),
    )


_read_again = lru_cache(MAX_KNOWN)(_read_request)
"""Around each poll an executor asks the same; only the header has another number."""


def read_list_offsets_response(
    version: int, frame: Buffer
) -> dict[TopicPartition, PartitionOffset]:
    """Return what a response says; `frame` is whole, length included.

    Nothing for versions as in `read_list_offsets_request`. Raises MalformedResponse.
    """
    rows = read_partitions(LIST_OFFSETS, version, frame, _ANSWER) if _is_read(version) else ()
    return {(topic, index): PartitionOffset(*answer) for topic, _, (index, *answer) in rows}


def change_offsets(version: int, frame: bytes, offsets: Mapping[TopicPartition, int]) -> bytes:
    """Return the whole frame with other offsets for these partitions; all else stays as it is.

    Partitions that the response does not name change nothing. A response of version 0, or one with
    nothing to change, is returned as the same object. Raises MalformedResponse.
    """
    if not (offsets and _is_read(version)):
        return frame
    place = response_partitions(LIST_OFFSETS, version, *_ANSWER).partition.seek("offset", b"", 0)
    changed = bytearray(frame)
    for topic, pos, (index, _, _) in read_partitions(LIST_OFFSETS, version, frame, _ANSWER):
        if (topic, index) in offsets:
            _INT64.pack_into(changed, pos + place, offsets[topic, index])
    return frame if changed == frame else bytes(changed)


def list_offsets_response(
    version: int, correlation_id: int, offsets: Mapping[TopicPartition, int]
) -> bytes:
    """Return a whole frame that answers with these offsets, and no leader epochs.

    So brokers answer a look-up of LATEST or EARLIEST, but that most of them know the epoch.
    Raises ValueError for version 0 and for versions that no schema here knows.
    """
    if not _is_read(version):
        raise ValueError(f"no way to answer ListOffsets version {version}")
    if len(offsets) == 1:
        ((key, offset),) = offsets.items()
        before, behind = _around_offset(version, *key)
        body = b"".join((before, _INT64.pack(offset), behind))
    else:
        body = _answer_body(version, offsets)
    return _frame(version, correlation_id, body)


def _frame(version: int, correlation_id: int, body: bytes) -> bytes:
    header_tags = _EMPTY_TAGS if plan_of(LIST_OFFSETS, version).is_flexible else b""
    length = RESPONSE_HEADER.size - LENGTH_BYTES + len(header_tags) + len(body)
    return b"".join((RESPONSE_HEADER.pack(length, correlation_id), header_tags, body))


@lru_cache(MAX_KNOWN)
def _around_offset(version: int, topic: str, index: int) -> tuple[bytes, bytes]:
    """Return what comes before and behind the offset in the body of an answer for one partition."""
    body = _answer_body(version, {(topic, index): 0})
    partitions = response_partitions(LIST_OFFSETS, version, *_ANSWER)
    ((_, pos, _),) = partitions.read(body, 0)
    start = pos + partitions.partition.seek("offset", b"", 0)
    return body[:start], body[start + _INT64.size :]


def _answer_body(version: int, offsets: Mapping[TopicPartition, int]) -> bytes:
    topics: dict[str, list[_Fields]] = {}
    for (topic, index), offset in offsets.items():
        row = {"partition_index": index, "offset": offset, **_NO_MORE}
        topics.setdefault(topic, []).append(row)
    rows = [{"name": topic, "partitions": each} for topic, each in topics.items()]
    values = {"throttle_time_ms": 0, "topics": rows}
    return _written(response_layout(LIST_OFFSETS, version), values)


def _written(record: RecordLayout, values: _Fields) -> bytes:
    """Return a record with these values of its fields; those that it does not have are left out."""
    parts: list[bytes] = []
    for field, layout in record.fields.items():
        value = values[field]
        if isinstance(value, list):
            parts.append(layout.length.write(len(value)))
            parts += [_written(layout.element, each) for each in value]
        else:
            parts.append(layout.write(value))
    if record.tags is not None:
        parts.append(_EMPTY_TAGS)
    return b"".join(parts)
