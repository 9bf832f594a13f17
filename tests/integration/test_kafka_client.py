"""The proxy's own client at a real broker."""

import asyncio
import socket
import ssl
from contextlib import closing

import pytest
import trustme
from support.detour import detour
from support.proxy_process import HOST

from examples.devkit.broker import EmbeddedBroker
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.upstream import UpstreamError


async def test_it_speaks_tls_and_checks_names(kafka: EmbeddedBroker) -> None:
    authority = trustme.CA()
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(HOST).configure_cert(server_tls)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with detour(kafka.bootstrap, tls=server_tls) as way:
        with closing(KafkaClient(Bootstrap([way.address], trusting))) as client:
            for _ in range(2):
                assert (await client.metadata()).brokers[0].port == kafka.port
            assert way.opened == 1
        stranger = Bootstrap([way.address], ssl.create_default_context())
        with pytest.raises(UpstreamError, match="certificate verify failed"):
            await KafkaClient(stranger).metadata()


async def test_the_next_bootstrap_server_is_asked(kafka: EmbeddedBroker) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), HOST, 0)
    dead = server.sockets[0].getsockname()[:2]
    client = KafkaClient(Bootstrap([dead, (HOST, kafka.port)]))
    async with server:
        for _ in range(2):
            assert (await client.metadata()).brokers
        assert client.connections == 1
        client.close()
    assert client.connections == 0


async def test_who_asks_together_is_answered_though_one_bootstrap_server_is_dead(
    kafka: EmbeddedBroker,
) -> None:
    """Each tries all servers by itself: what another one meets does not count for it."""
    with socket.create_server((HOST, 0)) as taken:
        dead = taken.getsockname()[:2]
    with closing(KafkaClient(Bootstrap([dead, (HOST, kafka.port)]))) as client:
        answers = await asyncio.gather(*(client.metadata() for _ in range(5)))
    assert all(answer.brokers for answer in answers)
