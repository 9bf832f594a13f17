"""Responses changed on their way to the client: broker addresses, API versions, throttle time.

Only the fields in question are replaced. Every other byte stays as the broker sent it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeAlias

from proxy.wire.apis import (
    API_VERSIONS,
    DESCRIBE_CONFIGS,
    LENGTH_BYTES,
    METADATA,
    RESPONSE_HEADER_BYTES,
    is_known,
    last_offered_version,
    plan_of,
)
from proxy.wire.frames import (
    INT32,
    MalformedResponse,
    check_whole_response,
    unreadable_is_malformed,
)
from proxy.wire.layout import (
    INCOMPLETE,
    NULL,
    STEP_ELEMENTS,
    Buffer,
    RecordLayout,
    Steps,
    read_tags,
    response_layout,
    run_generator,
    seek_in_steps,
    skip_in_steps,
    skip_tags,
    tagged_field_layout,
    write_tags,
)

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

KNOWN_ANSWERS, MAX_KNOWN_ANSWER_BYTES = 32, 1 << 12
"""So many answers to ApiVersions are remembered, and read in one step, of so many bytes at most."""

_CONTROLLERS = 2
_BROKER = 4
_BROKER_RESOURCES = (_BROKER, 8)
"""A broker's settings, and its loggers."""
_ADDRESS_SETTINGS = frozenset(
    {"listeners", "advertised.listeners", "host.name", "advertised.host.name"}
)
"""Of a broker; the last two before Kafka 3."""
_ADDRESS_WORDS = b"listeners", b"host.name"
"""One is in the name of each of them, and none in those of topics' settings."""
_SOUGHT_BYTES = 1 << 20
"""So many are looked through in one step."""
_PER_BROKER_ARRAYS = ("groups", "transaction_states")
_NO_SIZE = -1
"""Of a log dir: not known."""
_MAX_INT32 = 2**31 - 1
_ERROR_CODE_BYTES = 2

_Edit: TypeAlias = tuple[int, int, bytes]
"""Start and end of the bytes to replace, and what comes in their place."""


def rewrite_in_steps(
    api_key: int,
    version: int,
    frame: Buffer,
    advertise: Advertise,
    *,
    passes_unknown: bool = False,
    fallback: tuple[str, int] | None = None,
) -> Steps[Buffer]:
    """Return a response as clients may see it, in steps.

    `frame` is the whole frame, length included, or of Metadata up to what `brokers_end` says; that
    it is of an API and version whose responses carry addresses is not checked. `version` is the
    request's. Brokers' addresses are replaced by what `advertise` says. A broker without one is
    left out of Metadata, DescribeCluster and node endpoints; FindCoordinator then answers
    COORDINATOR_NOT_AVAILABLE. ApiVersions is capped to what is known here; APIs that are not stay
    in it only with `passes_unknown`. Metadata names one more broker at `fallback`, if given, in
    each version: not all who ask for the latest go back to their bootstrap servers. A response with
    nothing to change is returned as the same object. Raises MalformedResponse.
    """
    if api_key == API_VERSIONS and len(frame) <= MAX_KNOWN_ANSWER_BYTES:
        start, end = LENGTH_BYTES, RESPONSE_HEADER_BYTES
        length, rest = bytes(frame[:start]), bytes(frame[end:])
        capped = _capped(version, length, rest, passes_unknown=passes_unknown)
        return frame if capped is None else capped[:start] + frame[start:end] + capped[end:]
    with unreadable_is_malformed():
        message = _Rewritten(frame)
        yield from _edit(
            api_key, version, message, advertise, passes_unknown=passes_unknown, fallback=fallback
        )
        return message.frame()


