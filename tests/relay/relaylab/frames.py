"""Kafka frames as bytes, written by hand."""

from itertools import pairwise
from struct import pack, unpack_from

from proxy.quota.gate import LEAST_GRANT_BYTES
from proxy.wire.apis import (
    FETCH,
    METADATA,
    PRODUCE,
    plan_of,
)
from proxy.wire.layout import encode_uvarint

LIST_OFFSETS = 2
FIRST_VERSION_WITHOUT_NODE = 15
UNKNOWN_API = 999

_PATTERN = bytes(range(251))
"""Of a length that no buffer is a multiple of, so that a lost or doubled piece shows."""


def framed(content: bytes) -> bytes:
    return pack(">i", len(content)) + content


def request(
    api_key: int, version: int, correlation_id: int, body: bytes = b"", client_id: str = "test"
) -> bytes:
    name = client_id.encode()
    tags = b"\0" if plan_of(api_key, version).request_is_flexible else b""
    head = pack(">hhih", api_key, version, correlation_id, len(name)) + name + tags
    return framed(head + body)


def response(api_key: int, version: int, correlation_id: int, body: bytes = b"") -> bytes:
    tags = b"\0" if plan_of(api_key, version).is_flexible else b""
    return framed(pack(">i", correlation_id) + tags + body)


def fetch_request(
    correlation_id: int,
    version: int = 11,
    client_id: str = "test",
    max_bytes: int = LEAST_GRANT_BYTES,
    max_wait_ms: int = 0,
) -> bytes:
    """Of a Fetch only the header, the wait and the limit matter, which no quota lowers here."""
    node = pack(">i", -1) if version < FIRST_VERSION_WITHOUT_NODE else b""
    body = node + pack(">iii", max_wait_ms, 1, max_bytes)
    return request(FETCH, version, correlation_id, body, client_id)


def fetch_response(correlation_id: int, record_bytes: int, version: int = 11) -> bytes:
    """Version 4 to 11, whose body is not looked at; throttle time 0."""
    body = pack(">i", 0) + (_PATTERN * (record_bytes // len(_PATTERN) + 1))[:record_bytes]
    return response(FETCH, version, correlation_id, body)


def produce_request(correlation_id: int, acks: int, record_bytes: int = 100) -> bytes:
    body = pack(">hhi", -1, acks, 1000) + bytes(record_bytes)  # no transactional id
    return request(PRODUCE, 7, correlation_id, body)


def metadata_request(correlation_id: int) -> bytes:
    return request(METADATA, 1, correlation_id, pack(">i", 0))


def metadata_response(
    correlation_id: int, brokers: dict[int, tuple[str, int]], topic_bytes: int = 0
) -> bytes:
    """Version 1; with `topic_bytes` one topic of no partitions for every 100 bytes or so."""
    body = pack(">i", len(brokers))
    for node_id, (host, port) in brokers.items():
        body += pack(">ih", node_id, len(host)) + host.encode() + pack(">ih", port, -1)
    topics = topic_bytes // 100
    topic = pack(">hh", 0, 91) + b"t" * 91 + pack(">?i", False, 0)
    body += pack(">ii", next(iter(brokers), -1), topics) + topic * topics
    return response(METADATA, 1, correlation_id, body)


def metadata_brokers(frame: bytes) -> dict[int, tuple[str, int]]:
    """The brokers that a Metadata response of version 1 names."""
    (count,) = unpack_from(">i", frame, 8)
    pos, brokers = 12, {}
    for _ in range(count):
        node_id, size = unpack_from(">ih", frame, pos)
        pos += 6
        host = frame[pos : pos + size].decode()
        port, rack_size = unpack_from(">ih", frame, pos + size)
        pos += size + 6 + max(rack_size, 0)
        brokers[node_id] = host, port
    return brokers


def fetch_partitions(correlation_id: int, records: list[bytes]) -> bytes:
    """A Fetch response of version 15, one partition for each of `records`."""
    partitions = b"".join(
        pack(">ihqqq", index, 0, 10, 10, 0)
        + b"\1"  # no aborted transactions
        + pack(">i", -1)
        + encode_uvarint(len(data) + 1)
        + data
        + b"\0"
        for index, data in enumerate(records)
    )
    topic = bytes(16) + encode_uvarint(len(records) + 1) + partitions + b"\0"
    body = pack(">ihi", 0, 0, 0) + encode_uvarint(2) + topic + b"\0"
    return response(FETCH, 15, correlation_id, body)


def in_pieces(sent, cuts, from_end):
    """Cut bytes at these parts of their length, and so many bytes before their end."""
    places = {int(cut * len(sent)) for cut in cuts} | {max(len(sent) - n, 0) for n in from_end}
    return [sent[a:b] for a, b in pairwise(sorted({0, len(sent), *places}))]
