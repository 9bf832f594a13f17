"""What a client meets that has too many connections, or opens them too fast, on real sockets."""

from struct import pack

import pytest
from relaylab.frames import fetch_request, fetch_response, request, response
from relaylab.lab import Lab, open_lab, until

from metrics.clock import clock_ms
from proxy.quota.entities import CONNECTION_RATE, DEFAULT, MAX_CONNECTIONS
from proxy.quota.rules import QuotaManagerSettings, Rule
from proxy.relay.services import Limits
from proxy.wire.apis import API_VERSIONS, SASL_AUTHENTICATE, SASL_HANDSHAKE

REASON = "too_many_connections_of_client"
STRANGER = "127.0.0.2"
RATE = 4
"""Connections per second."""

WAIT_MS = 1000.0 / RATE * 0.9
"""For how long each waits after the one before, once so many have come; less what those took."""


def most(bound: int, **keys: str) -> Rule:
    return Rule(bounds={MAX_CONNECTIONS: bound}, **(keys or {"client_id": "test"}))


def paced(per_second: float, **keys: str) -> Rule:
    return Rule(bounds={CONNECTION_RATE: per_second}, **(keys or {"client_id": "test"}))


def text(value: str) -> bytes:
    return pack(">h", len(value)) + value.encode()


async def log_in(lab: Lab, user: str):
    """A connection on which a user has logged in by PLAIN, and the broker's end of it."""
    client, broker = await lab.pair(request(API_VERSIONS, 0, 1))
    for number, (api, body, reply) in enumerate(
        (
            (SASL_HANDSHAKE, text("PLAIN"), pack(">hi", 0, 1) + text("PLAIN")),
            (
                SASL_AUTHENTICATE,
                pack(">i", len(user) + 3) + f"\0{user}\0x".encode(),
                pack(">hhi", 0, -1, 0),
            ),
        ),
        2,
    ):
        version = 1 if api == SASL_HANDSHAKE else 0
        if number == 2:
            await broker.send(response(API_VERSIONS, 0, 1, pack(">hi", 0, 0)))
            await client.frame()
        await client.send(request(api, version, number, body))
        await broker.frame()
        await broker.send(response(api, version, number, reply))
        await client.frame()
    return client, broker


async def test_one_too_many_is_closed_before_the_broker_sees_it():
    async with open_lab(rules=(most(2),)) as lab:
        pairs = [await lab.pair(fetch_request(1)) for _ in range(2)]
        third = await lab.client()
        await third.send(fetch_request(1))
        assert await third.ended() == b""
        assert lab.rejected(REASON) == 1
        assert lab.accepted.empty()
        await lab.pair(fetch_request(1, client_id="other"))
        client, broker = pairs[0]
        await client.close()
        await broker.ended()
        client, broker = await lab.pair(fetch_request(1))
        answer = fetch_response(1, 1000)
        await broker.send(answer)
        assert await client.frame() == answer
        assert lab.rejected(REASON) == 1
    assert lab.services.connection_quotas.counts == {}


async def test_an_idle_one_gives_way_to_an_address_with_fewer(monkeypatch: pytest.MonkeyPatch):
    # Below 0, as the loop's time is that of its round, behind the lane's.
    monkeypatch.setattr("proxy.relay.connection.GIVE_WAY_S", -1.0)
    async with open_lab(rules=(most(4),)) as lab:
        strangers = [await lab.pair(fetch_request(1), STRANGER) for _ in range(4)]
        own = await lab.client()
        await own.send(fetch_request(1))
        assert await own.ended() == b"", "all of the stranger's are busy"
        for client, broker in strangers[1:]:
            await broker.send(fetch_response(1, 10))
            await client.frame()
        ours = [await lab.pair(fetch_request(1)) for _ in range(2)]
        for client, broker in strangers[1:3]:
            assert await client.ended() == await broker.ended() == b""
        # Two of each address now: nobody gives way.
        for address in (None, STRANGER):
            late = await lab.client(address=address)
            await late.send(fetch_request(1))
            assert await late.ended() == b""
        assert lab.services.connection_quotas.counts == {"client-id=test": 4}
        assert lab.rejected(REASON) == 5
        for client, broker in (*ours, strangers[0]):
            await broker.send(fetch_response(1, 10))
            assert await client.frame() == fetch_response(1, 10)
    assert lab.services.connection_quotas.counts == {}


