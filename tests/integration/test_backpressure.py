"""The batches of real Spark queries follow the rate of their processing, and nothing is lost."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from pyspark.sql import SparkSession
from support import driver
from support.groups import offsets_of
from support.proxy_process import HOST, WAIT_S, ProxyProcess, until
from support.raw import RawClient, produce
from support.streams import END_S, Stream, feed, known, partition_of

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.loopback import free_ports
from proxy.backpressure.cost import GROWTH, WORTHWHILE
from proxy.spark import QuotaListener

pytestmark = pytest.mark.slow

RECORD_BYTES = 100
HIGH_BOUND_BYTES = 50_000_000
"""Far above what a query reads here: its batches are bounded, its reading is not."""

TRIGGER = driver.TRIGGER
RATE = 400
PER_BATCH = RATE // 2
"""What a rate of RATE makes of the batches of TRIGGER."""

Run = Callable[..., ProxyProcess]
Listen = Callable[..., QuotaListener]
MakeStream = Callable[..., Stream]
MakeTopic = Callable[..., str]


def steady(client_id: str, bound_bytes: int = HIGH_BOUND_BYTES, **adaptive: Any) -> dict[str, Any]:
    """Make an adaptive rule whose rate is always RATE, once there is one."""
    return {
        "client-id": client_id,
        "consumer_byte_rate": bound_bytes,
        "adaptive": {
            "batch_interval": "500ms",
            "min_rate": RATE,
            "max_rate": RATE,
            **adaptive,
        },
    }


def two_batches(query: Stream) -> None:
    """Let the proxy learn the rate of a query that waits at the end of its log."""
    for _ in range(2):
        until_reported(query, 10, RECORD_BYTES)


def until_reported(query: Stream, count: int, size: int) -> None:
    """Feed a query so much of each of two partitions, and wait until it has reported all of it."""
    read = query.ends()
    fed = {partition: read.get(partition, 0) + count for partition in (0, 1)}
    query.feed(count, size)

    def completed() -> dict[int, int]:
        return {each["partition"]: each["completed_to"] for each in query.known()["partitions"]}

    query.until(lambda: completed() == fed, "all of it is reported")


def clamped(query: Stream, after: int = -1) -> list[int]:
    """Give the batches whose driver was told less than the truth."""
    return [
        number
        for number in sorted(query.batches)
        if number > after and query.batches[number].clamp.get("withheld")
    ]


@pytest.mark.usefixtures("no_data_loss")
def test_a_query_of_which_nothing_is_known_starts_slowly(
    proxy: Run, listen: Listen, stream: MakeStream, topic: MakeTopic
) -> None:
    """Where nothing is configured, the first of a backlog is a batch of min_rate's default."""
    interval_s, min_rate, count = 2, 100, 3000
    rule = {"client-id": "fresh", "consumer_byte_rate": HIGH_BOUND_BYTES, "adaptive": {}}
    running = proxy(rules=[rule])
    listen(running)
    query = stream(running, "fresh", topic(2), row_ms=2)
    query.feed(count, RECORD_BYTES)
    query.start(f"{interval_s} seconds")
    query.until(lambda: 0 in query.batches, "its first batch is known")
    assert query.batches[0].rows == min_rate * interval_s
    shown = "adaptive_withheld_records"
    assert 0 < running.metrics().value(shown, query="fresh") < 2 * count
    query.until(lambda: running.metrics().value(shown, query="fresh") == 0, "none is withheld")
    query.until(lambda: sum(each.rows for each in query.batches.values()) == 2 * count, "all")
    query.stop()


@pytest.mark.usefixtures("no_data_loss")
def test_a_query_with_the_default_trigger_reads_on(
    proxy: Run, listen: Listen, stream: MakeStream, topic: MakeTopic
) -> None:
    """Where neither the trigger nor the rule has an interval, what comes in is read."""
    rule = {"client-id": "at-once", "consumer_byte_rate": HIGH_BOUND_BYTES, "adaptive": {}}
    running = proxy(rules=[rule])
    listen(running)
    query = stream(running, "at-once", topic(2))
    query.feed(200, RECORD_BYTES)
    query.start("0 seconds")
    for end in (400, 600, 800):
        query.feed(200, RECORD_BYTES)
        query.until_read({0: end, 1: end})
    query.stop()


