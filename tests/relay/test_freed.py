"""A closed pair's memory is freed at once: no reference cycle waits for the garbage collector."""

import gc
from collections import Counter
from collections.abc import Iterator

import pytest
from relaylab import frames
from relaylab.lab import Lab, open_lab, slow_client, turns, until

from proxy.relay.lifecycle import PairPhase
from proxy.wire.apis import METADATA

CLIENTS = ("slow-0", "slow-1")
"""Of the two rounds: a client that owes its quota would not be read from again."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # so that what other tests have left is not looked at each time
    gc.disable()
    yield
    gc.enable()


def objects() -> Counter[str]:
    """Count what there is of the relay's objects, by class."""
    rooms = ("proxy.relay.", "proxy.cluster.")
    counted = Counter[str]()
    for kind, count in Counter(map(type, gc.get_objects())).items():
        if str(kind.__module__).startswith(rooms):
            counted[kind.__name__] += count
    return counted


async def new(lab: Lab, _: str) -> None:
    await lab.client()


async def dialling(lab: Lab, _: str) -> None:
    lab.services.times_of(METADATA)  # made once, if the request gets so far
    client = await lab.client()
    await client.send(frames.metadata_request(1))
    (connection,) = lab.relay.connections
    await until(lambda: connection.life.state is not PairPhase.NEW)


async def answered(lab: Lab, _: str) -> None:
    client, broker = await lab.pair(frames.metadata_request(1))
    await broker.send(frames.metadata_response(1, {}))
    await client.frame()


async def unanswered(lab: Lab, _: str) -> None:
    await lab.pair(frames.fetch_request(1))


async def held(lab: Lab, client_id: str) -> None:
    _, broker = await lab.pair(frames.fetch_request(1, client_id=client_id))
    await broker.send(frames.fetch_response(1, 10_000))
    await until(lambda: lab.held)


async def response_under_way(lab: Lab, _: str) -> None:
    client, broker = await lab.pair(frames.fetch_request(1))
    await broker.send(frames.fetch_response(1, 16 << 20)[:200_000])
    await client.receive(200_000)


async def refused(lab: Lab, _: str) -> None:
    client = await lab.client()
    await client.send(b"GET / HTTP/1.1\r\n\r\n")
    await client.ended()


STATES = [new, dialling, answered, unanswered, held, response_under_way, refused]


def drain(lab: Lab) -> None:
    for connection in tuple(lab.relay.connections):
        connection.drain()
        connection.close("drained")


async def end(lab: Lab, how: str) -> None:
    """Close every pair, and what the test itself has of it."""
    if how == "the client goes":
        for each in lab.ends:
            each.reset()
    elif how == "it is drained":
        drain(lab)
    await until(lambda: not lab.relay.connections)
    while not lab.accepted.empty():
        lab.accepted.get_nowait()
    for each in lab.ends:
        each.reset()
    lab.ends.clear()
    await turns(20)


@pytest.mark.parametrize("state", [answered, unanswered, held], ids=lambda state: state.__name__)
async def test_a_closed_pair_of_a_client_by_tls_leaves_nothing(no_collector, certificates, state):
    rules = tuple(map(slow_client, CLIENTS))
    async with open_lab(rules=rules, client_tls=certificates) as lab:
        counts = []
        for client_id in CLIENTS:
            await state(lab, client_id)
            await end(lab, "the client goes")
            counts.append(objects())
        assert counts[1] - counts[0] == Counter()


@pytest.mark.parametrize("how", ["the client goes", "it is drained"])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
async def test_a_closed_pair_leaves_nothing(no_collector, state, how):
    rules = tuple(map(slow_client, CLIENTS))
    async with open_lab(rules=rules) as lab:
        counts = []
        lab.services.times_of(METADATA)  # of which the state `dialling` may see nothing
        for client_id in CLIENTS:  # the first time makes what is made once
            await state(lab, client_id)
            await end(lab, how)
            counts.append(objects())
        assert counts[1] - counts[0] == Counter()
