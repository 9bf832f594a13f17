"""The first fields of a request's body, read or lowered before the rest has come."""

from functools import cache
from struct import Struct

from proxy.wire.apis import FETCH, JOIN_GROUP, PRODUCE
from proxy.wire.frames import INT32, RequestHead
from proxy.wire.layout import (
    INCOMPLETE,
    UNREADABLE,
    Buffer,
    PartitionRow,
    request_layout,
    request_partitions,
)
from proxy.wire.malformed import MalformedFrame

MAX_BYTES = 2**31 - 1

DEFAULT_BATCH_BYTES = 1 << 20
"""About the largest record batch that a broker takes by default (message.max.bytes)."""


def produce_acks(head: RequestHead, frame: Buffer) -> tuple[int, int] | None:
    """Return how many acknowledgements a Produce request asks for, and where that number ends.

    They are -1, 0 or 1; with 0 there is no response. None means that more bytes are needed. Raises
    MalformedFrame when the frame ends before the field, ValueError when the version is unknown.
    """
    return _read_int(PRODUCE, head, frame, "acks")


def session_timeout_ms(head: RequestHead, frame: Buffer) -> tuple[int, int] | None:
    """Return the session timeout of a JoinGroup request, and where it ends, as `produce_acks`."""
    return _read_int(JOIN_GROUP, head, frame, "session_timeout_ms")


def fetch_limits(
    version: int, frame: Buffer, start: int, frame_bytes: int
) -> tuple[int, int, int] | None:
    """Return the limits of a Fetch request whose body is at `start`, and where they end.

    The first is for how many milliseconds the broker may wait for data, the second how many bytes
    the whole response may have: before version 3, which has no such limit, MAX_BYTES. None means
    that more bytes are needed. Raises as `produce_acks` does.
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
    fields = request_partitions(FETCH, version)
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


def fetch_limit_at(version: int, start: int) -> int | None:
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


def _read_int(api_key: int, head: RequestHead, frame: Buffer, field: str) -> tuple[int, int] | None:
    body = memoryview(frame)[head.header_end : head.frame_bytes]
    pos = 0
    try:
        for name, node in request_layout(api_key, head.api_version).fields.items():
            value, pos = node.read(body, pos)
            if name == field:
                return int(value), head.header_end + pos
        raise KeyError(field)
    except INCOMPLETE:
        if len(frame) < head.frame_bytes:
            return None
        raise MalformedFrame("bad_body", f"the request ends before {field}") from None
    except ValueError as error:
        raise MalformedFrame("bad_body", f"{field}: {error}") from None
