"""Frames of one connection stay in order, whatever is done to each of them."""

import asyncio
from struct import pack, unpack_from

import pytest
from parts.sensor_views import sensors_in_use
from relaylab import frames
from relaylab.lab import LISTENER, fast_client, open_lab, slow_client, turns, until

from proxy.quota.entities import DEFAULT, QuotaKind
from proxy.quota.rules import QuotaManagerSettings, Rule
from proxy.relay.pump import END
from proxy.relay.requests import LEFT_IN_FLIGHT
from proxy.relay.responses import LONGEST_MUTE_MS, MAX_HEAD_BYTES
from proxy.relay.services import Limits

BIG_BYTES = 300_000
PATHS = ["splice", "copy", "tls client", "tls upstream", "tls both"]


@pytest.fixture(params=PATHS)
def path(request, certificates):
    """Arguments of a lab for every way that bodies can take."""
    return {
        "splice": {},
        "copy": {"splice": False},
        "tls client": {"client_tls": certificates},
        "tls upstream": {"upstream_tls": certificates},
        "tls both": {"client_tls": certificates, "upstream_tls": certificates},
    }[request.param]


async def test_requests_and_responses_pass_byte_for_byte(path):
    async with open_lab(**path, passes_unknown_apis=True) as lab:
        first = frames.request(frames.UNKNOWN_API, 77, 1, b"anything")
        client, broker = await lab.pair(first)
        answer = frames.response(frames.UNKNOWN_API, 77, 1, b"something")
        await broker.send(answer)
        assert await client.frame() == answer
        big = frames.produce_request(2, acks=1, record_bytes=BIG_BYTES)
        await client.send(big)
        assert await broker.frame() == big
        answer = frames.response(0, 7, 2, b"stored")
        await broker.send(answer)
        assert await client.frame() == answer


async def test_small_large_and_rewritten_responses_mixed(path):
    async with open_lab(**path) as lab:
        client, broker = await lab.pair(frames.fetch_request(0))
        asked = [frames.fetch_request(0)]
        answers = [frames.fetch_response(0, 10)]
        for number in range(1, 24, 4):
            asked += [
                frames.fetch_request(number),
                frames.metadata_request(number + 1),
                frames.fetch_request(number + 2, version=15),
                frames.request(frames.LIST_OFFSETS, 1, number + 3),
            ]
            answers += [
                frames.fetch_response(number, BIG_BYTES),
                frames.metadata_response(number + 1, {7: ("real", 9092)}, 5_000),
                frames.fetch_partitions(number + 2, [bytes(100_000), b"x"]),
                frames.response(frames.LIST_OFFSETS, 1, number + 3, b"offsets"),
            ]
        sending = asyncio.create_task(client.send(b"".join(asked[1:])))
        assert [await broker.frame() for _ in asked[1:]] == asked[1:]
        await sending
        sending = asyncio.create_task(broker.send(b"".join(answers)))
        for answer in answers:
            frame = await client.frame()
            assert frame[4:8] == answer[4:8]
            if b"real" not in answer:
                assert frame == answer
            assert b"real" not in frame
        await sending


async def test_one_byte_at_a_time():
    async with open_lab() as lab:
        first = frames.metadata_request(1)
        client = await lab.client()
        await client.send(*(first[i : i + 1] for i in range(len(first))))
        broker = await lab.broker()
        assert await broker.frame() == first
        answer = frames.metadata_response(1, {3: ("real", 1)})
        await broker.send(*(answer[i : i + 1] for i in range(len(answer))))
        address = lab.relay.listeners[LISTENER].address_of(3)
        assert frames.metadata_brokers(await client.frame()) == {3: address}
        assert lab.brokers.addresses == {3: ("real", 1)}


async def test_a_metadata_response_of_10_mb():
    async with open_lab() as lab:
        client, broker = await lab.pair(frames.metadata_request(1))
        answer = frames.metadata_response(1, {3: ("real", 1)}, 10_000_000)
        sending = asyncio.create_task(broker.send(answer))
        frame = await client.frame()
        await sending
        assert list(frames.metadata_brokers(frame)) == [3]
        assert frame[-5_000_000:] == answer[-5_000_000:]


@pytest.mark.parametrize("first_bytes", [3, 5_000, 100_000])
@pytest.mark.parametrize("count", [0, 100, 3_000])
async def test_metadata_is_sent_on_as_soon_as_its_brokers_are_there(count, first_bytes):
    async with open_lab(takes_free_ports=False) as lab:
        client, broker = await lab.pair(frames.metadata_request(1))
        named = dict.fromkeys(range(count), ("real-host-with-a-long-name", 1))
        answer = frames.metadata_response(1, named, 3_000_000)
        size = len(answer) - 1
        first = asyncio.create_task(broker.send(answer[:first_bytes], answer[first_bytes:size]))
        start = await client.receive(12)
        assert unpack_from(">iii", start)[1:] == (1, 0)  # no broker has a port
        (length,) = unpack_from(">i", start)
        assert length < size
        await client.receive(length - 9)
        await first
        await broker.send(answer[size:])
        assert await client.receive(1) == answer[size:]
        assert set(lab.brokers.addresses) == set(named)
        assert lab.services.kept_bytes.total == 0
        await client.send(frames.metadata_request(2))
        assert await broker.frame() == frames.metadata_request(2)


