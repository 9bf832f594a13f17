"""The topic of usage records: made with the right settings, appended to, read from a time on.

Who writes keeps what the cluster does not take, within bounds. What was tried keeps its content and
its numbers until it is written: it may be there already. The rest is summed up by client once it is
old, and the oldest is lost beyond a bound; then numbers are skipped, so that a reader sees the gap.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from aiokafka.partitioner import murmur2
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from structlog import get_logger

from metrics import UsageInstruments
from metrics.clock import MS_PER_SECOND, clock_ms
from proxy.cluster.kafka_client import Bootstrap
from proxy.cluster.upstream import NonRetriableError, UpstreamError
from proxy.state import StateError
from proxy.state.kafka.messages import GZIP_CODE, decode_batches
from proxy.state.kafka.state_topic import COMPACT, StateTopic
from proxy.usage.usage_record import UsageKey, UsageRecord, client_message_key

USAGE_PARTITIONS = 6
RETENTION_MS = 90 * 24 * 3600 * 1000

BATCH_LIMIT_BYTES = 900_000  # before compression; brokers take 1 MiB by default
MAX_BATCH_BYTES = 1 << 20  # of another one that is read: who may write might have us unpack more
GZIP = "gzip"

INVALID_TIMESTAMP = 32

NO_PRODUCER = -1
NOT_FOUND = -1  # in place of the offset at a time

FINE_MS = 10 * 60_000
"""What is not written for so long is summed up by client."""

MAX_UNWRITTEN = 50_000  # records; about 1 kB each
WRITTEN_TOGETHER = 150  # some ms to encode and compress, in steps; fits a batch with long names

ATTEMPT_LIMIT_S = 20.0
RETRY_S, RETRY_REFUSED_S = 2.0, 60.0
CLOSE_LIMIT_S = 3.0
"""How long an end waits for the last records to be written."""

_log = get_logger(__name__)


class UsageTopic(StateTopic):
    """The topic; one task at a time appends, or reads. Raises as StateTopic does."""

    def __init__(self, way: Bootstrap, name: str) -> None:
        super().__init__(way, name, USAGE_PARTITIONS)

    async def is_there(self) -> bool:
        """Return whether there is such a topic; count its partitions."""
        found = await self.retry(self._find)
        self.partitions = 0 if found is None else len(found.partitions)
        return found is not None

    async def _ensure(self) -> None:
        """See StateTopic. Its settings are looked at where the proxy may see them."""
        if not await self.is_there():
            self.partitions = USAGE_PARTITIONS
            await self.retry(self._create)
            await self.retry(lambda: self.by_leader([0]))
            await self.is_there()
        await self.retry(lambda: self.by_leader(range(self.partitions)))
        try:
            policy = (await self.retry(self._configs)).get("cleanup.policy")
        except NonRetriableError:
            return
        if policy is not None and COMPACT in policy:
            raise StateError(
                f"topic {self.name} would lose usage: its cleanup.policy is {policy}",
                f"set it: kafka-configs.sh --alter --topic {self.name} --add-config "
                "cleanup.policy=delete, or name another topic as usage.topic",
            )

    @staticmethod
    def settings(replicas: int) -> Mapping[str, str]:
        """See StateTopic."""
        return {
            "cleanup.policy": "delete",
            "compression.type": GZIP,  # Python reads it without more libraries
            "retention.ms": str(RETENTION_MS),
            "min.insync.replicas": StateTopic.settings(replicas)["min.insync.replicas"],
        }

    async def append(self, records: Sequence[UsageRecord]) -> None:
        """Append records, a batch at a time; when this returned they are kept.

        After an error it may be that they, or some, are there all the same.
        """
        by_partition: dict[int, list[UsageRecord]] = {}
        for record in records:
            partition = (murmur2(client_message_key(record)) & 0x7FFFFFFF) % self.partitions
            by_partition.setdefault(partition, []).append(record)
        for number, left in by_partition.items():
            while left:
                batch, count = _batch(left)
                await asyncio.sleep(0)  # it takes a millisecond
                await self.retry(partial(self.produce, {number: batch}))
                del left[:count]

    async def positions_at(self, time_ms: int) -> tuple[dict[int, int], dict[int, int]]:
        """Return by partition where the records of a time and later begin, and where all end now.

        Without partitions that have none.
        """
        numbers = range(self.partitions)
        ends = await self.retry(partial(self.offsets, numbers, -1))
        starts = await self.retry(partial(self.offsets, numbers, time_ms))
        found = {number: start for number, start in starts.items() if start != NOT_FOUND}
        return found, ends


def _batch(records: Sequence[UsageRecord]) -> tuple[bytes, int]:
    """Return a batch of the first records, as many as it takes, and how many these are."""
    batch = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=GZIP_CODE,
        is_transactional=0,
        # Not idempotent: whoever reads drops doubles by the records' own numbers.
        producer_id=NO_PRODUCER,
        producer_epoch=NO_PRODUCER,
        base_sequence=NO_PRODUCER,
        batch_size=BATCH_LIMIT_BYTES,
    )
    # Brokers refuse times to come, as of a record that ended before the clock was put back.
    count, now_ms = 0, int(time.time() * MS_PER_SECOND)
    for each in records:
        value, ended_ms = each.model_dump_json().encode(), min(each.end_ms, now_ms)
        if not batch.append(count, ended_ms, client_message_key(each), value, []):
            break
        count += 1
    return bytes(batch.build()), count


def fetched_values(topic: str, part: Any, positions: dict[int, int]) -> Iterator[bytes | None]:
    """Yield the values of what was fetched of a partition, from its position on, which goes along.

    None for a message without, or a batch that is damaged or in a compression that is not read.
    """
    number = part.partition_index
    try:
        for batch, messages in decode_batches(topic, part, MAX_BATCH_BYTES):
            for message in messages:
                if message.offset >= positions[number]:
                    yield message.value
            positions[number] = batch.next_offset
    except Exception:
        yield None


class UsageWriter:
    """Writes what is added, until cancelled; `close` it then."""

    def __init__(self, topic: UsageTopic, instruments: UsageInstruments) -> None:
        self._topic, self._instruments = topic, instruments
        self._sequence = 0
        self._trying: list[UsageRecord] = []
        """Those that may be in the topic already."""
        self._fine: deque[UsageRecord] = deque()
        self._coarse: dict[UsageKey, UsageRecord] = {}
        """What is old, summed up."""
        self._added = asyncio.Event()
        self._is_ready = False
        """Whether the topic is known to be there."""
        self._problem: str | None = None
        self._written_ms: float | None = None
        instruments.usage_written_age_seconds.set_function(self._age_s)

    @property
    def unwritten(self) -> int:
        """How many records wait."""
        return len(self._trying) + len(self._fine) + len(self._coarse)

    def add(self, record: UsageRecord) -> None:
        """Write a record soon."""
        self._fine.append(record)
        self._added.set()

    def coarsening(self, now_ms: float) -> Iterator[None]:
        """Sum up in small steps what is old, and give up what is too much; time since 1970."""
        old_ms = now_ms - FINE_MS
        while self._fine and (self._fine[0].end_ms < old_ms or self.unwritten > MAX_UNWRITTEN):
            record = self._fine.popleft()
            earlier = self._coarse.setdefault(record.summed_by, record)
            if earlier is not record:
                earlier.include(record)
            yield
        while self.unwritten > MAX_UNWRITTEN and self._coarse:
            del self._coarse[next(iter(self._coarse))]
            self._lose(1)
            yield

    def take(self) -> list[UsageRecord]:
        """Return what is to be written now, the oldest, with its numbers; the same until it is."""
        while len(self._trying) < WRITTEN_TOGETHER and (self._coarse or self._fine):
            oldest = self._coarse.pop(next(iter(self._coarse))) if self._coarse else None
            record = oldest or self._fine.popleft()
            record.sequence = self._sequence
            self._sequence += 1
            self._trying.append(record)
        return self._trying

    def written(self) -> None:
        """Forget what `take` gave: it is in the topic."""
        self._instruments.usage_records_written_total.inc(len(self._trying))
        self._trying = []
        self._written_ms = clock_ms()

    async def run(self) -> None:
        """Write, until cancelled."""
        while True:
            await self._added.wait()
            self._added.clear()
            await self._write_all()

    async def close(self) -> None:
        """Write what is left, if the cluster takes it in time; what it does not take is lost."""
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._write_all()
        except TimeoutError:
            self._lose(self.unwritten)
            _log.error("the last usage records are lost", records=self.unwritten)
        finally:
            self._topic.close()

    async def _write_all(self) -> None:
        while records := self.take():
            try:
                async with self._topic.within(ATTEMPT_LIMIT_S):
                    if not self._is_ready:
                        await self._topic.ensure(ATTEMPT_LIMIT_S)
                        self._is_ready = True
                    await self._topic.append(records)
            except Exception as error:  # also what answers cause that no broker should give
                self._failed(error)
                self._is_ready = False
                refused = not isinstance(error, UpstreamError)
                await asyncio.sleep(RETRY_REFUSED_S if refused else RETRY_S)
            else:
                self.written()
                if self._problem is not None:
                    self._problem = None
                    _log.info("usage is written again", topic=self._topic.name)

    def _failed(self, error: Exception) -> None:
        """Count a failure; log the first one, and another kind of it."""
        self._instruments.usage_write_errors_total.inc()
        kind = type(error).__name__
        if self._problem != kind:
            self._problem, name = kind, self._topic.name
            fix = "check that the brokers are up, and cluster.bootstrap_servers, tls and sasl"
            if isinstance(error, NonRetriableError):
                fix = f"let quota-proxy create, describe, read and write topic {name}"
                if error.error_code == INVALID_TIMESTAMP:
                    fix = "set this machine's clock, which is ahead of that of the brokers"
            fix = getattr(error, "fix", fix)
            about = {"topic": name, "error": getattr(error, "what", str(error)), "fix": fix}
            _log.error("usage is not written, trying again; relaying goes on", **about)

    def _lose(self, count: int) -> None:
        self._sequence += count
        self._instruments.usage_records_lost_total.inc(count)

    def _age_s(self) -> float:
        written_ms = self._written_ms
        return 0.0 if written_ms is None else (clock_ms() - written_ms) / MS_PER_SECOND
