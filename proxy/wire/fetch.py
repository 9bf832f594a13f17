"""What a Fetch request asks for, and within which limits; what a response says of a partition."""

from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import TypeAlias

from proxy.wire.apis import FETCH
from proxy.wire.frames import INT32, MalformedFrame
from proxy.wire.layout import (
    UNREADABLE,
    Buffer,
    PartitionFieldReader,
    PartitionRow,
    TooManyElements,
    request_layout,
    request_partition_reader,
)

TopicKey: TypeAlias = str | bytes
"""A topic's name; from Fetch version 13 on its id, 16 bytes."""

# Session ids and epochs are those of KIP-227.
NO_SESSION = 0
INITIAL_EPOCH = 0  # of a full request that wants to begin a session
FINAL_EPOCH = -1  # of a full request without a session; one that it names is closed
NO_OFFSET = -1

MAX_BYTES = 2**31 - 1

DEFAULT_BATCH_BYTES = 1 << 20
"""About the largest record batch that a broker takes by default (message.max.bytes)."""

FetchPosition: TypeAlias = tuple[TopicKey, int, int]
"""A topic, a partition and the offset from which it is asked for, as the client wrote it. A plain
tuple, because one is made for each partition."""


FetchedPartition: TypeAlias = tuple[int, int, int, int, int, int, int | None]
"""What a Fetch response says of one partition, a plain tuple like a position. Its fields:

partition; error_code, 0: none; high_watermark; last_stable_offset, from version 4 on;
log_start_offset, from version 5 on; records_bytes; end_offset, behind the last whole record batch.
Offsets are -1 when the response does not say. The end is None when there is no whole batch, or the
records were not seen.
"""


@dataclass(slots=True)
class FetchRequestContent:
    """What a Fetch request asks for. Not frozen, which would make it slower to make."""

    session_id: int
    """NO_SESSION before version 7."""
    session_epoch: int
    """FINAL_EPOCH before version 7."""
    positions: tuple[FetchPosition, ...]
    """In a full request all that is asked for, else what is new or has changed."""
    forgotten: tuple[tuple[TopicKey, int], ...]
    """Partitions that leave the session, applied after the positions; void in a full request."""
    latest: tuple[FetchPosition, ...] = ()
    """The positions of the last of several requests for which this one stands; void: it is one."""

    @property
    def is_full(self) -> bool:
        """Whether the request names all that it asks for, not only what has changed."""
        return self.session_epoch in (INITIAL_EPOCH, FINAL_EPOCH)

    def read_from(self, start: int) -> None:
        """Stand for a run of requests, of which the first asked from there and this is the last."""
        self.latest, ((topic, partition, _),) = self.positions, self.positions
        self.positions = ((topic, partition, start),)


def read_fetch_request(version: int, body: Buffer) -> FetchRequestContent:
    """Return what a request asks for; `body` starts behind the request's header.

    Null arrays read as empty, a null name as the empty string. What follows the partitions is left
    to the broker. Raises MalformedFrame and TooManyElements; ValueError for a version that the
    schemas do not know.
    """
    head, topics, forgotten = _request_form(version)
    view = memoryview(body)
    asked: list[PartitionRow] = []
    gone: list[PartitionRow] = []
    try:
        session_id, epoch = head.unpack_from(view) or (NO_SESSION, FINAL_EPOCH)
        pos = topics.read_array(view, head.size, asked)
        if forgotten is not None:
            forgotten.read_array(view, pos, gone)
    except TooManyElements:
        raise
    except UNREADABLE as error:
        raise MalformedFrame("bad_body", f"a Fetch request: {error}") from None
    return FetchRequestContent(
        session_id,
        epoch,
        tuple([(topic, index, offset) for topic, _, (index, offset) in asked]),
        tuple([(topic, index) for topic, _, (index,) in gone]),
    )


@cache
def _request_form(version: int) -> tuple[Struct, PartitionFieldReader, PartitionFieldReader | None]:
    """Return how to read what comes before the topics, the topics and those that are forgotten."""
    layout = request_layout(FETCH, version)
    array = "forgotten_topics_data"
    return (
        layout.head("session_id", "session_epoch"),
        request_partition_reader(FETCH, version, "partition", "fetch_offset"),
        request_partition_reader(FETCH, version, array=array) if array in layout.fields else None,
    )


def fetch_limits(
    version: int, frame: Buffer, start: int, frame_bytes: int
) -> tuple[int, int, int] | None:
    """Return the limits of a Fetch request whose body is at `start`, and where they end.

    The first is for how many milliseconds the broker may wait for data, the second how many bytes
    the whole response may have: before version 3, which has no such limit, MAX_BYTES. None means
    that more bytes are needed. Raises as `read_int_field` does.
    """
    limits, bytes_at = _limits(version)
    end = start + limits.size
    if frame_bytes < end:
        raise MalformedFrame("bad_body", "the request ends before its limits")
    if len(frame) < end:
        return None
    found = limits.unpack_from(frame, start)
    wait_ms, max_bytes = (*found, MAX_BYTES) if bytes_at is None else found
    return wait_ms, max_bytes, end


def lower_fetch_bytes(
    version: int, frame: memoryview | bytearray, start: int, max_bytes: int
) -> None:
    """Limit a Fetch request, whose body is at `start`, in place to responses of about `max_bytes`.

    A broker sends one record batch at least, whatever the limit. Before version 3 it does not, and
    only partitions have limits: those that are in `frame` are lowered, each to its part, but not
    below the largest batch that Kafka takes by default.
    """
    _, bytes_at = _limits(version)
    if bytes_at is not None:
        INT32.pack_into(frame, start + bytes_at, max_bytes)
        return
    fields = request_partition_reader(FETCH, version)
    found: list[PartitionRow] = []
    try:
        topics = request_layout(FETCH, version).seek("topics", frame, start)
        fields.read_array(frame, topics, found)
    except UNREADABLE:  # the broker says so, or the rest has not come yet
        pass
    limit = fields.partition.seek("partition_max_bytes", b"", 0)
    for _, pos, _ in found:
        (asked_bytes,) = INT32.unpack_from(frame, pos + limit)
        part_bytes = max(max_bytes // len(found), DEFAULT_BATCH_BYTES)
        INT32.pack_into(frame, pos + limit, min(asked_bytes, part_bytes))


def max_bytes_position(version: int, start: int) -> int | None:
    """Return where a Fetch request, whose body is at `start`, says how many bytes it takes at most.

    None before version 3: only its partitions have limits.
    """
    _, bytes_at = _limits(version)
    return None if bytes_at is None else start + bytes_at


@cache
def _limits(version: int) -> tuple[Struct, int | None]:
    """Return how to read a Fetch request's longest wait and its limit, and where the limit is.

    None: it has no limit. Raises ValueError for a version that the schemas do not know.
    """
    layout = request_layout(FETCH, version)
    wait_at = layout.seek("max_wait_ms", b"", 0)
    if "max_bytes" not in layout.fields:
        return Struct(f">{wait_at}xi"), None
    bytes_at = layout.seek("max_bytes", b"", 0)
    return Struct(f">{wait_at}xi{bytes_at - wait_at - INT32.size}xi"), bytes_at