async def test_one_that_was_used_lately_does_not_give_way():
    async with open_lab(rules=(most(2),)) as lab:
        for _ in range(2):
            client, broker = await lab.pair(fetch_request(1), STRANGER)
            await broker.send(fetch_response(1, 10))
            await client.frame()
        own = await lab.client()
        await own.send(fetch_request(1))
        assert await own.ended() == b""
        assert lab.rejected(REASON) == 1


async def test_a_user_is_counted_once_the_login_has_shown_it():
    rules = (most(1, user="alice"), most(1, client_id=DEFAULT))
    async with open_lab(rules=rules) as lab:
        clients = [(await log_in(lab, user))[0] for user in ("alice", "alice", "bob")]
        assert lab.services.connection_quotas.counts == {}
        for client in clients:
            await client.send(fetch_request(9))
        assert await clients[1].ended() == b""
        await until(lambda: len(lab.services.connection_quotas.counts) == 2)
        counts = {"user=alice": 1, "client-id=test": 1}
        assert lab.services.connection_quotas.counts == counts
        assert lab.rejected(REASON) == 1
    assert lab.services.connection_quotas.counts == {}


async def test_one_too_soon_waits_and_is_served_then():
    async with open_lab(rules=(paced(RATE),)) as lab:
        began_ms, clients = clock_ms(), []
        while not lab.held:  # on a machine that stands still amid these, more come at once
            clients.append(await lab.client())
            await clients[-1].send(fetch_request(1))
            await until(lambda: lab.held or lab.accepted.qsize() == len(clients))
        (row,) = (row for row in lab.relay.list.rows() if row.hold is not None)
        assert (row.hold.where, row.hold.kind, row.state, row.client_id) == (
            "connection_rate",
            CONNECTION_RATE,
            "dialling",
            "test",
        )
        assert row.hold.rule is lab.services.quotas.table.rules[0]
        brokers = [await lab.broker() for _ in clients]
        assert len(clients) > RATE
        assert clock_ms() - began_ms >= (len(clients) - RATE) * WAIT_MS
        assert [await broker.frame() for broker in brokers] == [fetch_request(1)] * len(clients)
        assert not lab.held


async def test_one_that_waits_gains_by_a_higher_rate():
    async with open_lab(rules=(paced(0.1),)) as lab:
        first = await lab.pair(fetch_request(1))
        late = [await lab.client() for _ in range(2)]
        for client in late:
            await client.send(fetch_request(1))
        await until(lambda: lab.held == len(late))
        began_ms = clock_ms()
        lab.services.quotas.update(QuotaManagerSettings(rules=(paced(0.5),)))
        brokers = [await lab.broker() for _ in late]
        assert 1900 < clock_ms() - began_ms < 9000
        assert [await broker.frame() for broker in brokers] == [fetch_request(1)] * 2
        assert first


async def test_a_user_who_comes_too_soon_waits_behind_the_login():
    async with open_lab(rules=(paced(RATE, user="alice"),)) as lab:
        ends = [await log_in(lab, "alice") for _ in range(2 * RATE)]
        for client, _ in ends:
            await client.send(fetch_request(9))
        await until(lambda: lab.held)
        _, last = ends[-1]
        assert last.unread == b""
        for _, broker in ends:
            assert await broker.frame() == fetch_request(9)


@pytest.mark.parametrize("how", ["client", "drain", "operator"])
async def test_one_that_ends_while_it_waits_leaves_nothing(how):
    async with open_lab(rules=(paced(0.1),), limits=Limits(drain_timeout_s=0.2)) as lab:
        pair = await lab.pair(fetch_request(1))
        late = await lab.client()
        await late.send(fetch_request(1))
        await until(lambda: lab.held)
        if how == "client":
            await late.close()
        elif how == "operator":
            (row,) = (row for row in lab.relay.list.rows() if row.hold is not None)
            lab.relay.list.close(row.number)
            assert await late.ended() == b""
        else:
            await lab.relay.drain()
        await until(lambda: not lab.held)
        assert lab.accepted.empty()
        assert pair


async def test_more_that_wait_than_may_are_closed():
    async with open_lab(rules=(paced(0.01),)) as lab:
        await lab.pair(fetch_request(1))
        late = await lab.client()
        await late.send(fetch_request(1))
        assert await late.ended() == b""
        assert lab.rejected("connection_rate") == 1
