"""The topics of what a client reads and writes: all of it at first, later by samples."""

import asyncio
import random

import pytest
from relaylab import frames
from relaylab.lab import LISTENER, Lab, open_lab, until
from relaylab.topic_frames import BY_ID, BY_NAME, ORDERS_ID, fetch, fetched, produce

from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.rules import Rule
from proxy.relay import clients as clients_module
from proxy.relay.clients import ClientUsage
from proxy.relay.lane import Lane
from proxy.relay.pump import SPLICE_MIN_BYTES
from proxy.wire.apis import PRODUCE

CONSUMER, PRODUCER = QuotaKind.CONSUMER_BYTE_RATE, QuotaKind.PRODUCER_BYTE_RATE
TEST = ClientIdentity(LISTENER, None, "test")
FAR = Rule(client_id="test", bounds={CONSUMER: 1e12, PRODUCER: 1e12})
BY_TOPIC = Rule(topic="orders", bounds={CONSUMER: 1e12, PRODUCER: 1e12})
OBSERVED = Rule(client_id="test", bounds={CONSUMER: 1.0}, enforce=False)
HELD = Rule(client_id="test", bounds={CONSUMER: 1.0})


def usage(lab: Lab) -> ClientUsage:
    return lab.services.clients.usage[TEST]


async def exchange(client, broker, request, response):
    """Return once the client has the response to a request; both are not changed."""
    await client.send(request)
    assert await broker.frame() == request
    sending = asyncio.create_task(broker.send(response))
    assert await client.frame() == response
    await sending


@pytest.mark.parametrize("rules", [(), (FAR,), (BY_TOPIC,)], ids=["none", "far", "by topic"])
@pytest.mark.parametrize("size", [100, 20_000, 3 * SPLICE_MIN_BYTES])
async def test_at_first_all_is_walked_and_exact(rules, size):
    async with open_lab(rules=rules, sample_every=50) as lab:
        client, broker = await lab.pair(frames.metadata_request(0))
        await broker.send(frames.metadata_response(0, {}))
        await client.frame()
        for number in range(1, 6):
            response = fetched(number, {"clicks": 70, "orders": size})
            await exchange(client, broker, fetch(number, "orders", "clicks"), response)
        answer = frames.response(PRODUCE, 9, 9)
        await exchange(client, broker, produce(9, {"a": size, "b": size}), answer)
        read, written = usage(lab).fetched, usage(lab).produced
        await until(lambda: read.sizes == {"orders": 5 * size, "clicks": 350})
        assert written.sizes == {"a": size, "b": size}
        counted = lab.count(
            "bytes_total", listener=LISTENER, user="", client_id="test", api="Fetch"
        )
        assert (read.total_bytes, read.is_sampled) == (counted, False)


async def test_topics_by_id_count_when_their_names_are_known():
    async with open_lab(sample_every=50) as lab:
        client, broker = await lab.pair(fetch(1, ORDERS_ID, version=BY_ID))
        await broker.send(fetched(1, {ORDERS_ID: 500}, version=BY_ID))
        await client.frame()
        await until(lambda: lab.services.topic_names.wanted() == (ORDERS_ID.bytes,))
        lab.services.topic_names.resolved({ORDERS_ID.bytes: "orders"})
        assert usage(lab).fetched.sizes == {"orders": 500}


@pytest.mark.parametrize("lane", [True, False], ids=["lane", "python"])
@pytest.mark.parametrize("rules", [(), (FAR,)], ids=["none", "far"])
async def test_later_one_in_some_is_walked_and_stands_for_the_others(monkeypatch, rules, lane):
    if lane and Lane is None:
        pytest.skip("there was no compiler")
    chance = random.Random(3)
    monkeypatch.setattr(clients_module, "random", chance.random)
    monkeypatch.setattr(clients_module, "WALKED_AT_FIRST", 20)
    async with open_lab(rules=rules, lane=lane, sample_every=4) as lab:
        client, broker = await lab.pair(fetch(0, "a", "b"))
        moved = {"a": 500, "b": 0}
        await broker.send(fetched(0, {"a": 500}))
        await client.frame()
        read, total = usage(lab).fetched, 800
        for number in range(1, total):
            topic, size = "ab"[chance.random() < 0.4], 400 + chance.randrange(200)
            moved[topic] += size
            await exchange(client, broker, fetch(number, "a", "b"), fetched(number, {topic: size}))
        assert (read.is_sampled, read.weight) == (True, 4)
        counted = lab.count(
            "bytes_total", listener=LISTENER, user="", client_id="test", api="Fetch"
        )
        assert read.total_bytes == pytest.approx(counted, rel=0.15)
        share = read.sizes["a"] / sum(read.sizes.values())
        assert share == pytest.approx(moved["a"] / sum(moved.values()), abs=0.08)
        children = dict(lab.services.instruments.bytes_total.counted())
        assert children[LISTENER, "", "test", "Fetch"].requests == total


async def test_a_long_request_to_one_topic_is_not_kept_and_one_to_several_is():
    async with open_lab(sample_every=50) as lab:
        client, broker = await lab.pair(frames.metadata_request(0))
        await broker.send(frames.metadata_response(0, {}))
        await client.frame()
        for number, sizes in enumerate(({"a": 400_000}, {"a": 200_000, "b": 300_000}), start=1):
            request = produce(number, sizes)
            sending = asyncio.create_task(client.send(request))
            assert await broker.frame() == request
            await sending
            await broker.send(frames.response(PRODUCE, 9, number))
            await client.frame()
        sizes = usage(lab).produced.sizes
        assert sizes["a"] == pytest.approx(600_000, abs=20)  # a few bytes behind it are its own
        assert sizes["b"] == 300_000


async def test_holds_seconds_above_and_connections_are_recorded():
    async with open_lab(rules=(HELD,), sample_every=50) as lab:
        client, broker = await lab.pair(fetch(1, "orders"))
        await broker.send(fetched(1, {"orders": 60_000}))
        await until(lambda: usage(lab).held_ms["read"] > 0)
        assert usage(lab).connections == 1
    async with open_lab(rules=(OBSERVED,), sample_every=50) as lab:
        lab.services.quotas.on_would_throttle = lab.services.clients.would_throttle
        client, broker = await lab.pair(fetch(1, "orders"))
        await broker.send(fetched(1, {"orders": 60_000}, version=BY_NAME))
        await client.frame()
        await until(lambda: usage(lab).would_be_s["read"] == 1)
