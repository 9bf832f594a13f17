"""The ends of followed logs are known, whatever happens to topics and brokers."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from structlog.testing import capture_logs
from support.detour import detour
from support.proxy_process import HOST
from support.waiting import at_work, eventually

from examples.devkit.broker import EmbeddedBroker, EmbeddedCluster
from metrics.clock import clock_ms
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.upstream import UpstreamError
from proxy.progress import log_offset_poller as module
from proxy.progress.log_offset_poller import LogOffsetPoller
from proxy.progress.query import FollowedQuery, ProgressSettings, QuerySettings
from proxy.progress.query_registry import QueryRegistry
from proxy.progress.tracker import QueryReader

Partition = tuple[str, int]


class Book:
    """What is followed, and what was told of it."""

    def __init__(self, *followed: Partition) -> None:
        self.followed = list(followed)
        self.ends: dict[Partition, int] = {}
        self.starts: dict[Partition, int] = {}
        self.asked = 0
        self.stale_ones: list[Partition] = []
        self.began_ms = time.monotonic() * 1000

    def partitions(self) -> list[Partition]:
        self.asked += 1
        return self.followed

    def stale(self, _now_ms: float) -> list[Partition]:
        return self.stale_ones

    def readers_of(self, topic: str, partition: int) -> "list[BookReader]":
        return [BookReader(self, (topic, partition))]


class BookReader:
    """Notes what is told of one partition."""

    def __init__(self, book: Book, key: Partition) -> None:
        self.book, self.key = book, key
        self.log = self

    def record_lookup_end(self, end: int, now_ms: float, *, client_saw_it: bool) -> None:
        assert self.book.began_ms <= now_ms <= time.monotonic() * 1000
        assert not client_saw_it
        self.book.ends[self.key] = end

    def record_start(self, offset: int) -> None:
        self.book.starts[self.key] = offset


def asking(book: Book, *addresses: tuple[str, int]) -> LogOffsetPoller:
    return LogOffsetPoller(book, KafkaClient(Bootstrap(addresses)))


def read_from(topic: str, offset: int) -> tuple[QueryRegistry, FollowedQuery]:
    """Give the registry of a query that reads a topic's first partition from there, and it."""
    query = QuerySettings(name="orders", client_id="orders")
    book = QueryRegistry(ProgressSettings(queries=(query,)), lambda _: None, lambda _: True)
    orders = book.query_of("orders")
    assert orders is not None
    QueryReader(orders).fetch_asked(topic, None, [(0, offset)], clock_ms())
    return book, orders


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for interval in ("LOG_END_INTERVAL_S", "STALE_END_INTERVAL_S", "RETRY_PAUSE_S"):
        monkeypatch.setattr(module, interval, 0.02)


async def test_ends_and_starts(
    kafka: EmbeddedBroker, topic: Callable[..., str], fill: Callable[..., None]
) -> None:
    name, other = topic(3), topic()
    fill(name, 30, 20, partitions=2)
    with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
        cut = TopicPartition(name, 0, 4)
        admin.delete_records([cut])[cut].result(30)
    book = Book((name, 0), (name, 1), (other, 0))
    client = KafkaClient(Bootstrap([(HOST, kafka.port)]))
    ends = LogOffsetPoller(book, client)
    async with at_work(ends.run()):
        await eventually(lambda: len(book.ends) == 3, "told")
        assert book.ends == {(name, 0): 15, (name, 1): 15, (other, 0): 0}
        assert book.starts == {(name, 0): 4, (name, 1): 0, (other, 0): 0}
        assert client.connections == 1
    assert client.connections == 0


