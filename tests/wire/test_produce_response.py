"""Responses to Produce that are like an earlier one, with kafka-python's codec as the oracle."""

from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.protocol.producer.produce import ProduceResponse

from proxy.wire.apis import APIS, PRODUCE
from proxy.wire.produce import MAX_SHAPES, AddressFreeResponseShapes

VERSIONS = range(10, APIS[PRODUCE].max_version + 1)
Topic = ProduceResponse.TopicProduceResponse
Partition = Topic.PartitionProduceResponse
TOPIC_ID = UUID(int=5)
INT64 = st.integers(-(2**63), 2**63 - 1)
EXAMPLES = 50
"""For each version."""


def framed(response, correlation_id=1):
    response.with_header(correlation_id=correlation_id)
    return bytes(response.encode(header=True, framed=True))


@st.composite
def changes(draw, count):
    """Draw the numbers of so many partitions, and a throttle time."""
    numbers = st.tuples(INT64, INT64, INT64)
    size = {"min_size": count, "max_size": count}
    return draw(st.lists(numbers, **size)), draw(st.integers(0, 2**31 - 1))


def answer(version, partitions, numbers, throttle_ms, **fields):
    topic = fields.pop("topic", "orders")
    key = {"topic_id": TOPIC_ID} if version >= 13 else {"name": topic}
    found = [
        Partition(
            index=index,
            error_code=fields.get("error_code", 0),
            base_offset=base,
            log_append_time_ms=time_ms,
            log_start_offset=start,
            record_errors=[],
            error_message=fields.get("error_message"),
        )
        for index, (base, time_ms, start) in zip(range(partitions), numbers, strict=True)
    ]
    topics = [Topic(**key, partition_responses=found)] if partitions else []
    return ProduceResponse[version](responses=topics, throttle_time_ms=throttle_ms)


@pytest.mark.parametrize("version", VERSIONS)
def test_other_numbers_are_the_same_shape(version):
    @settings(max_examples=EXAMPLES)
    @given(data=st.data(), partitions=st.integers(0, 5))
    def check(data, partitions):
        shapes = AddressFreeResponseShapes()
        first = framed(answer(version, partitions, *data.draw(changes(partitions))))
        second = framed(answer(version, partitions, *data.draw(changes(partitions))), 2)
        assert not shapes.knows(version, memoryview(first))
        shapes.learn(version, first)
        assert shapes.knows(version, memoryview(first))
        assert shapes.knows(version, memoryview(second))

    check()


@pytest.mark.parametrize("version", VERSIONS)
def test_any_other_byte_is_another_shape(version):
    """So is whatever adds a broker to it: that takes other lengths, counts or tags."""
    shapes = AddressFreeResponseShapes()
    frame = framed(answer(version, 2, [(1, 2, 3), (4, 5, 6)], 7))
    numbers = [(-1, -1, -1), (-1, -1, -1)]
    other = framed(answer(version, 2, numbers, -1), -1)
    shapes.learn(version, frame)
    same = 0
    for place in range(4, len(frame)):
        for bit in range(8):
            changed = bytearray(frame)
            changed[place] ^= 1 << bit
            is_number = frame[place] != other[place]
            assert shapes.knows(version, memoryview(changed)) is is_number
            same += not is_number
    assert same > 100


@pytest.mark.parametrize("version", VERSIONS)
def test_a_response_that_names_a_broker_is_not_learnt(version):
    response = answer(version, 1, [(1, 2, 3)], 0, error_code=6)
    node = ProduceResponse.NodeEndpoint(node_id=1, host="kafka", port=9092, rack=None)
    response.node_endpoints = [node]
    frame = framed(response)
    shapes = AddressFreeResponseShapes()
    shapes.learn(version, frame)
    assert not shapes.knows(version, memoryview(frame))


def test_so_many_are_remembered():
    shapes = AddressFreeResponseShapes()
    frames = [framed(answer(12, 1, [(1, 2, 3)], 0, topic="t" * size)) for size in range(1, 40)]
    for frame in frames:
        shapes.learn(12, frame)
    assert sum(shapes.knows(12, memoryview(frame)) for frame in frames) == MAX_SHAPES


def test_responses_of_one_length_that_take_turns_are_remembered_once_each():
    shapes = AddressFreeResponseShapes()
    frames = [framed(answer(12, 1, [(1, 2, 3)], 0, topic=topic)) for topic in ("left", "here")]
    for frame in frames * MAX_SHAPES:
        shapes.learn(12, frame)
    assert all(shapes.knows(12, memoryview(frame)) for frame in frames)
    assert len(shapes.pairs(12)) == len(frames)
