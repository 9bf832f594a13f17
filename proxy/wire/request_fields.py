"""The first fields of a request's body, read or lowered without decoding the rest."""

import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

from proxy.wire.apis import APIS, FETCH, JOIN_GROUP, PRODUCE, is_known
from proxy.wire.frames import RequestHead
from proxy.wire.layout import (
    Array,
    Buffer,
    Cursor,
    Fixed,
    Node,
    read_uvarint,
    record_of,
    request_layout,
)
from proxy.wire.malformed import MalformedFrame, MalformedResponse

Step: TypeAlias = Callable[[Buffer, int], tuple[Any, int]]

_NULL = -1
_SHORT = Struct(">h")
_INT = Struct(">i")

_CACHED_PREFIXES = 1024


class _NeedMore(Exception):  # noqa: N818 - a signal, not an error
    """The bytes end inside a field."""


def decode_prefix(
    api_key: int, version: int, body: Buffer, last_field: str
) -> dict[str, Any] | None:
    """Return the untagged top-level fields from the first one to `last_field`, by name.

    None means that more bytes are needed. Only strings, bytes and values of fixed size can be
    read. Raises ValueError when the schemas have no such API, version or field, MalformedFrame
    for a length that cannot be.
    """
    values: dict[str, Any] = {}
    pos = 0
    try:
        for name, step in _steps(api_key, version, last_field):
            values[name], pos = step(body, pos)
    except (IndexError, struct.error, _NeedMore):
        return None
    except UnicodeDecodeError as error:
        raise MalformedFrame("bad_body", f"{last_field}: {error}") from None
    return values


def produce_acks(head: RequestHead, frame: Buffer) -> int | None:
    """Return how many acknowledgements a Produce request asks for: -1, 0 or 1.

    None means that more bytes are needed. 0 means that there will be no response. Raises
    MalformedFrame when the frame ends before the field, ValueError when the version is unknown.
    """
    return _read_int(PRODUCE, head, frame, "acks")


def session_timeout_ms(head: RequestHead, frame: Buffer) -> int | None:
    """Return the session timeout that a JoinGroup request asks for, in milliseconds.

    None means that more bytes are needed. Raises as `produce_acks` does.
    """
    return _read_int(JOIN_GROUP, head, frame, "session_timeout_ms")


class FetchLimits(NamedTuple):
    """What a Fetch request says of how much it wants and how long it waits for it."""

    max_wait_ms: int
    """How long the broker may wait for data before it answers."""

    max_bytes: int
    """Of the whole response. Before version 3, which has no such limit, MAX_BYTES."""


MAX_BYTES = 2**31 - 1

DEFAULT_BATCH_BYTES = 1 << 20
"""About the largest record batch that a broker takes by default (message.max.bytes)."""


def fetch_limits(head: RequestHead, frame: Buffer) -> FetchLimits | None:
    """Return the limits of a Fetch request; None means that more bytes are needed.

    Raises as `produce_acks` does.
    """
    wait_at, bytes_at = _fetch_offsets(head.api_version)
    end = head.header_end + max(wait_at, bytes_at or 0) + _INT.size
    if head.frame_bytes < end:
        raise MalformedFrame("bad_body", "the request ends before its limits")
    if len(frame) < end:
        return None
    (max_wait_ms,) = _INT.unpack_from(frame, head.header_end + wait_at)
    if bytes_at is None:
        return FetchLimits(max_wait_ms, MAX_BYTES)
    return FetchLimits(max_wait_ms, _INT.unpack_from(frame, head.header_end + bytes_at)[0])


