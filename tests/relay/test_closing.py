"""Whatever ends a connection, in whatever state: both sides are closed and nothing is left.

That nothing is left is checked at the end of every lab: sockets, pipes, delay queues, counts.
"""

import asyncio
from struct import pack

import pytest
from parts.interceptors import AllShown
from relaylab import frames
from relaylab.lab import Lab, open_lab, slow_client, turns, until

from proxy.quota.entities import QuotaKind
from proxy.relay.interceptor import InterceptedRequest
from proxy.relay.lifecycle import PairPhase
from proxy.relay.services import Limits
from proxy.wire.apis import FETCH, FIND_COORDINATOR
from proxy.wire.fetch_response import FetchObserver

BIG_BYTES = 16 << 20


async def new(lab: Lab):
    return await lab.client(), None


async def half_a_head(lab: Lab):
    client = await lab.client()
    await client.send(frames.metadata_request(1)[:7], b"")
    return client, None


async def dialling(lab: Lab):
    client = await lab.client()
    await client.send(frames.metadata_request(1))
    (connection,) = lab.relay.connections
    await until(lambda: connection.life.state is not PairPhase.NEW)
    return client, None


async def answered(lab: Lab):
    client, broker = await lab.pair(frames.metadata_request(1))
    await broker.send(frames.metadata_response(1, {}))
    await client.frame()
    return client, broker


async def unanswered(lab: Lab):
    return await lab.pair(frames.metadata_request(1))


async def held(lab: Lab):
    client, broker = await lab.pair(frames.fetch_request(1, client_id="slow"))
    await broker.send(frames.fetch_response(1, 10_000))
    await until(lambda: lab.held)
    return client, broker


async def held_with_more_asked(lab: Lab):
    client, broker = await held(lab)
    await client.send(frames.metadata_request(2))
    await broker.frame()
    return client, broker


async def waiting(lab: Lab):
    """Its client owes what another connection was answered, so its Fetch is not sent on."""
    before, _ = await held(lab)
    before.reset()
    await until(lambda: not lab.relay.connected)
    client, broker = await lab.pair(frames.request(frames.LIST_OFFSETS, 1, 1, client_id="slow"))
    await broker.send(frames.response(frames.LIST_OFFSETS, 1, 1))
    await client.frame()
    await client.send(frames.fetch_request(2, client_id="slow"))
    await until(lambda: lab.held)
    return client, broker


async def full(lab: Lab):
    client, broker = await unanswered(lab)
    for number in range(2, 5):
        await client.send(frames.metadata_request(number))
        await broker.frame()
    return client, broker


async def request_under_way(lab: Lab):
    big = frames.produce_request(1, acks=1, record_bytes=BIG_BYTES)
    client = await lab.client()
    await client.send(big[:200_000])
    broker = await lab.broker()
    assert await broker.receive(200_000) == big[:200_000]
    return client, broker


async def response_under_way(lab: Lab):
    client, broker = await lab.pair(frames.fetch_request(1))
    await broker.send(frames.fetch_response(1, BIG_BYTES)[:200_000])
    await client.receive(200_000)
    return client, broker


class WalkedFetch(InterceptedRequest):
    takes_whole = False

    def observer(self, _now_ms):
        return FetchObserver()


class WalkingInterceptor(AllShown):
    """Has the response to each Fetch walked."""

    def wants(self, api_key, _now_ms):
        return api_key == FETCH

    def request(self, _head, _frame, _now_ms):
        return WalkedFetch()


async def walk_under_way(lab: Lab):
    lab.services.interceptor = lambda *_: WalkingInterceptor()
    client, broker = await lab.pair(frames.fetch_request(1, version=15))
    await broker.send(frames.fetch_partitions(1, [bytes(300_000)])[:200_000])
    await client.receive(200_000)
    return client, broker


async def rewriting(lab: Lab):
    client, broker = await lab.pair(frames.metadata_request(1))
    await broker.send(frames.metadata_response(1, {}, 50_000)[:20_000], b"")
    return client, broker


async def client_not_reading(lab: Lab):
    client, broker = await lab.pair(frames.fetch_request(1))
    client.writer.transport.pause_reading()
    broker.writer.write(frames.fetch_response(1, 64 << 20))
    (connection,) = lab.relay.connections
    await until(lambda: connection.responses.sending_blocked)
    return client, broker


async def broker_not_reading(lab: Lab):
    client, broker = await unanswered(lab)
    broker.writer.transport.pause_reading()
    client.writer.write(frames.produce_request(2, acks=1, record_bytes=64 << 20))
    (connection,) = lab.relay.connections
    await until(lambda: connection.requests.sending_blocked)
    return client, broker


