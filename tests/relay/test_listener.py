"""Ports of a listener: bootstrap, one for each broker, or names on one port."""

import asyncio
import socket
from contextlib import closing, contextmanager

import pytest
from relaylab.lab import no_free_descriptor, until
from structlog.testing import capture_logs

from examples.devkit.loopback import free_ports
from proxy.relay.listener import Listener, ListenerSettings
from proxy.relay.ports import ListenerError, ReusePortSockets
from proxy.relay.tls import sni_pattern

HOST = "127.0.0.1"
SNI = "broker-{node_id}.kafka.example"


@contextmanager
def opened(*broker_ports: int, takes_free_ports: bool = False, sni: str | None = None):
    accepted = []
    listener = Listener(
        ListenerSettings("main", HOST, "proxy.example", takes_free_ports, sni=sni),
        asyncio.get_running_loop(),
        lambda sock, origin: accepted.append((sock, origin.ip, origin.node_id)),
        lambda *_: None,
    )
    ports = {None: 0, **dict(enumerate(broker_ports))}
    listener.use(
        {node: ReusePortSockets().open("main", HOST, port)[0] for node, port in ports.items()}
    )
    listener.accept()
    try:
        yield listener, accepted
    finally:
        listener.close()
        for sock, _, _ in accepted:
            sock.close()


async def connect_to(port: int, accepted: list) -> None:
    with closing(socket.socket()) as sock:
        sock.setblocking(False)
        count = len(accepted)
        await asyncio.get_running_loop().sock_connect(sock, (HOST, port))
        await until(lambda: len(accepted) > count)


async def test_the_port_tells_the_broker():
    ports = free_ports(3)
    with opened(*ports) as (listener, accepted):
        await connect_to(listener.bootstrap_port, accepted)
        for port in ports:
            await connect_to(port, accepted)
        assert [(ip, node_id) for _, ip, node_id in accepted] == [
            (HOST, None),
            (HOST, 0),
            (HOST, 1),
            (HOST, 2),
        ]
        assert listener.address_of(2) == ("proxy.example", ports[2])


async def test_a_broker_without_a_port_is_named_once():
    ports = free_ports(2)
    with opened(*ports) as (listener, _), capture_logs() as logs:
        assert listener.address_of(2) is None
        assert listener.address_of(2) is None
        assert listener.address_of(0) == ("proxy.example", ports[0])
    assert [(log["node_id"], log["listener"]) for log in logs] == [(2, "main")]
    assert "fix" in logs[0]


async def test_free_ports_open_when_a_broker_is_named():
    with opened(takes_free_ports=True) as (listener, accepted):
        _, port = listener.address_of(1000)
        assert listener.address_of(1000) == ("proxy.example", port)
        assert listener.address_of(7)[1] not in (port, listener.bootstrap_port)
        await connect_to(port, accepted)
        assert accepted[0][2] == 1000


async def test_a_broker_counts_as_left_out_until_it_has_its_port():
    with opened(takes_free_ports=True) as (listener, _), capture_logs() as logs:
        with no_free_descriptor():
            assert listener.address_of(3) is listener.address_of(3) is None
        assert len(listener.without_port) == 1
        assert listener.address_of(3) is not None
        assert len(listener.without_port) == 0
    assert [(log["node_id"], log["fix"]) for log in logs] == [(3, "raise the limit of open files")]


async def test_addresses_outlive_the_sockets():
    with opened(takes_free_ports=True) as (listener, _), capture_logs() as logs:
        address = listener.address_of(4)
        listener.close()
        assert listener.address_of(4) == address
        assert listener.address_of(5) is None
        with pytest.raises(ConnectionRefusedError):
            await connect_to(address[1], [])
    assert not logs


async def test_names_on_one_port():
    with opened(sni=SNI) as (listener, _):
        assert listener.address_of(12) == ("broker-12.kafka.example", listener.bootstrap_port)
        assert listener.node_of("broker-12.kafka.example") == 12
        assert listener.node_of("kafka.example") is listener.node_of(None) is None


@pytest.mark.parametrize(
    ("node_id", "fix"),
    [(7, "make broker_ports reach first port + 7"), (-5, "make broker_ports be 0, for any free")],
)
async def test_a_broker_without_a_port_is_left_out(node_id, fix):
    (port,) = free_ports(1)
    with opened(port) as (listener, _), capture_logs() as lines:
        assert listener.address_of(node_id) is None
    assert [line["fix"].startswith(fix) for line in lines] == [True]


async def test_a_port_in_use():
    with opened() as (listener, _):
        port = listener.bootstrap_port
        with pytest.raises(ListenerError, match=rf"'other': {HOST}:{port}: "):
            ReusePortSockets().open("other", HOST, port)


async def test_a_port_without_a_free_descriptor():
    with no_free_descriptor(), pytest.raises(ListenerError) as failed:
        ReusePortSockets().open("other", HOST, 0)
    assert failed.value.fix == "raise the limit of open files (ulimit -Hn, LimitNOFILE=)"


@pytest.mark.parametrize(
    ("name", "node_id"),
    [
        ("broker-0.kafka.example", "0"),
        ("BROKER-7.Kafka.Example", "7"),
        ("broker-.kafka.example", None),
        ("broker--1.kafka.example", None),
        ("broker-1xkafka.example", None),
        ("broker-1.kafka.example.evil", None),
        ("x.broker-1.kafka.example", None),
        ("broker-12345678901.kafka.example", None),
    ],
)
def test_the_name_tells_the_broker(name, node_id):
    match = sni_pattern(SNI).fullmatch(name)
    assert (match["node_id"] if match else None) == node_id
