"""The first fields of Produce and Fetch requests, against the codec."""

import struct

import pytest

from proxy.wire.apis import APIS, FETCH, PRODUCE
from proxy.wire.frames import parse_request_head
from proxy.wire.prefix import MalformedFrame, decode_prefix, fetch_max_wait_ms, produce_acks

CASES = [(PRODUCE, "acks", produce_acks), (FETCH, "max_wait_ms", fetch_max_wait_ms)]


@pytest.mark.parametrize(("api_key", "field", "read"), CASES)
def test_every_version_reads_what_the_codec_reads(filler, api_key, field, read):
    request = APIS[api_key].request
    for version in range(request.max_version + 1):
        for seed in range(10):
            body = filler(seed).body(request, version)
            message = request.decode(body, version=version)
            message.with_header(correlation_id=1, client_id="c")
            frame = bytes(message.encode(version=version, header=True, framed=True))
            head = parse_request_head(frame, max_request_bytes=10**6)
            assert read(head, frame) == getattr(message, field)
            values = decode_prefix(api_key, version, memoryview(frame)[head.header_end :], field)
            assert all(getattr(message, name) == value for name, value in values.items())
            for cut in range(head.header_end, head.header_end + 4):
                assert read(head, frame[:cut]) in (None, getattr(message, field))
            assert read(head, frame[: head.header_end]) is None


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
        produce_acks(head, frame)
    assert raised.value.reason == "bad_body"


@pytest.mark.parametrize(
    ("api_key", "version", "field"),
    [(PRODUCE, 99, "acks"), (999, 0, "acks"), (PRODUCE, 9, "nothing"), (PRODUCE, 9, "topic_data")],
)
def test_what_the_schemas_do_not_have_is_a_value_error(api_key, version, field):
    with pytest.raises(ValueError, match=r"no schema|no field|read ahead|ends"):
        decode_prefix(api_key, version, b"\0" * 100, field)
