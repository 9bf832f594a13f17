"""State in a topic: under the tests of every store, and with crashes, rivals and brokers away."""

import asyncio
import importlib.util
import inspect
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
import trustme
from confluent_kafka import Producer as AnyProducer
from cryptography.hazmat.primitives import serialization
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from kafka.protocol.producer import EndTxnRequest
from support.state_faults import commits_lost

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.broker_settings import Quorum, new_cluster_id
from examples.devkit.loopback import HOST, free_ports
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.state import KafkaStore, Record, StateError
from proxy.state.kafka import slot_store
from proxy.state.kafka.producer import Producer
from proxy.state.kafka.state_topic import StateTopic
from proxy.state.store import ClosedError

WRITER = """
import sys
from proxy.cluster.kafka_client import Bootstrap
from proxy.state import KafkaStore, Record

store = KafkaStore(Bootstrap([(sys.argv[1], int(sys.argv[2]))]), sys.argv[3])
number = 0
while True:
    number += 1
    store.put_many([Record.of(f"all/{part}", [number, "x" * 50_000]) for part in range(20)])
    print(number, flush=True)
"""
"""Each write takes two batches and more."""

TAKEN = r"another proxy \(process \d+ on .*\) has taken the state in topic .*\n    fix: stop one"

SOON_S = 2.0
"""For writes of which some are to fail."""

LONG_S = 60.0
"""For writes that are to get through at any load."""

TOPIC = "the-state"
"""Of a broker that is the test's own, or is none."""

Open = Callable[..., KafkaStore]


def _tests_of_every_store() -> Iterator[tuple[str, Any]]:
    path = Path(__file__).parents[1] / "unit" / "state" / "test_store.py"
    spec = importlib.util.spec_from_file_location("tests_of_every_store", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in vars(module).items():
        if name.startswith("test_") and "store" in inspect.signature(value).parameters:
            yield name, value


globals().update(_tests_of_every_store())


@pytest.fixture
def name(topic_names: Iterator[str]) -> str:
    """Of a topic that is not there yet."""
    return f"state-{next(topic_names)}"


@pytest.fixture
def opened(kafka: EmbeddedBroker, name: str) -> Iterator[Open]:
    """`opened(**arguments)` opens the state in the test's topic; all are closed in the end."""
    stores: list[KafkaStore] = []

    def open_(topic: str = name, **arguments: Any) -> KafkaStore:
        stores.append(KafkaStore(Bootstrap([(HOST, kafka.port)]), topic, **arguments))
        return stores[-1]

    yield open_
    for each in reversed(stores):
        each.close()


@pytest.fixture(scope="module")
def shared_topic(topic_names: Iterator[str]) -> str:
    return f"state-{next(topic_names)}"


@pytest.fixture
def store(opened: Open, shared_topic: str) -> KafkaStore:
    made = opened(shared_topic)
    made.put_many((), delete=[record.key for record in made.items("")])
    return made


KEYS = st.sampled_from(["a/1", "a/2", "b/1", "a/12"])
BATCHES = st.lists(st.tuples(st.dictionaries(KEYS, st.integers()), st.sets(KEYS)), max_size=4)


@hypothesis.settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(BATCHES)
def test_batches_leave_what_a_dictionary_would_hold(opened, shared_topic, batches):
    expected: dict[str, int] = {}
    with closing(opened(shared_topic)) as store:
        store.put_many((), delete=[record.key for record in store.items("")])
        for puts, deletes in batches:
            records = [Record.of(key, value) for key, value in puts.items()]
            store.put_many(records, delete=deletes)
            expected = {key: value for key, value in expected.items() if key not in deletes} | puts
    with closing(opened(shared_topic)) as store:
        assert {item.key: item.value for item in store.items("")} == expected


# The topic


def test_a_topic_that_somebody_made_rightly_is_used(topic, opened):
    existing = topic(1, {"cleanup.policy": "compact"})
    opened(existing).put("a/b", 1)
    assert opened(existing).get("a/b").value == 1


def test_the_state_that_an_earlier_version_has_is_read_and_taken(kafka, topic, opened):
    """Its messages name no writer."""
    existing = topic(1, {"cleanup.policy": "compact"})
    earlier = AnyProducer({"bootstrap.servers": kafka.bootstrap})
    form = "form", b"1"
    earlier.produce(existing, b'{"token":"t","host":"h","pid":1}', b"owner", headers=[form])
    earlier.produce(existing, b"1", b"a/b", headers=[form, ("version", b"1")])
    assert earlier.flush(30) == 0
    store = opened(existing)
    assert [(item.key, item.value) for item in store.items("")] == [("a/b", 1)]
    store.put("a/b", 2)
    assert opened(existing).get("a/b").value == 2


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ([], "was not written by quota-proxy"),
        ([("form", b"2"), ("version", b"1")], "by a newer version of quota-proxy: its form is 2"),
    ],
)
def test_what_cannot_be_read_is_told_and_nobody_loses_the_state(
    kafka, name, opened, headers, message
):
    owner = opened()
    owner.put("a/b", 1)
    stranger = AnyProducer({"bootstrap.servers": kafka.bootstrap})
    stranger.produce(name, b"{}", b"a/c", headers=headers)
    assert stranger.flush(30) == 0
    with pytest.raises(StateError, match=f"the message at offset .* of topic {name} .*{message}"):
        opened()
    owner.put("a/c", 2)


