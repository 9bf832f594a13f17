"""Responses changed on their way to the client: broker addresses, API versions, throttle time.

Only the fields in question are replaced. Every other byte stays as the broker sent it.
"""

from collections.abc import Callable
from struct import Struct
from typing import TypeAlias

from proxy.wire.apis import (
    API_VERSIONS,
    DESCRIBE_CLUSTER,
    FIND_COORDINATOR,
    LENGTH_BYTES,
    METADATA,
    api_of,
    is_known,
    max_safe_version,
)
from proxy.wire.frames import response_body
from proxy.wire.layout import (
    Array,
    Buffer,
    Cursor,
    Node,
    Record,
    Sized,
    TagSection,
    read_string,
    read_tags,
    record_of,
    response_layout,
    tagged_response_layout,
    write_count,
    write_string,
    write_tags,
)
from proxy.wire.malformed import MalformedResponse

__all__ = [
    "Advertise",
    "MalformedResponse",
    "raise_throttle_time",
    "rewrite_response",
    "set_throttle_time",
]

Advertise: TypeAlias = Callable[[int, str, int], tuple[str, int] | None]
"""Takes a broker's node id, real host and real port; gives the host and port to tell clients, or
None when clients cannot reach this broker through the proxy."""

Edit: TypeAlias = tuple[int, int, bytes]
"""Start and end of the bytes to replace, and what comes in their place."""

COORDINATOR_NOT_AVAILABLE = 15
UNSUPPORTED_VERSION = 35
NO_NODE = -1
NO_PORT = -1

_CONTROLLERS = 2
_MAX_INT32 = 2**31 - 1

_INT8 = Struct(">b")
_INT16 = Struct(">h")
_INT32 = Struct(">i")

_BROKER_ID_FIELD = {METADATA: "node_id", DESCRIBE_CLUSTER: "broker_id"}


def rewrite_response(
    api_key: int,
    version: int,
    frame: bytes,
    advertise: Advertise,
    *,
    passes_unknown: bool = False,
) -> bytes:
    """Return the response as clients may see it.

    `frame` is the whole frame, length included; `version` is the request's. Brokers' addresses are
    replaced by what `advertise` says. A broker without one is left out of Metadata,
    DescribeCluster and node endpoints; FindCoordinator then answers COORDINATOR_NOT_AVAILABLE.
    ApiVersions is capped to what is known here; APIs that are not stay in it only with
    `passes_unknown`. A response with nothing to change is returned as the same object. Raises
    MalformedResponse.
    """
    if api_key == API_VERSIONS:
        edits = _cap_versions(version, frame, passes_unknown)
    elif version < api_of(api_key).first_with_addresses:
        return frame
    else:
        layout, cursor = _open(api_key, version, frame)
        if api_key in _BROKER_ID_FIELD:
            edits = _brokers(api_key, layout, cursor, advertise)
        elif api_key == FIND_COORDINATOR:
            edits = _coordinators(layout, cursor, advertise)
        else:
            edits = _node_endpoints(api_key, version, layout, cursor, advertise)
    if not edits:
        return frame
    body = _splice(frame, edits)[LENGTH_BYTES:]
    return _INT32.pack(len(body)) + body


def set_throttle_time(api_key: int, version: int, frame: bytes, throttle_ms: int) -> bytes:
    """Return the whole frame with throttle_time_ms raised to `throttle_ms`, never lowered.

    A response that has no such field, or whose API or version is not known, is returned as the
    same object. Raises MalformedResponse.
    """
    if not is_known(api_key, version):
        return frame
    layout, cursor = _open(api_key, version, frame)
    if "throttle_time_ms" not in layout.fields:
        return frame
    cursor.seek(layout, "throttle_time_ms")
    offset, _ = cursor.skip(layout.fields["throttle_time_ms"])
    changed = bytearray(frame)
    raise_throttle_time(changed, offset, throttle_ms)
    return bytes(changed)