STATES = [
    *(new, half_a_head, dialling, answered, unanswered, held, held_with_more_asked, waiting, full),
    *(request_under_way, response_under_way, walk_under_way, rewriting),
    *(client_not_reading, broker_not_reading),
]
WITH_BROKER = [state for state in STATES if state not in (new, half_a_head, dialling)]
PATHS = [pytest.param({}, id="splice"), pytest.param({"splice": False}, id="copy")]


def settings(**more):
    rules = (
        slow_client("slow"),
        slow_client("slow-producer", QuotaKind.PRODUCER_BYTE_RATE),
    )
    return {"rules": rules, "limits": Limits(max_in_flight_requests=4), **more}


def named(state) -> str:
    return state.__name__


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("state", STATES, ids=named)
async def test_the_relay_closes(state, path):
    async with open_lab(**settings(**path)) as lab:
        client, broker = await state(lab)
        await lab.relay.close()
        assert lab.relay.connected == lab.held == 0
        await client.ended()
        if broker is not None:
            await broker.ended()


# What the peer sees of a reset depends on data under way: it is enough that it ends.
@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("state", [s for s in STATES if s is not broker_not_reading], ids=named)
async def test_the_client_goes(state, end):
    async with open_lab(**settings()) as lab:
        client, broker = await state(lab)
        if end == "close":
            client.writer.close()
        else:
            client.reset()
        await until(lambda: not lab.relay.connected)
        assert lab.held == 0
        if broker is not None:
            await broker.ended()


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize(
    ("state", "is_error"),
    [
        (answered, False),
        (unanswered, True),
        (full, True),
        (request_under_way, True),
        (response_under_way, True),
        (walk_under_way, True),
        (rewriting, True),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_the_broker_goes(state, is_error, end):
    async with open_lab(**settings()) as lab:
        client, broker = await state(lab)
        if end == "close":
            broker.writer.close()
        else:
            broker.reset()
        await client.ended()
        await until(lambda: not lab.relay.connected)
        assert lab.upstream_errors("closed") == is_error


async def test_what_the_broker_sent_before_it_closed_arrives_when_its_hold_is_over():
    async with open_lab(**settings()) as lab:
        client, broker = await held(lab)
        broker.writer.close()
        await turns(20)
        lab.services.reapers.release_all()
        assert await client.ended() == frames.fetch_response(1, 10_000)
        await until(lambda: not lab.relay.connected)
        assert lab.upstream_errors("closed") == 0


async def test_an_end_whose_turn_comes_late_finds_the_pair_closed(monkeypatch):
    async with open_lab() as lab:
        _, broker = await lab.pair(frames.metadata_request(1))
        (connection,) = lab.relay.connections
        steps = []
        monkeypatch.setattr(lab.services.paced_steps, "add", lambda step, _: steps.append(step))
        await broker.close()
        await until(lambda: steps)
        steps[0]()  # reads the end
        close = steps[-1]
        connection.close("idle")
        await turns()
        close()
        assert lab.upstream_errors("closed") == 0


async def test_a_muted_client_that_goes_leaves_the_delay_queue_at_once():
    async with open_lab(rules=(slow_client(),), holds=False) as lab:
        client, broker = await lab.pair(frames.fetch_request(1))
        await broker.send(frames.fetch_response(1, 10_000))
        await client.frame()
        assert lab.held == 1
        client.writer.close()
        await until(lambda: not lab.held)
        await broker.ended()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", "http_on_plain_port", id="http"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01", "tls_on_plain_port", id="tls"),
        pytest.param(pack(">i", -1), "negative_length", id="negative"),
        pytest.param(pack(">i", 2), "too_short", id="short"),
        pytest.param(pack(">i", 2**31 - 1), "too_long", id="long"),
        pytest.param(frames.framed(pack(">hhih", 3, 1, 1, 900)), "bad_header", id="client id"),
        pytest.param(frames.request(78, 1, 1), "unsupported_version", id="hidden"),
        pytest.param(frames.request(3, 99, 1), "unsupported_version", id="unreadable"),
        pytest.param(frames.request(0, 7, 1, b"\xff\xff"), "bad_body", id="no acks"),
        pytest.param(
            frames.framed(pack(">hhihx", 0, 9, 1, 0) + b"\xff\xff\xff\x7f" + bytes(100_000)),
            "bad_header",
            id="endless transactional id",
        ),
        pytest.param(frames.request(17, 0, 1, b"\0\5PLAIN"), "unsupported_sasl", id="raw sasl"),
    ],
)
async def test_a_client_that_breaks_the_rules(sent, reason):
    async with open_lab() as lab:
        other, other_broker = await unanswered(lab)
        client = await lab.client()
        client.writer.write(sent)
        await client.ended()
        assert lab.rejected(reason) == 1
        assert lab.relay.connected == 1
        await other_broker.send(frames.metadata_response(1, {}))
        assert await other.frame() == frames.metadata_response(1, {})


