"""Which broker of several coordinates a group."""

import asyncio
from contextlib import closing
from itertools import count

from examples.devkit.broker import EmbeddedBroker, EmbeddedCluster
from examples.devkit.loopback import HOST
from proxy.cluster.kafka_client import GROUP_COORDINATOR, Bootstrap, KafkaClient
from proxy.cluster.upstream import UpstreamError

WAIT_S = 60.0


def coordinated_elsewhere(cluster: EmbeddedCluster, group: str) -> tuple[str, EmbeddedBroker]:
    """Return the name of a group whose coordinator is not the controller, and that broker."""

    async def ask(name: str) -> int:
        addresses = [(HOST, broker.port) for broker in cluster.brokers]
        with closing(KafkaClient(Bootstrap(addresses))) as client:

            def check(error_code: int) -> None:
                if error_code:
                    raise UpstreamError("not_ready", name)

            async with client.within(WAIT_S):
                key = GROUP_COORDINATOR, name
                return (await client.retry(lambda: client.coordinator(key, check)))[1]

    for number in count():
        port = asyncio.run(ask(f"{group}-{number}"))
        broker = next(each for each in cluster.brokers if each.port == port)
        if broker is not cluster.brokers[0]:
            return f"{group}-{number}", broker
    raise AssertionError
