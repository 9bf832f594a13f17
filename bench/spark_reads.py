"""Spark reads a topic directly and through the proxy, in turn: a study.

One Spark session with two tasks drops what it reads; a batch query and a streaming one with the
trigger availableNow, without the listener, with it, and with an adaptive rule besides.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence

import psutil
from pyspark.sql import SparkSession

from bench import topics
from bench.lab import NEVER_VIOLATED, followed_rule, open_lab, rule, unviolated_rules
from examples.devkit.broker import EmbeddedBroker
from examples.devkit.jars import connector_jars
from proxy.spark import QuotaListener, client_options

TOPIC, PARTITIONS = "read", 4
BATCHED = {"linger.ms": 20, "batch.size": 1_000_000}
DIRECT, PLAIN, FOLLOWED, ADAPTIVE = "direct", "plain", "followed", "adaptive"
WAYS = {"batch": (DIRECT, PLAIN), "stream": (DIRECT, PLAIN, FOLLOWED, ADAPTIVE)}
LISTENED = (FOLLOWED, ADAPTIVE)
WARM_UPS = 2
Times = Sequence[float]
"""Of one read, in seconds: wall; CPU of proxy, broker and Spark."""


def read(
    spark: SparkSession, form: str, name: str, bootstrap: str, listener: QuotaListener
) -> None:
    """Read the whole topic."""
    reader = spark.read if form == "batch" else spark.readStream
    source = reader.format("kafka").options(**client_options(name, bootstrap))
    frame = source.option("subscribe", TOPIC).option("startingOffsets", "earliest").load()
    if form == "batch":
        frame.write.format("noop").mode("overwrite").save()
        return
    if name in LISTENED:
        spark.streams.addListener(listener)
    with tempfile.TemporaryDirectory() as checkpoint:
        stream = frame.writeStream.queryName(name).option("checkpointLocation", checkpoint)
        drop = stream.foreachBatch(
            lambda batch, _: batch.write.format("noop").mode("append").save()
        )
        drop.trigger(availableNow=True).start().awaitTermination()
    if name in LISTENED:
        spark.streams.removeListener(listener)


def main() -> None:
    """Print wall time to direct, and CPU, for each form and way: medians of the rounds."""
    parser = argparse.ArgumentParser(prog="bench.spark_reads", description=__doc__)
    parser.add_argument("record_bytes", type=int)
    parser.add_argument("megabytes", type=int)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with open_lab() as lab:
        broker = lab.enter(EmbeddedBroker(lab.work_dir / "broker"))
        host, _, port = broker.bootstrap.rpartition(":")
        topics.create(broker.bootstrap, TOPIC, PARTITIONS)
        count = options.megabytes * 10**6 // options.record_bytes
        value = os.urandom(options.record_bytes)
        topics.fill(broker.bootstrap, TOPIC, PARTITIONS, value, count, BATCHED)
        rules = [rule(PLAIN, NEVER_VIOLATED), rule(FOLLOWED, NEVER_VIOLATED)]
        proxy = lab.start_proxy(
            (host, int(port)),
            [*rules, followed_rule(ADAPTIVE), *unviolated_rules()],
            queries=[{"name": name} for name in LISTENED],
            pinned=False,
        )
        javas = {each.pid for each in psutil.Process().children(recursive=True)}
        builder = SparkSession.builder.master("local[2]").config("spark.driver.memory", "3g")
        builder = builder.config("spark.jars", ",".join(map(str, connector_jars())))
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1")
        builder = builder.config("spark.driver.host", "127.0.0.1")
        spark = builder.config("spark.ui.enabled", "false").getOrCreate()
        below = [
            each for each in psutil.Process().children(recursive=True) if "java" in each.name()
        ]
        (spark_java,) = (each for each in below if each.pid not in javas)
        (broker_java,) = (each for each in below if each.pid in javas)
        listener = QuotaListener("http://{}:{}".format(*proxy.admin))

        def used_s() -> Times:
            ours, _ = proxy.child.usage()
            return (
                time.monotonic(),
                ours,
                *(sum(each.cpu_times()[:2]) for each in (broker_java, spark_java)),
            )

        def measure(form: str, way: str) -> Times:
            before = used_s()
            bootstrap = broker.bootstrap if way == DIRECT else "{}:{}".format(*proxy.bootstrap)
            read(spark, form, way, bootstrap, listener)
            return [after - first for first, after in zip(before, used_s(), strict=True)]

        for form, ways in WAYS.items():
            for way in ways * WARM_UPS:
                measure(form, way)
            rounds = [
                {way: measure(form, way) for way in ways[:: -1 if number % 2 else 1]}
                for number in range(options.rounds)
            ]
            for way in ways:
                ratio = statistics.median(each[way][0] / each[DIRECT][0] for each in rounds)
                medians = (
                    statistics.median(column)
                    for column in zip(*(each[way] for each in rounds), strict=True)
                )
                wall_s, *cpu_s = medians
                cpu = ", ".join(f"{each:.2f}" for each in cpu_s)
                per_gb = cpu_s[0] / options.megabytes * 1000
                print(f"{form} {way}: {wall_s:.2f} s, {ratio:.3f} of direct; CPU of proxy, broker,")
                print(f"    Spark {cpu} s; of the proxy {per_gb:.2f} s/GB", flush=True)


if __name__ == "__main__":
    main()
