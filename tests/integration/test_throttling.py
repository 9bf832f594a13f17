"""Real clients are held to their rate, notice nothing but time, and do not wait twice."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from time import monotonic

import pytest
from support.clients import CLIENTS, Access, Client, Read
from support.proxy_process import ProxyProcess

MODES = ("delay", "mute")

BOUND_BYTES = 1_000_000
BURST_S = 1.1
"""What a sensor that looks back on 11 samples of 100 ms lets pass before it holds anything."""

RECORD_BYTES = 10_000
COUNT = 900
"""Nine times what passes in a second."""

FRAMES = 1.05
"""What is sent for a byte of records of RECORD_BYTES."""


def check_bound(sent_bytes: int, elapsed_s: float, largest_bytes: int, who: str) -> None:
    allowed = BOUND_BYTES * (elapsed_s + BURST_S) + largest_bytes
    assert sent_bytes <= allowed, f"{who}: {sent_bytes} bytes in {elapsed_s:.1f} s"


@pytest.mark.slow
def test_consumers_get_their_rate(
    proxy: Callable[..., ProxyProcess], topic: Callable[..., str], fill: Callable[..., None]
) -> None:
    """All read side by side, half of them by way of a proxy that delays, half of one that mutes."""
    rules = [{"client-id": "<default>", "consumer_byte_rate": BOUND_BYTES}]
    by_mode = {mode: proxy(rules=rules, throttle={"mode": mode}) for mode in MODES}
    name = topic(partitions=3)
    fill(name, COUNT, RECORD_BYTES, partitions=3)
    readers = list(product(MODES, CLIENTS))

    def read(mode: str, client: Client) -> Read:
        return client.consume(Access(by_mode[mode].bootstrap, client.name), name, COUNT)

    with ThreadPoolExecutor(len(readers)) as pool:
        reads = list(pool.map(read, *zip(*readers, strict=True)))

    metrics = {mode: running.metrics() for mode, running in by_mode.items()}
    for (mode, client), got in zip(readers, reads, strict=True):
        who = f"{client.name}, {mode}"
        numbers = [int(value[:8]) for values in got.values.values() for value in values]
        assert sorted(numbers) == list(range(COUNT)), f"{who}: each record arrives once"
        assert got.assignments == 1, f"{who}: no rebalance"
        check_bound(got.value_bytes, got.elapsed_s, 3 << 20, who)
        entity = f"client-id={client.name}"
        assert metrics[mode].value("throttled_responses_total", quota_entity=entity) > 0, who
    assert {each.value("delay_queue_size") for each in metrics.values()} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_producers_get_their_rate(
    proxy: Callable[..., ProxyProcess], topic: Callable[..., str], mode: str
) -> None:
    """No more than that, and they are held for no longer than what they send takes at that rate.

    Each client and each `acks` is a client of its own; all write side by side.
    """
    rules = [{"client-id": "<default>", "producer_byte_rate": BOUND_BYTES}]
    running = proxy(rules=rules, throttle={"mode": mode})
    count = COUNT * 2 // 3
    records = [(0, b"%08d" % number + bytes(RECORD_BYTES - 8)) for number in range(count)]
    # When closed, kafka-python abandons what its socket has not taken, acknowledged or not.
    writers = [
        (client, acks, f"{client.name}-{name}")
        for acks, name in ((0, "none"), (1, "leader"), (-1, "all"))
        for client in CLIENTS
        if acks or client.name != "kafka-python"
    ]

    def write(client: Client, acks: int, client_id: str) -> tuple[Read, float]:
        name = topic()
        started = monotonic()
        client.produce(Access(running.bootstrap, client_id), name, records, acks=acks)
        # What is not acknowledged may still be on its way: when it can be read, it is there.
        read = client.consume(Access(running.bootstrap, f"reader-{client_id}"), name, count)
        return read, monotonic() - started

    with ThreadPoolExecutor(len(writers)) as pool:
        written = list(pool.map(write, *zip(*writers, strict=True)))
    metrics = running.metrics()
    for (_, _, client_id), (got, elapsed_s) in zip(writers, written, strict=True):
        numbers = sorted(int(value[:8]) for value in got.values[0])
        assert numbers == list(range(count)), f"{client_id}: each record arrives once"
        check_bound(got.value_bytes, elapsed_s, 2 << 20, client_id)
        counted = metrics.value("bytes_total", client_id=client_id, api="Produce")
        assert counted <= FRAMES * got.value_bytes, f"{client_id}: no byte counts twice"