@pytest.mark.usefixtures("no_data_loss")
def test_batches_follow_the_rate_of_processing(
    kafka: EmbeddedBroker, proxy: Run, listen: Listen, stream: MakeStream, topic: MakeTopic
) -> None:
    """A backlog is read in batches that fit, at two speeds; a partition comes."""
    static, min_rate, record_bytes, row_ms, interval_s = 1_500_000, 10, 500, 16, 2
    # Not reached but where the machine is so slow that few of the long batches would be all.
    adaptive = {"batch_interval": f"{interval_s}s", "min_rate": min_rate, "max_rate": 200}
    running = proxy(
        rules=[{"client-id": "follower", "consumer_byte_rate": static, "adaptive": adaptive}]
    )
    listen(running)
    query = stream(running, "follower", topic(2), row_ms=row_ms)
    started = query.start(f"{interval_s} seconds")
    # Only batches of different sizes tell what a record costs; what the first one took, Spark did
    # once, where it is the first in its driver. What it had read ahead by then was not measured.
    for count in (100, 20) * 10:
        until_reported(query, count, record_bytes)
        learnt = query.known()["adaptive"]
        busy_tasks = (learnt["rate"] or 0) * row_ms / 1000  # it has two, for two partitions
        per_record = (learnt["bytes_per_record"] or 0) / record_bytes
        if is_learnt := 0.5 < busy_tasks < 3 and 0.8 < per_record < 2:
            break
    assert is_learnt, learnt

    fed = {partition: end + 2000 for partition, end in query.ends().items()}
    query.feed(2000, record_bytes)
    query.until(lambda: len(clamped(query)) >= 4, "bounded batches")
    fast = clamped(query)
    query.row_ms *= 2
    last = max(query.batches)
    query.until(lambda: len(clamped(query, last)) >= 4, "bounded batches, slower ones")
    slow = clamped(query, last)
    took_ms = {
        progress["batchId"]: progress["durationMs"]["triggerExecution"]
        for progress in started.recentProgress
    }
    bounded = [
        (query.batches[number].rows, query.batches[number].clamp["offsets"])
        for number in (*fast, *slow)
    ]
    assert all(rows <= offsets for rows, offsets in bounded), bounded
    assert sum(rows == offsets for rows, offsets in bounded) > len(bounded) / 2, bounded
    interval_ms, fixed_ms = interval_s * 1000, min(took_ms.values())
    for number in (*fast[2:], *slow[2:]):
        # In a batch are the records that the one before did in an interval; where its report comes
        # later than the proxy waits for it, the one before that. Sizes are tried out up to GROWTH,
        # or what fits into as long as is worthwhile while much comes in.
        rows = {each: query.batches[each].rows for each in (number - 1, number - 2)}
        done = [each / took_ms[before] * interval_ms for before, each in rows.items()]
        worthwhile = max(done) * WORTHWHILE * fixed_ms / interval_ms
        lowest = min(done) / GROWTH
        highest = max(max(*rows.values(), *done) * GROWTH, worthwhile)
        planned = query.batches[number].clamp["why"]
        seen = number, planned, query.sizes(), took_ms
        assert lowest <= query.batches[number].rows <= highest, seen
    document = query.known()["adaptive"]
    assert min_rate <= document["rate"]
    assert document["bound"] <= document["static_bound"] == static
    # Too high as long as executors have read ahead; how far is theirs.
    assert 0.8 * record_bytes < document["bytes_per_record"]
    assert document["reason"].startswith("batch ")

    with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
        admin.create_partitions([NewPartitions(query.topic, 3)])[query.topic].result(WAIT_S)
    query.row_ms = 0
    query.feed(50, record_bytes, [2])
    query.until_read({2: 50})

    query.stop()
    query.start()
    query.finish()
    query.check_all_read(fed | {2: 50})


