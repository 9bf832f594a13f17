"""What Fetches of a run have in common leaves no room for any that mean something else."""

from struct import pack
from uuid import UUID

import pytest

from proxy.wire.apis import APIS, FETCH, plan_of
from proxy.wire.fetch import read_fetch_request
from proxy.wire.fetch_response import fetch_body_start
from proxy.wire.fetch_run import fetch_run_shape
from proxy.wire.frames import parse_request_head

VERSION, NAMED, NOT_FLEXIBLE, WITH_SESSIONS = 17, 12, 11, 7
TOPIC, OTHER = UUID(int=7), UUID(int=8)
SESSION = 77
MIN_BATCH_BYTES, BATCH_PREFIX_BYTES = 61, 12


def batch(start: int, count: int, size: int = 0) -> bytes:
    body_bytes = MIN_BATCH_BYTES + size - BATCH_PREFIX_BYTES
    head = pack(">qiibIhi", start, body_bytes, 0, 2, 0, 0, count - 1)
    return head + bytes(MIN_BATCH_BYTES + size - len(head))


def asked(
    offset,
    *,
    number=1,
    topic=TOPIC,
    forgotten=(),
    partitions=(0,),
    of=None,
    version=VERSION,
    **fields,
):
    request = APIS[FETCH].request
    of = {"current_leader_epoch": 3, "partition_max_bytes": 1000, **(of or {})}
    rows = [
        request.FetchTopic.FetchPartition(partition=each, fetch_offset=offset, **of)
        for each in partitions
    ]
    named = {"topic": str(topic), "topic_id": topic}
    gone = [request.ForgottenTopic(**named, partitions=[each]) for each in forgotten]
    message = request[version](
        **{"session_id": SESSION, "session_epoch": number, "max_bytes": 5000, **fields},
        topics=[request.FetchTopic(**named, partitions=rows)],
        forgotten_topics_data=gone,
    )
    message.with_header(correlation_id=number, client_id="c")
    return bytes(message.encode(header=True, framed=True))


def answered(
    records, *, number=1, topic=TOPIC, partitions=(0,), of=None, version=VERSION, **fields
):
    response = APIS[FETCH].response
    topic_of = response.FetchableTopicResponse
    about = {"high_watermark": 90, "last_stable_offset": 90, "log_start_offset": number}
    rows = [
        topic_of.PartitionData(partition_index=each, records=records, **about, **(of or {}))
        for each in partitions
    ]
    topics = [topic_of(topic=str(topic), topic_id=topic, partitions=rows)]
    message = response[version](**{"session_id": SESSION, **fields}, responses=topics)
    message.with_header(correlation_id=number)
    return bytes(message.encode(header=True, framed=True))


def shape_of(request: bytes, response: bytes):
    head = parse_request_head(memoryview(request), max_request_bytes=1 << 20)
    version = head.api_version
    read_fetch_request(version, memoryview(request)[head.header_end :])  # as for every first one
    at = fetch_body_start(plan_of(FETCH, version), response, len(response))
    return fetch_run_shape(version, request, head.header_end, response, at)


def is_like(shape, frame: bytes) -> bool:
    mask, content = shape
    return bytes(a & b for a, b in zip(frame, mask, strict=False)) == content


RECORDS_BYTES = [MIN_BATCH_BYTES, MIN_BATCH_BYTES + 300, MIN_BATCH_BYTES]


def reading_on(version=VERSION):
    of = {"version": version}
    return (
        (asked(10, **of), answered(batch(10, 5), **of)),
        (asked(15, number=2, **of), answered(batch(15, 3, size=300), number=2, **of)),
        (asked(18, number=3, **of), answered(batch(18, 1), number=3, **of)),
    )


FIRST, SECOND, THIRD = reading_on()
EACH_FORM = pytest.mark.parametrize("version", [WITH_SESSIONS, NOT_FLEXIBLE, NAMED, VERSION])
SESSIONLESS = {"session_id": 0, "session_epoch": -1}