async def test_stale_ends_are_asked_for_between_and_nothing_else_is(
    kafka: EmbeddedBroker,
    topic: Callable[..., str],
    fill: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STALE_END_INTERVAL_S", 0.02)
    monkeypatch.setattr(module, "LOG_END_INTERVAL_S", 3600.0)
    monkeypatch.setattr(module, "SLICE", 2)
    name, new = topic(3), topic()
    fill(name, 3, 20, partitions=3)
    book = Book((name, 0), (name, 1), (name, 2))
    async with at_work(asking(book, (HOST, kafka.port)).run()):
        await eventually(lambda: len(book.ends) == 3, "told")
        book.starts.clear()
        book.stale_ones = [(name, 1)]
        fill(name, 30, 20, partitions=3)
        await eventually(lambda: book.ends[name, 1] == 11, "told again")
        assert book.ends == {(name, 0): 1, (name, 1): 11, (name, 2): 1}
        book.stale_ones = [*book.followed, (new, 0)]
        await eventually(lambda: sorted(book.ends.values()) == [0, 11, 11, 11], "all are told")
    assert book.starts == {}
    assert book.asked == 1


async def test_the_lag_of_a_query_at_work_is_known_though_nothing_passes(
    kafka: EmbeddedBroker,
    topic: Callable[..., str],
    fill: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LOG_END_INTERVAL_S", 3600.0)
    name = topic()
    fill(name, 3, 20)
    book, orders = read_from(name, 1)
    ends = LogOffsetPoller(book, KafkaClient(Bootstrap([(HOST, kafka.port)])))
    async with at_work(ends.run()):
        await eventually(lambda: orders.partitions[name, 0].lag_records() == 2, "asked for")
        fill(name, 5, 20)
        await eventually(lambda: orders.partitions[name, 0].lag_records() == 7, "asked again")


async def test_a_topic_made_anew_while_nobody_reads_it_leaves_no_lag_that_is_not_there(
    kafka: EmbeddedBroker, topic: Callable[..., str], fill: Callable[..., None], quick: None
) -> None:
    name = topic()
    fill(name, 9, 20)
    book, orders = read_from(name, 2)
    ends = LogOffsetPoller(book, KafkaClient(Bootstrap([(HOST, kafka.port)])))
    async with at_work(ends.run()):
        await eventually(lambda: orders.partitions[name, 0].lag_records() == 7, "asked for")
        with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
            await asyncio.to_thread(admin.delete_topics([name])[name].result, 30)
            new = NewTopic(name, 1, 1)
            await eventually(lambda: admin.create_topics([new])[name].exception() is None, "made")
        await asyncio.to_thread(fill, name, 5, 20)
        await eventually(lambda: orders.partitions[name, 0].lag_records() == 3, "believed")


async def test_without_anything_followed_nothing_is_opened(
    kafka: EmbeddedBroker, quick: None
) -> None:
    book = Book()
    async with detour(kafka.bootstrap) as way:
        async with at_work(asking(book, way.address).run()):
            await eventually(lambda: book.asked > 10, "polled")
        assert way.opened == 0


async def test_a_topic_is_deleted_and_made_anew(
    kafka: EmbeddedBroker, topic: Callable[..., str], fill: Callable[..., None], quick: None
) -> None:
    """The others go on, it is not made by our asking, and it is found when it is back."""
    gone, stays = topic(), topic()
    fill(gone, 3, 20)
    book = Book((gone, 0), (stays, 0), (stays, 7))
    with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin, capture_logs() as logs:
        async with at_work(asking(book, (HOST, kafka.port)).run()):
            await eventually(lambda: book.ends == {(gone, 0): 3, (stays, 0): 0}, "told")
            admin.delete_topics([gone])[gone].result(30)
            await eventually(lambda: len(logs) > 1, "noticed")
            fill(stays, 2, 20)
            await eventually(lambda: book.ends[stays, 0] == 2, "the other goes on")
            asked = book.asked
            await eventually(lambda: book.asked > asked + 10, "looked for")
            assert gone not in admin.list_topics(timeout=10).topics
            fill(gone, 1, 20)  # which makes it, as brokers do by default
            await eventually(lambda: book.ends[gone, 0] == 1, "found again")
    missing = "followed partitions have no leader or are gone"
    assert [(line["event"], line["partitions"]) for line in logs] == [
        (missing, f"{stays}-7"),
        (missing, f"{gone}-0, {stays}-7"),
    ]


async def test_a_cluster_that_does_not_answer_is_logged_once(
    kafka: EmbeddedBroker, topic: Callable[..., str], quick: None
) -> None:
    book = Book((topic(), 0))
    server = await asyncio.start_server(lambda _, writer: writer.close(), HOST, 0)
    address = server.sockets[0].getsockname()[:2]
    ends = asking(book, address)
    async with server:
        with pytest.raises(UpstreamError, match="closed the connection"):
            await ends.poll()
        with capture_logs() as logs:
            async with at_work(ends.run()):
                asked = book.asked
                await eventually(lambda: book.asked > asked + 5, "tried again")
    assert [line["event"] for line in logs if "leader" not in line["event"]] == [
        "log ends not read, lag may be out of date"
    ]
    assert book.ends == {}


@pytest.mark.slow
async def test_leaders_are_asked_side_by_side_and_one_that_is_down_holds_up_no_other(
    tmp_path: Path, quick: None
) -> None:
    with EmbeddedCluster(tmp_path, 2) as cluster:
        names = _one_topic_per_broker(cluster)
        book = Book(*((name, 0) for name in names.values()))
        ends = asking(book, *((HOST, broker.port) for broker in cluster.brokers))
        with capture_logs() as logs:
            async with at_work(ends.run()):
                await eventually(lambda: len(book.ends) == 2, "both told")
                controller, other = cluster.brokers
                other.kill()
                await eventually(lambda: logs, "noticed")
                book.ends.clear()
                await eventually(lambda: book.ends, "the other is still asked")
                assert set(book.ends) == {(names[controller.settings.node_id], 0)}
                await asyncio.to_thread(other.start)
                await eventually(lambda: len(book.ends) == 2, "both told again")


def _one_topic_per_broker(cluster: EmbeddedCluster) -> dict[int, str]:
    with AdminClient({"bootstrap.servers": cluster.bootstrap}) as admin:
        names = {
            broker.settings.node_id: f"on-{broker.settings.node_id}" for broker in cluster.brokers
        }
        new = [
            NewTopic(name, num_partitions=1, replica_assignment=[[node]])
            for node, name in names.items()
        ]
        for made in admin.create_topics(new).values():
            made.result(30)
    return names