def empty_broker_response(api_key: int, version: int, frame: Buffer) -> Steps[Buffer]:
    """Return a response to what is asked of each broker as one without any data has it, in steps.

    That broker is the fallback: no groups, no transactions, no replicas in its log dirs, and no
    configuration of its own where the one asked did not know its id. Log dirs themselves stay:
    Java's Admin takes none at all for a lack of rights. Raises MalformedResponse.
    """
    with unreadable_is_malformed():
        layout, pos = _open(api_key, version, frame)
        message = _Rewritten(frame)
        if "results" in layout.fields:
            empty = _empty_config if api_key == DESCRIBE_CONFIGS else _empty_log_dir
            yield from _edit_elements(layout, "results", message, pos, empty)
        else:
            spans, _ = yield from layout.spans(frame, pos)
            body = _Element(layout, frame, spans)
            message.edit([body.empty(name) for name in _PER_BROKER_ARRAYS if name in spans])
        return message.frame()


def without_config_addresses(version: int, frame: Buffer) -> Steps[Buffer]:
    """Return a DescribeConfigs response without the addresses in brokers' settings, in steps.

    These come as Kafka has secrets: null, sensitive and without synonyms. A response with nothing
    to change is returned as the same object. Raises MalformedResponse.
    """
    for start in range(0, len(frame), _SOUGHT_BYTES):
        some = bytes(frame[start : start + _SOUGHT_BYTES + len(max(_ADDRESS_WORDS, key=len)) - 1])
        if any(word in some for word in _ADDRESS_WORDS):
            break
        yield
    else:
        return frame  # of 1,000 topics after 5 ms, and to read each setting takes 76
    with unreadable_is_malformed():
        layout, pos = _open(DESCRIBE_CONFIGS, version, frame)
        results, message = layout.fields["results"], _Rewritten(frame)
        count, pos = results.count(frame, layout.seek("results", frame, pos))
        for _ in range(count):
            spans, end = yield from results.element.spans(frame, pos)
            result = _Element(results.element, frame, spans)
            if result.value("resource_type") == _BROKER:
                yield from _edit_elements(results.element, "configs", message, pos, _hide_address)
            pos = end
            yield
        return message.frame()


def brokers_end(version: int, start: Buffer) -> Steps[int | None]:
    """Return where the brokers of a Metadata response end, by its first bytes; None: not in them.

    In steps. Behind them it names no address. Raises MalformedResponse.
    """
    try:
        layout, pos = _open(METADATA, version, start)
        pos = layout.seek("brokers", start, pos)
        end = yield from skip_in_steps(layout.fields["brokers"], start, pos)
    except INCOMPLETE:
        return None
    except ValueError as error:
        raise MalformedResponse(f"a response to rewrite: {error}") from None
    return end if end <= len(start) else None


@lru_cache(KNOWN_ANSWERS)
def _capped(version: int, length: bytes, rest: bytes, *, passes_unknown: bool) -> bytes | None:
    """Return a response to ApiVersions as clients may see it, None when nothing is to be changed.

    Without its correlation id it is the same for all clients of a broker with the same version.
    """
    frame = length + bytes(RESPONSE_HEADER_BYTES - LENGTH_BYTES) + rest
    check_whole_response(frame)
    message = _Rewritten(frame)
    with unreadable_is_malformed():
        run_generator(
            _edit(API_VERSIONS, version, message, no_address, passes_unknown=passes_unknown)
        )
        capped = message.frame()
    return None if capped is frame else bytes(capped)


def no_address(_node_id: int, _host: str, _port: int) -> None:
    """Return no address."""


def with_throttle_time(
    api_key: int, version: int, frame: Buffer, throttle_ms: int
) -> Steps[Buffer]:
    """Return the whole frame with throttle_time_ms raised to `throttle_ms`, never lowered.

    In steps. A response that has no such field, or whose API or version is not known, is returned
    as the same object. Raises MalformedResponse.
    """
    if not is_known(api_key, version):
        return frame
    check_whole_response(frame)
    with unreadable_is_malformed():
        layout, pos = _open(api_key, version, frame)
        if "throttle_time_ms" not in layout.fields:
            return frame
        throttle_at = yield from seek_in_steps(layout, "throttle_time_ms", frame, pos)
        changed = bytearray(frame)
        raise_throttle_time(changed, throttle_at, throttle_ms)
    return changed


def raise_throttle_time(head: bytearray | memoryview, offset: int, throttle_ms: int) -> None:
    """Raise the throttle_time_ms at `offset`, never lower it. The rest of the frame may lack."""
    (present,) = INT32.unpack_from(head, offset)
    INT32.pack_into(head, offset, min(max(present, throttle_ms), _MAX_INT32))