@EACH_FORM
def test_those_that_read_on_are_alike(version):
    first, second, third = reading_on(version)
    asked_like, answered_like, offset_at, tag_bytes = shape_of(*first)
    assert tag_bytes == (3 if version > NOT_FLEXIBLE else 0)
    for request, response in (first, second, third):
        assert len(request) == len(asked_like[0])
        assert is_like(asked_like, request)
        assert is_like(answered_like, response)
        assert response.endswith(bytes(tag_bytes))
    assert int.from_bytes(second[0][offset_at : offset_at + 8], "big") == 15


def test_how_much_they_ask_for_is_no_difference():
    """The lane limits it anew for each lease of a bounded client."""
    asked_like, *_ = shape_of(*FIRST)
    assert is_like(asked_like, asked(15, number=2, max_bytes=4000))


def test_without_a_session_as_well():
    none = SESSIONLESS
    asked_like, answered_like, *_ = shape_of(
        asked(10, **none), answered(batch(10, 5), session_id=0)
    )
    assert is_like(asked_like, asked(15, **none))
    assert is_like(answered_like, answered(batch(15, 1), session_id=0))
    assert not is_like(asked_like, asked(16, session_id=0, session_epoch=1))


@pytest.mark.parametrize(
    "other",
    [
        {"topic": OTHER},
        {"partitions": [1]},
        {"partitions": [0, 1]},
        {"forgotten": [1]},
        {"session_id": SESSION + 1},
        {"session_epoch": -1},
        {"min_bytes": 2},
        {"isolation_level": 1},
        {"rack_id": "r"},
        {"of": {"partition_max_bytes": 999}},
        {"of": {"current_leader_epoch": 4}},
        {"of": {"log_start_offset": 1}},
    ],
    ids=str,
)
def test_a_request_that_differs_is_not(other):
    like, *_ = shape_of(*FIRST)
    request = asked(**{"offset": 15, "number": 2, **other})
    assert len(request) != len(SECOND[0]) or not is_like(like, request)


@pytest.mark.parametrize(
    "other",
    [
        {"topic": OTHER},
        {"partitions": [1]},
        {"session_id": 0},
        {"session_id": SESSION + 1},
        {"error_code": 70},
        {"throttle_time_ms": 5},
        {"of": {"error_code": 1}},
        {"of": {"preferred_read_replica": 1}},
    ],
    ids=str,
)
@pytest.mark.parametrize("version", [NOT_FLEXIBLE, VERSION])
def test_nor_is_a_response(other, version):
    _, like, *_ = shape_of(*reading_on(version)[0])
    answer = {"records": batch(15, 3), "number": 2, "version": version, **other}
    assert not is_like(like, answered(**answer))


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        pytest.param({"version": WITH_SESSIONS - 1}, {}, id="a version without sessions"),
        pytest.param({"partitions": [0, 1]}, {}, id="two partitions"),
        pytest.param({"forgotten": [1]}, {}, id="one is forgotten"),
        pytest.param({"session_id": 0, "session_epoch": 0}, {}, id="a session begins"),
        pytest.param({}, {"records": None}, id="no records"),
        pytest.param({}, {"of": {"error_code": 1}}, id="an error"),
        pytest.param({}, {"topic": OTHER}, id="another topic"),
        pytest.param({}, {"partitions": [1]}, id="another partition"),
        pytest.param({}, {"partitions": [0, 1]}, id="more is answered"),
    ],
)
@pytest.mark.parametrize("version", [NOT_FLEXIBLE, VERSION])
def test_not_every_fetch_can_be_in_a_run(ask, answer, version):
    of = {"version": version, **ask}
    with pytest.raises(ValueError, match=r"like most|another answer"):
        shape_of(
            asked(**{"offset": 10, **of}),
            answered(**{"records": batch(10, 5), "version": of["version"], **answer}),
        )
