"""How each Java of the tests is run: with archives of the classes that it loads when it starts, and
without the optimising compiler, which takes more time than it gives back within a test.

With archives a Kafka broker and a Spark driver start with about half the work.
`python tests/java_classes.py` makes them, once for each checkout. Java takes no archive that
another Java, or other jars, have made: then it loads the classes as it does without.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from confluent_kafka import Consumer, Producer
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from examples.devkit.broker import QUICK_START, EmbeddedBroker
from examples.devkit.jars import connector_jars

FOLDER = Path(__file__).parents[1] / "build" / "java-classes"
BROKER = FOLDER / "broker.jsa"
SPARK = FOLDER / "spark.jsa"
VARIABLES = {"JDK_JAVA_OPTIONS": BROKER, "SPARK_SUBMIT_OPTS": SPARK}
"""Where each Java, and after it the driver of each Spark, takes more options from."""

SHORT_LIVED = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""A Spark driver of a minute takes half the time of a core with it."""
SMALL_PLANS = (
    "-Dspark.sql.codegen.wholeStage=false -Dspark.sql.codegen.factoryMode=NO_CODEGEN "
    "-Dspark.sql.adaptive.enabled=false -Dspark.sql.shuffle.partitions=1"
)
"""To compile a plan, and to plan anew amid it, takes Spark longer than some records do; and so do
the 200 tasks of a shuffle.
"""
WORKERS = Path(__file__).parent / "spark_worker"
QUICK_WORKERS = (
    f"-Dspark.python.daemon.module=daemon_without_archives -Dspark.executorEnv.PYTHONPATH={WORKERS}"
)
"""A Python worker of Spark's takes a sixth of the time for a task with it."""
FEW_PROCESSES = (
    "-Djdk.lang.Process.launchMechanism=VFORK -Dspark.sql.streaming.checkpointFileManagerClass="
    "org.apache.spark.sql.execution.streaming.FileSystemBasedCheckpointFileManager"
)
"""Else Java starts twenty for each batch, each by way of another: `readlink` and `chmod`."""

TIMEOUT_S = 120
QUIET = ("-Xlog:disable", "-Xlog:all=error:stderr")
"""Of each class that is not archived Java would say why."""


def set_java_options() -> None:
    """Let each Java that is started from here on be one that ends soon, and use the archives."""
    for variable, file in VARIABLES.items():
        archive = f"-XX:SharedArchiveFile={file} -Xshare:auto {' '.join(QUIET)}"
        settings = (SHORT_LIVED, SMALL_PLANS, QUICK_WORKERS, FEW_PROCESSES)
        os.environ[variable] = " ".join((*settings, archive if file.exists() else ""))


def make(file: Path, run: Callable[[str], None]) -> None:
    """Write an archive; `run` starts and ends a Java with the option that it is given."""
    # Made beside its place and then moved: whoever looks meanwhile sees no half of it.
    half = file.with_suffix(f".{os.getpid()}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    run(f"-XX:ArchiveClassesAtExit={half}")
    half.replace(file)


def run_broker(option: str) -> None:
    """Let a broker format its storage and serve a producer and a member of a group."""
    with tempfile.TemporaryDirectory() as folder:
        users = {"user": "secret"}
        broker = EmbeddedBroker(
            Path(folder), sasl_users=users, jvm_options=(*QUICK_START, *QUIET, option)
        )
        with broker:
            fill(broker)
            access = {"bootstrap.servers": broker.bootstrap, "log_level": 0, "group.id": "group"}
            consumer = Consumer({**access, "auto.offset.reset": "earliest"})
            consumer.subscribe(["topic"])
            consumer.poll(TIMEOUT_S)
            consumer.close()
            broker.stop(TIMEOUT_S)


def run_spark(option: str) -> None:
    """Let a query read a topic."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder)) as broker:
        fill(broker)
        options = {
            "spark.jars": ",".join(map(str, connector_jars())),
            "spark.driver.extraJavaOptions": " ".join((*QUIET, option)),
            "spark.ui.enabled": "false",
        }
        spark = SparkSession.builder.master("local[2]").config(map=options).getOrCreate()
        access = {"kafka.bootstrap.servers": broker.bootstrap, "subscribe": "topic"}
        records = spark.readStream.format("kafka").options(**access, startingOffsets="earliest")
        query = records.load().writeStream.foreachBatch(count).trigger(availableNow=True).start()
        query.awaitTermination(TIMEOUT_S)
        spark.stop()
        end_jvm()


def count(batch: DataFrame, _: int) -> None:
    """Process a batch."""
    batch.count()


def fill(broker: EmbeddedBroker) -> None:
    """Write a record, to a new topic."""
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    producer.produce("topic", b"value")
    producer.flush(TIMEOUT_S)


def end_jvm() -> None:
    """End Spark's JVM too: its clients would look for their broker, and say so, until the end."""
    # pyspark has no public way to end it, and else would take it for one that runs.
    gateway = SparkContext._gateway  # noqa: SLF001
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(TIMEOUT_S)
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001


if __name__ == "__main__":
    for file, run in ((BROKER, run_broker), (SPARK, run_spark)):
        if not file.exists():
            sys.stderr.write(f"making {file}\n")
            make(file, run)
