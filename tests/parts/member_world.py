"""Several members over one store: who owns what goes from one to another, and reports with it."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass

from parts.lookups import LOOKUP_VERSION, lookup_answer, lookup_request
from parts.quota_world import QuotaWorld
from parts.reports import ReportingDriver, batch_document, uuid

from metrics.clock import clock_ms
from proxy.admin.document_models import RowContext
from proxy.admin.pipeline_documents import COMPLETION
from proxy.cluster.kafka_client import Bootstrap
from proxy.pipeline.graph import PipelineSettings, SourceProducerSettings, StageSettings
from proxy.progress.query import ProgressSettings, QuerySettings
from proxy.progress.query_registry import owns_all
from proxy.progress.report import ALL_QUERIES, RefusalReason, ReportRefused
from proxy.queries.queries import Queries
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.rules import AdaptiveSettings, Rule
from proxy.relay.intercept_queue import InterceptQueue
from proxy.relay.interceptor import NotOwnerError
from proxy.state import MemoryStore
from proxy.wire.apis import APIS, FETCH, LIST_OFFSETS
from proxy.wire.frames import RequestHead
from proxy.wire.list_offsets import read_list_offsets_response

NOWHERE = ("127.0.0.1", 1)
BOUND = 1e6
CONSUMER = QuotaKind.CONSUMER_BYTE_RATE
STAGES = ("one", "two")
PIPELINE = "p"
FETCH_VERSION = 12


@dataclass(frozen=True)
class Owned:
    clients: frozenset[str] = frozenset()
    pipelines: frozenset[str] = frozenset()

    def client(self, client_id):
        return client_id in self.clients

    def pipeline(self, name):
        return name in self.pipelines


OF_PIPELINE = Owned(frozenset({*STAGES, "feed"}), frozenset({PIPELINE}))
NOTHING = Owned()


def joined(*parts):
    return Owned(
        frozenset().union(*(part.clients for part in parts)),
        frozenset().union(*(part.pipelines for part in parts)),
    )


class Groups:
    """The consumer groups of the cluster. None ever goes back."""

    def __init__(self):
        self.offsets = {}

    def commit(self, group, offsets):
        kept = self.offsets.setdefault(group, {})
        for partition, offset in offsets.items():
            assert offset >= kept.get(partition, 0)
            kept[partition] = offset


class GroupCommitter:
    """In the place of Committer, whose cluster is this test's."""

    run = None  # it does what it is told to

    def __init__(self, registry, groups):
        self.registry, self.groups, self.known = registry, groups, set()

    def commit(self, names: set[str] | None = None):
        for group in self.registry.due_commits():
            if names is not None and group not in names:
                continue
            if group not in self.known:
                self.known.add(group)
                self.registry.group_has(group, self.groups.offsets.get(group, {}))
            offsets = self.registry.due_commits().get(group, {})
            self.groups.commit(group, offsets)
            self.registry.committed(group, offsets, 0.0)

    async def flush(self, timeout_s):  # noqa: ARG002
        self.commit()
        return True

    async def revoke(self, names, timeout_s):  # noqa: ARG002
        self.commit(set(names))
        self.registry.drop_commits(names)
        self.known -= set(names)
        return True


class LogEndsOf:
    """In the place of LogOffsetPoller."""

    run = None

    def __init__(self, ends):
        self.ends = ends

    async def look_up(self, partitions):
        return {key: self.ends[key] for key in partitions if key in self.ends}


class MemberWorld(QuotaWorld):
    """One member with real parts, but for the cluster."""

    def __init__(self, tier, owns, store=None):
        adaptive = AdaptiveSettings(batch_interval_ms=1000.0)
        rules = [
            Rule(client_id=name, bounds={CONSUMER: BOUND}, adaptive=adaptive)
            for name in (*STAGES, "lone")
        ]
        super().__init__(*rules)
        self.tier = tier
        self.queries = Queries(
            *(tier.progress, tier.pipelines, self.quotas, Bootstrap([NOWHERE]), self.instruments),
            metrics=self.prometheus,
            knows_client=lambda client_id: client_id not in self.unknown,
            unshown=InterceptQueue(lambda *_: None),
        )
        self.unknown = set()
        """Clients that have never connected here."""
        self.registry, self.pressure = self.queries.registry, self.queries.backpressure
        self.running = self.queries.running
        self.committer = self.queries.committer = GroupCommitter(self.registry, tier.groups)
        self.queries.log_offset_poller = LogEndsOf(tier.ends)
        self.store = store or tier.store
        self.queries.load(self.store, owns)
        self.clients = {}

    def client(self, client_id):
        """Return the client's connection here, which stays."""
        if client_id not in self.clients:
            identity = ClientIdentity("default", None, client_id)
            self.clients[client_id] = self.queries.following.client(identity, 1)
        return self.clients[client_id]

    def wants(self, client_id):
        client = self.client(client_id)
        return {key for key in (FETCH, LIST_OFFSETS) if client.wants(key, self.clock())}

    clock = staticmethod(clock_ms)

    def fetch(self, client_id, topic, end, *, answers=True):
        """Let an executor read up to an offset; return what gives it the response."""
        client, now_ms = self.client(client_id), self.clock()
        if not client.wants(FETCH, now_ms):
            return lambda: None
        topic_of = APIS[FETCH].request.FetchTopic
        partition = topic_of.FetchPartition(
            partition=0, current_leader_epoch=-1, fetch_offset=0, log_start_offset=-1,
            last_fetched_epoch=-1, partition_max_bytes=1,
        )  # fmt: skip
        message = APIS[FETCH].request(
            replica_id=-1, max_wait_ms=500, min_bytes=1, session_id=0, session_epoch=0,
            topics=[topic_of(topic=topic, partitions=[partition])],
        )  # fmt: skip
        body = bytes(message.encode(version=FETCH_VERSION))
        head = RequestHead(len(body), FETCH, FETCH_VERSION, 1, client_id, 0)
        seen = client.request(head, memoryview(body), now_ms)
        seen.sent()

        def respond():
            observer = seen.observer(self.clock())
            observer.session(0, 0)
            observer.partitions(topic, [(0, 0, end, end, 0, 100, end)])
            observer.ended()

        if answers:
            respond()
        return respond

    def look_up(self, client_id, topic="a", end=1000):
        """Return what a driver is told of the end of a log; None: it is to ask another member."""
        client, now_ms = self.client(client_id), self.clock()
        if not client.wants(LIST_OFFSETS, now_ms):
            return end
        try:
            seen = client.request(*lookup_request(client_id, topic), now_ms)
            answer = seen.response(LOOKUP_VERSION, lookup_answer(end, topic), now_ms)
        except NotOwnerError:
            return None
        ((_, offset),) = read_list_offsets_response(LOOKUP_VERSION, answer).values()
        return offset

    async def tick(self):
        self.committer.commit()
        self.running.tick(self.clock())
        await self.queries.close()  # writes what has changed
        self.queries.resume(self.store)

    def completion(self):
        now = RowContext(0.0, self.clock())
        return [COMPLETION.document(each.completion, now) for each in self.queries.pipelines()]


