"""Fetch requests read, with kafka-python's codec as the oracle."""

from contextlib import suppress
from random import Random
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.apis import APIS, FETCH
from proxy.wire.fetch import FetchRequestContent, read_fetch_request
from proxy.wire.frames import MalformedFrame
from proxy.wire.layout import MAX_ELEMENTS, MAX_TAGS, TooManyElements, encode_uvarint

REQUEST = APIS[FETCH].request
VERSIONS = range(REQUEST.max_version + 1)
FIRST_SESSIONS = 7
FIRST_RACKS = 11
FIRST_TAGGED = 12
FIRST_IDS = 13
EXAMPLES = 25

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
NAMES = st.text(st.characters(codec="utf-8"), max_size=200)
POSITIONS = st.lists(st.tuples(INT32, INT64, st.none() | st.uuids(), st.none() | INT64), max_size=6)
FORGOTTEN = st.lists(INT32, max_size=4)
TOPICS = st.lists(st.tuples(NAMES, st.uuids(), POSITIONS), max_size=4)


def key_field(version, name, topic_id):
    return {"topic": name} if version < FIRST_IDS else {"topic_id": topic_id}


def key_of(version, topic):
    return topic.topic if version < FIRST_IDS else topic.topic_id.bytes


def request_body(version, topics, forgotten=(), session=(0, -1), rack="", tagged=None):
    """Encode; `tagged` is a cluster id, which brings the replica's state, too."""
    topic_of, forgotten_of = REQUEST.FetchTopic, REQUEST.ForgottenTopic
    partition_of = topic_of.FetchPartition
    tags = {}
    if tagged is not None and version >= FIRST_TAGGED:
        tags["cluster_id"] = tagged
    if tagged is not None and version >= 15:
        tags["replica_state"] = REQUEST.ReplicaState(version=version, replica_id=4, replica_epoch=9)
    message = REQUEST(
        version=version,
        max_wait_ms=500,
        min_bytes=1,
        session_id=session[0],
        session_epoch=session[1],
        rack_id=rack,
        topics=[
            topic_of(
                version=version,
                partitions=[
                    partition_of(
                        version=version,
                        partition=index,
                        current_leader_epoch=7,
                        fetch_offset=offset,
                        partition_max_bytes=1 << 20,
                        **({"replica_directory_id": directory} if directory else {}),
                        **({"high_watermark": high} if high is not None else {}),
                    )
                    for index, offset, directory, high in positions
                ],
                **key_field(version, name, topic_id),
            )
            for name, topic_id, positions in topics
        ],
        forgotten_topics_data=[
            forgotten_of(version=version, partitions=indexes, **key_field(version, name, topic_id))
            for name, topic_id, indexes in (forgotten if version >= FIRST_SESSIONS else ())
        ],
        **tags,
    )
    return bytes(message.encode(version=version))


def decoded(version, body):
    """What the codec reads."""
    message = REQUEST.decode(body, version=version)
    has_sessions = version >= FIRST_SESSIONS
    return FetchRequestContent(
        message.session_id if has_sessions else 0,
        message.session_epoch if has_sessions else -1,
        tuple(
            (key_of(version, topic), part.partition, part.fetch_offset)
            for topic in message.topics or ()
            for part in topic.partitions or ()
        ),
        tuple(
            (key_of(version, topic), index)
            for topic in ((message.forgotten_topics_data if has_sessions else None) or ())
            for index in topic.partitions or ()
        ),
    )


def test_it_covers_every_version():
    assert list(VERSIONS) == list(range(19))


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    topics=TOPICS,
    forgotten=st.lists(st.tuples(NAMES, st.uuids(), FORGOTTEN), max_size=3),
    session=st.tuples(INT32, INT32),
    rack=NAMES,
    tagged=st.none() | NAMES,
)
def test_a_request_is_read_as_the_codec_reads_it(version, topics, forgotten, session, rack, tagged):
    body = request_body(version, topics, forgotten, session, rack, tagged)
    ask = read_fetch_request(version, body)
    assert ask == decoded(version, body)
    assert len(ask.positions) == sum(len(positions) for _, _, positions in topics)
    assert read_fetch_request(version, memoryview(body)) == ask
    assert read_fetch_request(version, bytearray(body + b"more")) == ask


@pytest.mark.parametrize("version", VERSIONS)
def test_unknown_tags_and_null_arrays(filler, version):
    for seed in range(60):
        body = filler(seed, unknown_tags=True).body(REQUEST, version)
        assert read_fetch_request(version, body) == decoded(version, body)


