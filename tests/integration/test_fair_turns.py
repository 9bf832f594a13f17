"""Clients that share a bound: one with many connections does not make the others wait."""

import itertools
import time
from collections.abc import Callable
from threading import Thread

import pytest
from support.proxy_process import HOST, ProxyProcess, until
from support.raw import RawClient, fetch, produce

from bench.greedy import Run, Seat, ask
from examples.devkit.broker import EmbeddedBroker

BOUND_BYTES = 250_000
BATCH_BYTES = 16_000
CONNECTIONS = 60
"""A turn for each of them is almost four seconds of the bound."""
ASKED = 8
LONGEST_S = 120.0


@pytest.mark.parametrize("mode", ["delay", "mute"])
def test_a_client_beside_one_with_many_connections_is_answered_soon(
    kafka: EmbeddedBroker,
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    mode: str,
) -> None:
    """While it waits the others get less than a second of the bound, once it was there before."""
    name = topic()
    with RawClient(kafka.bootstrap) as writer:
        writer.ask(produce(7, name, bytes(BATCH_BYTES)))
    rule = {"client-id": "<default>", "scope": "shared", "consumer_byte_rate": BOUND_BYTES}
    running = proxy(rules=[rule], throttle={"mode": mode}, limits={"drain_timeout": "1s"})
    run = Run(time.monotonic() + LONGEST_S, most_bytes=BOUND_BYTES * int(LONGEST_S))
    seat = Seat((HOST, running.port), HOST, "greedy", name)
    with RawClient(running.bootstrap, "greedy") as client:
        request = client.encode(fetch(12, name, max_bytes=BATCH_BYTES))
    work = (run, seat, itertools.repeat(request))
    greedy = Thread(target=ask, args=work, kwargs={"connections": CONNECTIONS})
    greedy.start()
    try:
        until(
            lambda: run.got_bytes > CONNECTIONS * BATCH_BYTES + 2 * BOUND_BYTES,
            "it is held to the bound",
        )
        beside = []
        with RawClient(running.bootstrap, "modest") as modest:
            for _ in range(ASKED):
                before = run.got_bytes
                answer = modest.ask(fetch(12, name, max_bytes=BATCH_BYTES))
                assert answer.responses[0].partitions[0].records
                beside.append(run.got_bytes - before)
    finally:
        run.end_s = 0.0
        greedy.join()
    assert max(beside[1:]) < BOUND_BYTES, beside