def raise_throttle_time(head: bytearray | memoryview, offset: int, throttle_ms: int) -> None:
    """Raise the throttle_time_ms at `offset`, never lower it. The rest of the frame may lack."""
    (present,) = _INT32.unpack_from(head, offset)
    _INT32.pack_into(head, offset, min(max(present, throttle_ms), _MAX_INT32))


def _open(api_key: int, version: int, frame: bytes) -> tuple[Record, Cursor]:
    """Return the body's layout and a cursor at its start."""
    cursor = Cursor(frame, response_body(api_key, version, frame))
    if _INT32.unpack_from(frame)[0] != len(frame) - LENGTH_BYTES:
        raise MalformedResponse("the frame's length is not that of the frame")
    if api_key == API_VERSIONS and _read_int(_INT16, frame, cursor.pos) == UNSUPPORTED_VERSION:
        version = 0  # so that any client can read it (KIP-511)
    if not is_known(api_key, version):
        raise MalformedResponse(f"no schema for API {api_key} version {version}")
    return response_layout(api_key, version), cursor


def _cap_versions(version: int, frame: bytes, passes_unknown: bool) -> list[Edit]:
    """Lower the highest version of each API to the safe one; leave out what cannot be used."""
    layout, cursor = _open(API_VERSIONS, version, frame)
    cursor.seek(layout, "api_keys")

    def cap(spans: dict[str, tuple[int, int]]) -> list[Edit] | None:
        api_key = _read_int(_INT16, frame, spans["api_key"][0])
        lowest = _read_int(_INT16, frame, spans["min_version"][0])
        highest = _read_int(_INT16, frame, spans["max_version"][0])
        safe = max_safe_version(api_key, passes_unknown=passes_unknown)
        if safe is None or highest <= safe:
            return []
        return None if lowest > safe else [(*spans["max_version"], _INT16.pack(safe))]

    return _edit_elements(cursor, layout.fields["api_keys"], cap)


def _brokers(api_key: int, layout: Record, cursor: Cursor, advertise: Advertise) -> list[Edit]:
    """Rewrite the brokers of Metadata and DescribeCluster."""
    if "endpoint_type" in layout.fields:
        ahead = Cursor(cursor.data, cursor.pos)
        ahead.seek(layout, "endpoint_type")
        start, _ = ahead.skip(layout.fields["endpoint_type"])
        if _read_int(_INT8, ahead.data, start) == _CONTROLLERS:
            return []  # controllers serve no topic data, and the proxy has no port for them
    cursor.seek(layout, "brokers")
    return _addresses(cursor, layout.fields["brokers"], _BROKER_ID_FIELD[api_key], advertise)


def _coordinators(layout: Record, cursor: Cursor, advertise: Advertise) -> list[Edit]:
    """Rewrite FindCoordinator: one coordinator in the body, from version 4 on an array of them."""
    if "coordinators" not in layout.fields:
        return _coordinator(layout, cursor.data, cursor.spans(layout), advertise)
    cursor.seek(layout, "coordinators")
    array = layout.fields["coordinators"]
    record = record_of(array)
    return _edit_elements(
        cursor, array, lambda spans: _coordinator(record, cursor.data, spans, advertise)
    )


def _coordinator(
    record: Record, data: Buffer, spans: dict[str, tuple[int, int]], advertise: Advertise
) -> list[Edit]:
    """Rewrite one coordinator. One without a host is an error's and stays as it is."""
    host_form = _string_of(record.fields["host"])
    host = read_string(host_form, data, spans["host"])
    if not host:
        return []
    node_id = _read_int(_INT32, data, spans["node_id"][0])
    port = _read_int(_INT32, data, spans["port"][0])
    error = _read_int(_INT16, data, spans["error_code"][0])
    address = advertise(node_id, host, port) if error == 0 and node_id != NO_NODE else None
    if address is not None:
        return _address_edits(host_form, spans, (host, port), address)
    code = _INT16.pack(error or COORDINATOR_NOT_AVAILABLE)
    return sorted(
        [
            (*spans["error_code"], code),
            (*spans["node_id"], _INT32.pack(NO_NODE)),
            (*spans["host"], write_string(host_form, "")),
            (*spans["port"], _INT32.pack(NO_PORT)),
        ]
    )


