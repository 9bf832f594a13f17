"""As `lasting_clients`, with Kafka's own clients for Java: those of the jar that is named."""

import argparse
import os
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from py4j.java_gateway import JavaGateway

from bench.lasting_clients import (
    INTERVAL_S,
    PARTITION,
    POLL_S,
    Names,
    add_names,
    names_of,
    start_all,
    tell,
)
from examples.devkit.ivy import pyspark_jars_dir
from examples.devkit.java import find_java

TEXT = "org.apache.kafka.common.serialization.StringDeserializer"
TO_BYTES = "org.apache.kafka.common.serialization.StringSerializer"


def main() -> None:
    """Run until stdin ends."""
    parser = argparse.ArgumentParser(prog="bench.lasting_java", description=__doc__)
    parser.add_argument("--jar", required=True, type=Path, help="of Kafka's clients")
    options = add_names(parser)
    shipped = pyspark_jars_dir()
    (py4j,) = shipped.glob("py4j-*.jar")
    gateway = JavaGateway.launch_gateway(
        port=0,
        jarpath=str(py4j),
        classpath=os.pathsep.join(map(str, [options.jar, *shipped.glob("slf4j-api-*.jar")])),
        javaopts=["-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"],
        java_path=str(find_java()),
        die_on_exit=True,
    )
    jvm = gateway.jvm
    roles = (partial(_group, jvm), partial(_alone, jvm), partial(_write, jvm))
    start_all(roles, names_of(options))


def _settings(jvm: Any, names: Names, client_id: str, **more: object) -> Any:
    settings = jvm.java.util.HashMap()
    given = {"bootstrap_servers": names.bootstrap, "client_id": client_id, **more}
    for key, value in given.items():
        settings.put(key.replace("_", "."), value)
    return settings


def _consumer(jvm: Any, names: Names, client_id: str, **more: object) -> Any:
    settings = _settings(
        jvm, names, client_id, key_deserializer=TEXT, value_deserializer=TEXT, **more
    )
    return jvm.org.apache.kafka.clients.consumer.KafkaConsumer(settings)


def _group(jvm: Any, names: Names) -> None:
    consumer = _consumer(
        jvm, names, names.group, group_id=names.group, auto_offset_reset="earliest"
    )
    consumer.subscribe(jvm.java.util.Collections.singletonList(names.source))
    _read(jvm, "group", consumer)


def _alone(jvm: Any, names: Names) -> None:
    consumer = _consumer(jvm, names, names.alone)
    start = jvm.org.apache.kafka.common.TopicPartition(names.source, PARTITION)
    starts = jvm.java.util.Collections.singletonList(start)
    consumer.assign(starts)
    consumer.seekToBeginning(starts)
    _read(jvm, "alone", consumer)


def _read(jvm: Any, what: str, consumer: Any) -> None:
    wait = jvm.java.time.Duration.ofMillis(round(POLL_S * 1000))
    while True:
        records = consumer.poll(wait)
        if records.isEmpty():
            continue
        for record in records.iterator():
            tell(what, record.value())


def _write(jvm: Any, names: Names) -> None:
    settings = _settings(jvm, names, names.writer, enable_idempotence=True)
    settings.put("key.serializer", TO_BYTES)
    settings.put("value.serializer", TO_BYTES)
    producer = jvm.org.apache.kafka.clients.producer.KafkaProducer(settings)
    sent: SimpleQueue[tuple[int, Any]] = SimpleQueue()

    def await_all() -> None:
        while True:
            number, future = sent.get()
            try:
                future.get()
            except Exception:
                tell("failed", number)
            else:
                tell("written", number)

    threading.Thread(target=await_all, daemon=True).start()
    for number in count():
        record = jvm.org.apache.kafka.clients.producer.ProducerRecord(names.sink, str(number))
        sent.put((number, producer.send(record)))
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main()
