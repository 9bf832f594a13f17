"""Walking a Fetch response: the tail is found whatever the pieces, and made harmless in place."""

from random import Random
from struct import pack

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from proxy.wire import fetch_response
from proxy.wire.apis import APIS, FETCH, plan_of
from proxy.wire.fetch_response import FetchWalker
from proxy.wire.frames import MalformedResponse
from proxy.wire.layout import read_tags, write_tags
from proxy.wire.rewrite import FILLER_TAGS, tail_without_endpoints

VERSIONS = range(4, APIS[FETCH].max_version + 1)
FIRST_TAGGED = 12
FIRST_ENDPOINTS = 16


def fetch_body_start(filler, version, seed):
    body = filler(seed, unknown_tags=True).body(APIS[FETCH].response, version)
    return body, decode(version, body)


@pytest.mark.parametrize("header", [b"", b"\1"], ids=["ends", "has a tagged field"])
def test_a_body_begins_behind_a_header_without_tagged_fields(header):
    plan, start = plan_of(FETCH, FIRST_TAGGED), bytes(8)
    assert fetch_response.fetch_body_start(plan, start + b"\0.", 10) == 9
    with pytest.raises(MalformedResponse):
        fetch_response.fetch_body_start(plan, start + header, 9 + len(header))


def decode(version, body):
    return APIS[FETCH].response.decode(body, version=version)


def tail_start(version, body):
    """Where the body's own tag section starts, in one piece: compared with the codec below."""
    return FetchWalker(version, len(body)).feed(body)


def walk_in_pieces(version, body, cuts, *, use_skip):
    """Feed the body cut at `cuts`; return where the walker stopped."""
    walker = FetchWalker(version, len(body))
    taken = 0
    for cut in [*cuts, len(body)]:
        while taken < cut and not walker.at_tail:
            if use_skip and walker.opaque_bytes:
                moved = min(walker.opaque_bytes, cut - taken)
                walker.skip(moved)
                taken += moved
            else:
                taken += walker.feed(memoryview(body)[taken:cut])
        assert walker.remaining_bytes == len(body) - taken
    return taken, walker


def records_bytes(message):
    partitions = [part for topic in message.responses for part in topic.partitions]
    return sum(len(part.records or b"") for part in partitions)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tail_is_where_the_codec_has_it(filler, version):
    for seed in range(30):
        body, message = fetch_body_start(filler, version, seed)
        walker = FetchWalker(version, len(body))
        taken = walker.feed(body + b"the next response")
        assert walker.opaque_bytes == 0
        assert walker.at_tail is (version >= FIRST_TAGGED)
        if version < FIRST_TAGGED:
            assert (taken, walker.remaining_bytes) == (len(body), 0)
            continue
        tail = body[taken:]
        assert walker.remaining_bytes == len(tail)
        tags, end = read_tags(tail, 0)
        assert end == len(tail)
        # the same body with an empty section decodes to the same message without its tags
        bare = decode(version, body[:taken] + b"\0")
        assert bare.responses == message.responses
        assert not bare.node_endpoints
        known = {f"_{tag.number}": tail[tag.start : tag.end] for tag in tags if tag.number}
        assert (message.unknown_tags or {}) == known
        assert any(tag.number == 0 for tag in tags) == bool(
            "node_endpoints" in (message.tags or ())
        )


@pytest.mark.parametrize("version", VERSIONS)
def test_every_single_cut_gives_the_same(filler, version):
    body, _ = fetch_body_start(filler, version, seed=4)
    whole = tail_start(version, body)
    for cut in range(len(body) + 1):
        for use_skip in (False, True):
            assert walk_in_pieces(version, body, [cut], use_skip=use_skip)[0] == whole


@pytest.mark.parametrize("version", VERSIONS)
def test_byte_by_byte_gives_the_same_and_holds_little(filler, version):
    for seed in range(8):
        body, _ = fetch_body_start(filler, version, seed)
        walker = FetchWalker(version, len(body))
        taken = 0
        while taken < len(body) and not walker.at_tail:
            assert walker.feed(body[taken : taken + 1]) == 1
            taken += 1
            assert len(walker.held) <= 5
        assert taken == tail_start(version, body)


@given(version=st.sampled_from(list(VERSIONS)), seed=st.integers(0, 10**6), use_skip=st.booleans())
def test_any_split_gives_the_same(filler, version, seed, use_skip):
    body, _ = fetch_body_start(filler, version, seed)
    random = Random(seed)
    cuts = sorted(random.randrange(len(body) + 1) for _ in range(random.randrange(20)))
    taken, _ = walk_in_pieces(version, body, cuts, use_skip=use_skip)
    assert taken == tail_start(version, body)


