"""A Produce request is charged as its bytes come, and not by what it announces."""

from struct import pack

import pytest
from parts.interceptors import AllShown
from parts.sensor_views import sensors_in_use
from relaylab import frames
from relaylab.lab import open_lab, turns, until

from metrics.clock import clock_ms
from proxy.quota.entities import QuotaKind
from proxy.quota.rules import QuotaManagerSettings, Rule
from proxy.relay.interceptor import InterceptedRequest
from proxy.relay.services import Limits
from proxy.wire.apis import PRODUCE

PRODUCER = QuotaKind.PRODUCER_BYTE_RATE
BOUND = 100_000
ALLOWANCE_BYTES = 10 * BOUND
"""What a client that was quiet may send at once."""
ANNOUNCED_BYTES = 100_000_000
BODY_BYTES = 1_000_000
LONG_BYTES = 2 * ALLOWANCE_BYTES
CHEATERS = 20
RULE = Rule(client_id="test", bounds={PRODUCER: float(BOUND)})


def begun(acks=1, number=1, record_bytes=ANNOUNCED_BYTES):
    """The first bytes of a request: all that makes it known, and no records."""
    whole_bytes = len(frames.produce_request(number, acks, 0)) + record_bytes
    start = frames.produce_request(number, acks, 0)
    return pack(">i", whole_bytes - 4) + start[4:]


def charged(lab):
    """How many bytes were charged: a new sensor's rate is that of ten seconds."""
    (row,) = sensors_in_use(lab.services.quotas, clock_ms)
    return row.rate * row.window_ms / 1000


def waiting(lab):
    """How many connections wait for their turn."""
    return sum(row.waiting for row in sensors_in_use(lab.services.quotas, clock_ms))


def came(end):
    """How many bytes have come that were not received."""
    return len(end.unread)


