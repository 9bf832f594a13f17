"""From what clients move to what Parquet says: the same to the byte, whatever is ended between."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from parts.usage_driver import until_stored, usage_driver
from pyspark.sql import SparkSession
from support.operating import running
from support.proxy_process import ProxyProcess, config, until
from support.raw import RawClient, fetch

from examples.devkit.broker import EmbeddedBroker
from proxy.spark.usage.usage_stream import usage_query

pytestmark = pytest.mark.slow

CLIENTS = ("etl", "web")
RECORDS, RECORD_BYTES = 40, 1000
COPY_S = 240


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A broker of the test's own, which it may end."""
    with EmbeddedBroker(tmp_path / "kafka") as broker:
        yield broker


def move(process: ProxyProcess, topic: str, fill: Callable[..., None]) -> None:
    for client_id in CLIENTS:
        with RawClient(process.bootstrap, client_id) as client:
            for _ in range(10):
                client.ask(fetch(12, topic))
    fill(topic, RECORDS, RECORD_BYTES, bootstrap=process.bootstrap)


def counted(process: ProxyProcess) -> Counter[tuple[str, str]]:
    """Bytes by client id and direction, without those of who reads usage."""
    found: Counter[tuple[str, str]] = Counter()
    for sample in process.metrics().samples:
        if sample.name == "kafka_quota_proxy_bytes_total":
            direction = "write" if sample.labels["api"] == "Produce" else "read"
            found[sample.labels["client_id"], direction] += round(sample.value)
    return Counter({key: size for key, size in found.items() if key[0] != "quota-proxy-usage"})


def test_sums_in_parquet_are_the_counters_to_the_byte(
    kafka: EmbeddedBroker,
    spark: SparkSession,
    tmp_path: Path,
    topic: Callable[..., str],
    topic_names: Iterator[str],
    fill: Callable[..., None],
) -> None:
    name, usage, out = topic(), f"usage-{next(topic_names)}", tmp_path / "out"
    fill(name, RECORDS, RECORD_BYTES)
    document = {**config(kafka.bootstrap), "usage": {"topic": usage, "interval": "1s"}}

    def stored() -> Counter[tuple[str, str]]:
        options = {"kafka.bootstrap.servers": process.bootstrap}
        query = usage_query(spark, options, str(out), usage, {"availableNow": True})
        assert query.awaitTermination(COPY_S)
        records = spark.read.parquet(str(out / "usage"))
        key = ("member", "epoch", "sequence")
        assert records.count() == records.select(*key).distinct().count()
        rows = records.where("client_id != 'quota-proxy-usage'").groupBy("client_id", "direction")
        return Counter(
            {(row[0], row[1]): row[2] for row in rows.agg({"bytes": "sum"}).collect() if row[2]}
        )

    with running(ProxyProcess(document, tmp_path / "proxy")) as process:
        move(process, name, fill)
        with usage_driver(process.bootstrap, usage, out) as driver:
            until_stored(driver, out, 1)
            move(process, name, fill)
            kafka.kill()
            errors = "usage_write_errors_total"
            until(lambda: process.metrics().value(errors) > 0, "it is not written", COPY_S)
            kafka.start()
            move(process, name, fill)
        time.sleep(1)  # the last answers are counted when they have been sent
        first = counted(process)
        process.stop()
        process.start()
        move(process, name, fill)
        wanted = until(
            lambda: (
                len({*CLIENTS} & {key[0] for key in counted(process)}) == len(CLIENTS)
                and first + counted(process)
            ),
            "the clients are counted again",
        )
        until(lambda: stored() == wanted, "all is stored", COPY_S)
