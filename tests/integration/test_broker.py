"""The embedded broker: it serves, survives a crash, tells why it can't start, ends with us."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient

from proxy.devkit import BrokerError, DownloadError, JavaError, PysparkMissingError
from proxy.devkit.broker import EmbeddedBroker, EmbeddedCluster, free_ports
from proxy.devkit.jars import (
    IVY_SETTINGS_VARIABLE,
    JarSet,
    Module,
    connector_jars,
    default_cache_dir,
    fetch,
    find_java,
    kafka_jars,
)

WAIT_S = 60
USERS = {"alice": "alice-secret", "bob": "bob.secret"}


def values(bootstrap: str, topic: str, count: int, partition: int = 0) -> list[bytes]:
    """Read the first `count` values of a partition."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "reader"})
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


def test_without_sasl_users_there_is_no_sasl_listener(kafka: EmbeddedBroker) -> None:
    with pytest.raises(ValueError, match="give it sasl_users"):
        _ = kafka.sasl_bootstrap


@pytest.mark.slow
def test_a_killed_broker_comes_back_with_its_records(
    tmp_path: Path, fill: Callable[..., None]
) -> None:
    properties = {"broker.session.timeout.ms": "2000", "broker.heartbeat.interval.ms": "500"}
    with EmbeddedBroker(tmp_path, properties=properties) as broker:
        address = broker.bootstrap
        fill("kept", count=50, size=100, bootstrap=address)
        before = values(address, "kept", 50)
        broker.kill()
        assert broker.pid is None
        with pytest.raises(OSError, match="refused"):
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


@pytest.mark.parametrize("users", [{"a b": "x"}, {"a": 'x";'}, {"": "x"}, {"a": ""}])
def test_odd_sasl_users_are_refused(tmp_path: Path, users: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="SASL"):
        EmbeddedBroker(tmp_path, sasl_users=users)


@pytest.fixture(scope="module")
def sasl_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("sasl"), sasl_users=USERS) as broker:
        yield broker


@pytest.mark.slow
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
    sasl_broker: EmbeddedBroker, mechanism: str, user: str, password: str, right: bool
) -> None:
    errors: list[KafkaError] = []
    client = AdminClient(
        {
            "bootstrap.servers": sasl_broker.sasl_bootstrap,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.username": user,
            "sasl.password": password,
            "error_cb": errors.append,
        }
    )
    if right:
        brokers = client.list_topics(timeout=WAIT_S).brokers
        assert [broker.port for broker in brokers.values()] == [sasl_broker.sasl_port]
        assert not errors
    else:
        while not errors:
            client.poll(WAIT_S)
        assert errors[0].code() == KafkaError._AUTHENTICATION


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
    "import sys; from pathlib import Path; from proxy.devkit.broker import serve_broker; "
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
        "from proxy.devkit.broker import EmbeddedBroker\n"
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


