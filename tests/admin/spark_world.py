"""A world with Spark queries: a real book and real backpressure behind the server."""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from admin_world import CONSUMER, HOSTILE, MIB, RULES, AdminWorld
from parts.query_world import QueryWorld
from parts.reports import ReportingDriver, batch_document, uuid

from proxy.admin.server import AdminServer
from proxy.backpressure.query_advice import update_query_advice
from proxy.pipeline.running_pipeline import RunningPipeline
from proxy.progress.events import ProgressEvent
from proxy.progress.offset_ranges import SkipReason
from proxy.progress.query import FollowedQuery, ProgressSettings, QuerySettings
from proxy.progress.report import ALL_QUERIES, ReportableQueries, ReportRefused, parse_report
from proxy.progress.tracker import QueryReader
from proxy.quota.entities import ClientIdentity
from proxy.quota.rules import AdaptiveSettings, Rule

REPORTS = "/v1/spark/batches"
BYTES_PER_RECORD = 1000
ADAPTIVE = Rule(
    client_id="etl-payments",
    bounds={CONSUMER: 10 * MIB},
    adaptive=AdaptiveSettings(batch_interval_ms=2000.0, estimator="pid"),
    place="quota-proxy.yaml:18",
    number=4,
)
QUERIES = (
    QuerySettings(name="payments", client_id="etl-payments", commit_group="payments-progress"),
    QuerySettings(name="clicks", client_id="clicks", stuck_after_ms=60_000.0),
)


class SparkWorld(AdminWorld, QueryWorld):
    """Everything behind the server, with what it follows of queries."""

    def __init__(self, queries: tuple[QuerySettings, ...] = QUERIES) -> None:
        super().__init__((*RULES, ADAPTIVE))
        self.events: list[ProgressEvent] = []
        self.known: set[str] = set()
        settings = ProgressSettings(queries=queries)
        self.open_queries(
            settings, knows_client=self.known.__contains__, on_event=self.events.append
        )

    @property
    def now_s(self) -> float:
        """What the browser's clock shows: the page computes with it."""
        return time.time()

    def server(self, host: str = "127.0.0.1", **changes: Any) -> AdminServer:
        return super().server(host, **({"reports": self} | changes))

    async def accept(self, raw: bytes, scope: ReportableQueries) -> Mapping[str, object]:
        return self.take(raw, scope)

    def take(self, raw: bytes, scope: ReportableQueries = ALL_QUERIES) -> Mapping[str, object]:
        try:
            report = parse_report(raw)
        except ReportRefused as error:
            self.registry.refuse(error)
            raise
        accepted = self.accept_report(report, scope)
        query = accepted.query
        pressed = self.backpressure.of_client(query.client_id)
        update_query_advice(
            query,
            self.quotas.table,
            pressed[0].rule if pressed else None,
            is_followed=query.settings is not None,
            knows_client=lambda _: True,
            now_ms=self.now_ms,
        )
        return {
            "accepted": True,
            "lost_reports": accepted.lost_reports,
            "advice": [note.text for note in query.advice.values()],
            "rate": pressed[0].rate if pressed else None,
            "bound": pressed[0].bound if pressed else None,
        }

    def progress(self) -> Iterable[FollowedQuery]:
        return self.registry.queries

    def pressure(self) -> Mapping[str, Mapping[str, object]]:
        return {
            query.name: pressed.document(self.now_ms)
            for query in self.registry.queries
            for pressed in self.backpressure.of_client(query.client_id)
        }

    def pipelines(self) -> Iterable[RunningPipeline]:
        return ()