@pytest.mark.usefixtures("no_data_loss")
def test_bound_goes_when_reports_stop(
    proxy: Run, listen: Listen, stream: MakeStream, topic: MakeTopic
) -> None:
    """The batches' at once when the last report is too old, that of the bytes in steps. Until then
    the driver is never told less of a partition than before, however the lags shift.
    """
    hold_s, ends = 5, {0: 2020, 1: 6020}
    running = proxy(rules=[steady("silent", bound_bytes=200_000, hold=f"{hold_s}s")])
    listener = listen(running)
    query = stream(running, "silent", topic(2))
    query.start(TRIGGER)
    two_batches(query)
    query.feed(2000, RECORD_BYTES)
    query.until(lambda: clamped(query), "bounded batches")
    adapted = query.known()["adaptive"]["bound"]
    listener.close()
    last = max(query.batches)
    query.until(lambda: max(query.batches) > last, "a batch that is not reported")
    query.feed(4000, RECORD_BYTES, [1])
    query.until_read(ends)
    later = [query.batches[number] for number in sorted(query.batches) if number > last]
    lifted = next(batch for batch in later if not batch.clamp["on"])
    assert lifted.clamp["why"].startswith("no report for")
    assert lifted.rows > 2 * PER_BATCH, query.sizes()
    assert adapted < 200_000

    def is_back() -> bool:
        document = query.known()["adaptive"]
        return bool(document["bound"] == document["static_bound"] == 200_000)

    until(is_back, "the rule's own bound is in force again")
    assert query.known()["adaptive"]["reason"].startswith(f"no report for more than {hold_s} s")
    for name in ("adaptive_bound_bytes", "pid_bound_bytes"):
        assert running.metrics().value(name, query="silent") == 200_000
    query.stop()
    query.check_all_read(ends)


@pytest.mark.usefixtures("no_data_loss")
def test_reading_ahead_does_not_shrink_or_hold_batches(
    kafka: EmbeddedBroker,
    proxy: Run,
    listen: Listen,
    stream: MakeStream,
    topic: MakeTopic,
) -> None:
    """A consumer gets a megabyte at a time, the records of many batches to come: these are not the
    bytes of the few records that the batch has meanwhile, nor is it to wait for them so long.
    """
    size, rate, static = 1000, 100, 100_000_000
    batch = 900
    adaptive = {"batch_interval": "1s", "min_rate": rate, "max_rate": rate}
    running = proxy(
        rules=[{"client-id": "ahead", "consumer_byte_rate": static, "adaptive": adaptive}]
    )
    listen(running)
    query = stream(running, "ahead", topic(2))
    query.start("1 second", {"kafka.max.partition.fetch.bytes": "1048576"})
    two_batches(query)
    with RawClient(kafka.bootstrap) as client:
        for partition in (0, 0, 1, 1):
            client.ask(produce(9, query.topic, *[b"." * size] * batch, partition=partition))
    query.until(lambda: query.known()["run_batches"] >= 7, "bounded batches")
    document = query.known()["adaptive"]
    planned = {query.batches[number].clamp["offsets"] for number in clamped(query)}
    metrics = running.metrics()
    holds, short = (
        metrics.value(f"throttle_seconds_{kind}", quota="consumer_byte_rate", **bucket)
        for kind, bucket in (("count", {}), ("bucket", {"le": "0.5"}))
    )
    query.stop()
    assert planned == {rate}
    assert size < document["bytes_per_record"]
    assert short == holds, "they waited for the bytes of batches to come"


@pytest.mark.usefixtures("no_data_loss")
def test_available_now_reads_to_the_true_end(
    proxy: Run,
    listen: Listen,
    stream: MakeStream,
    topic: MakeTopic,
) -> None:
    """Whether the query is new, its rule bounds first batches, or its run before was bounded and
    has just been stopped.
    """
    rules = [steady("new"), steady("initial", initial_rate=RATE), steady("bounded")]
    running = proxy(rules=rules)
    listen(running)
    for name in ("new", "initial"):
        new = stream(running, name, topic(2))
        new.feed(1000, RECORD_BYTES)
        new.start()
        new.finish()
        assert new.sizes() == {0: 2000}
        new.check_all_read({0: 1000, 1: 1000})

    query = stream(running, "bounded", topic(2))
    end = 0
    for _ in range(2):
        query.start(TRIGGER)
        two_batches(query)
        query.feed(1000, RECORD_BYTES)
        end += 1020
        last = max(query.batches)
        numbers = query.until(lambda last=last: clamped(query, last)[1:], "bounded batches")
        assert {query.batches[number].rows for number in numbers} == {PER_BATCH}
        query.stop()
        query.start()
        query.finish()
        query.check_all_read({0: end, 1: end})


