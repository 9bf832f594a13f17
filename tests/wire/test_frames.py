"""Request and response heads: where they end, and what is refused how early."""

from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.apis import APIS
from proxy.wire.frames import (
    MAX_HEADER_BYTES,
    MalformedFrame,
    MalformedResponse,
    RequestHead,
    ends_with_frame,
    parse_request_head,
    parse_response_head,
    response_body_start,
)
from proxy.wire.layout import MAX_TAGS

MAX_BYTES = 100 * 1024 * 1024
EVERY_VERSION = [
    (key, version) for key, api in APIS.items() for version in range(api.max_version + 1)
]


def parse(data: bytes) -> RequestHead | None:
    return parse_request_head(data, max_request_bytes=MAX_BYTES)


def head_v1(api_key: int, version: int, client_id: bytes | None, rest: bytes = b"") -> bytes:
    size = -1 if client_id is None else len(client_id)
    content = pack(">hhih", api_key, version, 7, size) + (client_id or b"") + rest
    return pack(">i", len(content)) + content


@pytest.mark.parametrize("client_id", ["spark-query-1", "", None, "é" * 100])
def test_heads_of_every_api_and_version_are_read_as_the_codec_wrote_them(filler, client_id):
    for key, version in EVERY_VERSION:
        request = APIS[key].request
        message = request.decode(filler(version).body(request, version), version=version)
        message.with_header(correlation_id=key * 100 + version, client_id=client_id)
        body = bytes(message.encode(version=version))
        frame = bytes(message.encode(version=version, header=True, framed=True))
        header_end = len(frame) - len(body)
        expected = RequestHead(len(frame), key, version, key * 100 + version, client_id, header_end)
        assert parse(frame) == expected
        assert parse(memoryview(frame + b"the next request")) == expected
        assert all(parse(frame[:cut]) is None for cut in range(header_end))
        assert parse(frame[:header_end]) == expected


HEADS = {
    "no client id": (head_v1(1, 4, None), (1, 4, None, 14)),
    "client id is not UTF-8": (head_v1(3, 1, b"a\xff\xfeb"), (3, 1, "a\ufffd\ufffdb", 18)),
    "empty client id": (head_v1(1, 4, b""), (1, 4, "", 14)),
    "flexible, no tags": (head_v1(1, 12, b"ab", b"\0"), (1, 12, "ab", 17)),
    "flexible, one tag": (head_v1(1, 12, b"ab", b"\x01\x05\x02xy"), (1, 12, "ab", 21)),
    "unknown api": (head_v1(999, 3, b"ab", b"\0"), (999, 3, "ab", 16)),
    "unknown version": (head_v1(1, 99, b"ab", b"\0"), (1, 99, "ab", 16)),
    "negative api and version": (head_v1(-1, -1, b"ab"), (-1, -1, "ab", 16)),
    "header version 0": (pack(">ihhi", 12, 7, 0, 7) + b"body", (7, 0, None, 12)),
    "flexible ApiVersions": (head_v1(18, 3, b"ab", b"\0\x01\x01\0"), (18, 3, "ab", 17)),
}


@pytest.mark.parametrize("name", HEADS)
def test_head(name):
    frame, (api_key, version, client_id, header_end) = HEADS[name]
    assert parse(frame) == RequestHead(len(frame), api_key, version, 7, client_id, header_end)


