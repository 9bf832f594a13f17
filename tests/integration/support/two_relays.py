"""Two members in front of a real broker: two relays on one event loop, in a thread of its own."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from parts.interceptors import NothingShown
from parts.two_members import MapSteering, member_at, moved
from prometheus_client import CollectorRegistry

from metrics import Instruments
from proxy.cluster.kafka_client import Bootstrap
from proxy.cluster.upstream import Address
from proxy.quota.manager import QuotaManager
from proxy.quota.rules import QuotaManagerSettings, Rule
from proxy.relay.brokers import BrokerConnector
from proxy.relay.clients import ClientRegistry
from proxy.relay.intercept_queue import InterceptQueue
from proxy.relay.listener import ListenerSettings
from proxy.relay.ports import ReusePortSockets
from proxy.relay.relay import Relay
from proxy.relay.services import Limits, Reapers, Services

HOST = "127.0.0.1"
LISTENER = "default"
LIMIT_S = 30
MAX_CLIENTS = 100

T = TypeVar("T")


@dataclass(eq=False)
class Member:
    """One relay with what belongs to it."""

    relay: Relay
    services: Services
    steering: MapSteering
    metrics: CollectorRegistry
    nodes: set[int]

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self.relay.listeners[LISTENER].bootstrap_port}"

    def moved_bytes(self, client_id: str, api: str) -> float:
        """What a client has had here of an API."""
        labels = {"listener": LISTENER, "user": "", "client_id": client_id, "api": api}
        return self.metrics.get_sample_value("kafka_quota_proxy_bytes_total", labels) or 0.0

    @property
    def revoke(self) -> float:
        name = "kafka_quota_proxy_steered_connections_total"
        return self.metrics.get_sample_value(name) or 0.0

    def open_ports(self) -> dict[int, int]:
        """The ports of all known brokers."""
        listener = self.relay.listeners[LISTENER]
        found = {node: listener.address_of(node) for node in self.nodes}
        return {node: address[1] for node, address in found.items() if address is not None}


class TwoRelays:
    """Members `a` and `b`; call it from any other thread than that of the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, a: Member, b: Member, broker: Address
    ) -> None:
        self.loop, self.broker = loop, broker
        self.a, self.b = a, b

    def run(self, function: Callable[[], Awaitable[T]]) -> T:
        async def call() -> T:
            return await function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(LIMIT_S)

    def learn(self, node_id: int) -> None:
        """Have both members open a port for a broker."""

        async def go() -> None:
            self.a.relay.brokers.learn(node_id, *self.broker)
            await asyncio.sleep(0)

        self.run(go)

    def move(self, owner: str) -> None:
        """Have one member own all clients."""

        async def go() -> None:
            self.follow(owner)

        self.run(go)

    def stop(self, member: Member) -> None:
        """Have the other one own all clients, and this one close its ports."""

        async def go() -> None:
            other = "b" if member is self.a else "a"
            self.follow(other)
            await member.relay.drain()

        self.run(go)

    def follow(self, owner: str | None = None) -> None:
        """Give both members a new map; within the loop."""
        name = owner or str(self.a.steering.map.owners[0])
        members = tuple(
            member_at(each.steering.name, LISTENER, port, each.open_ports())
            for each in (self.a, self.b)
            if (port := each.relay.listeners[LISTENER].bootstrap_port)
        )
        for each in (self.a, self.b):
            each.steering.follow(moved(each.steering.map, name, members))


def _make(steering: MapSteering, bootstrap: str, rules: tuple[Rule, ...]) -> Member:
    loop = asyncio.get_running_loop()
    metrics = CollectorRegistry()
    instruments = Instruments(metrics, max_label_sets=MAX_CLIENTS)
    settings = QuotaManagerSettings(rules=rules)
    quotas = QuotaManager(settings, instruments)
    quotas.paces_new = True
    services = Services(
        loop=loop,
        limits=Limits(),
        holds=True,
        quotas=quotas,
        reapers=Reapers(loop, instruments),
        instruments=instruments,
        clients=ClientRegistry(instruments.bytes_total),
        interceptor=lambda *_: NothingShown(),
        unshown=InterceptQueue(loop.call_later),
        steering=steering,
    )
    host, port = bootstrap.rsplit(":", 1)
    brokers = BrokerConnector(Bootstrap([(host, int(port))], None, 10.0))
    listener = ListenerSettings(LISTENER, HOST, HOST, takes_free_ports=True)
    return Member(Relay((listener,), brokers, services), services, steering, metrics, set())


@contextmanager
def two_relays(bootstrap: str, *rules: Rule, owner: str = "b") -> Iterator[TwoRelays]:
    """Start them, with all clients owned by one of them."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> TwoRelays:
        a, b = (_make(steering, bootstrap, rules) for steering in MapSteering.pair(owner))
        host, port = bootstrap.rsplit(":", 1)  # one broker, at its own address
        pair = TwoRelays(loop, a, b, (host, int(port)))
        for each in (a, b):
            ports = ReusePortSockets()
            each.relay.use({LISTENER: {None: ports.open(LISTENER, HOST, 0)[0]}}, ports)
            each.relay.accept()

        def learned(by: Member, node_id: int) -> None:
            for each in (a, b):
                each.nodes.add(node_id)
                each.relay.brokers.learn(node_id, *by.relay.brokers.addresses[node_id])
            loop.call_soon(pair.follow)

        for each in (a, b):
            each.relay.brokers.on_learned = partial(learned, each)
        pair.follow()
        return pair

    try:
        pair = asyncio.run_coroutine_threadsafe(start(), loop).result(LIMIT_S)
        try:
            yield pair
        finally:
            for each in (pair.a, pair.b):
                pair.run(each.relay.close)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
