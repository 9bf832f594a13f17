"""Pipelines among real parts, with a clock of the test's."""

from collections import Counter

import yaml
from parts.query_world import QueryWorld
from parts.reports import ReportingDriver, batch_document, parsed, uuid
from parts.virtual_time import EPOCH_S, START_MS

from proxy.admin.document_models import RowContext
from proxy.admin.pipeline_documents import PIPELINE_ROW
from proxy.config import load_config
from proxy.pipeline.running import OF_NODES, OF_PIPELINES, RunningPipelines
from proxy.progress.progress_records import read_progress_records
from proxy.progress.query_registry import owns_all
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.state import MemoryStore, StateError

SECOND_MS = 1000.0
START_S = EPOCH_S + START_MS / SECOND_MS
CONSUMER, PRODUCER = QuotaKind.CONSUMER_BYTE_RATE, QuotaKind.PRODUCER_BYTE_RATE
STATIC = 1_000_000_000.0
NORMAL = 1000
LOW, HIGH = 50, 100

SECOND_STAGE = {"band": [LOW, HIGH]}


def stage(name, consumes, *produces, **more):
    return {
        "name": name,
        "consumes": [consumes],
        "produces": list(produces),
        "band": [0, 1_000_000],
        "sampling_interval": "1s",
        "period": "2s",
        "normal_rate": NORMAL,
        "step": NORMAL,
        **more,
    }


def pipeline(name="p", *, first=None, second=SECOND_STAGE, last="two", **more):
    """Make a pipeline: feed -> a -> one -> b -> two."""
    return {
        "name": name,
        "sources": [
            {"client-id": "feed", "produces": ["a"], "normal_rate": NORMAL, "step": NORMAL}
        ],
        "stages": [stage("one", "a", "b", **first or {}), stage(last, "b", **second)],
        **more,
    }


class WiredWorld(QueryWorld):
    """Pipelines among real parts; `store` outlives a restart."""

    def __init__(self, folder, *pipelines, store=None):
        self.file = folder / "proxy.yaml"
        self.store = store or MemoryStore()
        self.driver = ReportingDriver()
        self.batches, self.done = Counter(), Counter()
        self.progress, self.pressure = {}, {}  # records of them, by key
        self.ends = {}  # of logs, as the cluster says when it is asked
        self.config = self.configured(*pipelines)
        self.start()

    def configured(self, *pipelines):
        adaptive = {"batch_interval": "1s"}
        document = {
            "cluster": {"bootstrap_servers": ["localhost:9092"]},
            "listeners": [
                {
                    "name": "default",
                    "bind": "127.0.0.1:0",
                    "advertised_host": "h",
                    "broker_ports": 0,
                }
            ],
            "quotas": {
                "rules": [
                    {"client-id": name, "consumer_byte_rate": int(STATIC), "adaptive": adaptive}
                    for name in ("one", "two", "id-of-one")
                ]
                + [
                    {"client-id": "feed", "producer_byte_rate": int(STATIC)},
                    {"client-id": "feed", "user": "alice", "producer_byte_rate": int(STATIC)},
                ]
            },
            "pipelines": list(pipelines),
        }
        self.file.write_text(yaml.safe_dump(document))
        return load_config(self.file)

    def restart(self):
        """Begin again as another process that has all of the state."""
        self.keep()
        self.progress |= {record.key: record for record in self.registry.unwritten.take()[0]}
        self.pressure |= {record.key: record for record in self.backpressure.unwritten.take()[0]}
        self.start(self.progress.values(), self.pressure.values())

    def start(self, progress=(), pressed=()):
        """Begin, or begin again as another process that has the state of pipelines, and more."""
        self.open_quotas(self.config.quota_settings)
        self.open_queries(self.config.progress_settings)
        assert self.registry.load(read_progress_records(progress)) == []
        assert self.backpressure.load(pressed, self.now_ms) == []
        self.pipelines = RunningPipelines(
            self.config.pipelines,
            self.registry,
            self.backpressure,
            self.quotas,
            self.instruments,
            on_change=lambda: None,
            clock_ms=lambda: self.now_ms,
            clock_s=lambda: self.now_s,
        )
        self.show((OF_PIPELINES, self.pipelines.shown), (OF_NODES, self.pipelines.shown_nodes))
        for name in ("one", "two"):
            self.connect(name)
        self.pipelines.store = self.store
        self.pipelines.assign(self.store.items(""), owns_all, is_handed_over=False)

    def connect(self, client_id, user=None):
        identity = ClientIdentity("default", user, client_id)
        self.quotas.client(identity)
        if self.backpressure.of_identity(identity, self.now_ms) is not None:
            self.registry.follow(client_id)
        return identity

    def reload(self, *pipelines):
        self.config = self.configured(*pipelines)
        self.quotas.update(self.config.quota_settings)
        self.pipelines.update(self.config.pipelines)

    def report(self, name, event="progress", *, run=1, **more):
        ids = {"query_id": uuid(name), "run_id": uuid(f"{run} {name}")}
        report = parsed(self.driver.document(event, name=name, **ids, **more))
        asked = self.pipelines.lost_ends(report)
        ends = {key: end for key, end in self.ends.items() if key in asked}
        self.pipelines.reported(self.accept_report(report), self.now_ms, ends)

    def batch(self, name, topic, start, end, *, rows=None, took_ms=100, **more):
        self.done[name] += 1
        read = end - (start or 0)
        rows = read if rows is None else rows
        sizes = {"rows": rows, "source_rows": read, "took_ms": took_ms}
        batch = batch_document(self.done[name], start, end, topic, **sizes)
        self.report(name, batch=batch, **more)

    def write(self, client_id, topic, start, end):
        self.pipelines.appended(client_id, topic, 0, start, end, self.now_ms)

    def look_up(self, client_id, partitions):
        """Let a driver ask for ends, which it is not told yet."""
        self.pipelines.plans(client_id, partitions, self.now_ms)

    def see(self, client_id, topic, end, partition=0):
        """Let a client of a query be told the end of a log."""
        self.registry.follow(client_id)
        self.registry.query_of(client_id).log_end(topic, partition, end, self.now_ms)

    def tick(self, ms=0.0):
        self.pass_ms(ms)
        self.pipelines.tick(self.now_ms)

    def hurry(self, seconds=4, per_s=10 * HIGH):
        """Let stage `two` be sent more than it takes, until `one` is held."""
        self.batch("one", "a", 1000, 1001)
        self.batch("two", "b", 0, HIGH, took_ms=1000)
        for _ in range(seconds):
            self.batches["b"] += per_s
            self.see("two", "b", 1000 + self.batches["b"])
            self.tick(SECOND_MS)

    def pressed(self, client_id):
        (found,) = self.backpressure.of_client(client_id)
        return found

    def value(self, name, **labels):
        labels = {"pipeline": "p", **labels}
        return self.prometheus.get_sample_value(f"kafka_quota_proxy_{name}", labels)

    def document(self):
        (pipeline,) = self.pipelines.running.values()
        return PIPELINE_ROW.document(pipeline, RowContext(0.0, self.now_ms))

    def completion(self):
        return self.document()["completion"]

    def keep(self):
        records, gone = self.pipelines.unwritten.take()
        try:
            self.store.put_many(records, delete=gone)
        except StateError:
            self.pipelines.unwritten.give_back()

    @property
    def keys(self):
        return {
            record.key for prefix in ("flow/", "ledger/") for record in self.store.items(prefix)
        }
