"""TLS on either side: certificates as users, brokers told apart by name, brokers that want TLS."""

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from pyspark.sql import SparkSession
from support.clients import CLIENTS, Access, Client
from support.operating import running
from support.proxy_process import HOST, ProxyProcess, config, until
from support.raw import RawClient, api_versions, message

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.broker_settings import Quorum, new_cluster_id
from examples.devkit.loopback import free_ports
from proxy.config import load_config
from proxy.onboarding.local_usage import copy_usage_topic
from proxy.relay.log_limiter import LINES_AT_ONCE
from proxy.spark.usage.usage_stream import usage_query
from proxy.wire.apis import METADATA

SNI = "broker-{node_id}.kafka.example"
SIZES_BYTES = (1, 100, 70_000, 900_000) * 3
USER_BOUND_BYTES = 123_456

LOGIN_LISTENER = "listener.name.sasl_ssl"
USER, PASSWORD = "etl", "etl.secret-7"
COPY_S = 240


@dataclass(frozen=True, slots=True)
class Files:
    """An authority and what it has signed, in files."""

    authority: trustme.CA
    ca: str
    server: dict[str, str]
    client: dict[str, str]


@pytest.fixture(scope="session")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))

    def pair(name: str, issued: trustme.LeafCert) -> dict[str, str]:
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(str(cert))
        issued.private_key_pem.write_to_path(str(key))
        return {"cert_file": str(cert), "key_file": str(key)}

    names = [HOST, "localhost", "bootstrap.kafka.example", *[SNI.format(node_id=n) for n in (1, 9)]]
    server = pair("server", authority.issue_cert(*names))
    client = pair("client", authority.issue_cert("etl@example", common_name="etl"))
    return Files(authority, str(folder / "ca.pem"), server, client)


@pytest.fixture
def values() -> list[tuple[int, bytes]]:
    random = Random(5)
    return [(0, random.randbytes(size)) for size in SIZES_BYTES]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_clients_over_tls(
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    pem: Files,
    values: list[tuple[int, bytes]],
    client: Client,
) -> None:
    running = proxy(listeners=[{"tls": pem.server}])
    access = Access(running.bootstrap, ca_file=pem.ca)
    name = topic()
    client.produce(access, name, values)
    assert client.consume(access, name, len(values)).values[0] == [value for _, value in values]


def test_server_names_that_are_not_ascii_fill_no_log(
    proxy: Callable[..., ProxyProcess], pem: Files
) -> None:
    running = proxy(listeners=[{"tls": pem.server}])
    sent = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="aaaa.b")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    hello = sent.read().replace(b"aaaa.b", b"\xff" * 6)
    for _ in range(3 * LINES_AT_ONCE):
        with socket.create_connection((HOST, running.port)) as sock:
            sock.sendall(hello)
            while sock.recv(1 << 16):
                pass
    rejected = running.logged("client rejected", LINES_AT_ONCE)
    assert {each["reason"] for each in rejected} == {"tls_handshake"}


def test_it_is_shown_when_certificates_expire(
    proxy: Callable[..., ProxyProcess], pem: Files
) -> None:
    running = proxy(listeners=[{"tls": {**pem.server, "ca_file": pem.ca}}])
    name, metrics = "certificate_not_after_timestamp_seconds", running.metrics()
    for role in ("server", "client_ca"):
        assert metrics.value(name, listener="default", role=role) > time.time()


