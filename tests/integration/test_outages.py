"""No batch of a bounded query is above its bound because the proxy or the broker was away."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession
from support.proxy_process import HOST, WAIT_S, ProxyProcess, until
from support.streams import Stream

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.loopback import free_ports
from proxy.spark import QuotaListener

pytestmark = pytest.mark.slow

RATE = 400
TRIGGER_S = 1
BOUND = RATE * TRIGGER_S
BACKLOG = 8 * BOUND
"""Of each of two partitions: a batch that is not bounded has most of both."""
RECORD_BYTES = 100
AWAY_S = 1
LATER_BATCHES = 3


@pytest.fixture
def lasting(proxy: Callable[..., ProxyProcess], tmp_path: Path) -> Callable[..., ProxyProcess]:
    """`lasting(client_id, bootstrap_servers="")` starts a proxy that comes back at its address and
    with its state, and bounds each batch of that client.
    """

    def start(client_id: str, bootstrap_servers: str = "") -> ProxyProcess:
        port, first, last, admin_port = free_ports(4)
        adaptive = {"batch_interval": f"{TRIGGER_S}s", "min_rate": RATE, "max_rate": RATE}
        rule = {"client-id": client_id, "consumer_byte_rate": "1GB", "adaptive": adaptive}
        bind = {"bind": f"{HOST}:{port}", "broker_ports": f"{first}-{last}"}
        return proxy(
            bootstrap_servers=bootstrap_servers,
            rules=[rule],
            listeners=[bind],
            admin_port=admin_port,
            state={"kind": "sqlite", "path": str(tmp_path / f"{client_id}.db")},
        )

    return start


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A broker that the test may kill."""
    with EmbeddedBroker(tmp_path / "own-broker") as broker:
        yield broker


def read_bounded(query: Stream) -> None:
    """Start a query that the proxy does not know, and return amid its backlog when its batches are
    bounded.
    """
    query.start(f"{TRIGGER_S} second")
    for _ in range(3):
        batches = query.known()["run_batches"]
        query.feed(10, RECORD_BYTES)
        query.until(lambda n=batches: query.known()["run_batches"] > n, "a batch is reported")
    query.feed(BACKLOG, RECORD_BYTES)
    last = max(query.batches)
    query.until(
        lambda: [query.batches[n].rows for n in query.batches if n > last][-2:] == [BOUND, BOUND],
        "bounded batches",
    )


def check_later_batches(query: Stream, last: int) -> None:
    """Require that the batches after number `last` are within the bound, some of them at least."""

    def later() -> list[int]:
        return [rows for number, rows in query.sizes().items() if number > last]

    query.until(
        lambda: len(later()) >= LATER_BATCHES or max(later(), default=0) > BOUND, "more batches"
    )
    query.stop()
    assert max(later()) <= BOUND, later()
    for partition, offsets in query.offsets().items():
        assert offsets == list(range(len(offsets))), f"lost or doubled in {partition}"


@pytest.mark.usefixtures("no_data_loss")
def test_the_proxy_is_killed_between_two_batches(
    lasting: Callable[..., ProxyProcess],
    listen: Callable[..., QuotaListener],
    stream: Callable[..., Stream],
    topic: Callable[..., str],
) -> None:
    running = lasting("crashed")
    listen(running)
    query = stream(running, "crashed", topic(2))
    read_bounded(query)

    batches = query.known()["run_batches"]
    query.until(lambda: query.known()["run_batches"] > batches, "a batch has been reported")
    last = max(query.batches)
    running.kill()
    time.sleep(AWAY_S)
    running.start()
    check_later_batches(query, last)


@pytest.mark.usefixtures("no_data_loss")
def test_the_broker_is_killed(
    own_broker: EmbeddedBroker,
    lasting: Callable[..., ProxyProcess],
    listen: Callable[..., QuotaListener],
    spark: SparkSession,
    tmp_path: Path,
) -> None:
    running = lasting("brokerless", own_broker.bootstrap)
    listen(running)
    with AdminClient({"bootstrap.servers": own_broker.bootstrap, "log_level": 0}) as admin:
        admin.create_topics([NewTopic("orders", 2, 1)])["orders"].result(WAIT_S)
        until(lambda: len(admin.list_topics("orders").topics["orders"].partitions) == 2, "a topic")
    checkpoint = tmp_path / "checkpoint"
    query = Stream(spark, own_broker.bootstrap, running, "brokerless", "orders", checkpoint)
    try:
        read_bounded(query)
        last = max(query.batches)
        own_broker.kill()
        time.sleep(AWAY_S)
        own_broker.start()
        check_later_batches(query, last)
    finally:
        query.stop()