@pytest.mark.usefixtures("no_data_loss")
def test_available_now_after_a_driver_was_killed(
    kafka: EmbeddedBroker, proxy: Run, topic: MakeTopic, spark: SparkSession, tmp_path: Path
) -> None:
    """Its bounded run is still on the books, and the driver that follows it reports nothing."""
    running = proxy(rules=[steady("killed")])
    name = topic(2)
    feed(kafka.bootstrap, name, 10, RECORD_BYTES, [0, 1])
    arguments = [running.bootstrap, running.admin_url, "killed", name, str(tmp_path)]
    with (tmp_path / "driver.log").open("w") as log:
        first = subprocess.Popen(
            [sys.executable, driver.__file__, *arguments],
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
    try:

        def batches() -> int:
            assert first.poll() is None, (tmp_path / "driver.log").read_text()
            return int(known(running, "killed")["run_batches"])

        until(lambda: running.get("/v1/progress?query=killed")[0] == 200, "it is there", END_S)
        until(lambda: batches() >= 1, "a batch", END_S)
        feed(kafka.bootstrap, name, 10, RECORD_BYTES, [0, 1])
        until(lambda: batches() >= 2, "another batch", END_S)
        feed(kafka.bootstrap, name, 2000, RECORD_BYTES, [0, 1])
        done = batches()
        until(lambda: batches() >= done + 2, "bounded batches", END_S)
        assert known(running, "killed")["adaptive"]["clamp"]["withheld"] > 0
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    # Its Java takes a moment to go; a driver that connects meanwhile counts as the same one.
    until(lambda: running.metrics().value("connections") == 0, "its connections are gone")
    again = driver.writer(spark, running.bootstrap, "killed", name, tmp_path)
    query = again.trigger(availableNow=True).start()
    assert query.awaitTermination(END_S)
    rows = spark.read.schema("partition int, offset long").json(str(tmp_path / "rows")).collect()
    wanted = [(partition, offset) for partition in (0, 1) for offset in range(2020)]
    assert sorted((row.partition, row.offset) for row in rows) == wanted


@pytest.mark.usefixtures("no_data_loss")
def test_batches_stay_bounded_over_a_crash_of_the_proxy(
    proxy: Run, listen: Listen, stream: MakeStream, topic: MakeTopic, tmp_path: Path
) -> None:
    """Twice, amid a batch: the driver plans the next one on connections that are new."""
    port, first, last, admin_port = free_ports(4)
    running = proxy(
        rules=[steady("resumed")],
        listeners=[{"bind": f"{HOST}:{port}", "broker_ports": f"{first}-{last}"}],
        admin_port=admin_port,
        state={"kind": "sqlite", "path": str(tmp_path / "state.db")},
    )
    listen(running)
    query = stream(running, "resumed", topic(2))
    query.start(TRIGGER)
    two_batches(query)
    query.feed(1500, RECORD_BYTES)
    last = max(query.batches)
    query.until(lambda: len(clamped(query, last)) >= 2, "bounded batches")
    for _ in range(2):
        last = max(query.batches)
        query.gate.clear()
        query.until(lambda last=last: max(query.batches) > last, "a batch that does not end")
        running.kill()
        running.start()
        query.gate.set()
        query.until(lambda last=last: max(query.batches) >= last + 4, "more batches")
        assert query.known()["adaptive"]["clamp"]["withheld"] > 0
    query.until_read({0: 1520, 1: 1520})
    query.stop()
    query.check_all_read({0: 1520, 1: 1520})
    assert max(query.sizes().values()) == PER_BATCH, query.sizes()


@pytest.mark.usefixtures("no_data_loss")
def test_initial_rate_bounds_first_batches(
    proxy: Run,
    listen: Listen,
    stream: MakeStream,
    topic: MakeTopic,
) -> None:
    """From the first batch of a query's first run on, and that of one from its checkpoint."""
    running = proxy(rules=[steady("slowly", initial_rate=RATE)])
    listen(running)
    query = stream(running, "slowly", topic(2))
    query.feed(600, RECORD_BYTES)
    query.start(TRIGGER)
    query.until(lambda: len(query.batches) >= 3, "batches")
    query.stop()
    query.start(TRIGGER)
    query.until_read({0: 600, 1: 600})
    query.stop()
    query.check_all_read({0: 600, 1: 600})
    assert max(query.sizes().values()) <= PER_BATCH, query.sizes()


@pytest.mark.usefixtures("no_data_loss")
def test_a_small_partition_has_its_part_of_each_batch(
    proxy: Run,
    listen: Listen,
    stream: MakeStream,
    topic: MakeTopic,
) -> None:
    """In proportion to its lag it would have none until nearly all of the other is read."""
    running = proxy(rules=[steady("both", initial_rate=RATE)])
    listen(running)
    query = stream(running, "both", topic(2))
    backlog, few = 3000, 3
    query.feed(backlog, RECORD_BYTES, [0])
    query.feed(few, RECORD_BYTES, [1])
    query.start(TRIGGER)
    query.until(lambda: len(query.batches) > few, "batches")
    query.stop()
    first = [query.batches[number] for number in range(few)]
    assert [sorted(batch.offsets) for batch in first] == [[0, 1]] * few, query.sizes()
    assert [batch.rows for batch in first] == [PER_BATCH] * few


@pytest.mark.usefixtures("no_data_loss")
def test_a_driver_that_plans_no_batch_of_so_few_is_offered_more(
    proxy: Run,
    listen: Listen,
    stream: MakeStream,
    topic: MakeTopic,
) -> None:
    """As with `minOffsetsPerTrigger`: it need not wait for `maxTriggerDelay`."""
    least = 10 * PER_BATCH
    running = proxy(rules=[steady("choosy")])
    listen(running)
    query = stream(running, "choosy", topic(2))
    options = {"minOffsetsPerTrigger": str(least), "maxTriggerDelay": "10m"}

    def read_all_that_is_enough(offsets: int) -> None:
        """Wait until fewer of so many offsets are left than make a batch."""
        query.until(lambda: sum(query.sizes().values()) > offsets - least, f"{offsets} offsets")

    query.feed(least, RECORD_BYTES)
    query.start(TRIGGER, options)
    read_all_that_is_enough(2 * least)
    query.feed(least, RECORD_BYTES)
    read_all_that_is_enough(4 * least)
    query.stop()
    first, *later = query.sizes().values()  # the first one Spark plans at once, however small
    assert first <= PER_BATCH
    assert all(rows >= least for rows in later), query.sizes()
    query.start()
    query.finish()
    query.check_all_read({0: 2 * least, 1: 2 * least})


def test_a_run_that_read_past_the_proxy(
    kafka: EmbeddedBroker,
    proxy: Run,
    listen: Listen,
    stream: MakeStream,
    topic: MakeTopic,
    spark: SparkSession,
) -> None:
    """Its checkpoint is ahead of what the proxy knows; the next run gets on nevertheless."""
    running = proxy(rules=[steady("past", initial_rate=RATE)])
    listener = listen(running)
    query = stream(running, "past", topic(2))
    query.feed(100, RECORD_BYTES)
    query.start(TRIGGER)
    query.until_read({0: 100, 1: 100})
    query.stop()
    spark.streams.removeListener(listener)
    query.feed(500, RECORD_BYTES)
    query.start(options={"kafka.bootstrap.servers": kafka.bootstrap})
    query.finish()
    spark.streams.addListener(listener)
    query.feed(500, RECORD_BYTES)
    query.start(TRIGGER)
    query.until_read({0: 1100, 1: 1100})
    query.stop()
    query.check_all_read({0: 1100, 1: 1100})


def test_records_that_retention_removed(
    kafka: EmbeddedBroker,
    proxy: Run,
    listen: Listen,
    stream: MakeStream,
    topic: MakeTopic,
) -> None:
    """They are skipped with the reason, the query goes on, and so does its consumer group."""
    queries = [{"name": "unlucky", "commit_group": "unlucky-progress"}]
    running = proxy(rules=[steady("unlucky")], queries=queries)
    listen(running)
    query = stream(running, "unlucky", topic(2))
    query.start(TRIGGER, {"failOnDataLoss": "false"})
    two_batches(query)
    query.feed(600, 1000)
    query.until(lambda: clamped(query), "a bounded batch")
    query.gate.clear()
    with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
        gone = TopicPartition(query.topic, 0, 580)
        (removed,) = admin.delete_records([gone]).values()
        assert removed.result(WAIT_S).low_watermark == 580
    query.gate.set()
    query.until_read({0: 620, 1: 620})
    query.until(lambda: query.known()["totals"]["lag_records"] == 0, "all is reported")

    read = query.offsets()
    first, second = (partition_of(query.known(), query.topic, number) for number in (0, 1))
    assert {skip["reason"] for skip in first["skipped"]} == {"retention"}
    skipped = [n for skip in first["skipped"] for n in range(skip["from"], skip["to"])]
    assert {*read[0], *skipped} == set(range(620))
    assert len(read[0]) + len(skipped) == 620
    assert first["skipped_records"] == len(skipped) > 100
    assert read[1] == list(range(620))
    assert second["skipped"] == []
    notes = [note["kind"] for note in query.known()["notes"]]
    assert notes.count("skipped") == len(first["skipped"])
    both = {"query": "unlucky", "topic": query.topic}
    metrics = running.metrics()
    shown = metrics.value("partition_skipped_records_total", **both)
    assert shown == first["skipped_records"]
    whole = {(query.topic, 0): 620, (query.topic, 1): 620}
    until(lambda: offsets_of(kafka.bootstrap, "unlucky-progress") == whole, "the group is there")


@pytest.mark.usefixtures("no_data_loss")
def test_open_transactions_are_not_read(
    kafka: EmbeddedBroker,
    proxy: Run,
    listen: Listen,
    stream: MakeStream,
    topic: MakeTopic,
) -> None:
    """With read_committed a driver is told ends up to the last stable offset, and no more."""
    running = proxy(rules=[steady("careful")])
    listen(running)
    query = stream(running, "careful", topic(2))
    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap, "transactional.id": f"of-{query.topic}"}
    )
    producer.init_transactions(WAIT_S)
    written: list[str] = []

    def write(count: int) -> list[str]:
        producer.begin_transaction()
        values = [f"{len(written) + number:08d}" for number in range(count)]
        for number, value in enumerate(values):
            producer.produce(query.topic, value, partition=number % 2)
        assert producer.flush(WAIT_S) == 0
        written.extend(values)
        return values

    def values() -> list[str]:
        return sorted(value for batch in list(query.batches.values()) for value in batch.values)

    query.start(TRIGGER, {"kafka.isolation.level": "read_committed"})
    rate = None
    while rate is None:  # not a fixed number: a batch may have only the end of a transaction
        write(20)
        producer.commit_transaction(WAIT_S)
        query.until(lambda: len(values()) == len(written), "a batch is read")
        reports = query.known()["reports"]["received"]
        query.until(
            lambda before=reports: query.known()["reports"]["received"] > before, "it is reported"
        )
        rate = query.known()["adaptive"]["rate"]
    write(1000)
    producer.commit_transaction(WAIT_S)
    committed = list(written)
    aborted = write(100)
    producer.abort_transaction(WAIT_S)
    kept = [value for value in committed if value not in aborted]
    open_values = write(100)
    query.until(lambda: len(values()) >= len(kept), "all that is committed is read")
    idle = query.known()["reports"]["received"]
    query.until(lambda: query.known()["reports"]["received"] > idle + 2, "it stands there")
    assert values() == kept
    assert clamped(query)
    producer.commit_transaction(WAIT_S)
    query.until(lambda: len(values()) >= len(kept + open_values), "the rest is read")
    query.stop()
    assert values() == sorted(kept + open_values)