@pytest.mark.parametrize("version", [4, 11, 12, 13, 18])
@pytest.mark.parametrize("tagged_at", [None, 0, 500, 999])
def test_many_partitions_with_tags_at_one_of_them(version, tagged_at):
    directory = UUID(int=1)
    positions = [(i, i * 10, directory if i == tagged_at else None, None) for i in range(1000)]
    body = request_body(version, [("orders", UUID(int=5), positions)], session=(3, 0))
    ask = read_fetch_request(version, body)
    assert [(index, offset) for _, index, offset in ask.positions] == [
        (i, i * 10) for i in range(1000)
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_body_cut_off_before_the_end_of_the_partitions_is_refused(version):
    positions = [(1, 5, UUID(int=7), 8), (2, 6, None, None)]
    topics = [("orders", UUID(int=5), positions), ("clicks", UUID(int=6), positions)]
    forgotten = [("orders", UUID(int=5), [3, 4])]
    body = request_body(version, topics, forgotten, (3, 4), "rack", "cluster")
    ask = read_fetch_request(version, body)
    needed = len(body)
    if version >= FIRST_RACKS:  # what is behind is not looked at
        needed = body.rindex(b"rack") - (1 if version >= FIRST_TAGGED else 2)
    for cut in range(len(body)):
        if cut >= needed:
            assert read_fetch_request(version, body[:cut]) == ask
            continue
        with pytest.raises(MalformedFrame):
            read_fetch_request(version, body[:cut])


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(body=st.binary(max_size=200))
def test_any_bytes_are_read_or_malformed(version, body):
    with suppress(MalformedFrame, TooManyElements):
        read_fetch_request(version, body)


@pytest.mark.parametrize("version", VERSIONS)
def test_spoiled_requests_are_read_or_malformed(filler, version):
    random = Random(version)
    for seed in range(200):
        body = bytearray(filler(seed, unknown_tags=True).body(REQUEST, version))
        for _ in range(random.randint(1, 3)):
            body[random.randrange(len(body))] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
        with suppress(MalformedFrame, TooManyElements):
            read_fetch_request(version, body)


HEAD_4 = bytes(4 + 4 + 4 + 4 + 1)
HEAD_12 = bytes(25)
BAD = {
    "no body": (4, b""),
    "more topics than bytes": (4, HEAD_4 + b"\0\0\1\0" + bytes(20)),
    "negative topic count": (4, HEAD_4 + b"\xff\xff\xff\xfe" + bytes(20)),
    "negative name": (4, HEAD_4 + b"\0\0\0\1\xff\xfe" + bytes(20)),
    "name is not UTF-8": (4, HEAD_4 + b"\0\0\0\1\0\2\xff\xff" + bytes(20)),
    "more partitions than bytes": (4, HEAD_4 + b"\0\0\0\1\0\1t\0\0\1\0" + bytes(20)),
    "partitions run over the end": (4, HEAD_4 + b"\0\0\0\1\0\1t\0\0\0\2" + bytes(20)),
    "varint without end": (12, HEAD_12 + b"\xff" * 9),
    "tagged field runs over the end": (12, HEAD_12 + b"\2\2t\1\1\0\x7f\0"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed(name):
    version, body = BAD[name]
    with pytest.raises(MalformedFrame) as raised:
        read_fetch_request(version, body)
    assert raised.value.reason == "bad_body"


EMPTY_TOPIC = b"\2t\1\0"
TAG = b"\1\0"
CROWDED = {
    "null partitions": encode_uvarint(MAX_ELEMENTS + 2) + b"\2t\0\0" * (MAX_ELEMENTS + 1),
    "topics": encode_uvarint(MAX_ELEMENTS + 2) + EMPTY_TOPIC * (MAX_ELEMENTS + 1),
    "partitions": b"\2\2t" + encode_uvarint(MAX_ELEMENTS + 1) + bytes(33 * MAX_ELEMENTS) + b"\0",
    "tags of partitions": b"\2\2t"
    + encode_uvarint(MAX_ELEMENTS // MAX_TAGS + 1)
    + (bytes(32) + bytes([MAX_TAGS]) + TAG * MAX_TAGS) * (MAX_ELEMENTS // MAX_TAGS)
    + b"\0",
    "tags of topics": encode_uvarint(MAX_ELEMENTS // MAX_TAGS + 1)
    + (b"\2t\1" + bytes([MAX_TAGS]) + TAG * MAX_TAGS) * (MAX_ELEMENTS // MAX_TAGS),
}
"""Each has a little more than is read at once, in few bytes."""


@pytest.mark.parametrize("what", CROWDED)
def test_of_more_elements_than_are_read_at_once_none_are(what):
    with pytest.raises(TooManyElements):
        read_fetch_request(12, HEAD_12 + CROWDED[what] + b"\1\1\0")


@pytest.mark.parametrize("version", [-1, 19, 1000])
def test_unknown_versions(version):
    with pytest.raises(ValueError, match="no schema"):
        read_fetch_request(version, bytes(100))


@pytest.mark.parametrize(("epoch", "is_full"), [(0, True), (-1, True), (1, False), (-2, False)])
def test_which_requests_are_full(epoch, is_full):
    assert FetchRequestContent(3, epoch, (), ()).is_full is is_full
