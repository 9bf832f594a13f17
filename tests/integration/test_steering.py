"""Real clients and two members: each client goes to its owner, wherever it begins."""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource
from kafka import KafkaAdminClient
from kafka.admin import ConfigResource as PythonResource
from kafka.admin import ConfigResourceType
from pyspark.sql import SparkSession
from support.clients import CLIENTS, Access, Client, Librdkafka, Record
from support.kafka_tools import run_tool, tool_jars
from support.machine import MACHINE, machine_config
from support.operating import running
from support.proxy_process import ProxyProcess, until
from support.two_relays import two_relays

from examples.devkit.broker import EmbeddedBroker
from proxy.quota.entities import QuotaKind
from proxy.quota.rules import Rule
from proxy.relay import connection
from proxy.wire.rewrite import FALLBACK_NODE_ID

pytestmark = pytest.mark.slow

COUNT = 400
VALUE_BYTES = 1000
ONE_BROKER = 1
BETWEEN_S = 1.0
WAIT_S = 120


def records(first: int = 0, count: int = COUNT) -> list[Record]:
    padding = b"." * (VALUE_BYTES - 8)
    return [(0, b"%08d" % number + padding) for number in range(first, first + count)]


def numbers(values: list[bytes]) -> list[int]:
    return [int(value[:8]) for value in values]


def in_direct(kafka: EmbeddedBroker, topic: str, wanted: int) -> list[int]:
    """What is in a topic."""
    return numbers(Librdkafka().consume(Access(kafka.bootstrap), topic, wanted).values[0])


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_who_begins_at_the_wrong_member_is_served_by_the_owner(
    kafka: EmbeddedBroker, topic: Callable[..., str], client: Client
) -> None:
    name = topic()
    with two_relays(kafka.bootstrap) as pair:
        pair.learn(ONE_BROKER)
        access = Access(pair.a.bootstrap, client.name)
        client.produce(access, name, records())
        read = client.consume(access, name, COUNT)
        assert numbers(read.values[0]) == list(range(COUNT))
        for api in ("Fetch", "Produce"):
            assert pair.a.moved_bytes(client.name, api) == 0
            assert pair.b.moved_bytes(client.name, api) > COUNT
        assert pair.a.revoke == 0


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Visitors go sooner than in earnest, so that tests end sooner."""
    monkeypatch.setattr(connection, "MIN_VISIT_S", 0.2)


def later(*steps: Callable[[], None]) -> Future[None]:
    """Take these steps, each some time after the one before it."""
    pool = ThreadPoolExecutor(1)

    def run() -> None:
        for step in steps:
            time.sleep(BETWEEN_S)
            step()

    try:
        return pool.submit(run)
    finally:
        pool.shutdown(wait=False)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_consumer_goes_on_when_its_owner_moves_or_stops(
    kafka: EmbeddedBroker, topic: Callable[..., str], client: Client
) -> None:
    """It only knows the address of the member that stops, and what Metadata has told it.

    But for librdkafka: where all connections are gone at once it begins anew at its bootstrap
    servers, and forgets what Metadata told it.
    """
    name = topic()

    def write(first: int) -> None:
        Librdkafka().produce(Access(kafka.bootstrap), name, records(first))

    with two_relays(kafka.bootstrap) as pair:
        pair.learn(ONE_BROKER)
        write(0)
        steps: list[Future[None]] = []

        def disturb() -> None:
            steps.append(
                later(
                    lambda: pair.move("a"),
                    lambda: until(lambda: fetched_at_a() > 0, "it asks the new owner"),
                    lambda: write(COUNT),
                    lambda: until(served_by_a, "the new owner has served what was written"),
                    lambda: pair.stop(pair.a),
                    lambda: write(2 * COUNT),
                )
            )

        def fetched_at_a() -> float:
            return pair.a.moved_bytes(client.name, "Fetch")

        def served_by_a() -> bool:
            return fetched_at_a() > COUNT * VALUE_BYTES

        begins_anew = isinstance(client, Librdkafka)
        bootstrap = f"{pair.a.bootstrap},{pair.b.bootstrap}" if begins_anew else pair.a.bootstrap
        access = Access(bootstrap, client.name)
        read = client.consume(access, name, 3 * COUNT, at=(COUNT, disturb))
        steps[0].result(WAIT_S)
        assert numbers(read.values[0]) == list(range(3 * COUNT))
        assert pair.b.revoke
        assert pair.b.moved_bytes(client.name, "Fetch") > 2 * COUNT * VALUE_BYTES


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_producer_loses_and_doubles_nothing(
    kafka: EmbeddedBroker, topic: Callable[..., str], client: Client
) -> None:
    """It is over its quota, too: requests are held, and wait at the gate, when it has to go.

    It names both members to begin at: where all connections are gone at once librdkafka begins
    anew there, and forgets what Metadata told it.
    """
    name = topic()
    bound = 4 * COUNT * VALUE_BYTES / (3 * BETWEEN_S)
    rule = Rule(client_id=client.name, bounds={QuotaKind.PRODUCER_BYTE_RATE: bound})
    with two_relays(kafka.bootstrap, rule) as pair:
        pair.learn(ONE_BROKER)
        steps = later(lambda: pair.move("a"), lambda: pair.move("b"), lambda: pair.stop(pair.b))
        access = Access(f"{pair.b.bootstrap},{pair.a.bootstrap}", client.name)
        client.produce(access, name, records(count=8 * COUNT), is_disturbed=True)
        steps.result(WAIT_S)
        assert sorted(in_direct(kafka, name, 8 * COUNT)) == list(range(8 * COUNT))
        # A client may hear of a move before the member lets it go, and then goes by itself.
        assert pair.a.revoke + pair.b.revoke


def test_what_admin_tools_make_of_the_fallback(kafka: EmbeddedBroker) -> None:
    """Those that ask for Metadata, as librdkafka's do, see it as a broker; those that ask for the
    cluster, as kafka-python's and Kafka's own do, see the brokers.
    """
    with two_relays(kafka.bootstrap) as pair:
        pair.learn(ONE_BROKER)
        owner = pair.b.open_ports()[ONE_BROKER]
        fallback = int(pair.a.bootstrap.rsplit(":", 1)[1])
        with AdminClient({"bootstrap.servers": pair.a.bootstrap}) as admin:
            told = admin.list_topics(timeout=WAIT_S).brokers.values()
            assert {each.id: each.port for each in told} == {
                ONE_BROKER: owner,
                FALLBACK_NODE_ID: fallback,
            }
            nodes = admin.describe_cluster().result(WAIT_S).nodes
            assert {node.id for node in nodes} == {ONE_BROKER, FALLBACK_NODE_ID}
        with closing(KafkaAdminClient(bootstrap_servers=pair.a.bootstrap)) as python:
            (node,) = python.describe_cluster()["brokers"]
            assert (node["broker_id"], node["port"]) == (ONE_BROKER, owner)


def librdkafkas_sums(bootstrap: str) -> dict[str, Any]:
    """What librdkafka's Admin says of all brokers, and how many settings each has."""
    with AdminClient({"bootstrap.servers": bootstrap}) as admin:
        brokers = [str(each) for each in admin.list_topics(timeout=WAIT_S).brokers]
        settings = [
            admin.describe_configs([ConfigResource(ConfigResource.Type.BROKER, each)])
            for each in brokers  # of one broker in a call
        ]
        return {
            "groups": sorted(
                each.group_id for each in admin.list_consumer_groups().result(WAIT_S).valid
            ),
            "groups of each broker": sorted(each.id for each in admin.list_groups(timeout=WAIT_S)),
            "settings": sum(
                len(each.result(WAIT_S)) for of_one in settings for each in of_one.values()
            ),
        }


