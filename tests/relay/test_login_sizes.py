"""What a login may take before anybody knows who sends it."""

from struct import pack

import pytest
from relaylab import frames
from relaylab.busy_round import BusyRound
from relaylab.lab import LOCALHOST, open_lab, turns, until

from metrics.clock import clock_ms
from proxy.relay.paced_steps import BURST_MS, SHARE, LoginCpuLimit
from proxy.wire.apis import SASL_AUTHENTICATE, SASL_HANDSHAKE
from proxy.wire.sasl import MAX_BEARER_BYTES, MAX_READ_BYTES, MAX_UNREAD_BYTES

NEVER_MS, SOON_MS = 600_000.0, 50.0


def authenticate(correlation_id: int, auth_bytes: bytes) -> bytes:
    body = pack(">i", len(auth_bytes)) + auth_bytes
    return frames.request(SASL_AUTHENTICATE, 1, correlation_id, body)


async def shaken_hands(lab, mechanism: str):
    """Give a client whose handshake the broker has answered, and the broker."""
    name = mechanism.encode()
    client, broker = await lab.pair(
        frames.request(SASL_HANDSHAKE, 1, 1, pack(">h", len(name)) + name)
    )
    answer = frames.response(SASL_HANDSHAKE, 1, 1, pack(">hi", 0, 0))
    await broker.send(answer)
    assert await client.frame() == answer
    return client, broker


@pytest.mark.parametrize(
    ("mechanism", "most"),
    [
        ("PLAIN", MAX_READ_BYTES),
        ("SCRAM-SHA-512", MAX_READ_BYTES),
        ("OAUTHBEARER", MAX_BEARER_BYTES),
        ("GSSAPI", MAX_UNREAD_BYTES),
    ],
)
async def test_a_login_that_is_too_long_is_closed_by_its_first_bytes(mechanism, most):
    async with open_lab() as lab:
        client, broker = await shaken_hands(lab, mechanism)
        await client.send(authenticate(2, bytes(most))[:100])
        assert await client.ended() == b""
        assert await broker.ended() == b""
        assert lab.rejected("too_long") == 1


async def test_the_longest_token_that_is_not_read_passes():
    login = authenticate(2, bytes(MAX_UNREAD_BYTES - 100))
    async with open_lab() as lab:
        client, broker = await shaken_hands(lab, "GSSAPI")
        await client.send(login)
        assert await broker.frame() == login


@pytest.mark.parametrize("goes", [False, True])
async def test_logins_are_read_in_turn(monkeypatch, goes):
    # A connection is new for one request: nothing but the login waits for its turn.
    monkeypatch.setattr("proxy.relay.frame_flow.TURNS_OF_NEW", 1)
    first, following = authenticate(2, b"\0alice\0secret"), frames.metadata_request(3)
    async with open_lab() as lab:
        busy = BusyRound(lab)
        client, broker = await shaken_hands(lab, "PLAIN")
        await turns()
        busy.begin()
        await client.send(first + following)
        await until(lambda: len(busy.steps))
        await turns(10)
        assert broker.unread == b""
        if goes:
            (connection,) = lab.relay.connections
            connection.close("gone")
            busy.end()
            assert await broker.ended() == b""
            return
        busy.end()
        assert await broker.frame() == first
        await broker.send(frames.response(SASL_AUTHENTICATE, 1, 2, pack(">hhiq", 0, -1, 0, 0)))
        await client.frame()
        assert await broker.frame() == following


async def test_a_login_of_no_certain_user_is_refused_in_its_turn():
    async with open_lab() as lab:
        client, broker = await shaken_hands(lab, "PLAIN")
        await client.send(authenticate(2, b"\0alice\0") + frames.metadata_request(3))
        assert await client.ended() == b""
        assert await broker.ended() == b""
        assert lab.rejected("bad_body") == 1


@pytest.mark.parametrize("goes", [False, True])
async def test_logins_of_an_address_that_took_much_wait(monkeypatch, goes):
    login = authenticate(2, b"\0alice\0secret")
    async with open_lab() as lab:
        monkeypatch.setattr("proxy.relay.paced_steps.BURST_MS", 0.0)
        client, broker = await shaken_hands(lab, "PLAIN")
        pace, (connection,) = lab.services.login_pace, lab.relay.connections
        owed_ms = NEVER_MS if goes else SOON_MS
        pace.took(LOCALHOST, owed_ms * SHARE, clock_ms())
        began_ms = clock_ms()
        await client.send(login)
        if goes:
            await until(lambda: connection.in_flight)
            await client.close()
            connection.close("gone")
            assert await broker.ended() == b""
            return
        assert await broker.frame() == login
        assert clock_ms() - began_ms >= SOON_MS / 2
        pace.sweep(clock_ms() + NEVER_MS)
        assert pace.wait_ms(LOCALHOST, clock_ms()) == 0


def test_each_address_pays_for_its_own_logins(monkeypatch):
    monkeypatch.setattr("proxy.relay.paced_steps.MAX_ADDRESSES", 2)
    pace = LoginCpuLimit()
    for _ in range(100):
        pace.took("a", BURST_MS / 50, 0.0)
    pace.took("b", BURST_MS, 0.0)
    pace.took("c", 2 * BURST_MS, 0.0)  # there is no room for a third
    assert pace.wait_ms("a", 0.0) == pytest.approx(BURST_MS / SHARE)
    assert pace.wait_ms("b", 0.0) == pace.wait_ms("c", 0.0) == 0
    pace.sweep(BURST_MS / SHARE)
    assert pace.wait_ms("a", BURST_MS / SHARE) == 0
    pace.took("c", 2 * BURST_MS, BURST_MS / SHARE)
    assert pace.wait_ms("c", BURST_MS / SHARE) == pytest.approx(BURST_MS / SHARE)
