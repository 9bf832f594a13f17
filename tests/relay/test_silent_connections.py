"""Whoever opens connections and says nothing keeps nobody out."""

import asyncio
import gc
import weakref
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relaylab import frames
from relaylab.lab import LISTENER, LOCALHOST, open_lab, turns, until

from proxy.relay.connection import FIRST_REQUEST_S
from proxy.relay.listener import ClientOrigin, Listener, ListenerSettings
from proxy.relay.services import Limits
from proxy.relay.silent_connections import SilentConnection, SilentConnections

FULL = Limits(max_connections=3)
SETTINGS = ListenerSettings(LISTENER, LOCALHOST, "proxy", takes_free_ports=False)
PATIENT_S = 600.0


def silent_of(address: str) -> SilentConnection:
    listener = Listener(SETTINGS, None, None, None)
    return SilentConnection(ClientOrigin(listener, address, None), lambda: None, None)


async def served(lab):
    client, broker = await lab.pair(frames.metadata_request(1))
    await broker.send(frames.metadata_response(1, {}))
    await client.frame()
    return client


@pytest.mark.parametrize("limits", [FULL, Limits(max_connections_per_ip=3)])
async def test_the_longest_silent_gives_its_place_to_a_newcomer(limits):
    async with open_lab(limits=limits) as lab:
        silent = [await lab.client() for _ in range(3)]
        await until(lambda: len(lab.relay.connections) == 3)
        first = await served(lab)
        assert await silent[0].ended() == b""
        second = await served(lab)
        assert await silent[1].ended() == b""
        assert lab.rejected("evicted") == 2
        assert (lab.relay.connected, len(lab.relay.silent)) == (3, 1)
        await first.close()
        await second.close()


async def test_what_has_sent_a_request_keeps_its_place():
    async with open_lab(limits=FULL) as lab:
        clients = [await served(lab) for _ in range(3)]
        late = await lab.client()
        assert await late.ended() == b""
        assert (lab.rejected("too_many_connections"), lab.rejected("evicted")) == (1, 0)
        for client in clients:
            await client.send(frames.metadata_request(2))


async def test_a_handshake_that_is_not_done_is_silent(certificates):
    async with open_lab(limits=FULL, client_tls=certificates) as lab:
        silent = [await lab.silent_client() for _ in range(3)]
        await until(lambda: lab.relay.connected == 3)
        await turns(10)
        await served(lab)
        assert await asyncio.get_running_loop().sock_recv(silent[0], 1) == b""
        assert (lab.rejected("evicted"), lab.rejected("tls_handshake")) == (1, 0)
        assert lab.relay.connected == 3


async def test_one_that_waits_to_be_welcomed_is_silent(monkeypatch):
    async with open_lab(limits=FULL) as lab:
        monkeypatch.setattr("proxy.relay.paced_steps.PacedStepScheduler.has_time", False)
        steps = lab.services.paced_steps
        monkeypatch.setattr(steps, "_begin_round", lambda: None)
        for _ in range(4):
            await lab.silent_client()
        await until(lambda: lab.rejected("evicted") or lab.rejected("too_many_connections"))
        assert lab.rejected("evicted") == 1
        await until(lambda: len(steps) == 4)
        for _ in range(4):
            await lab.silent_client()
        # Those that were evicted are still in the queue, which is bounded.
        await until(lambda: lab.rejected("evicted") + lab.rejected("too_many_connections") == 5)
        assert (len(steps), lab.rejected("evicted")) == (4, 1)
        steps.run_all()
        assert len(lab.relay.connections) == 3


async def test_one_that_was_not_read_from_yet_is_not_silent(monkeypatch):
    async with open_lab(limits=Limits(max_connections=1)) as lab:
        monkeypatch.setattr("proxy.relay.paced_steps.PacedStepScheduler.has_time", False)
        steps = lab.services.paced_steps
        monkeypatch.setattr(steps, "_begin_round", lambda: None)
        first = await lab.silent_client()
        await asyncio.get_running_loop().sock_sendall(first, frames.metadata_request(1))
        await until(lambda: lab.relay.connected)
        await lab.silent_client()
        await until(lambda: lab.rejected("too_many_connections"))
        assert lab.rejected("evicted") == 0
        monkeypatch.undo()
        steps.run_all()
        assert await (await lab.broker()).frame() == frames.metadata_request(1)


async def test_the_first_request_must_begin_sooner_than_later_ones():
    async with open_lab() as lab:
        silent, client = await lab.client(), await served(lab)
        await until(lambda: len(lab.relay.connections) == 2)
        now_s = asyncio.get_running_loop().time()
        for late_s, connected in ((FIRST_REQUEST_S - 1.0, 2), (FIRST_REQUEST_S, 1)):
            for connection in tuple(lab.relay.connections):
                connection.check_idle(now_s + late_s, PATIENT_S)
            assert lab.relay.connected == connected
        assert await silent.ended() == b""
        assert lab.rejected("no_request") == 1
        await client.send(frames.metadata_request(2))


async def test_an_evicted_connection_needs_no_garbage_collector():
    async with open_lab(limits=Limits(max_connections=1)) as lab:
        await lab.client()
        await until(lambda: lab.relay.connections)
        gc.disable()
        try:
            evicted = weakref.ref(next(iter(lab.relay.connections)))
            await lab.client()
            await until(lambda: lab.rejected("evicted"))
            await turns(10)
            assert evicted() is None
        finally:
            gc.enable()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("come"), st.sampled_from("abc")),
            st.tuples(st.just("go"), st.integers(0, 20)),
            st.just(("evict", None)),
        )
    )
)
def test_the_address_with_most_comes_first(steps):
    silent_connections, model = SilentConnections(), []
    for what, which in steps:
        if what == "come":
            model.append(silent_of(which))
            silent_connections.add(model[-1])
        elif what == "go" and which < len(model):
            assert silent_connections.discard(gone := model.pop(which))
            assert not silent_connections.discard(gone)
        elif what == "evict":
            counts = Counter(each.origin.ip for each in model)
            longest = silent_connections.longest()
            assert (longest is None) is (not model)
            if longest is not None:
                address = longest.origin.ip
                assert counts[address] == max(counts.values())
                assert longest is next(each for each in model if each.origin.ip == address)
                assert longest is silent_connections.longest(address)
                model.remove(longest)
                silent_connections.discard(longest)
        assert len(silent_connections) == len(model)
    assert silent_connections.longest("d") is None
