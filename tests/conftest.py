"""Fixtures that many tests share: a real broker, topics on it, records in them, a real Spark."""

import faulthandler
import gc
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec
from pyspark.sql import SparkSession
from xdist.scheduler import LoadFileScheduling

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.jars import connector_jars

# Helper modules are no test modules: under import mode importlib they are found by path only.
sys.path.append(str(Path(__file__).parent))

from java_classes import end_jvm, set_java_options

set_java_options()

# A busy machine is no failure of the code, and a change fails by what it does, not by luck.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=10_000)
hypothesis.settings.load_profile("same")

gc.disable()  # until the tests are collected: of these objects none is garbage

ANSWER_TIMEOUT_S = 30
CLEAN_UP_TIMEOUT_S = 200
SASL_USERS = {"alice": "alice-secret", "bob": "bob.secret"}
CALM = {
    "broker.heartbeat.interval.ms": "2000",
    "broker.session.timeout.ms": "9000",
    "log.cleaner.backoff.ms": "60000",
    "replica.high.watermark.checkpoint.interval.ms": "60000",
}
"""For a broker that nobody kills. The first two are Kafka's own: with those of `EmbeddedBroker` one
that rests takes twice the time of a processor. The others look at each partition, 15 s and 5 s
apart by default: half of what a broker does at rest that has the topics of all tests.
"""

CHAINS = {
    "queries": re.compile(
        r"tests/integration/test_(answered_lookups|backpressure|doctor|outages|outside_queries|"
        r"pipelines|progress|slow_listeners|spark|steering|tls|usage_pipeline|worker_queries)\.py"
    ),
    "examples": re.compile(r"tests/integration/test_(demo|readme)|tests/spark/"),
    "pages": re.compile(r"tests/admin/test_page"),
}
"""Tests that one worker runs one after the other, since they share what takes long to start: a
Spark, or a browser. A Spark takes a processor: of the two chains that have one, neither waits for
the other, and they end about together.
"""

SPARK_OPTIONS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.streaming.noDataProgressEventInterval": "50",  # else idle after 10 s
}
SPARK_JAVA_OPTIONS = "-Xss8m -Dlog4j2.configurationFile={logging}"
"""When a query is stopped within foreachBatch, Spark 4.0 matches the long message of the exception
against a pattern; that needs more stack than threads have by default."""

SPARK_LOGGING = """
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = {file}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{HH:mm:ss.SSS}} %p %c{{1}}: %m%n%ex
"""


def _chain(nodeid: str) -> str | None:
    return next((name for name, tests in CHAINS.items() if tests.match(nodeid)), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the chains first, and then the files with slow tests: with several workers, each has
    something to do until near the end.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (_chain(item.nodeid) is None, item.path not in slow))


class ChainsAndFiles(LoadFileScheduling):
    """Gives the tests of a chain to one worker, and those of a file."""

    def _split_scope(self, nodeid: str) -> str:
        return _chain(nodeid) or super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Keep tests together where `--dist loadfile` asks for it."""
    return ChainsAndFiles(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Leave what was collected, a million objects, out of what the garbage collector looks at."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """End the process, which fails the test, when cleaning up after a test hangs: the time limit of
    a test that has failed by then does not hold any more.
    """
    faulthandler.dump_traceback_later(CLEAN_UP_TIMEOUT_S, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker for all tests of the session, with a SASL listener that knows `SASL_USERS` beside
    the plain one. A test that needs to harm a broker starts its own.
    """
    folder = tmp_path_factory.mktemp("kafka")
    with EmbeddedBroker(folder, sasl_users=SASL_USERS, properties=CALM) as broker:
        yield broker
        broker.kill()  # with the topics of all tests an orderly end takes long, and is of no use


@pytest.fixture(scope="session")
def topic_names() -> Iterator[str]:
    """Names whose order is that in which they are given, however many there are."""
    return (f"topic-{number:06}" for number in itertools.count())


@pytest.fixture
def topic(kafka: EmbeddedBroker, topic_names: Iterator[str]) -> Callable[..., str]:
    """`topic(partitions=1, config=None)` creates a topic with a new name, waits until each of its
    partitions has a leader that knows of it, and gives the name. A leader that does not yet refuses
    what is written, and a client that writes it again does so out of order.
    """

    def create(partitions: int = 1, config: dict[str, str] | None = None) -> str:
        name = next(topic_names)
        with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
            new = NewTopic(name, partitions, replication_factor=1, config=config or {})
            admin.create_topics([new])[name].result(ANSWER_TIMEOUT_S)
            while True:
                seen = admin.list_topics(name, timeout=ANSWER_TIMEOUT_S).topics[name].partitions
                if len(seen) == partitions and all(part.leader >= 0 for part in seen.values()):
                    break
            asked = {TopicPartition(name, each): OffsetSpec.latest() for each in range(partitions)}
            while any(each.exception() for each in admin.list_offsets(asked).values()):
                pass
        return name

    return create


@pytest.fixture
def fill(kafka: EmbeddedBroker) -> Callable[..., None]:
    """`fill(topic, count, size, partitions=1, bootstrap=None)` writes values of `size` bytes to the
    partitions in turn; number N starts with N in 8 digits, so that a test can tell them apart.
    """

    def produce(
        topic: str, count: int, size: int, partitions: int = 1, bootstrap: str | None = None
    ) -> None:
        config = {"linger.ms": 5, "message.max.bytes": max(size * 2, 10**6)}
        producer = Producer(
            {"bootstrap.servers": bootstrap or kafka.bootstrap, "log_level": 0, **config}
        )
        failed: list[str] = []

        def delivered(error: object, _message: object) -> None:
            if error is not None:
                failed.append(str(error))

        padding = b"." * (size - 8)
        for number in range(count):
            while True:
                try:
                    producer.produce(
                        topic,
                        b"%08d" % number + padding,
                        partition=number % partitions,
                        on_delivery=delivered,
                    )
                    break
                except BufferError:  # the queue is full: let some go out
                    producer.poll(1)
            producer.poll(0)
        unsent = producer.flush(ANSWER_TIMEOUT_S)
        assert (unsent, failed) == (0, [])

    return produce


@pytest.fixture(scope="session")
def spark_log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Spark's driver and its executor write their warnings: the terminal stays clean, and
    tests can read them.
    """
    return tmp_path_factory.mktemp("spark") / "spark.log"


@pytest.fixture(scope="session")
def spark(spark_log_file: Path) -> Iterator[SparkSession]:
    """The one Spark of the session. A test ends the queries, and takes away the listeners, that
    it began.
    """
    logging = spark_log_file.with_suffix(".properties")
    logging.write_text(SPARK_LOGGING.format(file=spark_log_file))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = (
        SparkSession.builder.master("local[2]")
        .appName("kafka-quota-proxy-test")
        .config(
            map={
                **SPARK_OPTIONS,
                "spark.jars": ",".join(map(str, connector_jars())),
                "spark.sql.warehouse.dir": str(spark_log_file.with_name("warehouse")),
                "spark.driver.extraJavaOptions": SPARK_JAVA_OPTIONS.format(
                    logging=logging.as_uri()
                ),
            }
        )
    )
    session = builder.getOrCreate()
    yield session
    session.stop()
    end_jvm()
