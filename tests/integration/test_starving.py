"""No client starves the others: neither with answers that it does not read, nor with many."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from struct import pack
from threading import Thread

import psutil
import pytest
from support.proxy_process import HOST, ProxyProcess, config, until
from support.raw import RawClient, message
from support.scripted_broker import ScriptedBroker, body

from proxy.relay.memory_pool import MOST_BYTES
from proxy.wire.apis import APIS, FIND_COORDINATOR, METADATA
from proxy.wire.frames import RequestHead

MIB = 1 << 20
GREEDY, PIPELINING, OTHER = "greedy", "pipelining", "other"

CONNECTIONS, LONG_BYTES = 60, 20 * MIB
MOST_MIB = 200
OTHERS_ASK = 100

PIPELINED, MANY_BROKERS = 200, 1000
MOST_CPU_MS = 40
"""Of one round of the event loop, for which all others wait. It is 10 at the most on one that has
nothing else to do; all of the requests together take 100 times as much."""

MEASURED_ROUNDS = """
import asyncio, time, uvloop

run = uvloop.run

async def measured(main):
    loop, last_s = asyncio.get_running_loop(), 0.0

    def go_round():
        nonlocal last_s
        now_s = time.thread_time()
        if now_s - last_s > 0.001:
            with open(ROUNDS, "a") as file:
                print((now_s - last_s) * 1000, file=file)
            now_s = time.thread_time()
        last_s = now_s
        loop.call_soon(go_round)

    go_round()
    return await main

