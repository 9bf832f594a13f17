"""A process whose clients move bytes, and the records that are made of them."""

from functools import partial

from prometheus_client import CollectorRegistry

from metrics import Instruments, UsageInstruments
from metrics.lock_free import REQUESTS
from proxy.cluster.kafka_client import Bootstrap
from proxy.progress.topics import TopicNames
from proxy.quota.entities import ClientIdentity
from proxy.quota.rules import RuleTable
from proxy.relay.clients import ClientRegistry, ClientUsage
from proxy.usage.usage_meter import UsageMeter
from proxy.usage.usage_record import UsageRecord
from proxy.usage.usage_topic import UsageTopic, UsageWriter
from proxy.wire.apis import FETCH, METADATA, PRODUCE

FIGURES = {
    "member": "host/0",
    "epoch": 1,
    "sequence": 0,
    "start_ms": 0,
    "end_ms": 60_000,
    "listener": "default",
    "user": None,
    "client_id": "etl",
    "hashed": False,
    "rule": None,
    "budget": None,
    "topic": "orders",
    "direction": "read",
    "bytes": 1000,
    "requests": 10,
    "connections": 1,
    "held_seconds": 0.5,
    "would_be_seconds": 2.0,
    "sampled": False,
    "rates": {7: 2},
    "peak": 1.4,
}


def record(**changes) -> UsageRecord:
    return UsageRecord(**FIGURES | changes)


def open_writer() -> tuple[UsageWriter, CollectorRegistry]:
    """Make a writer that has no cluster."""
    metrics = CollectorRegistry()
    topic = UsageTopic(Bootstrap([("nobody", 9092)]), "usage")
    return UsageWriter(topic, UsageInstruments(metrics)), metrics


class UsageWorld:
    """Clients of one process; nothing is sent anywhere."""

    def __init__(self, rules=(), hash_key=None, max_clients=100, sample_every=50, showing=tuple):
        self.names = TopicNames()
        self.bytes_total = Instruments(CollectorRegistry(), max_label_sets=max_clients).bytes_total
        self.clients = ClientRegistry(
            self.bytes_total, lambda: ClientUsage(self.names, sample_every)
        )
        self.meter = UsageMeter(
            *(self.bytes_total, self.clients.usage, lambda: RuleTable(rules), hash_key),
            showing=showing,
        )
        self.records: list[UsageRecord] = []
        self.counted: dict[tuple[str, ...], int] = {}
        """What was counted, also by counters that are gone, by the client's labels."""

    def identity(self, client_id, user=None, listener="default"):
        return ClientIdentity(listener, user, client_id)

    def connect(self, client_id="etl", user=None):
        self.clients.connected(self.identity(client_id, user))

    def leave(self, client_id="etl", user=None):
        self.clients.disconnected(self.identity(client_id, user))

    def move(self, size, client_id="etl", user=None, api=FETCH, requests=1):
        child = self.clients.byte_counter(self.identity(client_id, user), api)
        child.inc(size)
        child.cells[REQUESTS] += requests

    def walk(self, sizes, total, weight=1, client_id="etl", user=None, api=FETCH):
        usage = self.clients.usage[self.identity(client_id, user)]
        sampler = usage.produced if api == PRODUCE else usage.fetched
        sampler.add_all(sizes, weight)
        sampler.walked(total, weight)

    def read(self):
        for _ in self.meter.reading():
            pass

    def rate(self, seconds=10.0):
        self.read()
        for _ in self.meter.rating(seconds):
            pass

    def make_records(self, start_ms=0, end_ms=60_000):
        self.read()
        new: list[UsageRecord] = []
        make = partial(
            UsageRecord, member="host/0", epoch=1, sequence=0, start_ms=start_ms, end_ms=end_ms
        )
        for _ in self.meter.recording(make, new.append):
            pass
        self.records += new
        return new


APIS = (FETCH, PRODUCE, METADATA)
