"""Small real parts around the pressure on one query: its progress, its reports, its messages."""

from datetime import UTC, datetime
from itertools import count
from struct import pack
from uuid import UUID

from parts.query_world import QueryWorld
from parts.reports import ReportingDriver, batch_document, parsed

from proxy.backpressure.backpressure import ConnectionLookups, QueryBackpressure
from proxy.progress.progress_records import read_progress_records
from proxy.progress.query import FollowedQuery, ProgressSettings, QuerySettings
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.rules import AdaptiveSettings, QuotaManagerSettings, Rule
from proxy.state import Record
from proxy.wire.apis import APIS, LIST_OFFSETS
from proxy.wire.list_offsets import EARLIEST, LATEST, LookupRequest, read_list_offsets_response

CONSUMER = QuotaKind.CONSUMER_BYTE_RATE
CLIENT = "etl-orders"
IDENTITY = ClientIdentity("default", None, CLIENT)
ENTITY = f"client-id={CLIENT}"
STATIC = 10_000_000.0
INTERVAL_MS = 2000.0
VERSION = 9
NO_LEADER = 5
LABEL = "orders"
EPOCH_S = 1_767_323_045.0


def adaptive(**settings) -> AdaptiveSettings:
    """Settings with the estimator whose rate is simply that of the latest batch."""
    return AdaptiveSettings(**{"batch_interval_ms": INTERVAL_MS, "estimator": "pid", **settings})


def rule(static=STATIC, number=0, **settings) -> Rule:
    return Rule(
        client_id=CLIENT, bounds={CONSUMER: static}, adaptive=adaptive(**settings), number=number
    )


