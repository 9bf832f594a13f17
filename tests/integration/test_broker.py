"""The embedded broker: it serves, survives a crash, tells why it can't start, ends with us."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient

from examples.devkit import BrokerError
from examples.devkit.broker import EmbeddedBroker, EmbeddedCluster
from examples.devkit.jars import connector_jars, kafka_jars
from examples.devkit.loopback import free_ports
from proxy.cluster.upstream import UpstreamError

WAIT_S = 60


def values(bootstrap: str, topic: str, count: int, partition: int = 0) -> list[bytes]:
    """Read the first `count` values of a partition."""
    # Without commits no coordinator is needed, which a fresh broker would first have to make.
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "reader", "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(topic, partition, 0)])
    messages = consumer.consume(count, timeout=WAIT_S)
    consumer.close()
    return [message.value() for message in messages]


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Run Python code in a process of its own, which finds the project as this one does."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_jars_of_kafka_and_of_the_connector() -> None:
    names = [jar.name for jar in kafka_jars()]
    assert {"kafka_2.13-4.1.0.jar", "slf4j-simple-1.7.36.jar"} <= set(names)
    connector = [jar.name.rpartition("-")[0] for jar in connector_jars()]
    assert "kafka-clients" in connector
    assert not {"spark-core_2.13", "scala-library", "hadoop-client-api"} & set(connector)


def test_serves_metadata(kafka: EmbeddedBroker) -> None:
    assert kafka.nodes() == {1}
    assert kafka.bootstrap == f"127.0.0.1:{kafka.port}"
    kafka.start()  # runs already: nothing happens
    assert psutil.pid_exists(kafka.pid or 0)


def test_topic_and_fill_spread_records(
    kafka: EmbeddedBroker, topic: Callable[..., str], fill: Callable[..., None]
) -> None:
    name = topic(partitions=3)
    assert name != topic()
    fill(name, count=10, size=100, partitions=3)
    assert [value[:8] for value in values(kafka.bootstrap, name, 3, partition=2)] == [
        b"00000002",
        b"00000005",
        b"00000008",
    ]


def test_without_sasl_users_there_is_no_sasl_listener(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give it sasl_users"):
        _ = EmbeddedBroker(tmp_path).sasl_bootstrap


@pytest.mark.slow
def test_a_killed_broker_comes_back_with_its_records(
    tmp_path: Path, fill: Callable[..., None]
) -> None:
    with EmbeddedBroker(tmp_path) as broker:
        address = broker.bootstrap
        fill("kept", count=50, size=100, bootstrap=address)
        before = values(address, "kept", 50)
        broker.kill()
        assert broker.pid is None
        with pytest.raises(UpstreamError, match="refused"):
            broker.nodes()
        broker.start()
        assert broker.bootstrap == address
        assert values(address, "kept", 50) == before
        assert len(before) == 50
    with EmbeddedBroker(tmp_path) as successor:  # a new object, other ports, the same data
        assert successor.port != broker.port
        assert values(successor.bootstrap, "kept", 50) == before


@pytest.mark.slow
def test_early_death_is_told_with_the_end_of_the_log(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path, properties={"authorizer.class.name": "no.such.Class"})
    with pytest.raises(BrokerError, match=r"status 1 (?s:.*)no\.such\.Class") as caught:
        broker.start()
    assert str(broker.log_file) in caught.value.how
    assert broker.pid is None


@pytest.mark.slow
def test_a_broker_that_does_not_serve_in_time_is_killed(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path)
    with pytest.raises(BrokerError, match=r"does not serve after 0\.01 s"):
        broker.start(timeout_s=0.01)
    assert broker.pid is None


def test_bad_properties_are_told_at_formatting(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path, properties={"num.partitions": "many"})
    with pytest.raises(BrokerError, match=r"can't be formatted:(?s:.*)num\.partitions"):
        broker.start()


def test_a_taken_port_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(BrokerError, match=f"can't listen on 127.0.0.1:{port}"):
            EmbeddedBroker(tmp_path, port).start()


def test_a_folder_that_can_not_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BrokerError, match="can't use"):
        EmbeddedBroker(tmp_path / "file" / "data").start()


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
@pytest.mark.parametrize(
    ("user", "password", "right"),
    [
        ("alice", "alice-secret", True),
        ("bob", "bob.secret", True),
        ("alice", "bob.secret", False),
        ("carol", "alice-secret", False),
    ],
)
def test_sasl_login(
    kafka: EmbeddedBroker, mechanism: str, user: str, password: str, right: bool
) -> None:
    errors: list[KafkaError] = []
    access = {
        "bootstrap.servers": kafka.sasl_bootstrap,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": password,
        "error_cb": errors.append,
    }
    with AdminClient(access) as client:
        if right:
            brokers = client.list_topics(timeout=WAIT_S).brokers
            assert [broker.port for broker in brokers.values()] == [kafka.settings.sasl_port]
            assert not errors
        else:
            while not errors:
                client.poll(WAIT_S)
            assert errors[0].name() == "_AUTHENTICATION"


@pytest.mark.slow
def test_two_brokers_make_a_cluster(tmp_path: Path, fill: Callable[..., None]) -> None:
    properties = {"num.partitions": "2"}
    with EmbeddedCluster(tmp_path, 2, properties=properties) as cluster:
        assert [broker.nodes() for broker in cluster.brokers] == [{1, 2}, {1, 2}]
        fill("spread", count=10, size=20, partitions=2, bootstrap=cluster.bootstrap)
        read = [values(cluster.bootstrap, "spread", 5, partition) for partition in (0, 1)]
        assert [len(part) for part in read] == [5, 5]
    assert [broker.pid for broker in cluster.brokers] == [None, None]


SERVE = (
    "import sys; from pathlib import Path; from examples.devkit.command import serve_broker; "
    "sys.exit(serve_broker(int(sys.argv[1]), Path(sys.argv[2])))"
)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_command_says_ready_and_stops_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    (port,) = free_ports(1)
    with child(SERVE, str(port), str(tmp_path)) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == f"ready 127.0.0.1:{port}\n"
        (java,) = psutil.Process(command.pid).children()
        command.send_signal(number)
        rest, errors = command.communicate(timeout=WAIT_S)
    assert (command.returncode, rest, errors) == (0, "", "")
    assert not java.is_running()


@pytest.mark.slow
def test_command_fails_when_the_broker_dies(tmp_path: Path) -> None:
    with child(SERVE, "0", str(tmp_path)) as command:
        assert command.stdout is not None
        assert command.stdout.readline().startswith("ready 127.0.0.1:")
        (java,) = psutil.Process(command.pid).children()
        java.kill()
        _, errors = command.communicate(timeout=WAIT_S)
    assert command.returncode == 1
    assert "the broker ended by itself" in errors


@pytest.mark.slow
def test_broker_dies_with_its_parent_but_not_with_the_thread_that_started_it(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, threading; from pathlib import Path\n"
        "from examples.devkit.broker import EmbeddedBroker\n"
        "broker = EmbeddedBroker(Path(sys.argv[1]))\n"
        "thread = threading.Thread(target=broker.start); thread.start(); thread.join()\n"
        "print(broker.pid, broker.nodes(), flush=True); broker.wait()\n"
    )
    with child(code, str(tmp_path)) as parent:
        assert parent.stdout is not None
        pid, nodes = parent.stdout.readline().split()
        assert nodes == "{1}"
        java = psutil.Process(int(pid))
        parent.kill()
    psutil.wait_procs([java], timeout=WAIT_S)
    assert not java.is_running()
