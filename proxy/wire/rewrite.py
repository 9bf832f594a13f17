"""Responses changed on their way to the client: broker addresses, API versions, throttle time.

Only the fields in question are replaced. Every other byte stays as the broker sent it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from struct import Struct
from typing import Any, TypeAlias

from proxy.wire.apis import (
    API_VERSIONS,
    LENGTH_BYTES,
    METADATA,
    RESPONSE_HEADER_BYTES,
    api_of,
    is_known,
    max_safe_version,
)
from proxy.wire.frames import response_body
from proxy.wire.layout import (
    NULL,
    UNREADABLE,
    RecordLayout,
    read_tags,
    response_layout,
    tagged_response_layout,
    write_tags,
)
from proxy.wire.malformed import MalformedResponse

Advertise: TypeAlias = Callable[[int, str, int], tuple[str, int] | None]
"""Takes a broker's node id, real host and real port; gives the host and port for clients, or
None when clients cannot reach this broker through the proxy."""

COORDINATOR_NOT_AVAILABLE = 15
UNSUPPORTED_VERSION = 35
NO_NODE = -1
NO_PORT = -1

FALLBACK_NODE_ID = 1_999_999_973
"""Of the broker that stands for another member of the proxy. No broker has such an id in practice,
nor one that is 2^31 - 1 less it: that is under what id Kafka's consumers keep the connection to a
broker as their group's coordinator. So it may not be close to 2^31 - 1."""

KNOWN_ANSWERS, MAX_KNOWN_BYTES = 32, 1 << 16
"""So many answers to ApiVersions are remembered, of so many bytes at most."""

_CONTROLLERS = 2
_MAX_INT32 = 2**31 - 1
_INT32 = Struct(">i")
_ERROR_CODE_BYTES = 2

_Edit: TypeAlias = tuple[int, int, bytes]
"""Start and end of the bytes to replace, and what comes in their place."""


def rewrite_response(
    api_key: int,
    version: int,
    frame: bytes,
    advertise: Advertise,
    *,
    passes_unknown: bool = False,
    fallback: tuple[str, int] | None = None,
) -> bytes:
    """Return the response as clients may see it.

    `frame` is the whole frame, length included; `version` is the request's. Brokers' addresses are
    replaced by what `advertise` says. A broker without one is left out of Metadata,
    DescribeCluster and node endpoints; FindCoordinator then answers COORDINATOR_NOT_AVAILABLE.
    ApiVersions is capped to what is known here; APIs that are not stay in it only with
    `passes_unknown`. Metadata names one more broker at `fallback`, if given, in each version: not
    all who ask for the latest go back to their bootstrap servers. A response with nothing to change
    is returned as the same object. Raises MalformedResponse.
    """
    if api_key != API_VERSIONS and version < api_of(api_key).first_with_addresses:
        return frame
    if api_key == API_VERSIONS and len(frame) <= MAX_KNOWN_BYTES:
        start, end = LENGTH_BYTES, RESPONSE_HEADER_BYTES
        capped = _capped(version, frame[:start], frame[end:], passes_unknown=passes_unknown)
        return frame if capped is None else capped[:start] + frame[start:end] + capped[end:]
    rewritten = _rewritten(api_key, version, frame, advertise, passes_unknown=passes_unknown)
    if fallback is None or api_key != METADATA:
        return rewritten
    with unreadable_is_malformed():
        return _applied(rewritten, _fallback_edits(version, rewritten, *fallback))


@lru_cache(KNOWN_ANSWERS)
def _capped(version: int, length: bytes, rest: bytes, *, passes_unknown: bool) -> bytes | None:
    """Return a response to ApiVersions as clients may see it, None when nothing is to be changed.

    Without its correlation id it is the same for all clients of a broker with the same version.
    """
    frame = length + bytes(RESPONSE_HEADER_BYTES - LENGTH_BYTES) + rest
    capped = _rewritten(API_VERSIONS, version, frame, _nowhere, passes_unknown=passes_unknown)
    return None if capped is frame else capped


def _nowhere(_node_id: int, _host: str, _port: int) -> None:
    """Return no address: ApiVersions has none."""