@pytest.mark.parametrize("version", VERSIONS)
def test_all_record_data_can_be_skipped_unseen(filler, version):
    for seed in range(8):
        body, message = fetch_body_start(filler, version, seed)
        walker = FetchWalker(version, len(body))
        pos = unseen = 0
        while pos < len(body) and not walker.at_tail:
            if walker.opaque_bytes:
                moved = walker.opaque_bytes
                walker.skip(moved)
                unseen += moved
            else:
                moved = walker.feed(body[pos : pos + 1])
            pos += moved
        assert unseen >= records_bytes(message)


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
    "shorter than its first fields": (16, b"", 5),
    "more topics than bytes": (16, HEAD_16 + b"\x7f", 50),
    "topic count without end": (16, HEAD_16 + b"\xff" * 6, 500),
    "body ends inside a count": (16, HEAD_16 + b"\xff\xff", 12),
    "records run over the frame": (
        16,
        HEAD_16 + b"\2" + TOPIC_16 + b"\2" + PARTITION_16 + b"\xff\xff\x03",
        1000,
    ),
    "no tag section": (16, HEAD_16 + b"\1", 11),
    "bytes behind the topics": (4, bytes(8) + b"x", 9),
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
    assert walker.feed(body) == len(body)
    assert decode(4, body).responses[0].partitions[0].records is None
    assert walker.feed(b"") == 0


@given(
    version=st.sampled_from(list(VERSIONS)), data=st.binary(max_size=200), seed=st.integers(0, 99)
)
@example(version=12, data=bytes(10) + b"\1\0", seed=0)
def test_any_bytes_end_or_are_malformed(version, data, seed):
    walker = FetchWalker(version, len(data))
    random = Random(seed)
    taken = 0
    try:
        while taken < len(data) and not walker.at_tail:
            taken += walker.feed(data[taken : taken + random.randint(1, 20)])
    except MalformedResponse:
        return
    assert walker.remaining_bytes == len(data) - taken


@pytest.mark.parametrize("version", range(FIRST_ENDPOINTS, APIS[FETCH].max_version + 1))
def test_a_neutral_tail_keeps_length_and_all_but_the_endpoints(filler, version):
    removed = 0
    for seed in range(40):
        body, message = fetch_body_start(filler, version, seed)
        start = tail_start(version, body)
        tail = body[start:]
        neutral = tail_without_endpoints(tail)
        assert len(neutral) == len(tail)
        assert filler.host_marker not in neutral
        after = decode(version, body[:start] + neutral)
        assert not after.node_endpoints
        assert after.responses == message.responses
        tags = {name for name in after.unknown_tags or {} if int(name[1:]) not in FILLER_TAGS}
        assert tags == set(message.unknown_tags or {})
        if "node_endpoints" in (message.tags or ()):
            removed += 1
        else:
            assert neutral is tail
    assert removed > 0


def test_every_length_can_be_made_up():
    for size in (*range(1, 400), *range(16300, 16500), 2**21 + 5):
        tail = write_tags([(0, b"\1" * size), (3, b"abc")])
        neutral = tail_without_endpoints(tail)
        assert len(neutral) == len(tail), size
        tags, end = read_tags(neutral, 0)
        assert end == len(neutral), size
        assert [tag.number for tag in tags] in ([3, number] for number in FILLER_TAGS), size
        assert neutral[tags[0].start : tags[0].end] == b"abc", size
        assert not any(neutral[tags[1].start : tags[1].end]), size


NEUTRAL_GOLDEN = {
    "empty": (b"\0", b"\0"),
    "another tag": (b"\1\7\2xy", b"\1\7\2xy"),
    "no endpoints in the tag": (b"\1\0\1\1", b"\1\xff\x7f\0"),
    "endpoints": (b"\1\0\5abcde", b"\1\xff\x7f\4\0\0\0\0"),
    "between others": (b"\2\0\5abcde\7\2xy", b"\2\7\2xy\xff\x7f\4\0\0\0\0"),
    "twice": (b"\2\0\2ab\0\2cd", b"\2\xff\x7f\1\0\xff\x7f\1\0"),
}


@pytest.mark.parametrize("name", NEUTRAL_GOLDEN)
def test_neutral_tail_golden_bytes(name):
    before, after = NEUTRAL_GOLDEN[name]
    assert tail_without_endpoints(before) == after


@pytest.mark.parametrize("tail", [b"", b"\1", b"\1\0\5abc", b"\0x", b"\1\0\0", b"\xff" * 9])
def test_malformed_tail(tail):
    with pytest.raises(MalformedResponse):
        tail_without_endpoints(tail)


@given(
    fields=st.lists(st.tuples(st.integers(0, 3), st.binary(min_size=1, max_size=300)), max_size=5)
)
def test_neutral_tail_of_any_section(fields):
    assume(any(number == 0 for number, _ in fields))
    tail = write_tags(fields)
    neutral = tail_without_endpoints(tail)
    assert len(neutral) == len(tail)
    tags, _ = read_tags(neutral, 0)
    others = [(tag.number, neutral[tag.start : tag.end]) for tag in tags]
    assert [field for field in others if field[0] not in FILLER_TAGS] == [
        field for field in fields if field[0] != 0
    ]


def test_the_body_starts_behind_the_header(filler):
    frame = filler(1).response(FETCH, 17)
    body = frame[plan_of(FETCH, 17).body_offset :]
    assert FetchWalker(17, len(body)).feed(body) <= len(body)