def test_a_damaged_record_goes_by_a_message_without_value(kafka, name, opened):
    opened().put("a/b", 1)
    stranger = AnyProducer({"bootstrap.servers": kafka.bootstrap})
    stranger.produce(name, None, b"a/b")
    assert stranger.flush(30) == 0
    assert opened().items("") == []


# What is kept


def test_records_survive_a_restart(opened):
    with closing(opened()) as store:
        store.put("a/b", {"c": [1.5, "é"]}, version=2)
        store.put("a/é🦜", None)
        store.put("a/gone", 1)
        store.put_many((), delete=("a/gone",))
    with closing(opened()) as store:
        assert store.items("") == [
            Record("a/b", '{"c":[1.5,"\\u00e9"]}', 2),
            Record("a/é🦜", "null", 1),
        ]


def test_too_much_is_refused_and_nothing_of_it_written(opened, monkeypatch):
    store = opened()
    with pytest.raises(StateError, match="the record 'a/b' has 9000005 bytes, and topic"):
        store.put_many([Record.of("a/a", 1), Record.of("a/b", "x" * 9_000_000)])
    monkeypatch.setattr(slot_store, "MAX_STATE_BYTES", 100)
    store.put("a/b", "x" * 80)
    with pytest.raises(StateError, match="has more than 100 bytes\n    fix: name another topic"):
        store.put("a/c", "x" * 80)
    store.put("a/b", "y" * 80)
    assert [item.key for item in store.items("")] == ["a/b"]
    monkeypatch.setattr(slot_store, "MAX_STATE_BYTES", 50)
    with pytest.raises(StateError, match="has more than 50 bytes"):
        opened()
    store.put("a/b", "z")


