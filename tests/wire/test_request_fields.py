"""The first fields of Produce and Fetch requests, against the codec."""

import struct

import pytest

from proxy.wire.apis import APIS, FETCH, JOIN_GROUP, PRODUCE
from proxy.wire.fetch import DEFAULT_BATCH_BYTES, MAX_BYTES, fetch_limits, lower_fetch_bytes
from proxy.wire.frames import MalformedFrame, parse_request_head, read_int_field

CASES = [
    (PRODUCE, "acks", 2),
    (JOIN_GROUP, "session_timeout_ms", 4),
]


@pytest.mark.parametrize(("api_key", "field", "size"), CASES)
def test_every_version_reads_what_the_codec_reads(filler, api_key, field, size):
    request = APIS[api_key].request
    for version in range(request.max_version + 1):
        for seed in range(10):
            body = filler(seed).body(request, version)
            message = request.decode(body, version=version)
            message.with_header(correlation_id=1, client_id="c")
            frame = bytes(message.encode(version=version, header=True, framed=True))
            head = parse_request_head(frame, max_request_bytes=10**6)
            value, end = found = read_int_field(head, frame, field)
            assert value == getattr(message, field)
            assert frame[end - size : end] == value.to_bytes(size, "big", signed=True)
            for cut in range(head.header_end, head.header_end + 4):
                assert read_int_field(head, frame[:cut], field) in (None, found)
            assert read_int_field(head, frame[: head.header_end], field) is None


TRUNCATED = {
    "no body": (9, b""),
    "no acks": (9, b"\0"),
    "id runs over the frame": (9, b"\x7fabc"),
    "id length of -2": (3, b"\xff\xfe\0\0"),
    "id length runs over 32 bits": (9, b"\xff\xff\xff\xff\xff\x01\0\0"),
    "id is not UTF-8": (9, b"\x03\xff\xfe\0\0"),
}


@pytest.mark.parametrize("name", TRUNCATED)
def test_a_whole_frame_that_ends_early_is_malformed(name):
    version, body = TRUNCATED[name]
    header = struct.pack(">hhih", PRODUCE, version, 1, -1) + (b"\0" if version > 8 else b"")
    frame = struct.pack(">i", len(header + body)) + header + body
    head = parse_request_head(frame, max_request_bytes=10**6)
    with pytest.raises(MalformedFrame) as raised:
        read_int_field(head, frame, "acks")
    assert raised.value.reason == "bad_body"


@pytest.mark.parametrize(("api_key", "field", "size"), CASES)
def test_what_the_schemas_do_not_have_is_a_value_error(api_key, field, size):
    frame = struct.pack(">ihhih", 100, api_key, 99, 1, -1) + bytes(100)
    head = parse_request_head(frame, max_request_bytes=10**6)
    with pytest.raises(ValueError, match="no schema"):
        read_int_field(head, frame, field)


# Fetch limits


def fetch_frame(version: int, body: bytes) -> tuple[bytearray, object]:
    message = APIS[FETCH].request.decode(body, version=version)
    message.with_header(correlation_id=1, client_id="c")
    frame = bytearray(message.encode(version=version, header=True, framed=True))
    return frame, parse_request_head(frame, max_request_bytes=10**6)


def limits(head, frame):
    return fetch_limits(head.api_version, frame, head.header_end, head.frame_bytes)


def fetch_bodies(filler):
    request = APIS[FETCH].request
    for version in range(request.max_version + 1):
        for seed in range(20):
            yield version, filler(seed).body(request, version)


def test_limits_of_every_version_are_what_the_codec_reads(filler):
    for version, body in fetch_bodies(filler):
        frame, head = fetch_frame(version, body)
        message = APIS[FETCH].request.decode(body, version=version)
        max_bytes = message.max_bytes if version >= 3 else MAX_BYTES
        *found, end = limits(head, frame)
        assert found == [message.max_wait_ms, max_bytes]
        assert limits(head, frame[:end]) == (*found, end)
        assert limits(head, frame[: end - 1]) is None
        assert limits(head, frame[: head.header_end + 3]) is None


def test_a_fetch_without_room_for_its_limits_is_malformed():
    header = struct.pack(">hhih", FETCH, 11, 1, -1)
    frame = struct.pack(">i", len(header) + 4) + header + bytes(4)
    head = parse_request_head(frame, max_request_bytes=10**6)
    with pytest.raises(MalformedFrame):
        limits(head, frame)


@pytest.mark.parametrize("max_bytes", [777, 10 * DEFAULT_BATCH_BYTES])
def test_lowering_changes_the_limit_and_nothing_else(filler, max_bytes):
    for version, body in fetch_bodies(filler):
        frame, head = fetch_frame(version, body)
        lower_fetch_bytes(version, memoryview(frame), head.header_end, max_bytes)
        request = APIS[FETCH].request
        before = request.decode(body, version=version)
        after = request.decode(bytes(frame[head.header_end :]), version=version)
        if version >= 3:
            assert after.max_bytes == max_bytes
            after.max_bytes = before.max_bytes
        else:
            limits = [(topic, at) for topic in before.topics for at in topic.partitions]
            lowered = [at for topic in after.topics for at in topic.partitions]
            for (_, at), low in zip(limits, lowered, strict=True):
                part = max(max_bytes // len(limits), DEFAULT_BATCH_BYTES)
                assert low.partition_max_bytes == min(at.partition_max_bytes, part)
                low.partition_max_bytes = at.partition_max_bytes
        assert after == before


@pytest.mark.parametrize("version", [0, 1, 2])
def test_limits_of_partitions_are_lowered_as_far_as_the_frame_reaches(version):
    topic_of = APIS[FETCH].request.FetchTopic
    partition_of = topic_of.FetchPartition
    topics = [
        topic_of(
            version=version,
            topic=name,
            partitions=[
                partition_of(
                    version=version, partition=n, fetch_offset=n, partition_max_bytes=2**30
                )
                for n in range(3)
            ],
        )
        for name in ("orders", "clicks")
    ]
    request = APIS[FETCH].request(version=version, max_wait_ms=5, min_bytes=1, topics=topics)
    whole, head = fetch_frame(version, bytes(request.encode(version=version)))
    marks = [n for n in range(len(whole) - 3) if whole[n : n + 4] == struct.pack(">i", 2**30)]
    assert len(marks) == 6
    for cut in range(head.header_end, len(whole)):
        frame = bytearray(whole)
        lower_fetch_bytes(version, memoryview(frame)[:cut], head.header_end, 1)
        reached = [mark for mark in marks if mark + 4 <= cut]
        for mark in marks:
            limit = DEFAULT_BATCH_BYTES if mark in reached else 2**30
            assert struct.unpack_from(">i", frame, mark) == (limit,)