def kafka_pythons_sums(bootstrap: str) -> dict[str, Any]:
    """What kafka-python's Admin says of all brokers."""
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        dirs = [each["log_dirs"] for each in admin.describe_log_dirs()]
        assert all(dirs)
        brokers = [str(each) for each in admin.list_transactions()]
        asked = [PythonResource(ConfigResourceType.BROKER, each) for each in brokers]
        settings = admin.describe_configs(asked, config_filter="all")["broker"]
        return {
            "groups": sorted(each["group_id"] for each in admin.list_groups()),
            "replicas": sorted(
                (topic["name"], partition["partition_index"])
                for log_dir in itertools.chain(*dirs)
                for topic in log_dir["topics"]
                for partition in topic["partitions"]
            ),
            "transactions": sorted(
                str(each) for listed in admin.list_transactions().values() for each in listed
            ),
            "settings": sum(map(len, settings.values())),
        }


def javas_sums(bootstrap: str) -> dict[str, Any]:
    """What Kafka's own tools print of all brokers."""
    package, jars = "org.apache.kafka.tools", tool_jars()
    groups = run_tool(
        f"{package}.consumer.group.ConsumerGroupCommand", bootstrap, "--list", jars=jars
    )
    transactions = run_tool(f"{package}.TransactionsCommand", bootstrap, "list", jars=jars)
    return {
        "groups": sorted(groups.split()),
        "transactions": sorted(line.split()[:1] for line in transactions.splitlines()),
    }


def has_committed(consumer: Consumer, topic: str) -> bool:
    """Whether a commit was taken. The coordinator of a new cluster refuses the first ones."""
    try:
        consumer.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
    except KafkaException:
        return False
    return True


