"""A drain lets answers in flight go out, held ones at once, and takes no further requests."""

import asyncio

import pytest
from relaylab import frames
from relaylab.lab import LISTENER, open_lab, slow_client, turns, until

from proxy.relay.services import Limits

BIG_BYTES = 2 << 20


async def test_answers_in_flight_go_out():
    async with open_lab() as lab:
        client, broker = await lab.pair(frames.fetch_request(1))
        idle, _ = await lab.pair(frames.produce_request(1, acks=0))
        new = await lab.client()
        await until(lambda: lab.relay.connected == 3)
        draining = asyncio.create_task(lab.relay.drain())
        assert await idle.ended() == await new.ended() == b""
        await client.send(frames.fetch_request(2))
        await turns(20)
        assert not broker.unread
        sending = asyncio.create_task(broker.send(frames.fetch_response(1, BIG_BYTES)))
        assert await client.ended() == frames.fetch_response(1, BIG_BYTES)
        await sending
        for end in (client, idle, new):
            await end.close()
        await draining
        with pytest.raises(OSError):  # noqa: PT011 - refused
            await lab.client()


async def pipelined(lab, *behind: bytes):
    """Return a client whose Fetch is held, with two more and other requests behind it."""
    client, broker = await lab.pair(frames.fetch_request(1))
    for request in (frames.fetch_request(2), frames.fetch_request(3), *behind):
        await client.send(request)
        await broker.frame()
    answers = [frames.fetch_response(number, 10_000) for number in (1, 2, 3)]
    await broker.send(b"".join(answers))
    await until(lambda: lab.held)
    return client, broker, answers


async def test_of_many_held_answers_one_goes_out_at_once_and_others_when_they_are_due():
    async with open_lab(rules=(slow_client(),)) as lab:
        client, _, answers = await pipelined(lab)
        draining = asyncio.create_task(lab.relay.drain())
        assert await client.frame() == answers[0]
        await until(lambda: lab.held)
        await turns(20)
        assert not client.unread
        lab.services.reapers.release_all()
        assert await client.ended() == b"".join(answers[1:])
        await client.close()
        await draining


async def test_what_is_held_longer_than_a_drain_takes_is_not_sent():
    async with open_lab(rules=(slow_client(),), limits=Limits(drain_timeout_s=0.1)) as lab:
        client, _, answers = await pipelined(lab)
        await lab.relay.drain()
        assert await client.ended() == answers[0]


async def test_held_answers_before_that_to_a_produce_go_out_at_once():
    async with open_lab(rules=(slow_client(),)) as lab:
        client, broker, answers = await pipelined(lab, frames.produce_request(4, acks=1))
        answers.append(frames.response(0, 7, 4, b"stored"))
        draining = asyncio.create_task(lab.relay.drain())
        await broker.send(answers[-1])
        assert await client.ended() == b"".join(answers)
        await client.close()
        await draining


async def test_a_single_fetch_waits_for_nothing():
    async with open_lab(rules=(slow_client(),)) as lab:
        client, broker = await lab.pair(frames.fetch_request(1))
        other, owing = await lab.pair(frames.fetch_request(1))
        await owing.send(frames.fetch_response(1, 10_000))
        await until(lambda: lab.held)
        draining = asyncio.create_task(lab.relay.drain())
        await turns()
        await broker.send(frames.fetch_response(1, 10_000))
        for end in (client, other):
            assert await end.ended() == frames.fetch_response(1, 10_000)
            await end.close()
        await draining


async def test_a_muted_client():
    async with open_lab(rules=(slow_client(),), holds=False) as lab:
        client, broker = await lab.pair(frames.fetch_request(1))
        await broker.send(frames.fetch_response(1, 10_000))
        await client.frame()
        draining = asyncio.create_task(lab.relay.drain())
        assert await client.ended() == b""
        await client.close()
        await draining


async def test_a_request_under_way_is_finished():
    for acks in (0, 1):
        async with open_lab() as lab:
            big = frames.produce_request(1, acks=acks, record_bytes=BIG_BYTES)
            client = await lab.client()
            await client.send(big[:200_000])
            broker = await lab.broker()
            start = await broker.receive(200_000)
            draining = asyncio.create_task(lab.relay.drain())
            await turns(20)
            sending = asyncio.create_task(client.send(big[200_000:] + frames.metadata_request(2)))
            assert start + await broker.receive(len(big) - 200_000) == big
            await sending
            if acks:
                await broker.send(frames.response(0, 7, 1, b"stored"))
                assert await client.frame() == frames.response(0, 7, 1, b"stored")
            await client.ended()
            await client.close()
            await draining
            assert await broker.ended() == b""


async def test_metadata_that_goes_out_during_a_drain_still_names_the_brokers():
    async with open_lab() as lab:
        client, broker = await lab.pair(frames.metadata_request(1))
        address = lab.relay.listeners[LISTENER].address_of(5)
        draining = asyncio.create_task(lab.relay.drain())
        await turns()
        await broker.send(frames.metadata_response(1, {5: ("real", 9092)}))
        assert frames.metadata_brokers(await client.frame()) == {5: address}
        await client.close()
        await draining


async def test_what_does_not_drain_in_time_is_closed():
    async with open_lab(limits=Limits(drain_timeout_s=0.01)) as lab:
        client, _ = await lab.pair(frames.metadata_request(1))
        await lab.relay.drain()
        assert await client.ended() == b""


async def test_a_client_in_its_tls_handshake(certificates):
    async with open_lab(client_tls=certificates) as lab:
        await lab.silent_client()
        await until(lambda: lab.relay.connected)
        await asyncio.wait_for(lab.relay.drain(), 5)