uvloop.run = lambda main: run(measured(main))
"""
"""Writes the computing time of each longer round of the event loop, in milliseconds."""

VERSION = 1  # of Metadata
COORDINATORS_VERSION, GROUPS = 4, 1000
OTHER_ADDRESS = "127.0.0.2"
MOST_KEPT_MIB = 160
"""What is kept of all, of which one address has half, and what one that is rewritten takes."""


def metadata(host: str, port: int, *, brokers: int = 1, topic_bytes: int = 0) -> bytes:
    """Return the body of a Metadata response; topics take 100 bytes each."""
    response = pack(">i", brokers)
    for number in range(brokers):
        response += pack(">ih", number, len(host)) + host.encode() + pack(">ih", port, -1)
    topic = pack(">hh", 0, 91) + b"t" * 91 + pack(">?i", False, 0)
    topics = topic_bytes // len(topic)
    return response + pack(">ii", 0, topics) + topic * topics


def coordinators(size: int) -> bytes:
    """Return the body of a FindCoordinator response of 1,000 groups with long names."""
    key = "g" * (size // GROUPS)
    one = APIS[FIND_COORDINATOR].response.Coordinator(
        key=key, node_id=0, host=HOST, port=1, error_code=0, error_message=None
    )
    return body(FIND_COORDINATOR, COORDINATORS_VERSION, coordinators=[one] * GROUPS)


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    """Greedy clients are told of very many topics, pipelining ones of many brokers."""
    bodies: dict[str | None, bytes] = {}

    def answer(head: RequestHead) -> bytes:
        return bodies.get(head.client_id, bodies[OTHER])

    found = coordinators(LONG_BYTES)
    with ScriptedBroker({METADATA: answer, FIND_COORDINATOR: lambda _: found}) as running:
        host, port = running.host, running.port
        bodies[OTHER] = metadata(host, port)
        bodies[GREEDY] = metadata(host, port, topic_bytes=LONG_BYTES)
        bodies[PIPELINING] = metadata(host, port, brokers=MANY_BROKERS)
        yield running


@pytest.fixture
def start(broker: ScriptedBroker, tmp_path: Path) -> Iterator[Callable[..., ProxyProcess]]:
    """Start a proxy, after what its Python is to execute first."""
    with ExitStack() as stack:

        def begin(changes: str = "") -> ProxyProcess:
            running = ProxyProcess(
                config(broker.bootstrap), tmp_path / "proxy", anew=not changes, changes=changes
            )
            stack.callback(running.kill)
            running.start()
            stack.callback(running.stop)
            return running

        yield begin


def read_all(client: RawClient, count: int) -> None:
    for _ in range(count):
        client.receive_frame()


def ask(client: RawClient) -> None:
    assert client.ask(message(METADATA, VERSION, topics=[])).brokers


def test_answers_that_are_not_read_are_not_kept(
    broker: ScriptedBroker, start: Callable[..., ProxyProcess]
) -> None:
    proxy = start()
    process = psutil.Process(proxy.pid)
    peak = 0
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            client = stack.enter_context(RawClient(proxy.bootstrap, GREEDY))
            client.send(message(METADATA, VERSION, topics=[]))
        until(lambda: broker.asked[GREEDY, METADATA] == CONNECTIONS, "all have asked")
        until(lambda: broker.sent_bytes[GREEDY], "answers come")
        sent = 0
        while sent < broker.sent_bytes[GREEDY]:
            sent = broker.sent_bytes[GREEDY]
            for _ in range(OTHERS_ASK):
                with RawClient(proxy.bootstrap, OTHER) as other:
                    ask(other)
                peak = max(peak, process.memory_info().rss)
    assert peak < MOST_MIB * MIB, f"{peak / MIB:.0f} MiB"


@pytest.mark.slow
def test_answers_that_must_be_kept_whole_have_their_bound(
    broker: ScriptedBroker, start: Callable[..., ProxyProcess]
) -> None:
    """Coordinators stand all over the response; half a minute long nobody reads them."""
    running = start()
    process = psutil.Process(running.pid)
    before = process.memory_info().rss
    request = message(FIND_COORDINATOR, COORDINATORS_VERSION, key_type=0, coordinator_keys=["g"])
    peak = 0
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            client = stack.enter_context(RawClient(running.bootstrap, GREEDY))
            client.send(request)
        until(lambda: broker.asked[GREEDY, FIND_COORDINATOR] == CONNECTIONS, "all have asked")
        until(lambda: running.metrics().value("kept_bytes_waiting"), "some wait for room")
        with RawClient(running.bootstrap, OTHER, source=OTHER_ADDRESS) as other:
            assert other.ask(request).coordinators

        def closed() -> float:
            nonlocal peak
            with RawClient(running.bootstrap, OTHER) as other:
                ask(other)
            peak = max(peak, process.memory_info().rss)
            name, reason = "connections_rejected_total", "client_not_reading"
            return running.metrics().value(name, reason=reason)

        until(closed, "one that does not read is closed")
        assert running.metrics().value("kept_bytes") <= MOST_BYTES
    (warning,) = running.log("no room for frames that are kept whole, connections wait")
    assert warning["largest"]["client_id"] == GREEDY
    grown = (peak - before) / MIB
    assert grown < MOST_KEPT_MIB, f"{grown:.0f} MiB"
    until(lambda: not running.metrics().value("kept_bytes"), "all is free")


def test_many_requests_at_once_do_not_keep_others_waiting(
    start: Callable[..., ProxyProcess], tmp_path: Path
) -> None:
    rounds = tmp_path / "rounds"
    running = start(f"ROUNDS = {str(rounds)!r}\n{MEASURED_ROUNDS}")
    with (
        RawClient(running.bootstrap, PIPELINING) as client,
        RawClient(running.bootstrap, OTHER) as other,
    ):
        ask(client)
        ask(other)
        rounds.write_text("")
        request = message(METADATA, VERSION, topics=[])
        client.send(*(request for _ in range(PIPELINED)))
        reading = Thread(target=read_all, args=(client, PIPELINED))
        reading.start()
        while reading.is_alive():
            ask(other)
        reading.join()
    took_ms = sorted(float(line) for line in rounds.read_text().split())
    assert took_ms[-1] < MOST_CPU_MS
