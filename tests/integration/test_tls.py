"""TLS on either side: certificates as users, brokers told apart by name, brokers that want TLS."""

import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from support.clients import CLIENTS, Access, Client
from support.proxy_process import HOST, ProxyProcess
from support.raw import RawClient, api_versions, message

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.broker_settings import Quorum, new_cluster_id
from examples.devkit.loopback import free_ports
from proxy.wire.apis import METADATA

SNI = "broker-{node_id}.kafka.example"
SIZES_BYTES = (1, 100, 70_000, 900_000) * 3
USER_BOUND_BYTES = 123_456


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
def tls_kafka(tmp_path_factory: pytest.TempPathFactory, pem: Files) -> Iterator[str]:
    """`HOST:PORT` of a broker's TLS listener."""
    port, tls_port, controller = free_ports(3)
    issued = pem.authority.issue_cert(HOST, "localhost")
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    advertised = f"PLAINTEXT://{HOST}:{port},SSL://{HOST}:{tls_port}"
    properties = {
        "listeners": f"{advertised},CONTROLLER://{HOST}:{controller}",
        "advertised.listeners": advertised,
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL",
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
        yield f"{HOST}:{tls_port}"


@pytest.mark.slow
@pytest.mark.parametrize("client_side", ["plain", "tls"])
def test_brokers_over_tls(
    proxy: Callable[..., ProxyProcess],
    tls_kafka: str,
    pem: Files,
    values: list[tuple[int, bytes]],
    client_side: str,
) -> None:
    listener = {"tls": pem.server} if client_side == "tls" else {}
    running = proxy(
        bootstrap_servers=tls_kafka,
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
    proxy: Callable[..., ProxyProcess], tls_kafka: str, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger.pem"
    trustme.CA().cert_pem.write_to_path(str(stranger))
    running = proxy(
        bootstrap_servers=tls_kafka,
        cluster_tls={"ca_file": str(stranger)},
    )
    assert running.get("/readyz")[0] == 503
    with RawClient(running.bootstrap) as client:
        client.send(api_versions(3))
        assert client.is_closed_by_peer()
    running.until_counts("upstream_errors_total", 1, reason="tls")