@dataclass(slots=True)
class _Rewritten:
    """A message, and how far it has been written anew.

    Edits are not kept: those of a million coordinators would take ten times what they change.
    """

    data: Buffer
    written: bytearray = field(default_factory=bytearray)
    read: int = 0
    """What stands for so many bytes of `data` is in `written`."""

    def edit(self, edits: Iterable[_Edit]) -> None:
        """Apply edits, which are in order, behind earlier ones, and do not overlap."""
        for start, end, new in edits:
            self.written += memoryview(self.data)[self.read : start]
            self.written += new
            self.read = end

    def whole(self) -> Buffer:
        """Return all of it; the same object when it was not edited."""
        if self.read:
            self.edit([(len(self.data), len(self.data), b"")])
        return self.written if self.read else self.data

    def frame(self) -> Buffer:
        """Return a frame, or its first bytes, with its length in place, as `whole`."""
        changed = self.whole()
        if changed is self.written:
            (length,) = INT32.unpack_from(self.data)
            INT32.pack_into(changed, 0, length + len(changed) - len(self.data))
        return changed


@dataclass(slots=True)
class _Element:
    """An element of an array in a response: what its fields say, and how they are changed."""

    layout: RecordLayout
    data: Buffer
    spans: dict[str, tuple[int, int]]
    """Where each field begins and ends."""

    def value(self, field: str) -> Any:
        """Return a number or string; null as the empty string."""
        return self.layout.fields[field].read(self.data, self.spans[field][0])[0]

    def edit(self, field: str, value: Any) -> _Edit:
        """Return the edit that gives a field another value."""
        return *self.spans[field], self.layout.fields[field].write(value)

    def empty(self, field: str, length: int = 0) -> _Edit:
        """Return the edit that leaves nothing in an array; in a string, with NULL for a length."""
        return *self.spans[field], self.layout.fields[field].length.write(length)


_EditElement: TypeAlias = Callable[[_Element], list[_Edit] | None]
"""Returns the edits of an element, None when it has to go."""


def _open(api_key: int, version: int, frame: Buffer) -> tuple[RecordLayout, int]:
    """Return the layout of a frame's body, and where it begins."""
    start = RESPONSE_HEADER_BYTES
    if plan_of(api_key, version).is_flexible:
        start = skip_tags(frame, start)
    error_code = int.from_bytes(frame[start : start + _ERROR_CODE_BYTES], "big")
    if api_key == API_VERSIONS and error_code == UNSUPPORTED_VERSION:
        version = 0  # so that any client can read it (KIP-511)
    return response_layout(api_key, version), start


def _edit(
    api_key: int,
    version: int,
    message: _Rewritten,
    advertise: Advertise,
    *,
    passes_unknown: bool,
    fallback: tuple[str, int] | None = None,
) -> Steps[None]:
    """Edit a response."""
    frame = message.data
    layout, pos = _open(api_key, version, frame)
    fields = layout.fields
    if "endpoint_type" in fields:
        start = layout.seek("endpoint_type", frame, pos)
        if fields["endpoint_type"].read(frame, start)[0] == _CONTROLLERS:
            return  # controllers serve no topic data, and the proxy has no port for them
    add = None
    if fallback is not None and api_key == METADATA:
        add = partial(_fallback_broker, address=fallback)
    for array, edit in (
        ("api_keys", partial(_cap_version, passes_unknown=passes_unknown)),
        ("brokers", partial(_broker, advertise=advertise)),
        ("coordinators", partial(_coordinator, advertise=advertise)),
    ):
        if array in fields:
            yield from _edit_elements(layout, array, message, pos, edit, add)
            return
    if "host" in fields:
        spans, _ = yield from layout.spans(frame, pos)
        message.edit(_coordinator(_Element(layout, frame, spans), advertise))
        return
    endpoint = partial(_broker, advertise=advertise)
    yield from _edit_endpoints(api_key, version, message, pos, endpoint)


