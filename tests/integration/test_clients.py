"""Clients read and write through the proxy as they would without it, and never go round it."""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from support.clients import CLIENTS, Access, Client, Record
from support.proxy_process import ProxyProcess

from examples.devkit.broker import EmbeddedBroker

PARTITIONS = 6
SIZES_BYTES = (0, 1, 100, 4_000, 60_000, 70_000, 300_000, 900_000)
TOPIC_CONFIG = {"max.message.bytes": str(4 << 20)}


def mixed(seed: int, rounds: int = 3) -> list[Record]:
    """Records of all sizes, in random order, on all partitions; their data can't be guessed."""
    random = Random(seed)
    sizes = [size for size in SIZES_BYTES for _ in range(rounds)] + [200] * 300
    random.shuffle(sizes)
    return [(random.randrange(PARTITIONS), random.randbytes(size)) for size in sizes]


def by_partition(records: list[Record]) -> dict[int, list[bytes]]:
    values = defaultdict(list)
    for partition, value in records:
        values[partition].append(value)
    return values


@pytest.mark.parametrize("compression", [None, "lz4"], ids=["plain", "lz4"])
def test_what_is_written_is_read(
    kafka: EmbeddedBroker,
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    data_path: tuple[str, ...],
    compression: str | None,
) -> None:
    """Each client writes a topic and reads what another one wrote, all at the same time."""
    running = proxy(*data_path)
    topics = [topic(PARTITIONS, TOPIC_CONFIG) for _ in CLIENTS]
    written = [mixed(seed) for seed in range(len(CLIENTS))]

    def write(client: Client, name: str, records: list[Record]) -> None:
        access = Access(running.bootstrap, f"writer-{client.name}")
        client.produce(access, name, records, compression=compression)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, CLIENTS, topics, written))
        others = (*CLIENTS[1:], CLIENTS[0])
        reads = list(
            pool.map(
                lambda client, name, records: client.consume(
                    Access(running.bootstrap, f"reader-{client.name}"), name, len(records)
                ),
                others,
                topics,
                written,
            )
        )

    metrics = running.metrics()
    for client, read, records in zip(others, reads, written, strict=True):
        assert read.values == by_partition(records), client.name
        assert read.assignments == 1, client.name
        assert read.brokers, client.name
        assert kafka.bootstrap not in read.brokers, f"{client.name} goes round the proxy"
        if compression is None:
            fetched = metrics.value("bytes_total", client_id=f"reader-{client.name}", api="Fetch")
            assert fetched > read.value_bytes, client.name
    assert metrics.value("connections_rejected_total") == 0
    assert metrics.value("upstream_errors_total") == 0