@dataclass
class Job:
    """One query with its driver: reads, and makes the reports that QuotaListener would send."""

    world: SparkWorld
    name: str
    client_id: str
    topic: str = "payments"
    partitions: int = 3
    batch_id: int = -1
    at: int = 0
    """What each partition has completed."""
    step: int = 0
    """What each partition was given on top."""
    log_end: int = 0
    """What the driver was told last."""

    def __post_init__(self) -> None:
        ids = (uuid(f"{what} {self.name}") for what in ("query", "run", "sender"))
        self.driver = ReportingDriver(self.name, self.client_id, *ids)

    def report(self, event: str, **more: Any) -> dict[str, Any]:
        return self.driver.document(event, **{"age_ms": 5, **more})

    def ends(self, log_end: int) -> None:
        """Let the driver look up the log ends."""
        self.log_end = log_end
        query = self.world.registry.query_of(self.client_id)
        assert query is not None
        for partition in range(self.partitions):
            query.log_end(self.topic, partition, log_end, self.world.now_ms)

    def lose(self, offset: int) -> None:
        """Let the broker remove what is below and not read; its readers go on behind it."""
        query = self.world.registry.query_of(self.client_id)
        assert query is not None
        for partition in query.partitions.values():
            partition.log.record_start(offset)
            lost_from, reason = self.at + self.step, SkipReason.OUT_OF_RANGE
            partition.pass_over(lost_from, offset, reason, self.world.now_ms)

    def read(self, step: int) -> None:
        """Read `step` records of each partition."""
        identity = ClientIdentity("default", None, self.client_id)
        query = self.world.registry.query_of(self.client_id)
        assert query is not None
        quotas = self.world.quotas.client(identity)
        size = step * self.partitions * BYTES_PER_RECORD
        charge = quotas.charge(CONSUMER, size, self.world.now_ms)
        if charge is not None:
            self.world.quotas.held(charge, charge.delay_ms, self.world.now_ms)
        pressure = self.world.backpressure.of_identity(identity, self.world.now_ms)
        if pressure is not None:
            pressure.record_bytes(size)
        low = self.at + self.step
        self.step += step
        high = low + step
        end = max(high, self.log_end)
        reader = QueryReader(query)
        for number in range(self.partitions):
            given = (number, 0, end, end, 0, size, high)
            reader.fetch_asked(self.topic, None, [(number, low)], self.world.now_ms)
            reader.fetch_answered(self.topic, None, {number: low}, [given], self.world.now_ms)

    def complete(self, duration_ms: int) -> dict[str, Any]:
        """Return the report of a batch with all that was read."""
        self.batch_id += 1
        start, self.at, self.step = self.at, self.at + self.step, 0
        offsets = (dict.fromkeys(range(self.partitions), at) for at in (start, self.at))
        batch = batch_document(
            self.batch_id,
            *offsets,
            self.topic,
            rows=(self.at - start) * self.partitions,
            took_ms=duration_ms,
            timestamp=f"2026-09-21T12:{self.batch_id // 30:02}:{self.batch_id % 30 * 2:02}.000Z",
        )
        return self.report("progress", batch=batch)

    def tell(self, report: Mapping[str, Any]) -> None:
        """Give a report to the proxy, past HTTP."""
        self.world.take(json.dumps(report).encode())


SCENE = (
    *QUERIES,
    QuerySettings(name="audit", client_id="audit"),
    QuerySettings(name="ledger", client_id="etl-ledger", commit_group="ledger"),
)


def scene() -> SparkWorld:
    """Return a world with a query that goes on, one each that is stuck, has failed, can't commit,
    and has a hostile name.
    """
    world = SparkWorld(SCENE)
    world.known.add(HOSTILE)
    payments = Job(world, "payments", "etl-payments", partitions=4)
    clicks = Job(world, "clicks", "clicks", "clicks", partitions=2)
    audit = Job(world, "audit", "audit", "audit-log", partitions=1)
    ledger = Job(world, "ledger", "etl-ledger", "ledger")
    hostile = Job(world, HOSTILE, HOSTILE, "clicks", partitions=2)
    jobs = (payments, clicks, audit, ledger, hostile)
    for job in jobs:
        job.tell(job.report("started"))
        job.ends(1000)
        job.read(100)
    for turn in range(6):
        world.now_ms += 2000
        for job in jobs:
            if job is clicks and turn:
                continue
            job.ends(job.log_end + 1500)
            job.tell(job.complete(1400 + 150 * turn))
            job.read(1200)
        world.registry.committed("payments-progress", {}, world.now_ms)
    audit.lose(7500)
    audit.tell(audit.report("terminated", error="Job aborted due to stage failure: no space left"))
    world.registry.commit_failed("ledger", "the group has a live member, console-consumer-7")
    query = world.registry.query_of("clicks")
    assert query is not None
    query.log_end("clicks", 1, 90_000, world.now_ms)
    for _ in range(2):
        world.now_ms += 50_000
        for job in (payments, ledger, hostile):
            job.tell(job.complete(1900))
            job.ends(job.log_end + 800)
            job.read(600)
        world.registry.committed("payments-progress", {}, world.now_ms)
        list(world.registry.sweeping(world.now_ms))
    world.now_ms += 700
    return world