def _rewritten(
    api_key: int, version: int, frame: bytes, advertise: Advertise, *, passes_unknown: bool
) -> bytes:
    with unreadable_is_malformed():
        edits = _edits(api_key, version, frame, advertise, passes_unknown=passes_unknown)
    return _applied(frame, edits) if edits else frame


def _applied(frame: bytes, edits: list[_Edit]) -> bytes:
    """Return the whole frame with its edits, and so its length, in place."""
    body = _splice(frame, edits)[LENGTH_BYTES:]
    return _INT32.pack(len(body)) + body


def set_throttle_time(api_key: int, version: int, frame: bytes, throttle_ms: int) -> bytes:
    """Return the whole frame with throttle_time_ms raised to `throttle_ms`, never lowered.

    A response that has no such field, or whose API or version is not known, is returned as the
    same object. Raises MalformedResponse.
    """
    if not is_known(api_key, version):
        return frame
    with unreadable_is_malformed():
        layout, pos = _open(api_key, version, frame)
        if "throttle_time_ms" not in layout.fields:
            return frame
        changed = bytearray(frame)
        raise_throttle_time(changed, layout.seek("throttle_time_ms", frame, pos), throttle_ms)
    return bytes(changed)


def raise_throttle_time(head: bytearray | memoryview, offset: int, throttle_ms: int) -> None:
    """Raise the throttle_time_ms at `offset`, never lower it. The rest of the frame may lack."""
    (present,) = _INT32.unpack_from(head, offset)
    _INT32.pack_into(head, offset, min(max(present, throttle_ms), _MAX_INT32))


@dataclass(slots=True)
class _Element:
    """An element of an array in a response: what its fields say, and how they are changed."""

    layout: RecordLayout
    data: bytes
    spans: dict[str, tuple[int, int]]
    """Where each field begins and ends."""

    def value(self, field: str) -> Any:
        """Return a number or string; null as the empty string."""
        return self.layout.fields[field].read(self.data, self.spans[field][0])[0]

    def edit(self, field: str, value: Any) -> _Edit:
        """Return the edit that gives a field another value."""
        return *self.spans[field], self.layout.fields[field].write(value)


_EditElement: TypeAlias = Callable[[_Element], list[_Edit] | None]
"""Returns the edits of an element, None when it has to go."""


@contextmanager
def unreadable_is_malformed() -> Iterator[None]:
    """Raise MalformedResponse for what a broker has sent and no layout can read."""
    try:
        yield
    except MalformedResponse:
        raise
    except UNREADABLE as error:
        raise MalformedResponse(f"a response to rewrite: {error}") from None


def _open(api_key: int, version: int, frame: bytes) -> tuple[RecordLayout, int]:
    """Return the layout of a whole frame's body, and where it begins."""
    start = response_body(api_key, version, frame)
    error_code = int.from_bytes(frame[start : start + _ERROR_CODE_BYTES], "big")
    if api_key == API_VERSIONS and error_code == UNSUPPORTED_VERSION:
        version = 0  # so that any client can read it (KIP-511)
    return response_layout(api_key, version), start


def _edits(
    api_key: int, version: int, frame: bytes, advertise: Advertise, *, passes_unknown: bool
) -> list[_Edit]:
    """Return the edits of a response, in order."""
    layout, pos = _open(api_key, version, frame)
    fields = layout.fields
    if "endpoint_type" in fields:
        start = layout.seek("endpoint_type", frame, pos)
        if fields["endpoint_type"].read(frame, start)[0] == _CONTROLLERS:
            return []  # controllers serve no topic data, and the proxy has no port for them
    for array, edit in (
        ("api_keys", partial(_cap_version, passes_unknown=passes_unknown)),
        ("brokers", partial(_broker, advertise=advertise)),
        ("coordinators", partial(_coordinator, advertise=advertise)),
    ):
        if array in fields:
            return _edit_elements(layout, array, frame, pos, edit)
    if "host" in fields:
        return _coordinator(_Element(layout, frame, layout.spans(frame, pos)[0]), advertise)
    return _edit_endpoints(api_key, version, frame, pos, partial(_broker, advertise=advertise))


