"""Runs a job of the figure `backpressure`: feeds its topics and watches ends and batches."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import cycle
from typing import Any

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from confluent_kafka.cimpl import NewTopic

from bench.backpressure_jobs import Job
from bench.lab import Lab, Proxy
from bench.processes import BenchError, Child, python
from examples.devkit.jars import connector_jars
from metrics.clock import MS_PER_SECOND

READY_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0
LINE_TIMEOUT_S = 3600.0
"""For which a driver may say nothing: longer than any run."""
ADMIN_TIMEOUT_S = 30.0
FLUSH_TIMEOUT_S = 60.0
FEED_EVERY_S = 0.05
SAMPLE_EVERY_S = 0.25
LEAST_DRAIN_S = 15.0
"""How long every way may take at least to get through what is left when feeding has ended."""
DRAIN_FACTOR = 3.0
"""And how many times as long as the way without adaptive, if that is more."""
MOST_DRAIN_S = 60.0
VALUE = b"x" * 100
PRODUCER_SETTINGS = {"linger.ms": 5, "acks": "all", "queue.buffering.max.messages": 200_000}


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of a query; times are those of the system clock, in seconds."""

    started_s: float
    duration_s: float
    rows: int
    completed: int
    """Records below the ends of this batch, over all topics and partitions."""

    @property
    def ended_s(self) -> float:
        """When it was complete."""
        return self.started_s + self.duration_s


