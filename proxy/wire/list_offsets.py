"""ListOffsets: what a client asks for and is answered, other offsets in an answer, a new answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from struct import Struct
from types import MappingProxyType
from typing import NamedTuple

from proxy.wire.apis import APIS, LENGTH_BYTES, LIST_OFFSETS
from proxy.wire.frames import INT32, MalformedFrame, read_partitions
from proxy.wire.layout import (
    UNREADABLE,
    Buffer,
    PartitionFieldReader,
    TooManyElements,
    request_layout,
    request_partition_reader,
)
from proxy.wire.topic_partition import TopicPartition

LATEST = -1  # as a timestamp: the end of the log; with READ_COMMITTED its last stable offset
EARLIEST = -2  # as a timestamp: the start of the log
READ_UNCOMMITTED = 0
READ_COMMITTED = 1

_FIRST_VERSION = 1  # version 0, gone since Kafka 4.0, answers with lists; it is left alone
_is_read = range(_FIRST_VERSION, APIS[LIST_OFFSETS].max_version + 1).__contains__
_ANSWER = ("partition_index", "error_code", "offset")
_INT64 = Struct(">q")
_OFFSET_AT = Struct(">ihq").size  # behind partition_index, error_code and timestamp
_NO_ERROR, _NO_TIMESTAMP, _NO_LEADER_EPOCH = 0, -1, -1

MAX_LOOKUPS_KEPT, MAX_LOOKUP_BYTES = 1024, 256
"""How many look-ups and answers are kept, and the longest look-up of these: an executor asks the
same around each poll, and only the number in the header is another."""


@dataclass(slots=True)
class LookupRequest:
    """What a ListOffsets request asks for. Not frozen, which would make it slower to make."""

    isolation_level: int
    """READ_UNCOMMITTED or READ_COMMITTED; before version 2 always the first."""
    timestamps: Mapping[TopicPartition, int]
    """Milliseconds of the Unix epoch, or LATEST, EARLIEST and others below 0. Of a partition that
    is named twice the last."""
    correlation_id: int = 0


class ListedOffset(NamedTuple):
    """The answer for one partition: 0 for no error, -1 for no offset."""

    error_code: int
    offset: int


def read_list_offsets_request(version: int, body: Buffer, correlation_id: int = 0) -> LookupRequest:
    """Return what a request asks for; `body` starts behind the request's header.

    Nothing for version 0 and for versions that no schema here knows. Raises MalformedFrame and
    TooManyElements.
    """
    if len(body) <= MAX_LOOKUP_BYTES:
        asked = _read_again(version, bytes(body))
    else:
        asked = _read_request(version, body)
    return LookupRequest(*asked, correlation_id)


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
    except TooManyElements:
        raise
    except UNREADABLE as error:
        raise MalformedFrame("bad_body", f"a ListOffsets request: {error}") from None
    return levels[0] if levels else READ_UNCOMMITTED, MappingProxyType(timestamps)


_read_again = lru_cache(MAX_LOOKUPS_KEPT)(_read_request)


@cache
def _request_form(version: int) -> tuple[Struct, PartitionFieldReader]:
    """Return how to read the isolation level, if the version has it, and the partitions."""
    return (
        request_layout(LIST_OFFSETS, version).head("isolation_level"),
        request_partition_reader(LIST_OFFSETS, version, "partition_index", "timestamp"),
    )


def read_list_offsets_response(version: int, frame: Buffer) -> dict[TopicPartition, ListedOffset]:
    """Return what a response says; `frame` is whole, length included.

    Nothing for versions as in `read_list_offsets_request`. Raises MalformedResponse.
    """
    rows = read_partitions(LIST_OFFSETS, version, frame, _ANSWER) if _is_read(version) else ()
    return {(topic, index): ListedOffset(*answer) for topic, _, (index, *answer) in rows}


def change_offsets(version: int, frame: bytes, offsets: Mapping[TopicPartition, int]) -> bytes:
    """Return the whole frame with other offsets for these partitions; all else stays as it is.

    Partitions that the response does not name change nothing. A response of version 0, or one with
    nothing to change, is returned as the same object. Raises MalformedResponse.
    """
    if not (offsets and _is_read(version)):
        return frame
    changed = bytearray(frame)
    for topic, pos, (index, _, _) in read_partitions(LIST_OFFSETS, version, frame, _ANSWER):
        if (topic, index) in offsets:
            _INT64.pack_into(changed, pos + _OFFSET_AT, offsets[topic, index])
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
    if len(offsets) != 1:
        return _answer(version, correlation_id, offsets)
    ((key, offset),) = offsets.items()
    like, offset_at = _answer_like(version, *key)
    frame = bytearray(like)
    INT32.pack_into(frame, LENGTH_BYTES, correlation_id)
    _INT64.pack_into(frame, offset_at, offset)
    return bytes(frame)


@lru_cache(MAX_LOOKUPS_KEPT)
def _answer_like(version: int, topic: str, index: int) -> tuple[bytes, int]:
    """Return an answer for one partition, and where its offset is."""
    frame = _answer(version, 0, {(topic, index): 0})
    ((_, pos, _),) = read_partitions(LIST_OFFSETS, version, frame, _ANSWER)
    return frame, pos + _OFFSET_AT


def _answer(version: int, correlation_id: int, offsets: Mapping[TopicPartition, int]) -> bytes:
    topics: dict[str, list[tuple[int, ...]]] = {}
    for (topic, index), offset in offsets.items():
        row = index, _NO_ERROR, _NO_TIMESTAMP, offset, _NO_LEADER_EPOCH
        topics.setdefault(topic, []).append(row)
    response = APIS[LIST_OFFSETS].response[version](throttle_time_ms=0, topics=list(topics.items()))
    response.with_header(correlation_id=correlation_id)
    return bytes(response.encode(header=True, framed=True))
