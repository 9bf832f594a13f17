"""Where a frame ends and what its header says, for requests and responses."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from struct import Struct
from typing import Literal, NamedTuple, TypeAlias

from proxy.wire.apis import (
    CONTROLLED_SHUTDOWN,
    LENGTH_BYTES,
    RESPONSE_HEADER_BYTES,
    api_name,
    plan_of,
)
from proxy.wire.layout import (
    INCOMPLETE,
    NULL,
    UNREADABLE,
    Buffer,
    PartitionRow,
    request_layout,
    response_partition_reader,
    skip_tags,
)

MAX_HEADER_BYTES = 64 * 1024
"""A longer request header is refused, so that no more than this is held while waiting for its end.
The longest client id has 32 KiB, and no client sends tagged fields in the header."""

INT32 = Struct(">i")
_HEADER_V0 = Struct(">ihhi")
_HEADER_V1 = Struct(">ihhih")
RESPONSE_HEADER = Struct(">ii")

_MIN_LENGTH = _HEADER_V0.size - LENGTH_BYTES

_TLS_HANDSHAKE = b"\x16\x03"
_HTTP_STARTS = frozenset(
    (b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"DELE", b"PATC", b"CONN", b"TRAC", b"PRI ")
)

FrameFault = Literal[
    "negative_length",
    "too_long",
    "too_short",
    "tls_on_plain_port",
    "http_on_plain_port",
    "bad_header",
    "bad_body",
]
"""Why a request was not understood. A small fixed set, so it can be a metric label."""


class MalformedFrame(ValueError):  # noqa: N818 - named for what was found, as in the logs
    """A client sent bytes that are not a Kafka request; its connection has to be closed."""

    def __init__(self, reason: FrameFault, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class MalformedResponse(ValueError):  # noqa: N818 - see MalformedFrame
    """A broker's response does not follow the schema of its API and version."""


@contextmanager
def unreadable_is_malformed() -> Iterator[None]:
    """Raise MalformedResponse for what a broker has sent and no layout can read."""
    try:
        yield
    except MalformedResponse:
        raise
    except UNREADABLE as error:
        raise MalformedResponse(f"a response to rewrite: {error}") from None


FrameShape: TypeAlias = tuple[bytes, bytes]
"""A mask, and what is under it the same in all frames that are alike."""


def frame_shape(frame: bytes, changes: Iterable[tuple[int, bytes]]) -> FrameShape:
    """Return what frames are like one in; `changes` are parts of the mask, and where they are."""
    mask = bytearray(b"\xff" * len(frame))
    for at, bits in changes:
        mask[at : at + len(bits)] = bits
    return bytes(mask), bytes(map(int.__and__, frame, mask))


class RequestHead(NamedTuple):
    """A request's header. A tuple, because one is made for every request."""

    frame_bytes: int
    """Length of the whole frame, the four bytes of the length field included."""
    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    """With U+FFFD for what is not UTF-8, as brokers read it; so some ids of other bytes are one."""
    header_end: int
    """Offset of the body in the frame. For an API or version without a schema it is the offset
    behind the client id: whether a tag section follows is not known."""


def parse_request_head(view: Buffer, *, max_request_bytes: int) -> RequestHead | None:
    """Read the header of the request whose frame starts at `view[0]`.

    Returns None while more bytes are needed, which is never more than MAX_HEADER_BYTES.
    `max_request_bytes` bounds the frame's length field. Raises MalformedFrame as early as the
    bytes allow it.
    """
    have = len(view)
    if have < LENGTH_BYTES:
        return None
    (length,) = INT32.unpack_from(view)
    if not _MIN_LENGTH <= length <= max_request_bytes:
        raise _bad_length(bytes(view[:LENGTH_BYTES]), length, max_request_bytes)
    frame_bytes = LENGTH_BYTES + length
    if have < _HEADER_V0.size:
        return None
    _, api_key, version, correlation_id = _HEADER_V0.unpack_from(view)
    if api_key == CONTROLLED_SHUTDOWN and version == 0:  # the only one with a version 0 header
        return RequestHead(frame_bytes, api_key, version, correlation_id, None, _HEADER_V0.size)
    found = _read_client_id(view, frame_bytes)
    if found is None:
        return None
    client_id, pos = found
    if plan_of(api_key, version).request_is_flexible:
        behind = _skip_header_tags(view, pos, frame_bytes)
        if behind is None:
            return None
        pos = behind
    return RequestHead(frame_bytes, api_key, version, correlation_id, client_id, pos)