@pytest.mark.slow
@pytest.mark.parametrize("writes", [1, 12])
def test_a_killed_process_leaves_each_write_wholly_or_not_at_all(kafka, name, opened, writes):
    command = [sys.executable, "-c", WRITER, HOST, str(kafka.port), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        told = [int(process.stdout.readline()) for _ in range(writes)]
        process.send_signal(signal.SIGKILL)
        told += [int(line) for line in process.stdout if line.endswith("\n")]
    assert process.returncode == -signal.SIGKILL
    found = [record.value[0] for record in opened().items("all/")]
    assert len(found) == 20
    assert len(set(found)) == 1
    assert found[0] in (told[-1], told[-1] + 1)


def break_connections(port: int) -> None:
    """Break all that this process has to the port of a broker."""
    for each in psutil.Process().net_connections("tcp"):
        if each.raddr and each.raddr.port == port:
            with socket.socket(fileno=os.dup(each.fd)) as connection, suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def test_a_transaction_that_nobody_ended_is_not_read(opened):
    store = opened(timeout_s=SOON_S)
    store.put("a/b", "old")
    with (
        commits_lost(on_the_way_back=False),
        pytest.raises(StateError, match="cannot be written: lost"),
    ):
        store.put_many([Record.of("a/b", "new"), Record.of("a/c", "new")])
    successor = opened()
    assert [(item.key, item.value) for item in successor.items("")] == [("a/b", "old")]
    successor.put("a/d", 1)


@pytest.mark.parametrize("on_the_way_back", [True, False])
def test_a_write_that_failed_is_undone_by_the_next(opened, on_the_way_back):
    store = opened(timeout_s=SOON_S)
    store.put("a/b", "old")
    with (
        commits_lost(on_the_way_back=on_the_way_back),
        pytest.raises(StateError, match="cannot be written: lost"),
    ):
        store.put_many([Record.of("a/c", "new"), Record.of("a/d", "new")], delete=["a/b"])
    assert [item.key for item in store.items("")] == ["a/b"]
    store.put("a/d", "later")
    expected = [("a/b", "old"), ("a/d", "later")]
    assert [(item.key, item.value) for item in store.items("")] == expected
    assert [(item.key, item.value) for item in opened().items("")] == expected


def test_a_write_that_hangs_while_the_state_is_closed_has_failed(opened, monkeypatch):
    store = opened()
    hangs = threading.Event()
    ask = KafkaClient.ask

    async def ask_for_ever(client: KafkaClient, request: Any, broker: Any = None) -> Any:
        if isinstance(request, EndTxnRequest):
            hangs.set()
            await asyncio.Event().wait()
        return await ask(client, request, broker)

    monkeypatch.setattr(KafkaClient, "ask", ask_for_ever)
    monkeypatch.setattr(slot_store, "END_LIMIT_S", 0.1)
    with ThreadPoolExecutor() as threads:
        write = threads.submit(store.put, "a/b", 1)
        assert hangs.wait(30)
        store.close()
        with pytest.raises(ClosedError, match="the state is not open"):
            write.result(30)


async def test_many_writers_at_once(opened):
    store = opened()
    await asyncio.gather(*(store.write([Record.of(f"a/{number}", number)]) for number in range(50)))
    assert len(opened().items("a/")) == 50


# Two proxies


def test_the_newest_proxy_has_the_state(opened):
    first = opened()
    first.put("a/b", 1)
    second = opened()
    for _ in range(2):
        with pytest.raises(StateError, match=TAKEN):
            first.put("a/b", 2)
    second.put("a/b", 3)
    second.close()
    with pytest.raises(StateError, match=TAKEN):
        first.put("a/b", 4)
    first.close()
    assert opened().get("a/b").value == 3


def test_one_that_was_replaced_while_it_was_cut_off_does_not_take_the_state_back(kafka, opened):
    first = opened(timeout_s=SOON_S)
    first.put("a/b", 1)
    with commits_lost(on_the_way_back=False), pytest.raises(StateError, match="lost"):
        first.put("a/b", 2)
    break_connections(kafka.port)
    second = opened()
    with pytest.raises(StateError, match=TAKEN):
        first.put("a/b", 2)
    second.put("a/b", 3)


@pytest.mark.parametrize("count", [3, 6])
def test_many_that_start_at_once_leave_one(opened, count):
    stores: list[KafkaStore] = []
    errors: list[StateError] = []

    def start() -> None:
        try:
            stores.append(opened(timeout_s=LONG_S))
        except StateError as error:
            errors.append(error)

    opened().close()
    threads = [threading.Thread(target=start) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert len(stores) + len(errors) == count
    written = 0
    for store in stores:
        try:
            store.put("a/b", 1)
            written += 1
        except StateError as error:
            errors.append(error)
    assert [error.what for error in errors if "has taken the state" not in error.what] == []
    assert written == 1


@pytest.fixture
def give_up(kafka: EmbeddedBroker, name: str) -> Callable[[], None]:
    """Fence the proxy as brokers do that gave up its transaction: nobody has written its name."""

    async def take_over() -> None:
        with closing(StateTopic(Bootstrap([(HOST, kafka.port)]), name)) as topic:
            await Producer(topic, name).take_over()

    return lambda: asyncio.run(take_over())


def test_a_transaction_that_the_brokers_gave_up_is_written_again(opened, give_up):
    """Kafka then fences us, as if another proxy had come; but none has written its name."""
    store = opened()
    store.put("a/b", 1)
    give_up()
    store.put("a/b", 2)
    store.put("a/b", 3)
    assert opened().get("a/b").value == 3


def test_a_write_that_failed_is_undone_also_after_the_brokers_gave_up(opened, give_up):
    store = opened(timeout_s=SOON_S)
    store.put("a/b", "old")
    with (
        commits_lost(on_the_way_back=True),
        pytest.raises(StateError, match="cannot be written: lost"),
    ):
        store.put_many([Record.of("a/b", "new"), Record.of("a/c", "new")])
    give_up()
    store.put("a/d", 1)
    expected = [("a/b", "old"), ("a/d", 1)]
    assert [(item.key, item.value) for item in store.items("")] == expected
    assert [(item.key, item.value) for item in opened().items("")] == expected


def test_a_successor_has_the_last_write(opened):
    owner = opened()
    owner.put("a/b", 1)

    assert opened(looks=True).get("a/b").value == 1
    owner.put("a/b", 2)
    owner.close()
    successor = opened()
    assert successor.get("a/b").value == 2
    successor.put("a/b", 3)


def test_who_only_looks_writes_nothing(opened):
    owner = opened()
    owner.put("a/b", 1)
    with closing(opened(looks=True)) as looking, pytest.raises(StateError):
        looking.put("a/b", 2)
    owner.put("a/b", 3)


# Brokers that are away, or not ours


@pytest.fixture
def free_port() -> int:
    return free_ports(1)[0]


def test_no_broker_at_the_start(free_port):
    with pytest.raises(StateError) as caught:
        KafkaStore(Bootstrap([(HOST, free_port)]), TOPIC)
    assert f"cannot be opened: {HOST}:{free_port}: " in caught.value.what
    assert "Connection refused" in caught.value.what
    assert "cluster.bootstrap_servers" in caught.value.fix


def test_the_next_bootstrap_server_is_asked(kafka, name, free_port):
    with closing(KafkaStore(Bootstrap([(HOST, free_port), (HOST, kafka.port)]), name)) as store:
        store.put("a/b", 1)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "the broker closed the connection; so does a listener that wants a login"),
        (b"\x15\x03\x03\x00\x02\x02\x28", "what answers is not Kafka, or wants TLS"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what answers is not Kafka, or wants TLS"),
        (b"\0\0\0\x04\0\0\0\x01", f"{HOST}:"),
    ],
    ids=["closed", "tls", "http", "cut"],
)
def test_who_is_no_broker(answer, message):
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StateError, match=message):
            KafkaStore(Bootstrap([server.getsockname()[:2]]), TOPIC)
        thread.join(30)