def _edit_elements(
    layout: RecordLayout, field: str, data: bytes, pos: int, edit: _EditElement
) -> list[_Edit]:
    """Edit each element of an array in the record at `pos`."""
    array = layout.fields[field]
    count_start = layout.seek(field, data, pos)
    count, count_end = array.count(data, count_start)
    pos = count_end
    edits: list[_Edit] = []
    kept = 0
    for _ in range(count):
        spans, end = array.element.spans(data, pos)
        changes = edit(_Element(array.element, data, spans))
        edits += [(pos, end, b"")] if changes is None else changes
        kept += changes is not None
        pos = end
    if kept != count:
        edits.insert(0, (count_start, count_end, array.length.write(kept)))
    return edits


def _fallback_edits(version: int, frame: bytes, host: str, port: int) -> list[_Edit]:
    """Return the edits that add a broker to a Metadata response, under an id that none has."""
    layout, pos = _open(METADATA, version, frame)
    array = layout.fields["brokers"]
    count_start = layout.seek("brokers", frame, pos)
    count, count_end = array.count(frame, count_start)
    element, node_ids, pos = array.element, set(), count_end
    for _ in range(count):
        node_ids.add(element.fields["node_id"].read(frame, pos)[0])
        pos = element.skip(frame, pos)
    fallback_id = FALLBACK_NODE_ID
    while {fallback_id, _MAX_INT32 - fallback_id} & node_ids:
        fallback_id -= 1
    values = {"node_id": fallback_id, "host": host, "port": port}
    broker = b"".join(
        node.write(values[name]) if name in values else node.length.write(NULL)
        for name, node in element.fields.items()
    )
    if element.tags is not None:
        broker += write_tags([])
    return [(count_start, count_end, array.length.write(count + 1)), (pos, pos, broker)]


def _edit_endpoints(
    api_key: int, version: int, frame: bytes, pos: int, edit: _EditElement
) -> list[_Edit]:
    """Edit the new leaders' addresses (KIP-951) in the tag section of the body at `pos`."""
    layout = response_layout(api_key, version)
    number = (layout.tags or {})["node_endpoints"]
    array = tagged_response_layout(api_key, version, "node_endpoints")
    start = layout.seek(None, frame, pos)
    tags, end = read_tags(frame, start)
    fields = []
    for tag in tags:
        value = frame[tag.start : tag.end]
        if tag.number == number:
            value = _splice(value, _edit_elements(array, "node_endpoints", value, 0, edit))
        fields.append((tag.number, value))
    section = write_tags(fields)
    return [] if section == frame[start:end] else [(start, end, section)]


def _cap_version(api: _Element, passes_unknown: bool) -> list[_Edit] | None:
    """Lower the highest version of an API to the safe one; None when no version can be used."""
    safe = max_safe_version(api.value("api_key"), passes_unknown=passes_unknown)
    if safe is None or api.value("max_version") <= safe:
        return []
    return None if api.value("min_version") > safe else [api.edit("max_version", safe)]


def _broker(broker: _Element, advertise: Advertise) -> list[_Edit] | None:
    """Replace a broker's address; None when there is none for clients."""
    host, port = broker.value("host"), broker.value("port")
    node_id = broker.value("broker_id" if "broker_id" in broker.spans else "node_id")
    address = advertise(node_id, host, port)
    if address is None or address == (host, port):
        return None if address is None else []
    return [broker.edit("host", address[0]), broker.edit("port", address[1])]


def _coordinator(coordinator: _Element, advertise: Advertise) -> list[_Edit]:
    """Replace a coordinator's address, or answer that there is none.

    One without a host is an error's and stays as it is.
    """
    if not coordinator.value("host"):
        return []
    error = coordinator.value("error_code")
    if error == 0 and coordinator.value("node_id") != NO_NODE:
        edits = _broker(coordinator, advertise)
        if edits is not None:
            return edits
    none = {"node_id": NO_NODE, "host": "", "port": NO_PORT}
    none["error_code"] = error or COORDINATOR_NOT_AVAILABLE
    return sorted(coordinator.edit(field, value) for field, value in none.items())


def _splice(data: bytes, edits: list[_Edit]) -> bytes:
    """Apply edits, which are in order and do not overlap."""
    parts: list[bytes] = []
    pos = 0
    for start, end, new in edits:
        parts += (data[pos:start], new)
        pos = end
    parts.append(data[pos:])
    return b"".join(parts)
