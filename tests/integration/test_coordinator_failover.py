"""What a client gets while the tier's coordinator is away, with three brokers and Kafka's times."""

import os
import signal
import threading
from pathlib import Path

import pytest
from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic
from support.cheating import ANSWER_BYTES, BOUND_BYTES, cheat, check_bound, plain
from support.coordinators import coordinated_elsewhere
from support.machine import broker_ports, machine_config, until_settled
from support.operating import running
from support.proxy_process import ProxyProcess, until
from support.raw import RawClient, message

from examples.devkit.broker import EmbeddedBroker, EmbeddedCluster
from proxy.wire.apis import METADATA

WORKERS, BROKERS = 3, 3
AWAY_S = 25.0
"""Longer than brokers' sessions, 9 s, and members', 10 s, one after the other."""
REPLICATED = {
    "broker.session.timeout.ms": "9000",
    "broker.heartbeat.interval.ms": "2000",
    "default.replication.factor": str(BROKERS),
    "offsets.topic.replication.factor": str(BROKERS),
    "transaction.state.log.replication.factor": str(BROKERS),
}
TOPIC = "read-on"


def partition_led_by_others(cluster: EmbeddedCluster, broker: EmbeddedBroker) -> tuple[int, int]:
    """Return a partition of TOPIC that another broker leads, and that one's id."""
    with RawClient(cluster.brokers[0].bootstrap) as client:
        topics = client.ask(message(METADATA, 1, topics=None)).topics
    (found,) = (each for each in topics if each.name == TOPIC)
    return next(
        (each.partition_index, each.leader_id)
        for each in found.partitions
        if each.leader_id != broker.settings.node_id
    )


@pytest.mark.slow
def test_clients_read_on_within_their_bound_while_the_coordinator_is_away(tmp_path: Path) -> None:
    with EmbeddedCluster(tmp_path / "brokers", BROKERS, properties=REPLICATED) as cluster:
        group, coordinator = coordinated_elsewhere(cluster, "quota-proxy-tier-three")
        admin = KafkaAdminClient(bootstrap_servers=cluster.bootstrap.split(","))
        admin.create_topics([NewTopic(TOPIC, BROKERS, BROKERS)])
        admin.close()
        producer = KafkaProducer(bootstrap_servers=cluster.bootstrap.split(","))
        for partition in range(BROKERS):
            producer.send(TOPIC, bytes(ANSWER_BYTES), partition=partition)
        producer.close()
        partition, leader = partition_led_by_others(cluster, coordinator)
        rules = [{"client-id": "reads-on", "consumer_byte_rate": BOUND_BYTES}]
        settings = machine_config(cluster.bootstrap, WORKERS, nodes=BROKERS, rules=rules)
        settings["tier"]["name"] = group.removeprefix("quota-proxy-tier-")
        with running(ProxyProcess(settings, tmp_path)) as proxy:
            until(lambda: proxy.get("/readyz")[0] == 200, "it is ready")
            until_settled(proxy, WORKERS)
            addresses = broker_ports(proxy, WORKERS, leader)
            assert coordinator.pid is not None
            os.kill(coordinator.pid, signal.SIGSTOP)
            goes_on = threading.Timer(AWAY_S, os.kill, (coordinator.pid, signal.SIGCONT))
            goes_on.start()
            try:
                many = {"threads": 4, "at_most": 4, "seconds": 2 * AWAY_S}
                got = cheat(plain("reads-on"), addresses, TOPIC, partition=partition, **many)
            finally:
                goes_on.join()
            check_bound(got)
            until_settled(proxy, WORKERS)