def test_certificate_is_the_user(
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    fill: Callable[..., None],
    pem: Files,
) -> None:
    """The rule for the certificate's name is found; without a certificate nobody gets in."""
    context = ssl.create_default_context(cafile=pem.ca)
    context.load_cert_chain(pem.client["cert_file"], pem.client["key_file"])
    listener = {"tls": {**pem.server, "ca_file": pem.ca}}
    running = proxy(listeners=[listener])
    with RawClient(running.bootstrap, tls=context) as client:
        client.ask(api_versions(3))
    (user,) = running.metrics().labels("bytes_total", "user")
    assert "CN=etl" in user.split(",")

    bounded = proxy(
        listeners=[listener], rules=[{"user": user, "consumer_byte_rate": USER_BOUND_BYTES}]
    )
    name = topic()
    fill(name, 1, 1000)
    librdkafka = CLIENTS[-1]
    access = Access(bounded.bootstrap, ca_file=pem.ca, **pem.client)
    assert librdkafka.consume(access, name, 1).count == 1
    assert bounded.metrics().value("bound_bytes") == USER_BOUND_BYTES

    with (
        pytest.raises((ssl.SSLError, ConnectionError)),
        RawClient(bounded.bootstrap, tls=ssl.create_default_context(cafile=pem.ca)) as nobody,
    ):
        nobody.ask(api_versions(3))
    bounded.until_counts("connections_rejected_total", 1, reason="tls_handshake")
    bounded.logged("client rejected")


def test_brokers_are_told_apart_by_name(
    proxy: Callable[..., ProxyProcess], topic: Callable[..., str], pem: Files
) -> None:
    running = proxy(listeners=[{"broker_ports": None, "tls": {**pem.server, "sni": SNI}}])
    context = ssl.create_default_context(cafile=pem.ca)
    # The last one is not known (yet): another broker tells its client which there are.
    for name in ("bootstrap.kafka.example", SNI.format(node_id=1), SNI.format(node_id=9)):
        with RawClient(running.bootstrap, tls=context, server_name=name) as client:
            (broker,) = client.ask(message(METADATA, 9, topics=[])).brokers
            assert (broker.host, broker.port) == (SNI.format(node_id=1), running.port)


def test_client_without_tls_on_a_tls_port(proxy: Callable[..., ProxyProcess], pem: Files) -> None:
    running = proxy(listeners=[{"tls": pem.server}])
    with RawClient(running.bootstrap) as client:
        client.send(api_versions(3))
        while not client.is_closed_by_peer():
            pass  # an alert may come first
    running.until_counts("connections_rejected_total", 1, reason="tls_handshake")
    running.logged("client rejected")


@pytest.fixture(scope="module")
def tls_kafka(tmp_path_factory: pytest.TempPathFactory, pem: Files) -> Iterator[dict[str, str]]:
    """`HOST:PORT` of a broker's TLS listeners, by their protocol. SASL_SSL wants a certificate,
    too.
    """
    port, tls_port, login_port, controller = free_ports(4)
    issued = pem.authority.issue_cert(HOST, "localhost")
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    ports = {"PLAINTEXT": port, "SSL": tls_port, "SASL_SSL": login_port}
    advertised = ",".join(f"{name}://{HOST}:{number}" for name, number in ports.items())
    login = "org.apache.kafka.common.security.plain.PlainLoginModule"
    properties = {
        "listeners": f"{advertised},CONTROLLER://{HOST}:{controller}",
        "advertised.listeners": advertised,
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL,"
        "SASL_SSL:SASL_SSL",
        f"{LOGIN_LISTENER}.sasl.enabled.mechanisms": "PLAIN",
        f"{LOGIN_LISTENER}.plain.sasl.jaas.config": f'{login} required user_{USER}="{PASSWORD}";',
        f"{LOGIN_LISTENER}.ssl.client.auth": "required",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": pem.authority.cert_pem.bytes().decode(),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.key": key.decode(),
        "ssl.keystore.certificate.chain": issued.cert_chain_pems[0].bytes().decode(),
    }
    with EmbeddedBroker(
        tmp_path_factory.mktemp("tls-kafka"),
        port,
        properties=properties,
        quorum=Quorum(new_cluster_id(), 1, controller),
    ):
        yield {name: f"{HOST}:{number}" for name, number in ports.items()}