@pytest.mark.parametrize("acks", [0, 1])
async def test_who_only_announces_a_request_holds_nobody(acks):
    async with open_lab(rules=(RULE,)) as lab:
        cheater = await lab.client()
        await cheater.send(begun(acks))
        cheated = await lab.broker()
        assert await cheated.receive(len(begun(acks))) == begun(acks)
        client, broker = await lab.pair(frames.produce_request(1, 1))
        await broker.send(frames.response(PRODUCE, 7, 1, b"stored"))
        await client.frame()
        await client.send(frames.produce_request(2, 1, BODY_BYTES // 2))
        await broker.frame()
        await broker.send(frames.response(PRODUCE, 7, 2, b"stored"))
        await client.frame()
        assert charged(lab) < BODY_BYTES


@pytest.mark.parametrize("acks", [0, 1])
async def test_a_producer_that_dies_is_charged_for_what_it_sent(acks):
    async with open_lab(rules=(RULE,)) as lab:
        sent = begun(acks) + bytes(BODY_BYTES // 4)
        client = await lab.client()
        await client.send(sent)
        broker = await lab.broker()
        assert await broker.receive(len(sent)) == sent
        client.reset()
        await broker.ended()
        assert charged(lab) == pytest.approx(len(sent), rel=0.01)
        again, broker = await lab.pair(frames.produce_request(1, 1, BODY_BYTES // 4))
        await broker.send(frames.response(PRODUCE, 7, 1, b"stored"))
        await again.frame()


@pytest.mark.parametrize("acks", [0, 1])
async def test_what_was_announced_at_once_comes_in_turn(acks):
    async with open_lab(rules=(RULE,), read_limit_bytes=2 * BODY_BYTES) as lab:
        clients, brokers = [], []
        for number in range(CHEATERS):
            clients.append(await lab.client())
            await clients[-1].send(begun(acks, number, BODY_BYTES))
            brokers.append(await lab.broker())
        await until(lambda: all(map(came, brokers)))
        for end in clients:
            end.writer.write(bytes(BODY_BYTES))
        await until(
            lambda: waiting(lab) + sum(came(end) > BODY_BYTES for end in brokers) >= CHEATERS
        )
        assert sum(map(came, brokers)) < ALLOWANCE_BYTES + 2 * BODY_BYTES, "of 20 MB"
        lab.services.quotas.update(QuotaManagerSettings())
        for number, end in enumerate(brokers):
            whole = frames.produce_request(number, acks, BODY_BYTES)
            assert await end.receive(len(whole)) == whole


async def waiting_body(lab):
    """Two connections of a client, one of which has to wait in the middle of its request."""
    pairs = []
    for number in (1, 2):
        client = await lab.client()
        await client.send(begun(1, number, LONG_BYTES))
        broker = await lab.broker()
        await until(lambda broker=broker: broker.unread)
        pairs.append((client, broker))
    (_, first), (client, second) = pairs
    await pairs[0][0].send(bytes(LONG_BYTES))
    await until(lambda: came(first) > LONG_BYTES)
    client.writer.write(bytes(LONG_BYTES))
    await until(lambda: waiting(lab))
    assert came(second) < LONG_BYTES
    return client, second


@pytest.mark.parametrize("most", [64, 1], ids=["", "one in flight"])
async def test_a_body_that_waits_goes_on_when_its_client_may_send_again(most):
    limits = Limits(max_in_flight_requests=most)
    async with open_lab(rules=(RULE,), read_limit_bytes=2 * LONG_BYTES, limits=limits) as lab:
        _, broker = await waiting_body(lab)
        lab.services.quotas.update(QuotaManagerSettings())
        whole = frames.produce_request(2, 1, LONG_BYTES)
        assert await broker.receive(len(whole)) == whole


async def test_a_body_that_waits_goes_on_in_a_drain():
    async with open_lab(rules=(RULE,), read_limit_bytes=2 * LONG_BYTES) as lab:
        _, broker = await waiting_body(lab)
        for connection in list(lab.relay.connections):
            connection.drain()
        whole = frames.produce_request(2, 1, LONG_BYTES)
        assert await broker.receive(len(whole)) == whole


async def test_who_leaves_while_its_body_waits_leaves_its_place():
    async with open_lab(rules=(RULE,), read_limit_bytes=2 * LONG_BYTES) as lab:
        await waiting_body(lab)
        for connection in list(lab.relay.connections):
            connection.close("operator")
        (row,) = sensors_in_use(lab.services.quotas, clock_ms)
        assert row.waiting == 0


class Shown(InterceptedRequest):
    """A request that is taken whole, as those of a followed producer are."""


class TakingInterceptor(AllShown):
    def request(self, _head, _frame, _now_ms):
        return Shown()


async def test_a_request_that_is_taken_whole_is_charged_as_it_comes():
    async with open_lab(rules=(RULE,)) as lab:
        lab.services.interceptor = lambda *_: TakingInterceptor()
        whole = frames.produce_request(1, 1, BODY_BYTES)
        client = await lab.client()
        await client.send(whole[: BODY_BYTES // 4])
        broker = await lab.broker()
        await until(lambda: any(sensors_in_use(lab.services.quotas, clock_ms)))
        await turns(50)
        assert charged(lab) == pytest.approx(BODY_BYTES // 4, rel=0.01)
        await client.send(whole[BODY_BYTES // 4 :])
        assert await broker.frame() == whole
        assert charged(lab) == pytest.approx(len(whole), rel=0.01)


async def test_bytes_are_counted_once():
    async with open_lab(rules=(RULE,)) as lab:
        counted = {"listener": "default", "user": "", "client_id": "test", "api": "Produce"}
        asked = frames.produce_request(1, 1, BODY_BYTES // 2)
        client, broker = await lab.pair(asked)
        answer = frames.response(PRODUCE, 7, 1, b"stored")
        await broker.send(answer)
        await client.frame()
        assert lab.count("bytes_total", **counted) == len(asked) + len(answer)
        await client.send(begun(0, 2))
        await broker.receive(len(begun(0, 2)))
        assert lab.count("bytes_total", **counted) == len(asked) + len(answer) + len(begun(0, 2))
