"""The proxy answers look-ups of a streaming query's executors, and real Spark reads as without."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.errors import StreamingQueryException
from support.proxy_process import ProxyProcess, until
from support.streams import END_S, Stream, feed

from proxy.spark import QuotaListener, client_options

pytestmark = pytest.mark.slow

RECORD_BYTES = 100
ANSWERED_SHARE = 0.25
"""Of all look-ups at least. A machine that has other work to do answers some of them too late."""

QUICK_POLLS = {"kafka.fetch.max.wait.ms": "20"}
"""At the end of a log, where each look-up waits for the Fetch in flight."""

LOSS_FAILURE = r"failOnDataLoss|may have been lost"

Run = Callable[..., ProxyProcess]
Listen = Callable[..., QuotaListener]
MakeStream = Callable[..., Stream]
MakeTopic = Callable[..., str]


class TwoProxies:
    """A proxy that follows a query, before another one that shows what reaches the broker."""

    def __init__(self, proxy: Run, name: str, **parts: Any) -> None:
        self._name = name
        self._behind = proxy()
        self.running = proxy(
            bootstrap_servers=self._behind.bootstrap, queries=[{"name": name}], **parts
        )

    def answered_share(self) -> float:
        """Return how much of the bytes of its look-ups the broker did not see."""
        asked, forwarded = map(self._bytes, (self.running, self._behind))
        assert forwarded > 0
        return 1 - forwarded / asked

    def _bytes(self, process: ProxyProcess) -> float:
        return process.metrics().value("bytes_total", client_id=self._name, api="ListOffsets")


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.usefixtures("no_data_loss")
def test_a_backlog_is_read_once(
    proxy: Run, topic: MakeTopic, stream: MakeStream, listen: Listen, answers: bool
) -> None:
    proxies = TwoProxies(proxy, "backlog", progress={"answer_lookups": answers})
    listen(proxies.running)
    query = stream(proxies.running, "backlog", topic(2))
    query.feed(3000, RECORD_BYTES)
    query.start()
    query.finish()
    query.check_all_read({0: 3000, 1: 3000})
    share = proxies.answered_share()
    assert share >= ANSWERED_SHARE if answers else share == 0


@pytest.mark.usefixtures("no_data_loss")
@pytest.mark.parametrize("level", ["read_uncommitted", "read_committed"])
def test_no_batch_misses_what_was_written_before_it_was_planned(
    proxy: Run, topic: MakeTopic, stream: MakeStream, listen: Listen, level: str
) -> None:
    proxies = TwoProxies(proxy, "written")
    listen(proxies.running)
    query = stream(proxies.running, "written", topic(2))
    run = query.start("100 milliseconds", QUICK_POLLS | {"kafka.isolation.level": level})
    written: list[tuple[datetime, int]] = []
    for number in range(1, 7):
        query.feed(200, RECORD_BYTES)
        written.append((datetime.now(UTC), 200 * number))
        query.until_read({0: 200 * number, 1: 200 * number})
    query.check_all_read({0: 1200, 1: 1200})
    batches = 0
    for progress in run.recentProgress:
        planned_at = datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00"))
        least = max((end for at, end in written if at <= planned_at), default=0)
        (source,) = progress["sources"]
        ends = json.loads(source["endOffset"])[query.topic]
        assert min(ends.values()) >= least, progress
        batches += 1
    assert batches
    assert run.exception() is None


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_records_that_are_deleted_while_a_query_runs(
    proxy: Run, topic: MakeTopic, stream: MakeStream, listen: Listen, fails: bool, answers: bool
) -> None:
    """The query fails, or goes on behind them, as it is told."""
    name = f"deleted-{fails}-{answers}".lower()
    proxies = TwoProxies(proxy, name, progress={"answer_lookups": answers})
    listen(proxies.running)
    query = stream(proxies.running, name, topic(1))
    query.feed(2000, RECORD_BYTES, partitions=[0])
    query.gate.clear()
    options = {"maxOffsetsPerTrigger": "500", "failOnDataLoss": str(fails).lower()}
    run = query.start("100 milliseconds", QUICK_POLLS | options)
    query.until(lambda: 0 in query.batches, "the first batch was read")
    there_from = TopicPartition(query.topic, 0, 1500)
    with AdminClient({"bootstrap.servers": query.kafka}) as admin:
        admin.delete_records([there_from])[there_from].result(END_S)
    query.gate.set()
    if fails:
        with pytest.raises(StreamingQueryException, match=LOSS_FAILURE):
            run.awaitTermination(END_S)
    else:
        query.until_read({0: 2000})
        offsets = query.offsets()[0]
        assert len(set(offsets)) == len(offsets)
        assert set(offsets) >= {*range(500), *range(1500, 2000)}


@pytest.mark.parametrize("streams", [False, True])
def test_batch_queries_are_not_answered(
    proxy: Run, topic: MakeTopic, stream: MakeStream, listen: Listen, streams: bool
) -> None:
    """Not even with the client id of a query that is followed, nor while that runs."""
    proxies = TwoProxies(proxy, "batches")
    listen(proxies.running)
    running, name = proxies.running, topic(1)
    query = stream(running, "batches", topic(1))
    if streams:
        query.start("200 milliseconds")
    feed(query.kafka, name, 2000, RECORD_BYTES, [0])
    spark = query.spark
    read = (
        spark.read.format("kafka")
        .options(**client_options("batches", running.bootstrap))
        .option("subscribe", name)
        .option("kafka.max.partition.fetch.bytes", "5000")
        .load()
    )
    assert read.count() == 2000
    query.stop()
    until(lambda: proxies.answered_share() == 0, "both proxies counted the same look-ups")


def test_other_consumers_are_not_answered(
    proxy: Run, topic: MakeTopic, stream: MakeStream, listen: Listen
) -> None:
    """Not even with the client id of a query that is followed: no listener tells of a run."""
    proxies = TwoProxies(proxy, "consumer")
    listen(proxies.running)
    query = stream(proxies.running, "consumer", topic(1))
    query.feed(2000, RECORD_BYTES, [0])
    consumer = Consumer(
        {
            "bootstrap.servers": proxies.running.bootstrap,
            "group.id": "any",
            "client.id": "consumer",
            "enable.auto.commit": False,
        }
    )
    partition = TopicPartition(query.topic, 0, 0)
    consumer.assign([partition])
    assert until(lambda: consumer.poll(1), "a record")
    assert consumer.get_watermark_offsets(partition, timeout=END_S) == (0, 2000)
    consumer.close()
    assert proxies.answered_share() == 0
