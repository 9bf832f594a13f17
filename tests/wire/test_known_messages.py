"""Messages like those read before: what is read of them is what a reader that knows none reads."""

from functools import partial
from struct import Struct, pack
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire import fetch, layout, list_offsets
from proxy.wire.apis import APIS, FETCH, LIST_OFFSETS, PRODUCE, plan_of
from proxy.wire.fetch import read_fetch_request
from proxy.wire.frames import MalformedFrame, MalformedResponse
from proxy.wire.layout import (
    MAX_KNOWN,
    MAX_KNOWN_MESSAGE_BYTES,
    MessageShapeCache,
    PartitionFields,
    TooManyElements,
)
from proxy.wire.list_offsets import read_list_offsets_request, read_list_offsets_response
from proxy.wire.produce import read_produce_response

EXAMPLES = 60
"""For each kind of message."""
VERSIONS = {FETCH: (4, 7, 11, 12, 13, 17), LIST_OFFSETS: (1, 2, 5, 6, 10), PRODUCE: (3, 8, 9, 12)}
NAMES = ("orders", "clicks", "t", "")
IDS = tuple(UUID(int=n) for n in range(len(NAMES)))


def key_field(version, first_with_ids, field, topic):
    return {"topic_id": IDS[topic]} if version >= first_with_ids else {field: NAMES[topic]}


def framed(api_key, version, body):
    header = pack(">i", 42) + (b"\0" if plan_of(api_key, version).is_flexible else b"")
    return pack(">i", len(header + body)) + header + body


def fetch_request(version, topics, number, extra):
    request = APIS[FETCH].request
    topic_of, forgotten_of = request.FetchTopic, request.ForgottenTopic
    message = request(
        version=version,
        session_id=number % 3,
        session_epoch=number,
        rack_id="rack" if extra == "rack" else "",
        topics=[
            topic_of(
                version=version,
                partitions=[
                    topic_of.FetchPartition(version=version, partition=index, fetch_offset=offset)
                    for index, offset in partitions
                ],
                **key_field(version, 13, "topic", topic),
            )
            for topic, partitions in topics
        ],
        forgotten_topics_data=[
            forgotten_of(version=version, partitions=[1], **key_field(version, 13, "topic", 0))
        ]
        if extra == "more" and version >= 7
        else [],
    )
    return bytes(message.encode(version=version))


def list_offsets_request(version, topics, number, extra):
    request = APIS[LIST_OFFSETS].request
    topic_of = request.ListOffsetsTopic
    message = request(
        replica_id=-1,
        isolation_level=int(extra == "more"),
        topics=[
            topic_of(
                name=NAMES[topic],
                partitions=[
                    topic_of.ListOffsetsPartition(
                        partition_index=index,
                        timestamp=-1 - offset % 2,
                        current_leader_epoch=number,
                    )
                    for index, offset in partitions
                ],
            )
            for topic, partitions in topics
        ],
    )
    return bytes(message.encode(version=version))


def list_offsets_response(version, topics, number, extra):
    response = APIS[LIST_OFFSETS].response
    topic_of = response.ListOffsetsTopicResponse
    message = response(
        throttle_time_ms=int(extra == "more"),
        topics=[
            topic_of(
                name=NAMES[topic],
                partitions=[
                    topic_of.ListOffsetsPartitionResponse(
                        partition_index=index,
                        error_code=number % 2,
                        timestamp=-1,
                        offset=offset,
                        leader_epoch=number,
                    )
                    for index, offset in partitions
                ],
            )
            for topic, partitions in topics
        ],
    )
    return framed(LIST_OFFSETS, version, bytes(message.encode(version=version)))


def produce_response(version, topics, number, extra):
    response = APIS[PRODUCE].response
    topic_of = response.TopicProduceResponse
    message = response(
        throttle_time_ms=int(extra == "rack"),
        responses=[
            topic_of(
                name=NAMES[topic],
                partition_responses=[
                    topic_of.PartitionProduceResponse(
                        index=index,
                        error_code=number % 2,
                        base_offset=offset,
                        log_append_time_ms=-1,
                        log_start_offset=0,
                        record_errors=[],
                        error_message="refused" if extra == "more" else None,
                    )
                    for index, offset in partitions
                ],
            )
            for topic, partitions in topics
        ],
    )
    return framed(PRODUCE, version, bytes(message.encode(version=version)))


KINDS = {
    "Fetch request": (FETCH, fetch_request, read_fetch_request),
    "ListOffsets request": (LIST_OFFSETS, list_offsets_request, read_list_offsets_request),
    "ListOffsets response": (LIST_OFFSETS, list_offsets_response, read_list_offsets_response),
    "Produce response": (PRODUCE, produce_response, read_produce_response),
}

PARTITIONS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2**40)), max_size=2)
TOPICS = st.one_of(  # most often one partition
    st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 2**40)).map(
        lambda one: [(one[0], [one[1:]])]
    ),
    st.lists(st.tuples(st.integers(0, 3), PARTITIONS), max_size=2),
)


