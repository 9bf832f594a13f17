"""ListOffsets read and changed, with kafka-python's codec as the oracle."""

import contextlib
from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.apis import APIS, LIST_OFFSETS
from proxy.wire.frames import MalformedFrame, MalformedResponse
from proxy.wire.layout import MAX_ELEMENTS, TooManyElements, encode_uvarint
from proxy.wire.list_offsets import (
    EARLIEST,
    LATEST,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    LookupRequest,
    change_offsets,
    list_offsets_response,
    read_list_offsets_request,
    read_list_offsets_response,
)

API = APIS[LIST_OFFSETS]
VERSIONS = range(1, API.max_version + 1)
SEEDS = range(8)
EXAMPLES = 30
"""For each version."""

NAMES = st.text(st.characters(codec="utf-8"), max_size=40)
INT64 = st.integers(-(2**63), 2**63 - 1)
PARTITIONS = st.dictionaries(
    st.tuples(NAMES, st.integers(0, 2**31 - 1)),
    st.tuples(st.integers(-1, 110), INT64, INT64),
    max_size=12,
)


def by_topic(partitions):
    topics: dict[str, list] = {}
    for (topic, index), values in partitions.items():
        topics.setdefault(topic, []).append((index, values))
    return topics


def request_body(version, partitions, isolation):
    topic_of = API.request.ListOffsetsTopic
    partition_of = topic_of.ListOffsetsPartition
    topics = [
        topic_of(
            name=topic,
            partitions=[
                partition_of(partition_index=index, timestamp=timestamp)
                for index, (_, timestamp, _) in values
            ],
        )
        for topic, values in by_topic(partitions).items()
    ]
    message = API.request(replica_id=-1, isolation_level=isolation, timeout_ms=5, topics=topics)
    return bytes(message.encode(version=version))


def response_frame(version, partitions, correlation_id=42, throttle_ms=3, leader_epoch=7):
    topic_of = API.response.ListOffsetsTopicResponse
    partition_of = topic_of.ListOffsetsPartitionResponse
    topics = [
        topic_of(
            name=topic,
            partitions=[
                partition_of(
                    partition_index=index,
                    error_code=error,
                    timestamp=timestamp,
                    offset=offset,
                    leader_epoch=leader_epoch,
                )
                for index, (error, timestamp, offset) in values
            ],
        )
        for topic, values in by_topic(partitions).items()
    ]
    body = bytes(API.response(throttle_time_ms=throttle_ms, topics=topics).encode(version=version))
    header = pack(">i", correlation_id) + (
        b"\0" if API.response.flexible_version_q(version) else b""
    )
    return pack(">i", len(header + body)) + header + body


def test_it_covers_every_version():
    assert list(VERSIONS) == list(range(1, 12))


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(partitions=PARTITIONS, isolation=st.sampled_from([READ_UNCOMMITTED, READ_COMMITTED]))
def test_a_request_is_read_as_it_was_written(version, partitions, isolation):
    ask = read_list_offsets_request(version, request_body(version, partitions, isolation))
    assert ask.timestamps == {key: timestamp for key, (_, timestamp, _) in partitions.items()}
    assert ask.isolation_level == (isolation if version >= 2 else READ_UNCOMMITTED)


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(partitions=PARTITIONS)
def test_a_response_is_read_as_it_was_written(version, partitions):
    answers = read_list_offsets_response(version, response_frame(version, partitions))
    assert answers == {key: (error, offset) for key, (error, _, offset) in partitions.items()}


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(partitions=PARTITIONS, data=st.data())
def test_only_the_offsets_change(version, partitions, data):
    wanted = {
        key: data.draw(INT64) for key in partitions if data.draw(st.booleans(), label="changed")
    }
    frame = response_frame(version, partitions)
    expected = {
        key: (error, timestamp, wanted.get(key, offset))
        for key, (error, timestamp, offset) in partitions.items()
    }
    changed = change_offsets(version, frame, {**wanted, ("not there", 0): 1})
    assert changed == response_frame(version, expected)
    assert len(changed) == len(frame)
    if expected == partitions:
        assert changed is frame