async def test_a_truncated_frame():
    async with open_lab() as lab:
        client, _ = await half_a_head(lab)
        client.writer.write_eof()
        await client.ended()
        assert lab.rejected("truncated_frame") == 1


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        pytest.param(
            frames.metadata_request(1), frames.metadata_response(2, {}), id="another correlation id"
        ),
        pytest.param(frames.metadata_request(1), pack(">ii", 2, 1), id="no room for a header"),
        pytest.param(frames.metadata_request(1), pack(">ii", -5, 1), id="negative length"),
        pytest.param(
            frames.request(FIND_COORDINATOR, 0, 1), pack(">ii", 2**31 - 1, 1), id="too large"
        ),
        pytest.param(
            frames.metadata_request(1), frames.response(3, 1, 1, b"\0\0\0\7"), id="cut metadata"
        ),
    ],
)
async def test_a_broker_that_breaks_the_rules(asked, sent):
    async with open_lab() as lab:
        client, broker = await lab.pair(asked)
        await broker.send(sent)
        await client.ended()
        await broker.ended()
        assert lab.upstream_errors("bad_response") == 1


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(frames.framed(pack(">i", 1)), id="empty"),
        pytest.param(frames.framed(pack(">i", 1) + b"\1\0\0" + bytes(50)), id="header tags"),
        pytest.param(
            frames.response(1, 15, 1, bytes(10) + b"\xff\xff\xff\xff\x0f"), id="endless topics"
        ),
    ],
)
async def test_a_broker_that_breaks_the_rules_in_a_fetch_that_is_shown(sent):
    async with open_lab() as lab:
        lab.services.interceptor = lambda *_: WalkingInterceptor()
        client, broker = await lab.pair(frames.fetch_request(1, version=15))
        await broker.send(sent)
        await client.ended()
        await broker.ended()
        assert lab.upstream_errors("bad_response") == 1


async def test_a_response_to_nothing():
    async with open_lab() as lab:
        client, broker = await answered(lab)
        await broker.send(frames.metadata_response(2, {}))
        await client.ended()
        assert lab.upstream_errors("bad_response") == 1


async def test_a_client_that_never_reads_holds_the_broker_back():
    """However much the broker has to send, no more is taken than sockets and a pipe hold."""
    async with open_lab(splice=False) as lab:
        sock = await lab.silent_client()
        loop = asyncio.get_running_loop()
        for number in range(1, 65):
            await loop.sock_sendall(sock, frames.fetch_request(number))
        broker = await lab.broker()
        for number in range(1, 65):
            assert await broker.frame() == frames.fetch_request(number)
            broker.writer.write(frames.fetch_response(number, 1 << 20))
        (connection,) = lab.relay.connections
        await until(lambda: connection.responses.sending_blocked)
        await turns(50)
        assert connection.responses.sending_blocked
        assert broker.writer.transport.get_write_buffer_size() > 32 << 20
        broker.reset()


async def test_limits_of_connections():
    limits = Limits(max_connections=2, max_connections_per_ip=1)
    async with open_lab(limits=limits) as lab:
        first, _ = await lab.pair(frames.metadata_request(1))
        second = await lab.client()
        assert await second.ended() == b""
        assert lab.rejected("too_many_connections_per_ip") == 1
        await first.close()
        await until(lambda: not lab.relay.connected)
        third, broker = await lab.pair(frames.metadata_request(1))
        await broker.send(frames.metadata_response(1, {}))
        await third.frame()


async def test_no_tls_handshake(certificates):
    async with open_lab(client_tls=certificates) as lab:
        plain = await lab.silent_client()
        await asyncio.get_running_loop().sock_sendall(plain, b"GET / HTTP/1.1\r\n\r\n")
        await until(lambda: lab.rejected("tls_handshake"))
        assert lab.relay.connected == 0


async def test_the_relay_closes_during_a_tls_handshake(certificates):
    async with open_lab(client_tls=certificates) as lab:
        await lab.silent_client()
        await until(lambda: lab.relay.connected)
        await lab.relay.close()
        assert lab.relay.connected == 0
