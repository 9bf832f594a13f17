"""Tells what is the same in Fetches that read on, each from where the one before ended."""

from struct import Struct
from typing import TypeAlias

from proxy.wire.apis import FETCH
from proxy.wire.fetch import FetchedPartition
from proxy.wire.fetch_response import fetch_form
from proxy.wire.frames import FrameShape, frame_shape
from proxy.wire.layout import request_layout, request_partitions, write_uvarint

FetchRunShape: TypeAlias = tuple[FrameShape, FrameShape, int]
"""Of a whole request; of a response up to the length of its records; where the request has the
offset that it asks from."""

_REQUEST_NUMBER = 8, bytes(4)
"""Where the correlation id is, and its mask, as of all that differs."""
_RESPONSE_START = 0, bytes(8)  # length and correlation id
_EPOCH = Struct(">i")
_SIGN_OF_EPOCH = b"\x80\0\0\0"  # what begins a session anew has 0, and an answer of another one
_ANY_OFFSET = bytes(8)
_LOG_AT = 6  # behind a partition's index and error; up to the end of its head
_NO_TAGS = bytes(3)  # of the partition, the topic and the response


def fetch_run_shape(
    version: int, request: bytes, request_at: int, response: bytes, response_at: int
) -> FetchRunShape:
    """Return what a Fetch and its response have in common with others of a run.

    Those ask for the same partition, and get records of it and nothing else. All is the same but
    correlation ids, epochs of a session, offsets, records, and what is said of the log. Both frames
    are whole and were read before; their bodies are at `request_at` and `response_at`. Raises
    ValueError, or what reading raises, where none are like them, as with versions before 13.
    """
    body, answer = memoryview(request)[request_at:], memoryview(response)[response_at:]
    form, layout = fetch_form(version), request_layout(FETCH, version)
    fields = request_partitions(FETCH, version, "partition", "fetch_offset")
    row = fields.known.find(body, layout.head().size)
    if form.read_rows is None or not form.topic_bytes or row is None:
        raise ValueError("a version, or a request, that is not like most")
    topic, place, (index, _) = row
    topics, topic_at = form.read_count(answer, form.session.size)
    topic_end = topic_at + form.topic_bytes
    partitions, row_at = form.read_count(answer, topic_end)
    rows: list[FetchedPartition] = []
    _, end = form.read_rows(answer, row_at, len(answer), len(answer), 1, rows)
    session = 0, *layout.head("session_id").unpack_from(body)
    is_alone = topics == partitions == len(rows) == 1 and answer[topic_at:topic_end] == topic
    if not is_alone or session != form.session.unpack_from(answer) or answer[end:] != _NO_TAGS:
        raise ValueError("another answer than that of one partition")
    fetched, error, _, _, _, records_bytes, last = rows[0]
    if fetched != index or error or last is None:
        raise ValueError("another answer than records")
    offset_at = request_at + place + fields.partition.seek("fetch_offset", b"", 0)
    changes = [_REQUEST_NUMBER, (offset_at, _ANY_OFFSET)]
    epoch_at = request_at + layout.seek("session_epoch", b"", 0)
    if _EPOCH.unpack_from(request, epoch_at)[0] > 0:
        changes.append((epoch_at, _SIGN_OF_EPOCH))
    log = response_at + row_at + _LOG_AT, bytes(form.head.size - _LOG_AT)
    records_at = response_at + end - records_bytes - len(write_uvarint(records_bytes + 1))
    before_records = frame_shape(response[:records_at], [_RESPONSE_START, log])
    return frame_shape(request, changes), before_records, offset_at