def test_who_does_not_answer():
    with socket.create_server((HOST, 0)) as server, pytest.raises(StateError, match="no answer in"):
        KafkaStore(Bootstrap([server.getsockname()[:2]]), TOPIC, timeout_s=0.3)


def test_a_listener_that_wants_a_login(kafka):
    host, port = kafka.sasl_bootstrap.split(":")
    with pytest.raises(StateError, match="wants a login, which the proxy itself has not"):
        KafkaStore(Bootstrap([(host, int(port))]), TOPIC)


def test_a_connection_that_broke_is_made_anew(kafka, opened):
    store = opened()
    break_connections(kafka.port)
    store.put("a/b", 1)
    assert opened().get("a/b").value == 1


@pytest.mark.slow
def test_brokers_over_tls(tmp_path):
    authority = trustme.CA()
    issued = authority.issue_cert(HOST)
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    port, tls_port, controller = free_ports(3)
    advertised = f"PLAINTEXT://{HOST}:{port},SSL://{HOST}:{tls_port}"
    properties = {
        "listeners": f"{advertised},CONTROLLER://{HOST}:{controller}",
        "advertised.listeners": advertised,
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.key": key.decode(),
        "ssl.keystore.certificate.chain": issued.cert_chain_pems[0].bytes().decode(),
    }
    quorum = Quorum(new_cluster_id(), 1, controller)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    server = [(HOST, tls_port)]
    with EmbeddedBroker(tmp_path, port, properties=properties, quorum=quorum):
        way = Bootstrap(server, trusting)
        with closing(KafkaStore(way, TOPIC, timeout_s=SOON_S)) as store:
            store.put("a/b", 1)
            way.tls = ssl.create_default_context()
            store.put("a/b", 2)
            break_connections(tls_port)
            with pytest.raises(StateError, match="certificate verify failed"):
                store.put("a/b", 3)
            way.tls = trusting
            store.put("a/b", 3)
        with pytest.raises(StateError, match="certificate verify failed"):
            KafkaStore(Bootstrap(server, ssl.create_default_context()), TOPIC)
        with pytest.raises(StateError, match=r"wants TLS|closed the connection"):
            KafkaStore(Bootstrap(server), TOPIC)