async def test_metadata_whose_brokers_do_not_end():
    async with open_lab() as lab:
        client, broker = await lab.pair(frames.metadata_request(1))
        named = dict.fromkeys(range(MAX_HEAD_BYTES // 200), ("h" * 200, 1))
        sending = asyncio.create_task(broker.send(frames.metadata_response(1, named, 3_000_000)))
        assert await client.ended() == b""
        assert lab.upstream_errors("bad_response") == 1
        sending.cancel()


async def test_a_hold_in_the_middle_keeps_the_order():
    async with open_lab(rules=(slow_client(),)) as lab:
        client, broker = await lab.pair(frames.metadata_request(1))
        asked = [
            frames.fetch_request(2),
            frames.metadata_request(3),
            frames.request(frames.LIST_OFFSETS, 1, 4),
        ]
        await client.send(*asked)
        assert [await broker.frame() for _ in asked] == asked
        answers = [
            frames.metadata_response(1, {}),
            frames.fetch_response(2, BIG_BYTES),
            frames.metadata_response(3, {}),
            frames.response(frames.LIST_OFFSETS, 1, 4, b"offsets"),
        ]
        sending = asyncio.create_task(broker.send(b"".join(answers)))
        assert await client.frame() == answers[0]
        await until(lambda: lab.held == 1)
        await turns(20)
        assert not client.unread
        lab.services.reapers.release_all()
        assert [await client.frame() for _ in answers[1:]] == answers[1:]
        await sending
        assert lab.held == 0


async def test_a_held_response_stays_in_the_kernel():
    async with open_lab(rules=(slow_client(),)) as lab:
        client, broker = await lab.pair(frames.fetch_request(1))
        answer = frames.fetch_response(1, 16 << 20)
        sending = asyncio.create_task(broker.send(answer))
        await until(lambda: lab.held == 1)
        await turns(50)
        (connection,) = lab.relay.connections
        assert len(connection.responses.stash) <= 4096
        assert not sending.done()
        lab.services.reapers.release_all()
        assert await client.frame() == answer
        await sending


@pytest.mark.parametrize("path_name", ["splice", "copy"])
async def test_mute_answers_at_once_and_reads_no_more(path_name):
    async with open_lab(rules=(slow_client(),), holds=False, splice=path_name == "splice") as lab:
        client, broker = await lab.pair(frames.fetch_request(1))
        answer = frames.fetch_response(1, BIG_BYTES)
        await broker.send(answer)
        frame = await client.frame()
        (throttle_ms,) = unpack_from(">i", frame, 8)
        assert throttle_ms == LONGEST_MUTE_MS
        assert frame[12:] == answer[12:]
        assert lab.held == 1
        await client.send(frames.metadata_request(2))
        await turns(20)
        assert not broker.unread
        lab.services.reapers.release_all()
        assert await broker.frame() == frames.metadata_request(2)


async def test_mute_takes_a_pipelined_head_that_is_split():
    async with open_lab(rules=(slow_client(),), holds=False) as lab:
        client, broker = await lab.pair(frames.fetch_request(1))
        second = frames.metadata_request(2)
        await client.send(second[:9], b"")
        await broker.send(frames.fetch_response(1, 10_000))
        await client.frame()
        await client.send(second[9:])
        await turns(20)
        assert not broker.unread
        lab.services.reapers.release_all()
        assert await broker.frame() == second


@pytest.mark.parametrize("acks", [0, 1])
async def test_who_owes_too_much_is_not_read_from(acks):
    rule = slow_client(kind=QuotaKind.PRODUCER_BYTE_RATE)
    async with open_lab(rules=(rule,)) as lab:
        big = frames.produce_request(1, acks=acks, record_bytes=BIG_BYTES)
        client, broker = await lab.pair(big)
        pairs = [(client, broker)]
        for number in (2, 3):
            pairs.append(await lab.pair(frames.metadata_request(number)))
        for number, (end, _) in enumerate(pairs):
            await end.send(frames.produce_request(number, acks))
        await turns(50)
        assert not any(end.unread for _, end in pairs)
        lab.services.quotas.update(QuotaManagerSettings())
        for number, (_, end) in enumerate(pairs):
            assert await end.frame() == frames.produce_request(number, acks)


async def test_a_raised_quota_ends_a_hold():
    async with open_lab(rules=(slow_client(),)) as lab:
        client, broker = await lab.pair(frames.fetch_request(1))
        answer = frames.fetch_response(1, 10_000)
        await broker.send(answer)
        await until(lambda: lab.held)
        lab.relay.follow_changes()
        await turns(20)
        assert lab.held
        lab.services.quotas.update(QuotaManagerSettings(rules=(fast_client(),)))
        assert await client.frame() == answer


async def test_a_client_id_that_changes_within_a_connection_counts_as_the_first_one():
    rule = Rule(client_id=DEFAULT, bounds={QuotaKind.CONSUMER_BYTE_RATE: 1.0})
    async with open_lab(rules=(rule,)) as lab:
        client, broker = await lab.pair(frames.fetch_request(1, client_id="first"))
        await broker.send(frames.fetch_response(1, BIG_BYTES))
        await until(lambda: lab.held)
        lab.services.reapers.release_all()
        await client.frame()
        await client.send(frames.fetch_request(2, client_id="second"))
        await turns(50)
        assert not broker.unread
        entities = [row.entity for row in sensors_in_use(lab.services.quotas, lambda: 0.0)]
        assert entities == ["client-id=first"]


async def test_what_follows_a_login_is_read_when_it_is_answered():
    async with open_lab() as lab:
        login = frames.request(17, 1, 1, b"\0\x05PLAIN")
        second = frames.metadata_request(2)
        client = await lab.client()
        await client.send(login + second)
        broker = await lab.broker()
        assert await broker.frame() == login
        await turns(50)
        assert not broker.unread
        await broker.send(frames.response(17, 1, 1, pack(">hi", 0, 0)))
        assert await broker.frame() == second


async def test_produce_that_waits_is_sent_on_though_the_client_has_closed():
    rule = slow_client(kind=QuotaKind.PRODUCER_BYTE_RATE)
    async with open_lab(rules=(rule,)) as lab:
        asked = [frames.produce_request(number, acks=0, record_bytes=100) for number in range(20)]
        client = await lab.client()
        await client.send(b"".join(asked))
        broker = await lab.broker()
        await client.close()
        lab.services.quotas.update(QuotaManagerSettings())
        assert [await broker.frame() for _ in asked] == asked
        assert await broker.ended() == b""


async def test_who_closes_while_its_fetch_waits_is_noticed_though_it_was_asked_again_before():
    async with open_lab(rules=(slow_client(),)) as lab:
        client, broker = await lab.pair(frames.fetch_request(1))
        await broker.send(frames.fetch_response(1, 1_000_000))
        await client.send(frames.fetch_request(2))
        await until(lambda: any(each.waiter.gate for each in lab.relay.connections))
        (connection,) = lab.relay.connections
        for _ in range(3):
            connection.requests.run()
            assert connection.requests.wait is END
        await client.close()
        await until(lambda: not lab.relay.connections)


async def test_no_more_requests_are_read_than_may_be_unanswered():
    async with open_lab(limits=Limits(max_in_flight_requests=3)) as lab:
        asked = [frames.metadata_request(number) for number in range(10)]
        client = await lab.client()
        await client.send(b"".join(asked))
        broker = await lab.broker()
        for number in range(3):
            assert await broker.frame() == asked[number]
        for number in range(10):
            await turns(10)
            assert not broker.unread
            await broker.send(frames.metadata_response(number, {}))
            if number + 3 < 10:
                assert await broker.frame() == asked[number + 3]
            assert await client.frame() == frames.metadata_response(number, {})


async def test_of_one_that_has_left_few_requests_are_sent_on():
    async with open_lab() as lab:
        client = await lab.client()
        asked = [frames.metadata_request(number) for number in range(500)]
        client.writer.write(b"".join(asked))
        client.writer.write_eof()
        broker = await lab.broker()
        for number in range(LEFT_IN_FLIGHT):
            assert await broker.frame() == asked[number]
        for number in range(3):
            await turns(10)
            assert not broker.unread
            await broker.send(frames.metadata_response(number, {}))
            assert await broker.frame() == asked[number + LEFT_IN_FLIGHT]
        client.reset()
        await broker.send(*(frames.metadata_response(number, {}) for number in (3, 4)))
        assert len(await broker.ended()) <= 2 * len(asked[0])


async def test_a_split_login_with_one_request_in_flight():
    """The pause that the login itself brings about must not keep its own rest from being read."""
    async with open_lab(limits=Limits(max_in_flight_requests=1)) as lab:
        login = frames.request(17, 1, 1, b"\0\x05PLAIN")
        client = await lab.client()
        await client.send(login[:-3], login[-3:])
        broker = await lab.broker()
        assert await broker.frame() == login


@pytest.mark.parametrize("split", range(1, 14))
async def test_a_fetch_response_whose_first_bytes_come_in_two_parts(split):
    async with open_lab(rules=(slow_client("other"),)) as lab:
        client, broker = await lab.pair(frames.fetch_request(1, version=15))
        sent = frames.fetch_partitions(1, [b"records"])
        await broker.send(sent[:split], sent[split:])
        assert await client.frame() == sent