FAULTS = {
    "negative length": (pack(">i", -1), "negative_length"),
    "most negative length": (b"\x80\0\0\0", "negative_length"),
    "zero length": (pack(">i", 0), "too_short"),
    "no room for a header": (pack(">i", 7), "too_short"),
    "one byte above the limit": (pack(">i", MAX_BYTES + 1), "too_long"),
    "GET": (b"GET / HTTP/1.1\r\n", "http_on_plain_port"),
    "POST": (b"POST", "http_on_plain_port"),
    "PUT": (b"PUT /", "http_on_plain_port"),
    "HEAD": (b"HEAD", "http_on_plain_port"),
    "OPTIONS": (b"OPTI", "http_on_plain_port"),
    "DELETE": (b"DELETE", "http_on_plain_port"),
    "HTTP/2 preface": (b"PRI * HTTP/2.0", "http_on_plain_port"),
    "TLS 1.0 record": (b"\x16\x03\x01\x02\x00", "tls_on_plain_port"),
    "TLS 1.2 record": (b"\x16\x03\x03\x00\xf4", "tls_on_plain_port"),
    "no room for a client id": (pack(">ihhi", 8, 3, 1, 7), "bad_header"),
    "client id runs over the frame": (pack(">ihhih", 12, 3, 1, 7, 3), "bad_header"),
    "client id of length -2": (pack(">ihhih", 12, 3, 1, 7, -2), "bad_header"),
    "tags run over the frame": (head_v1(3, 12, b"ab", b"\x01\x05\x7fxy"), "bad_header"),
    "more tags than a record has": (
        head_v1(3, 12, b"ab", bytes([MAX_TAGS + 1]) + b"\1\0" * (MAX_TAGS + 1)),
        "bad_header",
    ),
    "tag section is missing": (head_v1(3, 12, b"ab"), "bad_header"),
    "tag count of six bytes": (head_v1(3, 12, b"ab", b"\xff\xff\xff\xff\xff\x01"), "bad_header"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(name):
    data, reason = FAULTS[name]
    with pytest.raises(MalformedFrame) as raised:
        parse(data)
    assert raised.value.reason == reason


@pytest.mark.parametrize("start", [b"", b"\0", b"GET", b"\x16\x03", b"\xff\xff\xff"])
def test_less_than_a_length_is_not_judged(start):
    assert parse(start) is None


def test_a_length_at_the_limit_is_accepted():
    frame = pack(">ihhih", MAX_BYTES, 3, 1, 7, -1)
    assert parse(frame).frame_bytes == MAX_BYTES + 4


def test_a_header_that_never_ends_is_refused_at_its_limit():
    endless = pack(">ihhih", MAX_BYTES, 3, 12, 7, -1) + b"\x01\x05" + b"\xff\xff\xff\x7f"
    assert parse(endless.ljust(MAX_HEADER_BYTES - 1, b"x")) is None
    with pytest.raises(MalformedFrame) as raised:
        parse(endless.ljust(MAX_HEADER_BYTES, b"x"))
    assert raised.value.reason == "bad_header"


@given(data=st.binary(max_size=80), length=st.integers(-1, 90))
def test_any_bytes_give_a_head_a_wait_or_a_named_fault(data, length):
    for bytes_ in (data, pack(">i", length) + data):
        try:
            head = parse(bytes_)
        except MalformedFrame:
            continue
        assert head is None or 12 <= head.header_end <= min(len(bytes_), head.frame_bytes)


def test_response_head():
    frame = pack(">ii", 10, 77) + b"abcdef"
    assert parse_response_head(frame) == (14, 77)
    assert parse_response_head(memoryview(frame)[:8]) == (14, 77)
    assert all(parse_response_head(frame[:cut]) is None for cut in range(8))
    for length in (3, 0, -1):
        with pytest.raises(MalformedResponse):
            parse_response_head(pack(">ii", length, 77))


RESPONSE_BODIES = {
    "plain": (3, 8, b"", 8),
    "empty tag section": (3, 9, b"\0", 9),
    "one tag": (3, 9, b"\x01\x05\x02xy", 13),
    "ApiVersions has no tag section": (18, 3, b"\0\0", 8),
    "unknown api": (999, 0, b"\0", 8),
}


@pytest.mark.parametrize("name", RESPONSE_BODIES)
def test_response_body(name):
    api_key, version, rest, offset = RESPONSE_BODIES[name]
    assert response_body_start(api_key, version, pack(">ii", 4 + len(rest), 77) + rest) == offset


@pytest.mark.parametrize("rest", [b"", b"\x01", b"\x01\x05\x7f", b"\xff\xff\xff\xff\xff\x01"])
def test_response_header_without_end(rest):
    with pytest.raises(MalformedResponse):
        response_body_start(3, 9, pack(">ii", 4 + len(rest), 77) + rest)
    with pytest.raises(MalformedResponse):
        response_body_start(3, 0, b"\0\0\0\4")


@pytest.mark.parametrize("length", [-1, 3, 5, 99])
def test_a_response_body_needs_the_whole_frame(length):
    with pytest.raises(MalformedResponse):
        response_body_start(3, 0, pack(">ii", length, 77))


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        pytest.param(b"", True, id="nothing"),
        pytest.param(pack(">i", 3) + b"abc", True, id="one frame"),
        pytest.param((pack(">i", 3) + b"abc") * 2, True, id="two frames"),
        pytest.param(pack(">i", 3) + b"ab", False, id="a byte short"),
        pytest.param(pack(">i", 3) + b"abc\0", False, id="a byte of the next"),
        pytest.param(pack(">i", -1), True, id="a negative length counts as nothing"),
    ],
)
def test_where_frames_end(data: bytes, whole: bool) -> None:
    assert ends_with_frame(data) is whole
