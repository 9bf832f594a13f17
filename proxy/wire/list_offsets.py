"""ListOffsets: what a client asks for, what it is answered, and other offsets in the answer."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import NamedTuple, TypeAlias

from proxy.wire.apis import LENGTH_BYTES, LIST_OFFSETS, is_known
from proxy.wire.frames import response_body
from proxy.wire.layout import (
    Array,
    Buffer,
    Cursor,
    Fixed,
    Record,
    Sized,
    TagSection,
    read_string,
    record_of,
    request_layout,
    response_layout,
)
from proxy.wire.malformed import MalformedFrame, MalformedResponse

LATEST = -1
"""As a timestamp: the end of the log; with READ_COMMITTED its last stable offset."""

EARLIEST = -2
"""As a timestamp: the start of the log."""

READ_UNCOMMITTED = 0
READ_COMMITTED = 1

TopicPartition: TypeAlias = tuple[str, int]
"""A topic's name and a partition's index."""

_FIRST_VERSION = 1
"""Version 0, gone since Kafka 4.0, answers with lists of offsets. It is left alone."""

_Layout: TypeAlias = Callable[[int, int], Record]
"""`request_layout` or `response_layout`."""

_INT8 = Struct(">b")
_INT16 = Struct(">h")
_INT32 = Struct(">i")
_INT64 = Struct(">q")


@dataclass(frozen=True, slots=True)
class _Row:
    """How a partition is written: fields of fixed size, then perhaps a tag section."""

    at: Mapping[str, int]
    """Where each field lies from the start."""
    size: int
    is_tagged: bool


@dataclass(frozen=True, slots=True)
class OffsetLookup:
    """What a ListOffsets request asks for."""

    isolation_level: int
    """READ_UNCOMMITTED or READ_COMMITTED; before version 2 always the first."""
    timestamps: Mapping[TopicPartition, int]
    """Milliseconds of the Unix epoch, or LATEST, EARLIEST and others below 0. Of a partition that
    is named twice the last."""
    correlation_id: int = 0
    """Of the request."""


class PartitionOffset(NamedTuple):
    """The answer for one partition."""

    error_code: int
    """0: none."""
    offset: int
    """-1 when there is none."""


def read_list_offsets_request(version: int, body: Buffer, correlation_id: int = 0) -> OffsetLookup:
    """Return what a request asks for; `body` starts behind the request's header.

    Nothing for version 0 and for versions that no schema here knows. Raises MalformedFrame.
    """
    if not _is_read(version):
        return OffsetLookup(READ_UNCOMMITTED, {}, correlation_id)
    layout = request_layout(LIST_OFFSETS, version)
    try:
        isolation = READ_UNCOMMITTED
        if "isolation_level" in layout.fields:
            ahead = Cursor(body, 0)
            ahead.seek(layout, "isolation_level")
            start, _ = ahead.skip(layout.fields["isolation_level"])
            (isolation,) = _INT8.unpack_from(body, start)
        timestamps = {
            key: _INT64.unpack_from(body, start + row.at["timestamp"])[0]
            for key, start, row in _partitions(request_layout, version, Cursor(body, 0))
        }
    except MalformedResponse as error:
        raise MalformedFrame("bad_body", f"a ListOffsets request: {error}") from None
    return OffsetLookup(isolation, timestamps, correlation_id)


def read_list_offsets_response(
    version: int, frame: Buffer
) -> dict[TopicPartition, PartitionOffset]:
    """Return what a response says; `frame` is whole, length included.

    Nothing for versions as in `read_list_offsets_request`. Raises MalformedResponse.
    """
    return {
        key: PartitionOffset(
            _INT16.unpack_from(frame, start + row.at["error_code"])[0],
            _INT64.unpack_from(frame, start + row.at["offset"])[0],
        )
        for key, start, row in _answers(version, frame)
    }


def change_offsets(version: int, frame: bytes, offsets: Mapping[TopicPartition, int]) -> bytes:
    """Return the whole frame with other offsets for these partitions; all else stays as it is.

    Partitions that the response does not name change nothing. A response of version 0, or one with
    nothing to change, is returned as the same object. Raises MalformedResponse.
    """
    if not offsets:
        return frame
    changed = bytearray(frame)
    for key, start, row in _answers(version, frame):
        if key in offsets:
            _INT64.pack_into(changed, start + row.at["offset"], offsets[key])
    return frame if changed == frame else bytes(changed)


def _answers(version: int, frame: Buffer) -> Iterator[tuple[TopicPartition, int, _Row]]:
    """Walk the partitions of a response; say where each lies, and how."""
    if not _is_read(version):
        return
    cursor = Cursor(frame, response_body(LIST_OFFSETS, version, frame))
    if _INT32.unpack_from(frame)[0] != len(frame) - LENGTH_BYTES:
        raise MalformedResponse("the frame's length is not that of the frame")
    yield from _partitions(response_layout, version, cursor)


def _is_read(version: int) -> bool:
    return version >= _FIRST_VERSION and is_known(LIST_OFFSETS, version)


def _partitions(
    layout_of: _Layout, version: int, cursor: Cursor
) -> Iterator[tuple[TopicPartition, int, _Row]]:
    """Walk topics and their partitions, which requests and responses hold in the same form."""
    layout = layout_of(LIST_OFFSETS, version)
    cursor.seek(layout, "topics")
    topics = layout.fields["topics"]
    topic = record_of(topics)
    name_form, partitions = topic.fields.values()
    # The schemas say so; the checks are for the types.
    assert isinstance(topics, Array)
    assert isinstance(partitions, Array)
    assert isinstance(name_form, Sized)
    row = _row_of(layout_of, version)
    index_at = row.at["partition_index"]
    data = cursor.data
    have = len(data)
    for _ in range(cursor.enter(topics)):
        name = read_string(name_form, data, cursor.skip(name_form))
        for _ in range(cursor.enter(partitions)):
            start = cursor.pos
            end = start + row.size
            if end + row.is_tagged > have:
                raise MalformedResponse(f"a partition at byte {start} runs over the end")
            if not row.is_tagged:
                cursor.pos = end
            elif data[end] == 0:
                cursor.pos = end + 1
            else:
                cursor.pos = end
                cursor.skip(TagSection())
            yield (name, _INT32.unpack_from(data, start + index_at)[0]), start, row
        if topic.tags is not None:
            cursor.skip(TagSection())


@cache
def _row_of(layout_of: _Layout, version: int) -> _Row:
    topic = record_of(layout_of(LIST_OFFSETS, version).fields["topics"])
    partition = record_of(topic.fields["partitions"])
    at: dict[str, int] = {}
    size = 0
    for name, node in partition.fields.items():
        assert isinstance(node, Fixed)
        at[name] = size
        size += node.size
    return _Row(at, size, partition.tags is not None)