def lower_fetch_bytes(head: RequestHead, frame: memoryview | bytearray, max_bytes: int) -> None:
    """Limit a Fetch request in place to responses of about `max_bytes`.

    A broker sends one record batch at least, whatever the limit. Before version 3 it does not, and
    only partitions have limits: those that are in `frame` are lowered, each to its part, but not
    below the largest batch that Kafka takes by default.
    """
    _, bytes_at = _fetch_offsets(head.api_version)
    if bytes_at is not None:
        _INT.pack_into(frame, head.header_end + bytes_at, max_bytes)
        return
    places = tuple(_partition_limits(head, frame))
    for place in places:
        (asked_bytes,) = _INT.unpack_from(frame, place)
        part_bytes = max(max_bytes // len(places), DEFAULT_BATCH_BYTES)
        _INT.pack_into(frame, place, min(asked_bytes, part_bytes))


def _partition_limits(head: RequestHead, frame: Buffer) -> Iterator[int]:
    """Yield where the limits of the partitions are, as far as the frame reaches."""
    layout = request_layout(FETCH, head.api_version)
    cursor = Cursor(memoryview(frame)[: head.frame_bytes], head.header_end)
    topics = layout.fields["topics"]
    topic = record_of(topics)
    partition = record_of(topic.fields["partitions"])
    try:
        cursor.seek(layout, "topics")
        for _ in range(cursor.enter(_array(topics))):
            cursor.skip(topic.fields["topic"])
            for _ in range(cursor.enter(_array(topic.fields["partitions"]))):
                yield cursor.spans(partition)["partition_max_bytes"][0]
    except MalformedResponse:  # the broker says so, or the rest has not come yet
        return


def _array(node: Node) -> Array:
    assert isinstance(node, Array)  # the schemas say so
    return node


@lru_cache(maxsize=_CACHED_PREFIXES)
def _fetch_offsets(version: int) -> tuple[int, int | None]:
    """Return where a Fetch request's longest wait and its limit are in the body; None: it has none.

    Raises ValueError for a version that the schemas do not know.
    """
    if not is_known(FETCH, version):
        raise ValueError(f"no schema for Fetch version {version}")
    offsets: dict[str, int] = {}
    end = 0
    for name, node in request_layout(FETCH, version).fields.items():
        if not isinstance(node, Fixed):
            break
        offsets[name] = end
        end += node.size
    return offsets["max_wait_ms"], offsets.get("max_bytes")


def _read_int(api_key: int, head: RequestHead, frame: Buffer, field: str) -> int | None:
    body = memoryview(frame)[head.header_end : head.frame_bytes]
    values = decode_prefix(api_key, head.api_version, body, field)
    if values is not None:
        return int(values[field])
    if len(frame) >= head.frame_bytes:
        raise MalformedFrame("bad_body", f"the request ends before {field}")
    return None


@lru_cache(maxsize=_CACHED_PREFIXES)
def _steps(api_key: int, version: int, last_field: str) -> tuple[tuple[str, Step], ...]:
    if not is_known(api_key, version):
        raise ValueError(f"no schema for API {api_key} version {version}")
    message = APIS[api_key].request
    flexible = message.flexible_version_q(version)
    steps: list[tuple[str, Step]] = []
    for field in message._struct.untagged_fields(version):
        steps.append((field.name, _step(field, flexible=flexible)))
        if field.name == last_field:
            return tuple(steps)
    raise ValueError(f"API {api_key} version {version} has no field {last_field!r}")


def _step(field: Any, *, flexible: bool) -> Step:
    if field.is_batchable():
        packing = Struct(field._type._be_fmt)
        return lambda data, pos: (packing.unpack_from(data, pos)[0], pos + packing.size)
    if field.type_str in ("string", "bytes", "records"):
        is_text = field.type_str == "string"
        if flexible:
            return lambda data, pos: _compact(data, pos, is_text=is_text)
        length = _SHORT if is_text else _INT
        return lambda data, pos: _sized(data, pos, length, is_text=is_text)
    raise ValueError(f"field {field.name!r} cannot be read ahead")


def _compact(data: Buffer, pos: int, *, is_text: bool) -> tuple[str | bytes | None, int]:
    try:
        size, pos = read_uvarint(data, pos)
    except ValueError as error:
        raise MalformedFrame("bad_body", str(error)) from None
    return _content(data, pos, size - 1, is_text=is_text)


def _sized(
    data: Buffer, pos: int, length: Struct, *, is_text: bool
) -> tuple[str | bytes | None, int]:
    (size,) = length.unpack_from(data, pos)
    return _content(data, pos + length.size, size, is_text=is_text)


def _content(data: Buffer, pos: int, size: int, *, is_text: bool) -> tuple[str | bytes | None, int]:
    if size == _NULL:
        return None, pos
    if size < 0:
        raise MalformedFrame("bad_body", f"a field of {size} bytes")
    end = pos + size
    if end > len(data):
        raise _NeedMore
    return (str(data[pos:end], "utf-8") if is_text else bytes(data[pos:end])), end