@pytest.mark.slow
@pytest.mark.parametrize("client_side", ["plain", "tls"])
def test_brokers_over_tls(
    proxy: Callable[..., ProxyProcess],
    tls_kafka: dict[str, str],
    pem: Files,
    values: list[tuple[int, bytes]],
    client_side: str,
) -> None:
    listener = {"tls": pem.server} if client_side == "tls" else {}
    running = proxy(
        bootstrap_servers=tls_kafka["SSL"],
        cluster_tls={"ca_file": pem.ca},
        listeners=[listener],
    )
    access = Access(running.bootstrap, ca_file=pem.ca if listener else None)
    name = f"over-{client_side}"
    client = CLIENTS[-1]
    client.produce(access, name, values)
    assert client.consume(access, name, len(values)).values[0] == [value for _, value in values]


@pytest.mark.slow
def test_broker_with_the_certificate_of_a_stranger(
    proxy: Callable[..., ProxyProcess], tls_kafka: dict[str, str], tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger.pem"
    trustme.CA().cert_pem.write_to_path(str(stranger))
    running = proxy(
        bootstrap_servers=tls_kafka["SSL"],
        cluster_tls={"ca_file": str(stranger)},
    )
    assert running.get("/readyz")[0] == 503
    with RawClient(running.bootstrap) as client:
        client.send(api_versions(3))
        assert client.is_closed_by_peer()
    running.until_counts("upstream_errors_total", 1, reason="tls")


@pytest.mark.slow
def test_usage_is_read_with_the_certificates_and_the_login_that_are_wanted(
    tls_kafka: dict[str, str],
    pem: Files,
    spark: SparkSession,
    tmp_path: Path,
    values: list[tuple[int, bytes]],
) -> None:
    usage = {"topic": "usage-by-login", "interval": "1s"}
    document = {**config(tls_kafka["SASL_SSL"], listeners=[{"tls": pem.server}]), "usage": usage}
    password_file = tmp_path / "password"
    password_file.write_text(PASSWORD)
    login = {"mechanism": "PLAIN", "username": USER, "password_file": str(password_file)}
    document["cluster"] |= {"tls": {"ca_file": pem.ca, **pem.client}, "sasl": login}

    def stored(folder: Path) -> dict[str, int]:
        rows = spark.read.parquet(str(folder / "usage")).where(f"user = '{USER}'")
        return {row[0]: row[1] for row in rows.groupBy("direction").agg({"bytes": "sum"}).collect()}

    jaas = "org.apache.kafka.common.security.plain.PlainLoginModule"
    options = {
        "kafka.security.protocol": "SASL_SSL",
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.location": pem.ca,
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.jaas.config": f'{jaas} required username="{USER}" password="{PASSWORD}";',
    }
    with running(ProxyProcess(document, tmp_path / "proxy")) as process:
        access = Access(process.bootstrap, "writer", USER, PASSWORD, pem.ca)
        CLIENTS[-1].produce(access, "by-login", values)
        until(lambda: process.metrics().value("usage_records_written_total") > 0, "it is written")
        options["kafka.bootstrap.servers"] = process.bootstrap

        def streamed() -> bool:
            out = tmp_path / "streamed"
            query = usage_query(spark, options, str(out), usage["topic"], {"availableNow": True})
            assert query.awaitTermination(COPY_S)
            return stored(out).get("write", 0) > sum(SIZES_BYTES)

        until(streamed, "all is stored", COPY_S)
    days = datetime.now(UTC).date() - timedelta(1)
    copy_usage_topic(spark, load_config(process.config_file), days, str(tmp_path / "copied"))
    assert stored(tmp_path / "copied")["write"] > sum(SIZES_BYTES)

    password_file.write_text("another")
    with pytest.raises(RuntimeError, match=r"can't read topic 'usage-by-login' at .*: Auth"):
        copy_usage_topic(spark, load_config(process.config_file), days, str(tmp_path / "refused"))