@pytest.mark.parametrize("sums", [librdkafkas_sums, kafka_pythons_sums, javas_sums])
def test_what_tools_add_up_over_all_brokers_is_as_without_a_proxy(
    kafka: EmbeddedBroker, topic: Callable[..., str], sums: Callable[[str], dict[str, Any]]
) -> None:
    """The fallback has no groups, transactions, replicas or settings."""
    name = topic()
    with closing(Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": name})) as consumer:
        until(lambda: has_committed(consumer, name), "a commit")
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name})
    producer.init_transactions(WAIT_S)
    direct = sums(kafka.bootstrap)
    assert name in direct["groups"]
    with two_relays(kafka.bootstrap) as pair:
        pair.learn(ONE_BROKER)
        for member in (pair.a, pair.b):
            assert sums(member.bootstrap) == direct


def all_own_slots(machine: ProxyProcess) -> bool:
    seen = machine.metrics()
    return all(seen.value("slots_owned", member=f"{MACHINE}/{number}") for number in range(2))


@pytest.mark.parametrize("sums", [librdkafkas_sums, kafka_pythons_sums])
def test_so_are_sums_through_workers(
    kafka: EmbeddedBroker, tmp_path: Path, sums: Callable[[str], dict[str, Any]]
) -> None:
    with running(ProxyProcess(machine_config(kafka.bootstrap, 2), tmp_path)) as machine:
        until(lambda: all_own_slots(machine), "each owns slots")
        with closing(KafkaAdminClient(bootstrap_servers=machine.bootstrap)) as admin:
            assert len(admin.list_transactions()) > 1  # the fallback is named
        assert sums(machine.bootstrap) == sums(kafka.bootstrap)


def test_kafkas_own_clients(kafka: EmbeddedBroker, topic: Callable[..., str]) -> None:
    """The console consumer goes to the owner, and the tools see the cluster as it is."""
    name = topic()
    Librdkafka().produce(Access(kafka.bootstrap), name, records())
    with two_relays(kafka.bootstrap) as pair:
        pair.learn(ONE_BROKER)
        package = "org.apache.kafka.tools"
        asked = ("--topic", name, "--from-beginning", "--max-messages", str(COUNT))
        options = ("--consumer-property", "client.id=java")
        jars = tool_jars()
        consumer = f"{package}.consumer.ConsoleConsumer"
        out = run_tool(consumer, pair.a.bootstrap, *asked, *options, jars=jars)
        assert len(out.split()) == COUNT
        assert pair.a.moved_bytes("java", "Fetch") == 0
        assert pair.b.moved_bytes("java", "Fetch") > COUNT * VALUE_BYTES
        out = run_tool(
            f"{package}.consumer.group.ConsumerGroupCommand", pair.a.bootstrap, "--list", jars=jars
        )
        assert len(out.split()) == len(set(out.split()))
        out = run_tool(f"{package}.LogDirsCommand", pair.a.bootstrap, "--describe", jars=jars)
        assert str(FALLBACK_NODE_ID) not in out


def test_a_client_of_kafka_3_goes_on_when_its_owner_stops(
    kafka: EmbeddedBroker, topic: Callable[..., str], spark: SparkSession
) -> None:
    """It knows no other addresses than those of its last metadata: it goes to the fallback."""
    name = topic()
    write = Librdkafka().produce
    write(Access(kafka.bootstrap), name, records())
    jvm: Any = spark._jvm  # noqa: SLF001 - pyspark has no public name for it
    with two_relays(kafka.bootstrap) as pair:
        pair.learn(ONE_BROKER)
        options = jvm.java.util.HashMap()
        deserializer = "org.apache.kafka.common.serialization.StringDeserializer"
        for key, value in {
            "bootstrap.servers": pair.b.bootstrap,
            "client.id": "java-3",
            "group.id": "java-3",
            "auto.offset.reset": "earliest",
            "key.deserializer": deserializer,
            "value.deserializer": deserializer,
        }.items():
            options.put(key, value)
        assert jvm.org.apache.kafka.common.utils.AppInfoParser.getVersion().startswith("3.")
        consumer = jvm.org.apache.kafka.clients.consumer.KafkaConsumer(options)
        try:
            consumer.subscribe(jvm.java.util.Collections.singletonList(name))
            second = jvm.java.time.Duration.ofSeconds(1)

            def read(wanted: int) -> None:
                count, end_s = 0, time.monotonic() + WAIT_S
                while count < wanted and time.monotonic() < end_s:
                    count += consumer.poll(second).count()
                assert count == wanted

            read(COUNT)
            assert pair.b.moved_bytes("java-3", "Fetch") > COUNT * VALUE_BYTES
            pair.stop(pair.b)
            write(Access(kafka.bootstrap), name, records(COUNT))
            read(COUNT)
            assert pair.a.moved_bytes("java-3", "Fetch") > COUNT * VALUE_BYTES
        finally:
            consumer.close()