def _node_endpoints(
    api_key: int, version: int, layout: Record, cursor: Cursor, advertise: Advertise
) -> list[Edit]:
    """Rewrite the new leaders' addresses (KIP-951) in the tag section that ends the body."""
    for node in layout.fields.values():
        cursor.skip(node)
    start, end = cursor.skip(TagSection())
    number = (layout.tags or {})["node_endpoints"]
    tags, _ = read_tags(cursor.data, start)
    array = tagged_response_layout(api_key, version, "node_endpoints")
    fields: list[tuple[int, bytes]] = []
    changed = False
    for tag in tags:
        value = bytes(cursor.data[tag.start : tag.end])
        if tag.number == number:
            edits = _addresses(Cursor(value, 0), array, "node_id", advertise)
            value = _splice(value, edits)
            changed |= bool(edits)
        fields.append((tag.number, value))
    return [(start, end, write_tags(fields))] if changed else []


def _addresses(cursor: Cursor, array: Node, id_field: str, advertise: Advertise) -> list[Edit]:
    """Rewrite an array of brokers; those without an address for clients are left out."""
    host_form = _string_of(record_of(array).fields["host"])

    def rewrite(spans: dict[str, tuple[int, int]]) -> list[Edit] | None:
        host = read_string(host_form, cursor.data, spans["host"])
        port = _read_int(_INT32, cursor.data, spans["port"][0])
        node_id = _read_int(_INT32, cursor.data, spans[id_field][0])
        address = advertise(node_id, host, port)
        return None if address is None else _address_edits(host_form, spans, (host, port), address)

    return _edit_elements(cursor, array, rewrite)


def _address_edits(
    host_form: Sized,
    spans: dict[str, tuple[int, int]],
    real: tuple[str, int],
    told: tuple[str, int],
) -> list[Edit]:
    if real == told:
        return []
    host, port = told
    return [
        (*spans["host"], write_string(host_form, host)),
        (*spans["port"], _INT32.pack(port)),
    ]


def _edit_elements(
    cursor: Cursor,
    array: Node,
    edit: Callable[[dict[str, tuple[int, int]]], list[Edit] | None],
) -> list[Edit]:
    """Edit each element of the array at the cursor; those for which `edit` gives None go."""
    if not isinstance(array, Array):
        raise TypeError(f"not an array: {array}")
    record = record_of(array)
    count_start = cursor.pos
    count = cursor.enter(array)
    count_end = cursor.pos
    edits: list[Edit] = []
    kept = 0
    for _ in range(count):
        start = cursor.pos
        changes = edit(cursor.spans(record))
        if changes is None:
            edits.append((start, cursor.pos, b""))
        else:
            edits += changes
            kept += 1
    if kept != count:
        edits.insert(0, (count_start, count_end, write_count(array, kept)))
    return edits


def _splice(data: bytes, edits: list[Edit]) -> bytes:
    """Apply edits, which are in order and do not overlap."""
    parts: list[bytes] = []
    pos = 0
    for start, end, new in edits:
        parts += (data[pos:start], new)
        pos = end
    parts.append(data[pos:])
    return b"".join(parts)


def _read_int(form: Struct, data: Buffer, pos: int) -> int:
    if pos + form.size > len(data):
        raise MalformedResponse(f"the response ends at byte {len(data)}")
    return int(form.unpack_from(data, pos)[0])


def _string_of(node: Node) -> Sized:
    if isinstance(node, Sized):
        return node
    raise TypeError(f"not a string: {node}")