def stage(name, consumes, *produces):
    return StageSettings(
        name=name, consumes=(consumes,), produces=produces, band=(0.0, 1e6),
        sampling_interval_ms=1000.0, period_ms=2000.0, ratio=0.5, normal_rate=1000.0, step=100.0,
    )  # fmt: skip


class Tier:
    """The members, the store that they share, and a cluster: feed -> a -> one -> b -> two."""

    def __init__(self, members=2, open_store=None):
        """`open_store` opens the state for each; None: one in memory for all."""
        self.store = MemoryStore()
        open_store = open_store or (lambda: self.store)
        self.groups, self.ends = Groups(), {}
        self.progress = ProgressSettings(
            queries=tuple(
                QuerySettings(name=name, client_id=name, commit_group=f"{name}-progress")
                for name in (*STAGES, "lone")
            )
        )
        source = SourceProducerSettings(
            client_id="feed", produces=("a",), normal_rate=1e3, step=1e2
        )
        self.pipelines = [
            PipelineSettings(
                name=PIPELINE,
                stages=(stage("one", "a", "b"), stage("two", "b")),
                sources=(source,),
            )
        ]
        lone = Owned(frozenset({"lone"}))
        owns = [owns_all] if members == 1 else [OF_PIPELINE, lone]
        self.members = [MemberWorld(self, each, open_store()) for each in owns]
        self.owner = 0
        self.drivers = {
            name: ReportingDriver(
                name, query_id=uuid(name), run_id=uuid(f"r{name}"), sender=uuid(name)
            )
            for name in (*STAGES, "lone")
        }
        self.batches = Counter()
        self.read, self.written = Counter(), 0
        self.refused = 0

    def member(self, client_id):
        if len(self.members) == 1:
            return self.members[0]
        return self.members[1 if client_id == "lone" else self.owner]

    async def hand_over(self):
        """Give the pipeline and its clients to the other member."""
        if len(self.members) == 1:
            return
        old, new = self.members[self.owner], self.members[1 - self.owner]
        left = Owned(old.queries.registry.owns.clients - OF_PIPELINE.clients)
        assert await old.queries.revoke(owns=left)
        await new.queries.assign(new.store, owns=joined(new.queries.registry.owns, OF_PIPELINE))
        self.owner = 1 - self.owner

    def write(self, count):
        """Let stage one write records into b, which its owner sees."""
        start, self.written = self.written, self.written + count
        self.ends["b", 0] = self.written
        member = self.member("one")
        member.running.appended("one", "b", 0, start, self.written, member.clock())

    async def report(self, name, event="progress", **more):
        """Send a report to who owns the query by then, as often as it takes."""
        raw = json.dumps(self.drivers[name].document(event, **more)).encode()
        while True:
            try:
                return await self.member(name).queries.accept(raw, ALL_QUERIES)
            except ReportRefused as error:
                if error.reason is not RefusalReason.OWNED_ELSEWHERE:
                    raise
                self.refused += 1
                await asyncio.sleep(0)

    def batch(self, name, topic, end, took_ms=0):
        start, self.read[name] = self.read[name], end
        self.batches[name] += 1
        self.ends[topic, 0] = max(end, self.ends.get((topic, 0), 0))
        return self.report(
            name,
            batch=batch_document(
                self.batches[name], start, end, topic, rows=end - start, took_ms=took_ms
            ),
        )

    async def totals(self):
        """Return what is the same however often owners change."""
        for member in self.members:
            await member.tick()
        progress = {
            (query.client_id, key): partition.committed_to
            for member in self.members
            for query in member.registry.queries
            for key, partition in query.partitions.items()
        }
        ledger = Counter()
        for member in self.members:
            found = member.prometheus.get_sample_value(
                "kafka_quota_proxy_ledger_completion_seconds_count", {"pipeline": PIPELINE}
            )
            ledger["completed"] += int(found or 0)
            for document in member.completion():
                ledger["pending"] += document["pending"]["batches"]
                ledger["edges"] += document["edges"]
        skipped = sum(
            partition.skipped.records
            for member in self.members
            for query in member.registry.queries
            for partition in query.partitions.values()
        )
        return progress, +ledger, self.groups.offsets, skipped