def read_int_field(head: RequestHead, frame: Buffer, field: str) -> tuple[int, int] | None:
    """Return one of the first fields of a request's body, an integer, and where it ends.

    None means that more bytes are needed. Raises MalformedFrame when the frame ends before the
    field, ValueError when the version is unknown.
    """
    body = memoryview(frame)[head.header_end : head.frame_bytes]
    pos = 0
    try:
        for name, node in request_layout(head.api_key, head.api_version).fields.items():
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


def parse_response_head(view: Buffer) -> tuple[int, int] | None:
    """Return (bytes of the whole frame, correlation id), None while more bytes are needed.

    Raises MalformedResponse when the length leaves no room for a correlation id.
    """
    if len(view) < RESPONSE_HEADER_BYTES:
        return None
    length, correlation_id = RESPONSE_HEADER.unpack_from(view)
    if length < RESPONSE_HEADER_BYTES - LENGTH_BYTES:
        raise MalformedResponse(f"a response of {length} bytes")
    return LENGTH_BYTES + length, correlation_id


def check_whole_response(frame: Buffer) -> None:
    """Raise MalformedResponse when a response frame is not whole, or has no room for a header."""
    size = len(frame)
    if size < RESPONSE_HEADER_BYTES or INT32.unpack_from(frame)[0] != size - LENGTH_BYTES:
        raise MalformedResponse(f"a response of {size} bytes that is not a whole frame")


def response_body_start(api_key: int, version: int, frame: Buffer) -> int:
    """Return where the body starts in a whole response frame, behind the header's tagged fields.

    Raises MalformedResponse, also when the frame is not whole.
    """
    check_whole_response(frame)
    if not plan_of(api_key, version).is_flexible:
        return RESPONSE_HEADER_BYTES
    try:
        return skip_tags(frame, RESPONSE_HEADER_BYTES)
    except UNREADABLE as error:
        raise MalformedResponse(f"the header's tag section: {error}") from None


def read_partitions(
    api_key: int, version: int, frame: Buffer, wanted: tuple[str, ...]
) -> list[PartitionRow]:
    """Return the wanted fields of each partition in a whole response. Raises MalformedResponse."""
    body = response_body_start(api_key, version, frame)
    try:
        return response_partition_reader(api_key, version, *wanted).read(frame, body)
    except UNREADABLE as error:
        raise MalformedResponse(f"a {api_name(api_key)} response: {error}") from None


def ends_with_frame(data: Buffer) -> bool:
    """Return whether `data`, which starts with a frame, holds whole frames and nothing else."""
    pos = 0
    while pos + LENGTH_BYTES <= len(data):
        pos += LENGTH_BYTES + max(INT32.unpack_from(data, pos)[0], 0)
    return pos == len(data)


def _bad_length(start: bytes, length: int, max_request_bytes: int) -> MalformedFrame:
    """Name the fault. Other protocols' first bytes read as a length that is out of range."""
    if start in _HTTP_STARTS:
        return MalformedFrame("http_on_plain_port", "an HTTP client on a Kafka port")
    if start.startswith(_TLS_HANDSHAKE):
        return MalformedFrame("tls_on_plain_port", "a TLS client on a port without TLS")
    if length < 0:
        return MalformedFrame("negative_length", f"a request of {length} bytes")
    if length < _MIN_LENGTH:
        return MalformedFrame("too_short", f"a request of {length} bytes has no header")
    return MalformedFrame("too_long", f"a request of {length} bytes, at most {max_request_bytes}")


def _read_client_id(view: Buffer, frame_bytes: int) -> tuple[str | None, int] | None:
    """Return the client id and the position behind it, None while more bytes are needed."""
    start = _HEADER_V1.size
    if frame_bytes < start:
        raise MalformedFrame("bad_header", f"no room for a client id in {frame_bytes} bytes")
    if len(view) < start:
        return None
    size = _HEADER_V1.unpack_from(view)[-1]
    if size == NULL:
        return None, start
    end = start + size
    if size < 0 or end > frame_bytes:
        raise MalformedFrame("bad_header", f"a client id of {size} bytes in {frame_bytes}")
    if len(view) < end:
        return None
    return str(view[start:end], "utf-8", "replace"), end


def _skip_header_tags(view: Buffer, pos: int, frame_bytes: int) -> int | None:
    """Return the position behind the header's tag section, None while more bytes are needed."""
    if pos < len(view) and pos < frame_bytes and view[pos] == 0:
        return pos + 1
    limit = min(frame_bytes, MAX_HEADER_BYTES)
    try:
        return skip_tags(view[:limit], pos)
    except INCOMPLETE:
        if len(view) < limit:
            return None
        raise MalformedFrame("bad_header", "the header's tag section has no end") from None
    except ValueError as error:
        raise MalformedFrame("bad_header", f"the header's tag section: {error}") from None
