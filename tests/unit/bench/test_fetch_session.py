"""What the load asks in a fetch session, and what the stand-in broker answers."""

from dataclasses import replace

import pytest
from kafka.protocol.consumer.fetch import FetchRequest, FetchResponse

from bench import traffic
from bench.fetch_session import (
    FIRST_READ_ON,
    FIRST_VERSION,
    NO_SESSION,
    SessionAnswers,
    SessionlessRequests,
    SessionRequests,
    epoch_of,
)

CLIENT_ID = "consumer-1"
SESSION_ID = 7
START = 1_000_000
BATCH_BYTES = 300
VERSIONS = range(FIRST_VERSION, traffic.CLIENT_VERSIONS[FetchRequest.API_KEY] + 1)


def answered(answers: SessionAnswers, epoch: int) -> bytes:
    answers.step(epoch)
    return answers.length + bytes(4) + answers.body[:]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("partitions", [range(1), range(50, 100)])
def test_offsets_and_epochs_go_up_together(version, partitions):
    asked = traffic.Asked(BATCH_BYTES, BATCH_BYTES * len(partitions), partitions)
    positions = {(CLIENT_ID, BATCH_BYTES, partitions.start): START}
    requests = SessionRequests(version, CLIENT_ID, asked, positions)
    read = traffic.read_fetch(version, bytes(requests.frame))
    assert read == replace(asked, offset=START)
    answers = SessionAnswers.make(version, read, SESSION_ID)
    requests.opened(answered(answers, 0))
    for epoch in (1, 2):
        request = FetchRequest.decode(bytes(requests.frame[4:]), version=version, header=True)
        assert (request.session_id, request.session_epoch) == (SESSION_ID, epoch)
        assert epoch_of(version, len(CLIENT_ID), bytes(requests.frame)) == epoch
        offsets = [each.fetch_offset for each in request.topics[0].partitions]
        assert offsets == [START + epoch] * len(partitions)
        frame = answered(answers, epoch)
        response = FetchResponse.decode(frame, version=version, header=True, framed=True)
        (topic,) = response.responses
        assert [each.partition_index for each in topic.partitions] == list(partitions)
        for partition in topic.partitions:
            assert partition.high_watermark == partition.last_stable_offset == START + epoch + 1
            assert len(partition.records) == BATCH_BYTES
            assert int.from_bytes(partition.records[:8], "big") == START + epoch
        assert requests.response_bytes == len(frame)
        requests.move_on()


def test_an_answer_without_all_partitions_is_refused():
    version = VERSIONS[-1]
    asked = traffic.Asked(BATCH_BYTES, BATCH_BYTES * 2, range(2))
    requests = SessionRequests(version, CLIENT_ID, asked, {})
    answers = SessionAnswers.make(version, traffic.Asked(BATCH_BYTES, BATCH_BYTES), SESSION_ID)
    with pytest.raises(ValueError, match="not a whole answer"):
        requests.opened(answered(answers, 0))


@pytest.mark.parametrize("version", VERSIONS)
def test_without_a_session_each_asks_for_what_is_behind_the_one_before(version):
    asked = traffic.Asked(BATCH_BYTES, BATCH_BYTES)
    positions = {}
    requests = SessionlessRequests(version, CLIENT_ID, asked, positions)
    read = traffic.read_fetch(version, bytes(requests.frame))
    assert read == replace(asked, offset=FIRST_READ_ON)
    answers = SessionAnswers.make(version, read, NO_SESSION)
    for number in range(3):
        assert positions[CLIENT_ID, BATCH_BYTES, 0] == FIRST_READ_ON + number
        request = FetchRequest.decode(bytes(requests.frame[4:]), version=version, header=True)
        assert (request.session_id, request.session_epoch) == (NO_SESSION, -1)
        frame = answered(answers, number)
        response = FetchResponse.decode(frame, version=version, header=True, framed=True)
        (wanted,), (given,) = (each.partitions for each in (*request.topics, *response.responses))
        assert wanted.fetch_offset == int.from_bytes(given.records[:8], "big")
        assert (response.session_id, given.high_watermark) == (0, wanted.fetch_offset + 1)
        requests.move_on()
