"""Tells what is the same in Fetches that read on, each from where the one before ended."""

from struct import Struct
from typing import TypeAlias

from proxy.wire.apis import FETCH
from proxy.wire.fetch import max_bytes_position
from proxy.wire.frames import FrameShape, frame_shape
from proxy.wire.layout import (
    PartitionRow,
    request_layout,
    request_partition_reader,
    response_layout,
    response_partition_reader,
)
from proxy.wire.produce import next_offset_of_batches

FetchRunShape: TypeAlias = tuple[FrameShape, FrameShape, int, int]
"""Of a whole request; of a response up to its records, but for a length of them that is a varint;
where the request has the offset that it asks from; how many bytes the response has behind its
records, all 0: none where the length is no varint."""

_REQUEST_NUMBER = 8, bytes(4)
"""Where the correlation id is, and its mask, as of all that differs."""
_RESPONSE_START = 0, bytes(8)  # length and correlation id
_EPOCH = Struct(">i")
_SIGN_OF_EPOCH = b"\x80\0\0\0"  # what begins a session anew has 0, and an answer of another one
_ANY_LIMIT, _ANY_OFFSET = bytes(4), bytes(8)
_NO_TAGS = bytes(3)  # of the partition, the topic and the response


def fetch_run_shape(
    version: int, request: bytes, request_at: int, response: bytes, response_at: int
) -> FetchRunShape:
    """Return what a Fetch and its response have in common with others of a run.

    Those ask for the same partition, and get records of it and nothing else. All is the same but
    correlation ids, epochs of a session, offsets, how much they ask for, records, and what is said
    of the log. Both frames are whole and were read before; their bodies are at `request_at` and
    `response_at`. Raises ValueError, or what reading raises, where none are like them, as with
    versions before 7, which have no sessions.
    """
    body = memoryview(request)[request_at:]
    layout, answer = request_layout(FETCH, version), response_layout(FETCH, version)
    asked = request_partition_reader(FETCH, version, "partition", "fetch_offset")
    limit_at = max_bytes_position(version, request_at)
    if "session_epoch" not in layout.fields or limit_at is None:
        raise ValueError("a version that is not like most")
    wanted: list[PartitionRow] = []
    gone_at = asked.read_array(body, asked.seek(body, 0), wanted)
    if len(wanted) != 1 or layout.fields["forgotten_topics_data"].count(body, gone_at)[0]:
        raise ValueError("a request that is not like most")
    ((topic, place, (index, _)),) = wanted
    session = 0, *layout.head("session_id").unpack_from(body)
    said = response_partition_reader(FETCH, version, "partition_index", "error_code")
    rows: list[PartitionRow] = []
    said.read_array(response, said.seek(response, response_at), rows)
    row_at = rows[0][1] if rows else 0
    is_alone = rows == [(topic, row_at, (index, 0))]
    if not is_alone or session != answer.head("error_code", "session_id").unpack_from(
        response, response_at
    ):
        raise ValueError("another answer than that of one partition")
    records_at = said.partition.seek("records", response, row_at)
    start, end = said.partition.fields["records"].content(response, records_at)
    tags, like_until = (b"", start) if answer.tags is None else (_NO_TAGS, records_at)
    if response[end:] != tags or next_offset_of_batches(response, start, end) is None:
        raise ValueError("another answer than records")
    offset_at = request_at + place + asked.partition.seek("fetch_offset", b"", 0)
    changes = [_REQUEST_NUMBER, (limit_at, _ANY_LIMIT), (offset_at, _ANY_OFFSET)]
    epoch_at = request_at + layout.seek("session_epoch", b"", 0)
    if _EPOCH.unpack_from(request, epoch_at)[0] > 0:
        changes.append((epoch_at, _SIGN_OF_EPOCH))
    log_at, log_end = (
        row_at + said.partition.seek(name, b"", 0)
        for name in ("high_watermark", "aborted_transactions")
    )
    log, length = (log_at, bytes(log_end - log_at)), (records_at, bytes(like_until - records_at))
    before_records = frame_shape(response[:like_until], [_RESPONSE_START, log, length])
    return frame_shape(request, changes), before_records, offset_at, len(tags)