def _edit_elements(
    layout: RecordLayout,
    name: str,
    message: _Rewritten,
    pos: int,
    edit: _EditElement,
    add: Callable[[RecordLayout, set[int]], bytes] | None = None,
) -> Steps[None]:
    """Edit each element of an array in the record at `pos`, and add one behind them.

    `add` makes it, and is given the ids of all nodes that the array names.
    """
    array, data = layout.fields[name], message.data
    count_start = layout.seek(name, data, pos)
    count, pos = array.count(data, count_start)
    count_at = len(message.written) + count_start - message.read
    count_end = count_at + pos - count_start
    node_ids: set[int] = set()
    kept = 0
    for number in range(1, count + 1):
        spans, end = yield from array.element.spans(data, pos)
        element = _Element(array.element, data, spans)
        changes = edit(element)
        message.edit([(pos, end, b"")] if changes is None else changes)
        kept += changes is not None
        if add is not None:
            node_ids.add(element.value("node_id"))
        pos = end
        if not number % STEP_ELEMENTS:
            yield
    if add is not None:
        message.edit([(pos, pos, add(array.element, node_ids))])
        kept += 1
    if kept != count:
        message.written[count_at:count_end] = array.length.write(kept)


def _fallback_broker(element: RecordLayout, node_ids: set[int], address: tuple[str, int]) -> bytes:
    """Return a broker of a Metadata response, under an id that none has."""
    fallback_id = FALLBACK_NODE_ID
    while {fallback_id, _MAX_INT32 - fallback_id} & node_ids:
        fallback_id -= 1
    values = dict(zip(("node_id", "host", "port"), (fallback_id, *address), strict=True))
    broker = b"".join(
        node.write(values[name]) if name in values else node.length.write(NULL)
        for name, node in element.fields.items()
    )
    return broker if element.tags is None else broker + write_tags([])


def _edit_endpoints(
    api_key: int, version: int, message: _Rewritten, pos: int, edit: _EditElement
) -> Steps[None]:
    """Edit the new leaders' addresses (KIP-951) in the tag section of the body at `pos`."""
    layout, frame = response_layout(api_key, version), message.data
    number = (layout.tags or {})["node_endpoints"]
    array = tagged_field_layout(api_key, version, "node_endpoints")
    start = yield from seek_in_steps(layout, None, frame, pos)
    tags, end = read_tags(frame, start)
    fields = []
    for tag in tags:
        value = bytes(frame[tag.start : tag.end])
        if tag.number == number:
            endpoints = _Rewritten(value)
            yield from _edit_elements(array, "node_endpoints", endpoints, 0, edit)
            value = bytes(endpoints.whole())
        fields.append((tag.number, value))
    section = write_tags(fields)
    if section != frame[start:end]:
        message.edit([(start, end, section)])


def _cap_version(api: _Element, passes_unknown: bool) -> list[_Edit] | None:
    """Lower the highest version of an API to the safe one; None when no version can be used."""
    safe = last_offered_version(api.value("api_key"), passes_unknown=passes_unknown)
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


def _hide_address(setting: _Element) -> list[_Edit]:
    """Give a setting with an address no value."""
    if setting.value("name") not in _ADDRESS_SETTINGS:
        return []
    edits = [setting.empty("value", NULL), setting.edit("is_sensitive", True)]
    return edits + ([setting.empty("synonyms")] if "synonyms" in setting.spans else [])


def _empty_log_dir(log_dir: _Element) -> list[_Edit]:
    """Leave no replicas in a log dir, and its sizes unknown: the real broker tells them."""
    sizes = [name for name in ("total_bytes", "usable_bytes") if name in log_dir.spans]
    return [log_dir.empty("topics"), *(log_dir.edit(name, _NO_SIZE) for name in sizes)]


def _empty_config(result: _Element) -> list[_Edit]:
    """Give the fallback a configuration without entries in place of an error."""
    of_broker = result.value("resource_type") in _BROKER_RESOURCES
    if not of_broker or result.value("resource_name") != str(FALLBACK_NODE_ID):
        return []
    error, message = result.edit("error_code", 0), result.empty("error_message", NULL)
    return [error, message, result.empty("configs")]


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