@pytest.mark.parametrize("version", VERSIONS)
def test_unknown_tags_and_null_arrays_stay_as_they_came(filler, version):
    """Messages written without the codec, which would drop what it does not know."""
    for seed in SEEDS:
        frame = filler(seed, unknown_tags=True).response(LIST_OFFSETS, version)
        answers = read_list_offsets_response(version, frame)
        assert change_offsets(version, frame, {}) is frame
        shifted = {key: (answer.offset + 2**62) % 2**63 for key, answer in answers.items()}
        changed = change_offsets(version, frame, shifted)
        again = read_list_offsets_response(version, changed)
        assert {key: answer.offset for key, answer in again.items()} == shifted
        assert {key: answer.error_code for key, answer in again.items()} == {
            key: answer.error_code for key, answer in answers.items()
        }
        back = {key: answer.offset for key, answer in answers.items()}
        restored = change_offsets(version, changed, back)
        # A partition named twice gets its last offset in both places.
        assert restored == change_offsets(version, frame, back)


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    offsets=st.dictionaries(st.tuples(NAMES, st.integers(0, 2**31 - 1)), INT64, max_size=12),
    correlation_id=st.integers(-(2**31), 2**31 - 1),
)
def test_an_answer_of_our_own_is_what_the_codec_writes(version, offsets, correlation_id):
    partitions = {key: (0, -1, offset) for key, offset in offsets.items()}
    expected = response_frame(version, partitions, correlation_id, throttle_ms=0, leader_epoch=-1)
    assert list_offsets_response(version, correlation_id, offsets) == expected


@pytest.mark.parametrize("version", [0, API.max_version + 1])
def test_no_answer_where_there_is_no_layout(version):
    with pytest.raises(ValueError, match="no way to answer"):
        list_offsets_response(version, 1, {("t", 0): 5})


def test_version_0_is_left_alone(filler):
    frame = filler(1).response(LIST_OFFSETS, 0)
    assert read_list_offsets_response(0, frame) == {}
    assert change_offsets(0, frame, {("t", 0): 5}) is frame
    assert read_list_offsets_request(0, b"whatever") == LookupRequest(READ_UNCOMMITTED, {})


def test_what_spark_4_asks():
    asked = {("t", 0): (0, LATEST, 0), ("t", 1): (0, EARLIEST, 0)}
    ask = read_list_offsets_request(9, memoryview(request_body(9, asked, READ_UNCOMMITTED)))
    assert ask == LookupRequest(READ_UNCOMMITTED, {("t", 0): LATEST, ("t", 1): EARLIEST})


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(junk=st.binary(max_size=200), data=st.data())
def test_garbage_is_refused_or_read_and_nothing_else(version, junk, data):
    partitions = {("topic", 1): (0, 1, 2), ("topic", 2): (0, 1, 2), ("u", 3): (0, 1, 2)}
    body = bytearray(request_body(version, partitions, 0))
    frame = bytearray(response_frame(version, partitions))
    start = data.draw(st.integers(0, len(body)))
    for cut in (junk, body[:start], body[:start] + junk, body[:start] + junk + body[start:]):
        with contextlib.suppress(MalformedFrame, TooManyElements):
            read_list_offsets_request(version, cut)
    start = data.draw(st.integers(0, len(frame)))
    for cut in (junk, frame[:start], frame[:start] + junk, frame[:start] + junk + frame[start:]):
        whole = pack(">i", max(len(cut) - 4, 0)) + bytes(cut[4:])
        for broken in (bytes(cut), whole):
            try:
                changed = change_offsets(version, broken, {("topic", 1): 9})
            except MalformedResponse:
                continue
            assert len(changed) == len(broken)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_frame_that_is_cut_off_is_refused(version):
    frame = response_frame(version, {("topic", 1): (0, 1, 2)})
    for end in range(len(frame)):
        with pytest.raises(MalformedResponse):
            read_list_offsets_response(version, frame[:end])


def test_of_more_topics_than_are_read_at_once_none_are():
    topics = encode_uvarint(MAX_ELEMENTS + 2) + b"\2t\1\0" * (MAX_ELEMENTS + 1)
    with pytest.raises(TooManyElements):
        read_list_offsets_request(6, b"\xff\xff\xff\xff\0" + topics + b"\0")