class BackpressureWorld(QueryWorld):
    """One query under real quotas, with a clock that only the test moves."""

    epoch_s = EPOCH_S

    def __init__(self, *rules: Rule, **settings):
        self.state: dict[str, Record] = {}
        self.record_changes = 0
        """How often backpressure said that there is something to write."""
        self.begin_process(*(rules or (rule(**settings),)))
        self.driver = ReportingDriver(LABEL)
        self.batch_ids = count()
        self.run = 0
        self.reported_at: dict[tuple[str, int], int] = {}

    def begin_process(self, *rules: Rule) -> list[str]:
        """Make all that is lost with a process, from the state; return what was refused of it."""
        self.rules = rules
        progress = ProgressSettings(queries=(QuerySettings(name=LABEL, client_id=CLIENT),))
        self.open_quotas(QuotaManagerSettings(rules=rules))
        self.open_queries(progress, on_change=self.count_change)
        self.client = self.quotas.client(IDENTITY)
        refused = self.registry.load(read_progress_records(self.kept("progress/")))
        return refused + self.backpressure.load(self.kept("pressure/"), self.now_ms)

    def count_change(self) -> None:
        self.record_changes += 1

    def kept(self, namespace: str) -> list[Record]:
        return [self.state[key] for key in sorted(self.state) if key.startswith(namespace)]

    def keep(self) -> None:
        """Write what has changed, as an application does all the time."""
        for records, deleted in (
            self.registry.unwritten.take(),
            self.backpressure.unwritten.take(),
        ):
            for key in deleted:
                self.state.pop(key, None)
            self.state.update({record.key: record for record in records})

    def crash(self, away_ms: float = 0.0, *rules: Rule) -> list[str]:
        """Let the process end without a word; another one begins after a while."""
        self.keep()
        self.now_ms += away_ms
        return self.begin_process(*(rules or self.rules))

    @property
    def query(self) -> FollowedQuery:
        query = self.registry.query_of(CLIENT)
        assert query is not None
        return query

    @property
    def run_id(self) -> str:
        return str(UUID(int=self.run + 1))

    @property
    def query_backpressure(self) -> QueryBackpressure:
        made = self.backpressure.of_identity(IDENTITY, self.now_ms)
        assert made is not None
        return made

    @property
    def document(self) -> dict:
        (pressure,) = self.backpressure.of_client(CLIENT)
        return pressure.document(self.now_ms)

    @property
    def gauge(self) -> float | None:
        name = "kafka_quota_proxy_adaptive_bound_bytes"
        return self.prometheus.get_sample_value(name, {"query": LABEL})

    @property
    def withheld(self) -> float | None:
        name = "kafka_quota_proxy_adaptive_withheld_records"
        return self.prometheus.get_sample_value(name, {"query": LABEL})

    def tick(self, ms: float = 0.0) -> None:
        """Let time pass as an application does, with a tick each second."""
        until_ms = self.now_ms + ms
        while self.now_ms < until_ms:
            self.now_ms = min(self.now_ms + 1000.0, until_ms)
            self.backpressure.tick(self.now_ms)
        self.backpressure.tick(self.now_ms)

    def update(self, *rules: Rule) -> None:
        self.rules = rules
        self.quotas.update(QuotaManagerSettings(rules=rules))

    def lookups(self) -> ConnectionLookups:
        lookups = ConnectionLookups(self.now_ms, query=self.query)
        lookups.follow(self.query_backpressure)
        return lookups

    def send(self, event: str, **more) -> None:
        self.driver.run_id = self.run_id
        self.accept_report(parsed(self.driver.document(event, **more)))

    def start(self, *, age_ms: float = 0.0, trigger=None) -> None:
        """A new run."""
        self.run += 1
        self.send("started", age_ms=age_ms, trigger=trigger)

    def batch(
        self,
        ends: dict[int, int] | None = None,
        *,
        rows: int | None = None,
        rate: float | None = None,
        ms: float = 1000.0,
        age_ms: float = 0.0,
        bytes_read: int = 0,
        topic: str = "t",
        starts: dict[int, int] | None = None,
    ) -> None:
        """Report a batch that was done `age_ms` ago, from where the last ended.

        It took `ms`, or what it took at `rate`; each offset is a record, if `rows` does not say
        otherwise.
        """
        if bytes_read:
            self.query_backpressure.record_bytes(bytes_read)
        ends = ends or {}
        before = {
            index: (starts or {}).get(index, self.reported_at.get((topic, index), 0))
            for index in ends
        }
        taken = sum(ends[index] - before[index] for index in ends) if rows is None else rows
        self.reported_at.update({(topic, index): end for index, end in ends.items()})
        if rate is not None:
            ms = max(1.0, taken / rate * 1000)
        trigger_s = EPOCH_S + (self.now_ms - age_ms - ms) / 1000
        batch = batch_document(
            next(self.batch_ids),
            before,
            ends,
            topic,
            rows=taken,
            took_ms=round(ms),
            timestamp=stamp(trigger_s),
        )
        self.send("progress", age_ms=age_ms, batch=batch)

    def rated(self, rate: float, ends: dict[int, int]) -> None:
        """Two batches up to `ends`, after which `rate` is known, and the size of a record: 100."""
        half = {index: end // 2 for index, end in ends.items()}
        self.batch(half, rate=rate)
        self.pass_ms(INTERVAL_MS)
        self.batch(ends, rate=rate, bytes_read=100 * sum(ends[p] - half[p] for p in ends))


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def ask(
    partitions, timestamp=LATEST, isolation=0, topic="t", correlation_id: int = 0
) -> LookupRequest:
    keys = [(topic, index) for index in partitions]
    return LookupRequest(isolation, dict.fromkeys(keys, timestamp), correlation_id)


def answer(offsets: dict[int, int], errors=(), topic="t") -> bytes:
    """A ListOffsets response frame as a broker makes it."""
    topic_of = APIS[LIST_OFFSETS].response.ListOffsetsTopicResponse
    partition_of = topic_of.ListOffsetsPartitionResponse
    partitions = [
        partition_of(
            partition_index=index,
            error_code=NO_LEADER if index in errors else 0,
            timestamp=-1,
            offset=offset,
            leader_epoch=1,
        )
        for index, offset in offsets.items()
    ]
    message = APIS[LIST_OFFSETS].response(
        throttle_time_ms=0, topics=[topic_of(name=topic, partitions=partitions)]
    )
    body = pack(">i", 1) + b"\0" + bytes(message.encode(version=VERSION))
    return pack(">i", len(body)) + body


def told(
    world: BackpressureWorld, lookups: ConnectionLookups, latest: dict[int, int], **how
) -> dict[int, int]:
    """What a driver reads that asks for the latest offsets now."""
    isolation = how.pop("isolation", 0)
    topic = how.get("topic", "t")
    number = how.pop("correlation_id", 0)
    asked = ask(latest, isolation=isolation, topic=topic, correlation_id=number)
    frame = lookups.answered(asked, VERSION, answer(latest, **how), world.now_ms)
    return {key[1]: found.offset for key, found in read(frame).items()}


def tell_earliest(
    world: BackpressureWorld, lookups: ConnectionLookups, offsets: dict[int, int]
) -> None:
    lookups.answered(ask(offsets, EARLIEST), VERSION, answer(offsets), world.now_ms)


def read(frame: bytes):
    return read_list_offsets_response(VERSION, frame)