@dataclass(slots=True)
class Watch:
    """What was seen of one run: how many records were there when, and the batches of each query.

    Attributes:
        started_s: when the queries had started and feeding began.
        fed_s: when the last record was confirmed.
        over_s: when nobody looked any more.
        ends: times, and sums of the topics' true end offsets.
        batches: by query.

    """

    started_s: float = 0.0
    fed_s: float = 0.0
    over_s: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    batches: dict[str, list[Batch]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """How many records there are in the end."""
        return self.ends[-1][1]

    def completed_s(self, query: str) -> float | None:
        """When the query had processed all that was fed; None if it has not."""
        return next(
            (batch.ended_s for batch in self.batches[query] if batch.completed >= self.total), None
        )


class Driver:
    """The Spark driver; a thread reads what it prints, as long as it runs."""

    def __init__(self, lab: Lab, proxy: Proxy) -> None:
        jars = ",".join(str(jar) for jar in connector_jars())
        self._child = lab.start(
            "spark",
            python(
                "bench.backpressure_driver",
                f"--jars={jars}",
                "--bootstrap={}:{}".format(*proxy.bootstrap),
                "--proxy=http://{}:{}".format(*proxy.admin),
                f"--work-dir={lab.work_dir}",
            ),
        )
        self._child.wait_line(lambda line: line.startswith('{"ready"'), READY_TIMEOUT_S)
        self._changed = threading.Condition()
        self._batches: dict[str, list[Batch]] = {}
        self._answers: dict[str, object] = {}
        self._failure: str | None = None
        threading.Thread(target=_read, args=(self._child, self._take), daemon=True).start()

    def start(self, job: Job, queries: Mapping[str, int], topics: Sequence[str]) -> None:
        """Start the queries of a job: names, with their numbers within their way."""
        with self._changed:
            self._batches = {name: [] for name in queries}
        self._ask("started", start=job.name, queries=queries, topics=topics)

    def stop(self) -> None:
        """Stop all queries; a batch in progress is given up."""
        self._ask("stopped")

    def batches(self) -> dict[str, list[Batch]]:
        """Give the batches so far of each query. Raises BenchError when one has failed."""
        with self._changed:
            if self._failure is not None:
                raise BenchError(f"{self._failure}{self._child.log_tail()}")
            return {name: list(batches) for name, batches in self._batches.items()}

    def close(self) -> None:
        """End the process."""
        self._child.stop()

    def _ask(self, answer: str, **figures: object) -> None:
        self._child.send_line(json.dumps(figures))
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_said(answer), ANSWER_TIMEOUT_S):
                raise BenchError(f"spark: not {answer}{self._child.log_tail()}")
            self._answers.clear()
            if self._failure is not None:
                raise BenchError(f"{self._failure}{self._child.log_tail()}")

    def _is_said(self, answer: str) -> bool:
        return answer in self._answers or self._failure is not None

    def _take(self, line: str) -> None:
        with self._changed:
            if not line.startswith("{"):
                self._failure = line
            elif "query" in (said := json.loads(line)):
                # A late one of a query that is stopped is of no use.
                self._batches.get(said["query"], []).append(_batch(said))
            elif "failed" in said:
                self._failure = said["failed"]
            else:
                self._answers |= said
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of a job.

    Attributes:
        queries: names, with their numbers within their way.
        topics: which are made, and read.
        none: which of the queries have no adaptive rule; the others may take some times as long.
        drain_s: how long queries without an adaptive rule took in other runs to get through.

    """

    queries: Mapping[str, int]
    topics: Sequence[str]
    none: Sequence[str] = ()
    drain_s: float = 0.0


def run(job: Job, driver: Driver, broker: str, plan: Plan) -> Watch:
    """Create the topics, start the queries, feed, and watch until all is processed or given up."""
    feed = _Feed(broker, plan.topics, job.shares)
    feed.write(job.backlog)
    feed.flush()
    driver.start(job, plan.queries, plan.topics)
    watch = Watch(started_s=time.time())
    _write_all(job, feed, watch)
    watch.fed_s = time.time()
    watch.ends.append((watch.fed_s, feed.end()))
    while not _is_over(watch, driver, plan):
        time.sleep(SAMPLE_EVERY_S)
        watch.ends.append((time.time(), feed.end()))
    watch.over_s = time.time()
    driver.stop()
    return watch


def _write_all(job: Job, feed: "_Feed", watch: Watch) -> None:
    """Feed as the job says, and look at the ends meanwhile."""
    fed, look_s = 0, watch.started_s
    while (elapsed_s := time.time() - watch.started_s) < job.feed_s:
        due = job.fed_after(elapsed_s)
        feed.write(due - fed)
        fed = due
        if time.time() >= look_s:
            watch.ends.append((time.time(), feed.end()))
            look_s += SAMPLE_EVERY_S
        time.sleep(FEED_EVERY_S)
    feed.write(job.fed_after(job.feed_s) - fed)
    feed.flush()


def _is_over(watch: Watch, driver: Driver, plan: Plan) -> bool:
    watch.batches = driver.batches()
    ends_s = {name: watch.completed_s(name) for name in watch.batches}
    if None not in ends_s.values():
        return True
    drains_s = [plan.drain_s]
    for name in plan.none:
        end_s = ends_s[name]
        drains_s.append(MOST_DRAIN_S if end_s is None else end_s - watch.fed_s)
    allowed_s = min(MOST_DRAIN_S, max(LEAST_DRAIN_S, DRAIN_FACTOR * max(drains_s)))
    return time.time() - watch.fed_s > allowed_s


class _Feed:
    """Writes records to topics of its own, and says where they end."""

    def __init__(self, broker: str, topics: Sequence[str], shares: Sequence[int]) -> None:
        self._admin = AdminClient({"bootstrap.servers": broker})
        created = self._admin.create_topics([NewTopic(topic, len(shares), 1) for topic in topics])
        for each in created.values():
            each.result(ADMIN_TIMEOUT_S)
        self._producer = Producer({"bootstrap.servers": broker, **PRODUCER_SETTINGS})
        self._topics = topics
        self._partitions = [
            TopicPartition(topic, number) for topic in topics for number in range(len(shares))
        ]
        self._turn = cycle(_spread(shares))
        self._written = 0

    def write(self, count: int) -> None:
        """Write so many records, to all topics together; those with one key are in each."""
        first, self._written = self._written, self._written + count
        topics = len(self._topics)
        for number in range(first // topics, self._written // topics):
            partition = next(self._turn)
            for topic in self._topics:
                self._producer.produce(topic, VALUE, key=b"%d" % number, partition=partition)
        self._producer.poll(0)

    def flush(self) -> None:
        """Wait until all is confirmed."""
        if self._producer.flush(FLUSH_TIMEOUT_S):
            raise BenchError(f"the topics were not filled in {FLUSH_TIMEOUT_S:.0f} s")

    def end(self) -> int:
        """Give the sum of the end offsets of all partitions."""
        wanted = {partition: OffsetSpec.latest() for partition in self._partitions}
        found = self._admin.list_offsets(wanted, request_timeout=ADMIN_TIMEOUT_S)
        return sum(each.result(ADMIN_TIMEOUT_S).offset for each in found.values())


def _spread(shares: Sequence[int]) -> list[int]:
    """Order the partitions so that each comes as often as its share says, evenly."""
    turns = [
        ((turn + 0.5) / share, partition)
        for partition, share in enumerate(shares)
        for turn in range(share)
    ]
    return [partition for _, partition in sorted(turns)]


def _read(child: Child, take: Callable[[str], None]) -> None:
    try:
        while True:
            take(child.wait_line(lambda line: line.startswith("{"), LINE_TIMEOUT_S))
    except (BenchError, OSError, ValueError) as error:
        take(f"spark: {error}")


def _batch(said: Mapping[str, Any]) -> Batch:
    started_s = datetime.fromisoformat(str(said["started"])).timestamp()
    return Batch(
        started_s,
        float(said["duration_ms"]) / MS_PER_SECOND,
        int(said["rows"]),
        _completed(said["ends"]),
    )


def _completed(ends: Sequence[Mapping[str, Mapping[str, int]] | None]) -> int:
    """Add up the ends; a topic that two sources read is complete where both are."""
    least: dict[tuple[str, str], int] = {}
    for source in ends:
        for topic, partitions in (source or {}).items():
            for partition, end in partitions.items():
                key = (topic, partition)
                least[key] = min(end, least.get(key, end))
    return sum(least.values())
