"""Walking a Fetch response: what is no response is found, whatever the pieces."""

from random import Random
from struct import pack

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.wire import fetch_response
from proxy.wire.apis import APIS, FETCH, plan_of
from proxy.wire.fetch_response import FetchWalker
from proxy.wire.frames import MalformedResponse

VERSIONS = range(4, APIS[FETCH].max_version + 1)
FIRST_TAGGED = 12


@pytest.mark.parametrize("header", [b"", b"\1"], ids=["ends", "has a tagged field"])
def test_a_body_begins_behind_a_header_without_tagged_fields(header):
    plan, start = plan_of(FETCH, FIRST_TAGGED), bytes(8)
    assert fetch_response.fetch_body_start(plan, start + b"\0.", 10) == 9
    with pytest.raises(MalformedResponse):
        fetch_response.fetch_body_start(plan, start + header, 9 + len(header))


def test_only_opaque_bytes_can_be_skipped():
    walker = FetchWalker(4, 100)
    for count in (1, -1):
        with pytest.raises(ValueError, match="cannot skip"):
            walker.skip(count)


@pytest.mark.parametrize("version", [-1, 19, 1000])
def test_unknown_versions(version):
    with pytest.raises(ValueError, match="no schema"):
        FetchWalker(version, 100)


HEAD_16 = bytes(4) + bytes(2) + bytes(4)  # throttle time, error code, session
TOPIC_16 = bytes(16)
PARTITION_16 = bytes(30) + b"\1" + bytes(4)  # up to the records

MALFORMED = {  # version, bytes shown, bytes that the body has
    "no body": (16, b"", 0),
    "shorter than its first fields": (16, bytes(5), 5),
    "more topics than bytes": (16, HEAD_16 + b"\x7f", 50),
    "topic count without end": (16, HEAD_16 + b"\xff" * 6, 500),
    "body ends inside a count": (16, HEAD_16 + b"\xff\xff", 12),
    "records run over the frame": (
        16,
        HEAD_16 + b"\2" + TOPIC_16 + b"\2" + PARTITION_16 + b"\xff\xff\x03",
        1000,
    ),
    "negative topic count": (4, bytes(4) + b"\xff\xff\xff\xfe" + bytes(50), 58),
    "negative topic name": (4, bytes(4) + b"\0\0\0\1" + b"\xff\xfe" + bytes(50), 60),
    "body ends inside a name's length": (4, bytes(4) + b"\0\0\0\1" + b"\0", 9),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name):
    version, shown, body_bytes = MALFORMED[name]

    def walk(size):
        walker = FetchWalker(version, body_bytes)
        for pos in range(0, max(len(shown), 1), size):
            walker.feed(shown[pos : pos + size])

    for size in (1, 3, 1000):
        with pytest.raises(MalformedResponse):
            walk(size)


def test_null_arrays_and_records():
    body = bytes(4) + pack(">ih", 1, 1) + b"t" + pack(">iihqq", 1, 0, 0, 5, 5) + pack(">ii", -1, -1)
    walker = FetchWalker(4, len(body))
    walker.feed(body)
    assert walker.is_done
    partition = APIS[FETCH].response.decode(body, version=4).responses[0].partitions[0]
    assert partition.records is None


@given(
    version=st.sampled_from(list(VERSIONS)), data=st.binary(max_size=200), seed=st.integers(0, 99)
)
@example(version=12, data=bytes(10) + b"\1\0", seed=0)
def test_any_bytes_end_or_are_malformed(version, data, seed):
    walker, random, taken = FetchWalker(version, len(data)), Random(seed), 0
    try:
        while taken < len(data):
            piece = data[taken : taken + random.randint(1, 20)]
            walker.feed(piece)
            taken += len(piece)
    except MalformedResponse:
        return
    assert walker.is_done or not data
