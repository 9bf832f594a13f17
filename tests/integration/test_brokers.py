"""A cluster of three: every leader through its own port, one that dies, one without a port."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from support.clients import CLIENTS, Access, Client, Read
from support.proxy_process import HOST, ProxyProcess, until
from support.raw import RawClient, message

from examples.devkit.broker import EmbeddedCluster
from examples.devkit.loopback import free_ports
from proxy.wire.apis import METADATA

pytestmark = pytest.mark.slow

BROKERS = 3
PARTITIONS = 6
COUNT = 300
WAIT_S = 60
PROPERTIES = {"broker.session.timeout.ms": "3000"}
"""A dead broker's partitions get new leaders after three seconds instead of nine."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with EmbeddedCluster(folder, BROKERS, properties=PROPERTIES) as three:
        yield three


def create(cluster: EmbeddedCluster, name: str, replicas: int) -> None:
    with AdminClient({"bootstrap.servers": cluster.bootstrap}) as admin:
        new = NewTopic(name, PARTITIONS, replication_factor=replicas)
        admin.create_topics([new])[name].result(WAIT_S)
    until(lambda: leaders(cluster.bootstrap, name) == {1, 2, 3}, "leaders on all brokers")


def leaders(bootstrap: str, name: str) -> set[int]:
    with AdminClient({"bootstrap.servers": bootstrap}) as admin:
        found = admin.list_topics(name, timeout=WAIT_S)
    return {part.leader for part in found.topics[name].partitions.values()}


def test_each_leader_has_a_port(
    proxy: Callable[..., ProxyProcess], cluster: EmbeddedCluster
) -> None:
    running = proxy(bootstrap_servers=cluster.bootstrap)
    create(cluster, "spread", 1)
    records = [(number % PARTITIONS, b"%08d" % number) for number in range(COUNT)]
    CLIENTS[-1].produce(Access(running.bootstrap), "spread", records)

    def read(client: Client) -> Read:
        return client.consume(Access(running.bootstrap, client.name), "spread", COUNT)

    with ThreadPoolExecutor() as pool:
        reads = list(pool.map(read, CLIENTS))
    for client, got in zip(CLIENTS, reads, strict=True):
        assert sorted(v for part in got.values.values() for v in part) == sorted(
            value for _, value in records
        ), client.name
        assert len(got.brokers - {running.bootstrap, f"bootstrap-0:{running.port}"}) >= BROKERS
        assert not got.brokers & set(cluster.bootstrap.split(",")), client.name


def test_broker_without_a_port_is_left_out(
    proxy: Callable[..., ProxyProcess], cluster: EmbeddedCluster
) -> None:
    """The range has ports for the brokers 0 to 2. The third one is told in one line, once."""
    first, *_ = free_ports(3)
    listener = {"broker_ports": f"{first}-{first + 2}"}
    running = proxy(bootstrap_servers=cluster.bootstrap, listeners=[listener])
    for version in (1, 9, 12):
        with RawClient(running.bootstrap) as client:
            answer = client.ask(message(METADATA, version, topics=None))
            told = {broker.node_id: (broker.host, broker.port) for broker in answer.brokers}
            assert told == {1: (HOST, first + 1), 2: (HOST, first + 2)}
    (line,) = running.logged("broker left out: it has no port")
    assert (line["node_id"], line["level"]) == (3, "error")
    assert running.metrics().value("brokers_without_port", listener="default") == 1
    assert "broker_ports" in line["fix"]


def test_clients_follow_a_leader_that_moves(
    proxy: Callable[..., ProxyProcess], cluster: EmbeddedCluster
) -> None:
    running = proxy(bootstrap_servers=cluster.bootstrap)
    create(cluster, "moving", BROKERS)
    client = CLIENTS[-1]
    half = COUNT // 2
    records = [(number % PARTITIONS, b"%08d" % number) for number in range(COUNT)]
    client.produce(Access(running.bootstrap), "moving", records[:half], acks=-1)
    victim = cluster.brokers[2]
    consumer = Consumer({"bootstrap.servers": running.bootstrap, "group.id": "moving"})
    consumer.assign([TopicPartition("moving", n, 0) for n in range(PARTITIONS)])
    values = {message.value() for message in consumer.consume(half, timeout=WAIT_S)}
    victim.kill()
    try:
        until(lambda: 3 not in leaders(running.bootstrap, "moving"), "new leaders", WAIT_S)
        client.produce(Access(running.bootstrap), "moving", records[half:], acks=-1)
        values |= {message.value() for message in consumer.consume(COUNT - half, timeout=WAIT_S)}
        assert values == {value for _, value in records}
    finally:
        consumer.close()
        victim.start()
