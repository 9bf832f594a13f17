"""The first fields of a request's body, read without decoding the rest."""

import struct
from collections.abc import Callable
from functools import lru_cache
from struct import Struct
from typing import Any, TypeAlias

from proxy.wire.apis import APIS, FETCH, PRODUCE, is_known
from proxy.wire.errors import MalformedFrame
from proxy.wire.frames import RequestHead
from proxy.wire.varint import Buffer, read_uvarint

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


def fetch_max_wait_ms(head: RequestHead, frame: Buffer) -> int | None:
    """Return how long the broker may wait for data before it answers a Fetch, in milliseconds.

    None means that more bytes are needed. Raises as `produce_acks` does.
    """
    return _read_int(FETCH, head, frame, "max_wait_ms")


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