@st.composite
def messages(draw, versions, write):
    """Draw versions and messages, many alike, some of them spoiled."""
    found = []
    for _ in range(draw(st.integers(1, 8))):
        version, extra = (
            draw(st.sampled_from(versions)),
            draw(st.sampled_from(("", "rack", "more"))),
        )
        data = bytearray(write(version, draw(TOPICS), draw(st.integers(0, 9)), extra))
        found.append((version, bytes(data)))
        spoiled = draw(st.sampled_from(("", "cut", "byte", "longer", "version")))
        place = draw(st.integers(0, len(data) - 1))
        if spoiled == "cut":
            found.append((version, bytes(data[:place])))
        elif spoiled == "byte":
            data[place] = draw(st.integers(0, 255))
            found.append((version, bytes(data)))
        elif spoiled == "longer":
            found.append((version, bytes(data[:place] + data[:1] + data[place:])))
        elif spoiled == "version":
            found.append((draw(st.sampled_from(versions)), bytes(data)))
    return found


def forget_all():
    kept = (layout.request_partitions, layout.response_partitions, *vars(fetch).values())
    for each in (*kept, *vars(list_offsets).values()):
        if each is not layout.request_layout and hasattr(each, "cache_clear"):
            each.cache_clear()


def outcome(read, version, data):
    try:
        return read(version, data)
    except (MalformedFrame, MalformedResponse, TooManyElements) as error:
        return type(error), str(error)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_what_is_known_changes_nothing(kind, data):
    api_key, write, read = KINDS[kind]
    some = data.draw(messages(VERSIONS[api_key], write))
    buffer = data.draw(st.sampled_from((bytes, bytearray, memoryview)))
    forget_all()
    known = [outcome(read, version, buffer(message)) for version, message in some * 2]
    new = []
    for version, message in some:
        forget_all()
        new.append(outcome(read, version, buffer(message)))
    assert known == new * 2


WANTED = {
    LIST_OFFSETS: ("partition_index", "error_code", "offset"),
    PRODUCE: ("index", "error_code", "base_offset"),
}


@pytest.mark.parametrize("api_key", WANTED)
def test_any_other_byte_is_seen(filler, api_key):
    """Messages written without the codec, with what it would drop."""
    for version in VERSIONS[api_key]:
        new = partial(PartitionFields, layout.response_layout(api_key, version), None)
        for seed in range(30):
            body = filler(seed, unknown_tags=True).body(APIS[api_key].response, version)
            fields = new(WANTED[api_key])
            if len(fields.read(body, 0)) != 1:
                continue
            for place in range(len(body)):
                other = bytearray(body)
                other[place] ^= 1
                assert rows(fields, other) == rows(new(WANTED[api_key]), other)


def rows(fields, data):
    try:
        return fields.read(data, 0)
    except layout.UNREADABLE as error:
        return str(error)


@pytest.mark.parametrize("version", VERSIONS[FETCH])
def test_a_fetch_request_with_another_position_is_known(version):
    forget_all()
    one, two = (fetch_request(version, [(0, [(n, n * 1000)])], n, "rack") for n in (1, 2))
    read_fetch_request(version, one)
    head = layout.request_layout(FETCH, version).head("session_id", "session_epoch")
    fields = layout.request_partitions(FETCH, version, "partition", "fetch_offset")
    topic, _, values = fields.known.find(two, head.size)
    assert (topic, *values) == (NAMES[0] if version < 13 else IDS[0].bytes, 2, 2000)


@pytest.mark.parametrize("kind", ["ListOffsets response", "Produce response"])
def test_a_response_with_another_offset_is_known(kind):
    api_key, write, read = KINDS[kind]
    for version in VERSIONS[api_key]:
        forget_all()
        one, two = (write(version, [(0, [(n, n * 1000)])], n, "more") for n in (1, 2))
        fields = layout.response_partitions(api_key, version, *WANTED[api_key])
        read(version, one)
        topic, _, values = fields.known.find(two, plan_of(api_key, version).body_offset)
        assert (topic, *values) == (NAMES[0], 2, 0, 2000)


def test_equal_look_ups_share_what_they_ask_for_and_cannot_change_it():
    body = list_offsets_request(5, [(0, [(0, 0)])], 1, "")
    one, two = (read_list_offsets_request(5, memoryview(body), number) for number in (7, 8))
    assert one.timestamps is two.timestamps
    assert (one.correlation_id, two.correlation_id) == (7, 8)
    with pytest.raises(TypeError):
        one.timestamps["orders", 0] = 5


def test_long_look_ups_are_not_kept():
    body = list_offsets_request(
        5, [(0, [(index, 0) for index in range(MAX_KNOWN_MESSAGE_BYTES)])], 1, ""
    )
    one, two = (read_list_offsets_request(5, body) for _ in range(2))
    assert one == two
    assert one.timestamps is not two.timestamps


FIELDS = Struct(">i")


def known_of(messages):
    """What knows messages that have nothing behind the fields."""
    known = MessageShapeCache(FIELDS)
    for message in messages:
        place = len(message) - FIELDS.size
        known.add(message, 0, ("topic", place, FIELDS.unpack_from(message, place)))
    return known


def test_of_too_many_the_oldest_are_forgotten():
    some = [pack(">ii", number, 0) for number in range(2 * MAX_KNOWN)]
    known = known_of(some)
    assert [each for each in some if known.find(each, 0) is not None] == some[MAX_KNOWN:]


@pytest.mark.parametrize(
    ("size", "is_kept"), [(MAX_KNOWN_MESSAGE_BYTES, True), (MAX_KNOWN_MESSAGE_BYTES + 1, False)]
)
def test_long_messages_are_not_kept(size, is_kept):
    message = bytes(size)
    assert (known_of([message]).find(message, 0) is not None) is is_kept
