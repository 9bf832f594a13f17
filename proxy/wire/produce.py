"""What a Produce request appends to each partition, and where the response says it went."""

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple, TypeAlias

from proxy.wire.apis import PRODUCE, is_known
from proxy.wire.fetch import TopicKey
from proxy.wire.frames import response_body
from proxy.wire.layout import (
    Array,
    Buffer,
    Cursor,
    Node,
    Record,
    Sized,
    TagSection,
    content_start,
    read_string,
    record_of,
    request_layout,
    response_layout,
)
from proxy.wire.malformed import MalformedFrame, MalformedResponse

_FIRST_VERSION = 3
"""Kafka 4.0 has none below; the schemas begin here, too."""

_INT16 = Struct(">h")
_INT32 = Struct(">i")
_INT64 = Struct(">q")

_Spans: TypeAlias = dict[str, tuple[int, int]]


class ProducedPartition(NamedTuple):
    """What a request appends to one partition."""

    topic: TopicKey
    partition: int
    offsets: int
    """How many offsets its record batches take: its records, and gaps if there are any."""


class AppendedPartition(NamedTuple):
    """What became of it."""

    topic: TopicKey
    partition: int
    error_code: int
    """0: none."""
    base_offset: int
    """Of the first record; -1 when nothing was appended, or it had been before (a duplicate)."""


def read_produce_request(version: int, body: Buffer) -> tuple[ProducedPartition, ...]:
    """Return what a request appends; `body` is whole and starts behind the request's header.

    Partitions whose records can't be read as record batches are left out: the broker refuses them.
    Nothing for versions that no schema here knows. Raises MalformedFrame.
    """
    if not _is_read(version):
        return ()
    layout = request_layout(PRODUCE, version)
    partition = record_of(record_of(layout.fields["topic_data"]).fields["partition_data"])
    records = partition.fields["records"]
    assert isinstance(records, Sized)  # the schemas say so
    found = []
    try:
        for topic, spans in _partitions(layout, Cursor(body, 0), "topic_data"):
            start, end = spans["records"]
            offsets = end_of_batches(body, content_start(records, body, start), end)
            if offsets is not None:
                found.append(ProducedPartition(topic, _read(_INT32, body, spans["index"]), offsets))
    except MalformedResponse as error:
        raise MalformedFrame("bad_body", f"a Produce request: {error}") from None
    return tuple(found)


def read_produce_response(version: int, frame: Buffer) -> tuple[AppendedPartition, ...]:
    """Return what a response says of each partition; `frame` is whole, length included.

    Nothing for versions that no schema here knows. Raises MalformedResponse.
    """
    if not _is_read(version):
        return ()
    cursor = Cursor(frame, response_body(PRODUCE, version, frame))
    layout = response_layout(PRODUCE, version)
    return tuple(
        AppendedPartition(
            topic,
            _read(_INT32, frame, spans["index"]),
            _read(_INT16, frame, spans["error_code"]),
            _read(_INT64, frame, spans["base_offset"]),
        )
        for topic, spans in _partitions(layout, cursor, "responses")
    )


def _is_read(version: int) -> bool:
    return version >= _FIRST_VERSION and is_known(PRODUCE, version)


def _partitions(layout: Record, cursor: Cursor, field: str) -> Iterator[tuple[TopicKey, _Spans]]:
    """Walk topics and their partitions, which requests and responses hold in the same form."""
    cursor.seek(layout, field)
    topics = layout.fields[field]
    topic = record_of(topics)
    key_form, partitions = topic.fields.values()
    # The schemas say so; the checks are for the types.
    assert isinstance(topics, Array)
    assert isinstance(partitions, Array)
    partition = record_of(partitions)
    for _ in range(cursor.enter(topics)):
        key = _key(key_form, cursor.data, cursor.skip(key_form))
        for _ in range(cursor.enter(partitions)):
            yield key, cursor.spans(partition)
        if topic.tags is not None:
            cursor.skip(TagSection())


def _key(form: Node, data: Buffer, span: tuple[int, int]) -> TopicKey:
    if isinstance(form, Sized):
        return read_string(form, data, span)
    start, end = span
    return bytes(data[start:end])


def _read(form: Struct, data: Buffer, span: tuple[int, int]) -> int:
    return int(form.unpack_from(data, span[0])[0])


_HEADER = Struct(">qi4xb")
"""Offset, length, magic: at the same places in every format."""

_OVERHEAD_BYTES = 12
"""Offset and length, which the length does not count."""

_BATCH_MAGIC = 2
_MIN_BATCH_BYTES = 61
_MIN_MESSAGE_BYTES = 26
"""Whole, overhead included. Older message sets have magic 0 or 1."""

_LAST_OFFSET_DELTA = Struct(">i")
_LAST_OFFSET_DELTA_AT = 23

_MAX_OFFSET = 2**63 - 1


def end_of_batches(data: Buffer, start: int, end: int) -> int | None:
    """Return the offset behind the last whole record batch in `data[start:end]`.

    Brokers cut off the last batch where the client's limit is: it does not count. Batches of
    control records count. None when there is no whole batch, and when the bytes are not record
    batches one after another. In message sets (magic 0 and 1) a message is taken for a batch; the
    offset of a compressed one is that of the last message in it.
    """
    found = None
    low = 0
    last_header = end - _HEADER.size
    while start <= last_header:
        offset, length, magic = _HEADER.unpack_from(data, start)
        after = start + _OVERHEAD_BYTES + length
        least = _MIN_BATCH_BYTES if magic == _BATCH_MAGIC else _MIN_MESSAGE_BYTES
        if not 0 <= magic <= _BATCH_MAGIC or after - start < least or offset < low:
            return None
        if after > end:
            break
        delta = 0
        if magic == _BATCH_MAGIC:
            (delta,) = _LAST_OFFSET_DELTA.unpack_from(data, start + _LAST_OFFSET_DELTA_AT)
            if delta < 0:
                return None
        found = low = offset + delta + 1
        if found > _MAX_OFFSET:
            return None
        start = after
    return found