LEAF = Module("example", "leaf", "1")
ROOT = Module("example", "root", "2")
POM = """<project><modelVersion>4.0.0</modelVersion><groupId>example</groupId>
<artifactId>{module.name}</artifactId><version>{module.revision}</version>{more}</project>"""
NEEDS_LEAF = """<dependencies><dependency><groupId>example</groupId><artifactId>leaf</artifactId>
<version>1</version></dependency></dependencies>"""


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository on disk in which `root` needs `leaf`; gives the settings file that names it."""
    base = tmp_path / "mirror"
    for module, more in ((LEAF, ""), (ROOT, NEEDS_LEAF)):
        folder = base / "example" / module.name / module.revision
        folder.mkdir(parents=True)
        stem = f"{module.name}-{module.revision}"
        (folder / f"{stem}.pom").write_text(POM.format(module=module, more=more))
        (folder / f"{stem}.jar").write_bytes(f"jar of {module.name}".encode())
    pattern = f"{base}/[organisation]/[module]/[revision]/[module]-[revision]"
    settings = tmp_path / "settings.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="disk"/><resolvers>'
        f'<filesystem name="disk" m2compatible="true"><ivy pattern="{pattern}.pom"/>'
        f'<artifact pattern="{pattern}.[ext]"/></filesystem></resolvers></ivysettings>'
    )
    monkeypatch.setenv(IVY_SETTINGS_VARIABLE, str(settings))
    return settings


@pytest.mark.usefixtures("mirror")
def test_jars_are_cached_whole_or_not_at_all(tmp_path: Path) -> None:
    said: list[tuple[int, int, str]] = []
    cache, jar_set = tmp_path / "cache", JarSet("both", (ROOT,))

    def get() -> tuple[Path, ...]:
        return fetch(jar_set, lambda *step: said.append(step), cache)

    leaf, root = get()
    assert (leaf, root) == (cache / "both" / "leaf-1.jar", cache / "both" / "root-2.jar")
    assert said == [(0, 1, "root-2"), (0, 2, "leaf-1"), (1, 2, "root-2"), (2, 2, "leaf-1")]
    assert sorted(path.name for path in cache.iterdir()) == ["both", "lock"]

    assert get() == (leaf, root)
    assert len(said) == 4, "a cached set is not fetched again"

    for damage in (lambda: leaf.write_bytes(b"jar"), root.unlink):
        damage()
        assert get() == (leaf, root), "a damaged set is fetched again"
        assert (leaf.read_bytes(), root.read_bytes()) == (b"jar of leaf", b"jar of root")


@pytest.mark.usefixtures("mirror")
def test_one_of_many_fetches_and_the_others_wait(tmp_path: Path) -> None:
    said: list[tuple[int, int, str]] = []
    with ThreadPoolExecutor(3) as pool:
        tasks = [
            pool.submit(fetch, JarSet("leaf", (LEAF,)), lambda *step: said.append(step), tmp_path)
            for _ in range(3)
        ]
    assert [task.result() for task in tasks] == [(tmp_path / "leaf" / "leaf-1.jar",)] * 3
    assert said.count((1, 1, "leaf-1")) == 1


@pytest.mark.usefixtures("mirror")
def test_what_is_provided_is_not_fetched(tmp_path: Path) -> None:
    jars = fetch(JarSet("less", (ROOT,), frozenset({"leaf"})), None, tmp_path)
    assert [jar.name for jar in jars] == ["root-2.jar"]


@pytest.mark.usefixtures("mirror")
@pytest.mark.parametrize("absent", [Module("example", "nothing", "1"), ROOT], ids=["all", "part"])
def test_failed_download_names_the_artifact_and_the_way_out(tmp_path: Path, absent: Module) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "mirror/example/leaf/1/leaf-1.jar").unlink()
    with pytest.raises(DownloadError, match=f"Download of {absent} failed") as caught:
        fetch(JarSet("broken", (absent,)), None, cache)
    named = "example#nothing;1: not found" if absent is not ROOT else "example#leaf;1"
    assert named in caught.value.what
    assert all(word in caught.value.how for word in ("proxyHost", IVY_SETTINGS_VARIABLE))
    assert not (cache / "broken").exists()


def test_a_server_that_can_not_be_reached_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(IVY_SETTINGS_VARIABLE, raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    (port,) = free_ports(1)
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", f"-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort={port}")
    with pytest.raises(DownloadError, match="Connection refused"):
        fetch(JarSet("far", (LEAF,)), None, tmp_path)


def test_settings_named_by_spark(
    tmp_path: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(IVY_SETTINGS_VARIABLE)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    (tmp_path / "spark-defaults.conf").write_text(f"spark.jars.ivySettings  {mirror}\n")
    assert fetch(JarSet("leaf", (LEAF,)), None, tmp_path)[0].read_bytes() == b"jar of leaf"

    mirror.unlink()
    with pytest.raises(DownloadError, match="no Ivy settings file") as caught:
        fetch(JarSet("other", (LEAF,)), None, tmp_path)
    assert "spark-defaults.conf" in caught.value.how


def test_a_cache_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match="cache can't be written"):
        fetch(JarSet("leaf", (LEAF,)), None, tmp_path / "file" / "cache")


def test_missing_pyspark_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(PysparkMissingError, match="pyspark is not installed") as caught:
        fetch(JarSet("leaf", (LEAF,)), None, tmp_path)
    assert "pip install" in caught.value.how


@pytest.mark.parametrize(
    ("variable", "folder"),
    [
        ("/c", "/c/kafka-quota-proxy"),
        ("", "/h/.cache/kafka-quota-proxy"),
        ("c", "/h/.cache/kafka-quota-proxy"),
    ],
    ids=["set", "empty", "relative"],
)
def test_cache_folder(monkeypatch: pytest.MonkeyPatch, variable: str, folder: str) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert default_cache_dir() == Path(folder)


def test_default_sets() -> None:
    names = [jar.name for jar in kafka_jars()]
    assert {"kafka_2.13-4.1.0.jar", "slf4j-simple-1.7.36.jar"} <= set(names)
    connector = [jar.name.rpartition("-")[0] for jar in connector_jars()]
    assert "kafka-clients" in connector
    assert not {"spark-core_2.13", "scala-library", "hadoop-client-api"} & set(connector)


@pytest.mark.parametrize(
    ("version_line", "message"),
    [
        ('openjdk version "17.0.15" 2025-04-15', None),
        ('openjdk version "21" 2023-09-19', None),
        ('Picked up JAVA_TOOL_OPTIONS: -Dx=1\nopenjdk version "17.0.1"', None),
        ('java version "1.8.0_202"', "is Java 8, which is too old"),
        ('openjdk version "11.0.2" 2019-01-15', "is Java 11, which is too old"),
        ("nonsense", "does not tell its version"),
    ],
    ids=["17", "21", "17 with options", "8", "11", "nonsense"],
)
def test_java_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version_line: str, message: str | None
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{version_line}\nEND\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if message is None:
        assert find_java() == java
    else:
        with pytest.raises(JavaError, match=message):
            find_java()


def test_no_java_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaError, match="No Java was found on the PATH") as caught:
        find_java()
    assert "Java 17" in caught.value.how


def test_java_home_without_java_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaError, match=r"No Java was found in JAVA_HOME"):
        find_java()
