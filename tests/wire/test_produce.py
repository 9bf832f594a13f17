"""Produce requests and responses read, with kafka-python's codec as the oracle."""

import contextlib
from struct import pack
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.memory_records import MemoryRecordsBuilder

from proxy.wire.apis import APIS, PRODUCE
from proxy.wire.frames import MalformedFrame, MalformedResponse
from proxy.wire.layout import MAX_ELEMENTS, MAX_TOPIC_BYTES, STEP_ELEMENTS
from proxy.wire.produce import (
    PartitionResponse,
    ProducedPartition,
    read_produce_request,
    read_produce_response,
    read_produced_bytes,
)

API = APIS[PRODUCE]
VERSIONS = range(3, API.max_version + 1)
FIRST_WITH_IDS = 13
SEEDS = range(8)
EXAMPLES = 30
"""For each version."""

MAGIC = 2
INDICES = st.integers(0, 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
NAMES = st.text(st.characters(codec="utf-8"), max_size=40)
IDS = st.uuids()


@st.composite
def topics(draw, version, values):
    """Draw topics, by name or id as the version has it, each with partitions and their values."""
    keys = IDS if version >= FIRST_WITH_IDS else NAMES
    return draw(
        st.dictionaries(keys, st.dictionaries(INDICES, values, max_size=4), min_size=0, max_size=4)
    )


def key_of(topic):
    return topic.bytes if isinstance(topic, UUID) else topic


def named(topic):
    return {"topic_id": topic} if isinstance(topic, UUID) else {"name": topic}


def batch(count, compression=0):
    """Make a batch of so many records."""
    builder = MemoryRecordsBuilder(MAGIC, compression, 100_000)
    for number in range(count):
        builder.append(timestamp=1, key=None, value=b"%d" % number)
    builder.close()
    return bytes(builder.buffer())


def request_body(version, wanted):
    topic_of = API.request.TopicProduceData
    partition_of = topic_of.PartitionProduceData
    message = API.request(
        transactional_id=None,
        acks=-1,
        timeout_ms=5,
        topic_data=[
            topic_of(
                **named(topic),
                partition_data=[
                    partition_of(index=index, records=records)
                    for index, records in partitions.items()
                ],
            )
            for topic, partitions in wanted.items()
        ],
    )
    return bytes(message.encode(version=version))


def response_frame(version, wanted):
    topic_of = API.response.TopicProduceResponse
    partition_of = topic_of.PartitionProduceResponse
    message = API.response(
        throttle_time_ms=3,
        responses=[
            topic_of(
                **named(topic),
                partition_responses=[
                    partition_of(
                        index=index,
                        error_code=error,
                        base_offset=base,
                        log_append_time_ms=-1,
                        log_start_offset=0,
                        record_errors=[],
                        error_message=None,
                    )
                    for index, (error, base) in partitions.items()
                ],
            )
            for topic, partitions in wanted.items()
        ],
    )
    body = bytes(message.encode(version=version))
    header = pack(">i", 42) + (b"\0" if API.response.flexible_version_q(version) else b"")
    return pack(">i", len(header + body)) + header + body


def test_it_covers_every_version():
    assert list(VERSIONS) == list(range(3, 14))


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_a_request_is_read_as_it_was_written(version, data):
    wanted = data.draw(topics(version, st.integers(1, 300)))
    sent = {
        topic: {
            index: batch(count, data.draw(st.sampled_from([0, 1])))  # none, gzip
            for index, count in partitions.items()
        }
        for topic, partitions in wanted.items()
    }
    for buffer in (bytes, bytearray, memoryview):
        read = read_produce_request(version, buffer(request_body(version, sent)))
        assert read == tuple(
            ProducedPartition(key_of(topic), index, count)
            for topic, partitions in wanted.items()
            for index, count in partitions.items()
        )


def summed(parts):
    found = {}
    for sizes in parts:
        for topic, size in sizes.items():
            found[topic] = found.get(topic, 0) + size
    return found


@pytest.mark.parametrize(("topics_count", "partitions"), [(300, 0), (1, 300), (20, 20)])
def test_of_many_topics_or_partitions_a_few_are_read_at_a_time(topics_count, partitions):
    """Hundreds of thousands of empty ones fit into a request."""
    of_each = dict.fromkeys(range(partitions), b"x")
    body = request_body(9, {f"t{number}": of_each for number in range(topics_count)})
    parts = list(read_produced_bytes(9, body, len(body)))
    assert summed(parts) == {f"t{number}": partitions for number in range(topics_count)}
    assert len(parts) > max(topics_count, topics_count * partitions) // STEP_ELEMENTS
    for part in parts:
        assert len(part) <= STEP_ELEMENTS
        assert sum(part.values()) <= STEP_ELEMENTS


@pytest.mark.parametrize(("more", "is_read"), [(1, True), (2, False)])
def test_a_request_with_more_partitions_than_producers_send_is_not_read(more, is_read):
    of_each = dict.fromkeys(range(MAX_ELEMENTS // 2 - 2), b"")
    wanted = {"a": {**of_each, 10**6: batch(1)}, "b": of_each}
    wanted |= {f"c{number}": {} for number in range(more)}
    read = read_produce_request(9, request_body(9, wanted))
    assert read == ((ProducedPartition("a", 10**6, 1),) if is_read else ())


@pytest.mark.parametrize("version", range(3, FIRST_WITH_IDS))
def test_a_name_that_no_topic_can_have_is_not_kept(version):
    longest = "a" * MAX_TOPIC_BYTES
    body = request_body(version, {longest: {0: b"x"}, longest + "a": {0: b"xy"}})
    assert summed(read_produced_bytes(version, body, len(body))) == {longest: 1, "": 2}


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_the_bytes_of_topics_are_added_up_and_what_is_cut_off_is_the_last_ones(version, data):
    wanted = data.draw(topics(version, st.integers(0, 300).map(bytes)))
    body = request_body(version, wanted)
    sizes = {key_of(topic): sum(map(len, of.values())) for topic, of in wanted.items()}
    assert summed(read_produced_bytes(version, memoryview(body), len(body))) == sizes
    end = data.draw(st.integers(0, len(body)))
    cut = summed(read_produced_bytes(version, body[:end], len(body)))
    assert all(cut[topic] == sizes[topic] for topic in list(cut)[:-1])
    assert not cut or sum(cut.values()) >= sum(sizes.values())


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_a_response_is_read_as_it_was_written(version, data):
    wanted = data.draw(topics(version, st.tuples(st.integers(-1, 130), INT64)))
    read = read_produce_response(version, response_frame(version, wanted))
    assert read == tuple(
        PartitionResponse(key_of(topic), index, *values)
        for topic, partitions in wanted.items()
        for index, values in partitions.items()
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "records",
    [None, b"", b"x", b"\xff" * 200, batch(3)[:-1], b"\0" * 100],
    ids=["null", "empty", "a byte", "ones", "cut", "zeros"],
)
def test_what_are_no_record_batches_is_left_out(version, records):
    topic = UUID(int=7) if version >= FIRST_WITH_IDS else "t"
    sent = {topic: {0: batch(2), 1: records, 2: batch(5)}}
    read = read_produce_request(version, request_body(version, sent))
    assert read == (ProducedPartition(key_of(topic), 0, 2), ProducedPartition(key_of(topic), 2, 5))


@pytest.mark.parametrize("version", VERSIONS)
def test_of_many_batches_in_a_partition_one_is_read(version):
    """Brokers refuse more than one. Who sends a hundred thousand has nobody wait for them."""
    topic = UUID(int=7) if version >= FIRST_WITH_IDS else "t"
    old = b"".join(pack(">qi4xb9x", number, 14, 1) for number in range(100))
    sent = {topic: {0: batch(2) + batch(5), 1: batch(3) + b"\1" * 20, 2: old}}
    read = read_produce_request(version, request_body(version, sent))
    assert [each.offsets for each in read] == [2, 3]


@pytest.mark.parametrize("version", VERSIONS)
def test_unknown_tags_and_nulls_are_walked_over(filler, version):
    """Messages written without the codec; what the codec makes of them is what is read."""
    for seed in SEEDS:
        tagged = filler(seed, unknown_tags=True)
        body = tagged.body(API.request, version)
        assert read_produce_request(version, body) == ()  # their records are noise
        frame = tagged.response(PRODUCE, version)
        oracle = API.response.decode(frame[4:], version=version, header=True)
        assert read_produce_response(version, frame) == tuple(
            PartitionResponse(
                each.topic_id.bytes if version >= FIRST_WITH_IDS else each.name,
                part.index,
                part.error_code,
                part.base_offset,
            )
            for each in oracle.responses or ()
            for part in each.partition_responses or ()
        )


@pytest.mark.parametrize("version", [0, 1, 2, 14, 99])
def test_versions_without_a_schema_are_left_alone(version):
    assert read_produce_request(version, b"whatever") == ()
    assert read_produce_response(version, b"whatever") == ()


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(junk=st.binary(max_size=200), data=st.data())
def test_garbage_is_refused_or_read_and_nothing_else(version, junk, data):
    ids = version >= FIRST_WITH_IDS
    first, second = (UUID(int=1), UUID(int=2)) if ids else ("topic", "u")
    body = request_body(version, {first: {1: batch(3), 2: batch(1)}, second: {3: batch(2)}})
    frame = response_frame(version, {first: {1: (0, 5), 2: (0, 6)}, second: {3: (3, -1)}})
    start = data.draw(st.integers(0, len(body)))
    for cut in (junk, body[:start], body[:start] + junk, body[:start] + junk + body[start:]):
        with contextlib.suppress(MalformedFrame):
            for each in read_produce_request(version, cut):
                assert each.offsets > 0
    start = data.draw(st.integers(0, len(frame)))
    for cut in (junk, frame[:start], frame[:start] + junk, frame[:start] + junk + frame[start:]):
        whole = pack(">i", max(len(cut) - 4, 0)) + cut[4:]
        for broken in (cut, whole):
            with contextlib.suppress(MalformedResponse):
                read_produce_response(version, broken)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_cut_off_is_refused(version):
    """A body may lack its end only where that says nothing of partitions: its last tags."""
    topic = UUID(int=1) if version >= FIRST_WITH_IDS else "topic"
    body = request_body(version, {topic: {1: batch(2)}})
    tail = 3 if API.request.flexible_version_q(version) else 0  # of partition, topic, message
    for end in range(len(body) - tail):
        with pytest.raises(MalformedFrame):
            read_produce_request(version, body[:end])
    frame = response_frame(version, {topic: {1: (0, 5)}})
    for end in range(len(frame) - 2 * bool(tail)):
        with contextlib.suppress(MalformedResponse):
            read = read_produce_response(version, frame[:end])
            assert end >= len(frame) - 5, read
            assert read == (PartitionResponse(key_of(topic), 1, 0, 5),)
