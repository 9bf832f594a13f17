"""What repeats on a connection is recognised, and what only looks like it is not."""

import asyncio

import pytest
from kafka.protocol.producer.produce import ProduceRequest, ProduceResponse
from relaylab import frames
from relaylab.lab import fast_client, open_lab

from proxy.relay.frame_flow import FAIR_FRAMES, READ_BYTES
from proxy.relay.lifecycle import ReadPauseReason
from proxy.relay.pump import WaitReason
from proxy.wire.apis import FETCH, LIST_OFFSETS, METADATA

VERSION = 12
Topic = ProduceResponse.TopicProduceResponse


def produce(correlation_id, acks=1):
    request = ProduceRequest[VERSION](
        transactional_id=None, acks=acks, timeout_ms=1000, topic_data=[]
    )
    request.with_header(correlation_id=correlation_id, client_id="test")
    return bytes(request.encode(header=True, framed=True))


def produced(correlation_id, offset, *, error_code=0, brokers=()):
    partition = Topic.PartitionProduceResponse(
        index=0,
        error_code=error_code,
        base_offset=offset,
        log_append_time_ms=-1,
        log_start_offset=0,
        record_errors=[],
        error_message=None,
    )
    response = ProduceResponse[VERSION](
        responses=[Topic(name="orders", partition_responses=[partition])], throttle_time_ms=0
    )
    response.node_endpoints = [
        ProduceResponse.NodeEndpoint(node_id=node_id, host=host, port=port, rack=None)
        for node_id, (host, port) in brokers
    ]
    response.with_header(correlation_id=correlation_id)
    return bytes(response.encode(header=True, framed=True))


async def test_a_broker_is_rewritten_in_a_response_behind_many_without_one():
    async with open_lab() as lab:
        client, broker = await lab.pair(produce(0))
        for number in range(4):
            if number:
                await client.send(produce(number))
                assert await broker.frame() == produce(number)
            answer = produced(number, 10 * number)
            await broker.send(answer)
            assert await client.frame() == answer
        for number, error_code in ((4, 0), (5, 6)):
            await client.send(produce(number))
            assert await broker.frame() == produce(number)
            leader = (1, ("kafka.internal", 9092))
            answer = produced(number, 7, error_code=error_code, brokers=[leader])
            assert b"kafka.internal" in answer
            await broker.send(answer)
            frame = await client.frame()
            assert b"kafka.internal" not in frame
            assert frame[4:8] == answer[4:8]


async def test_acks_of_a_request_that_begins_like_the_one_before():
    """Those without a response stand between those with one."""
    async with open_lab() as lab:
        client, broker = await lab.pair(produce(0))
        await broker.send(produced(0, 1))
        assert await client.frame() == produced(0, 1)
        for number, acks in enumerate((1, 0, 0, 1, -1, 0, 1), start=1):
            await client.send(produce(number, acks))
            assert await broker.frame() == produce(number, acks)
            if acks:
                await broker.send(produced(number, number))
                assert await client.frame() == produced(number, number)
        assert lab.count("requests_total", api="Produce", version="12") == 8


async def test_a_client_id_that_changes_later_counts_for_the_first_one():
    async with open_lab() as lab:
        client, broker = await lab.pair(frames.fetch_request(0, client_id="first"))
        for number, name in enumerate(("first", "other", "first", "third", "other"), start=1):
            await broker.send(frames.fetch_response(number - 1, 100))
            assert await client.frame() == frames.fetch_response(number - 1, 100)
            await client.send(frames.fetch_request(number, client_id=name))
            assert await broker.frame() == frames.fetch_request(number, client_id=name)
        counted = {"listener": "default", "user": "", "api": "Fetch"}
        assert lab.count("bytes_total", client_id="other", **counted) == 0
        assert lab.count("bytes_total", client_id="first", **counted) > 5 * 100


async def test_an_empty_client_id_makes_way_for_the_next_one():
    async with open_lab() as lab:
        names = ("", "", "late", "late")
        asked = [frames.fetch_request(each, client_id=name) for each, name in enumerate(names)]
        client, broker = await lab.pair(asked[0])
        for number, request in enumerate(asked):
            if number:
                await client.send(request)
                assert await broker.frame() == request
            await broker.send(frames.fetch_response(number, 100))
            await client.frame()
        sizes = [len(each) + len(frames.fetch_response(0, 100)) for each in asked]
        counted = {"listener": "default", "user": "", "api": "Fetch"}
        assert lab.count("bytes_total", client_id="", **counted) == sum(sizes[:2])
        assert lab.count("bytes_total", client_id="late", **counted) == sum(sizes[2:])


async def test_a_request_that_ends_before_what_it_is_known_by_is_refused():
    async with open_lab() as lab:
        client, broker = await lab.pair(produce(0))
        await broker.send(produced(0, 1))
        await client.frame()
        whole = produce(1)
        short = frames.framed(whole[4:-8])
        await client.send(short + whole)
        await client.ended()
        assert lab.rejected("bad_body") == 1


@pytest.mark.parametrize("api_key", [FETCH, METADATA, LIST_OFFSETS])
async def test_a_known_request_may_be_no_longer_than_others(api_key):
    async with open_lab() as lab:
        version = {FETCH: 11, METADATA: 1, LIST_OFFSETS: 1}[api_key]
        known = frames.request(api_key, version, 0, bytes(16))
        client, _ = await lab.pair(known)
        limit = lab.services.limits.max_request_bytes
        await client.send((limit + 1).to_bytes(4, "big") + known[4:])
        await client.ended()
        assert lab.rejected("too_long") == 1


async def test_many_small_frames_in_one_read_let_others_run_in_between():
    """One long frame makes reads long: hundreds of short ones come in one then."""
    async with open_lab(rules=(fast_client(),)) as lab:
        client, broker = await lab.pair(frames.produce_request(0, acks=0))
        (connection,) = lab.relay.connections
        flow = connection.requests
        for number in (1, 2):  # only after the first one is it known how far below its bound it is
            long = frames.produce_request(number, acks=0, record_bytes=20_000)
            await client.send(long)
            assert await broker.frame() == long
        assert flow.first_bytes == READ_BYTES
        short = [frames.produce_request(number, acks=0) for number in range(3, 403)]
        connection.pause(ReadPauseReason.MUTED)
        await client.send(*short)
        await asyncio.sleep(0.1)  # all of it is in the kernel now
        waits = []
        connection.unpause(ReadPauseReason.MUTED)
        while flow.stash or flow.wait is WaitReason.TURN:
            waits.append(flow.wait)
            await asyncio.sleep(0)
        assert waits.count(WaitReason.TURN) >= len(short) // FAIR_FRAMES - 1
        assert [await broker.frame() for _ in short] == short
