"""Fills the demo's topic."""

import random
from collections.abc import Callable

from kafka import KafkaAdminClient, KafkaProducer
from kafka.errors import KafkaError

from proxy.demo import DemoError

TOPIC = "orders"
PARTITIONS = 3
RECORD_BYTES = 4096

CLIENT_ID = "demo-data"
BATCH_BYTES = 512 * 1024
LINGER_MS = 20
FLUSH_TIMEOUT_S = 60.0
REPORT_RECORDS = 500
SEED = 20


def fill(bootstrap: str, records: int, report: Callable[[int], None]) -> None:
    """Create the topic and write `records` values of `RECORD_BYTES` to its partitions in turn.

    `report` is told how many were handed over so far. Returns when the broker has confirmed all;
    raises `DemoError` when it has not.
    """
    # Random, or the broker's and the clients' work would be less than that of real data.
    value = random.Random(SEED).randbytes(RECORD_BYTES)
    try:
        admin = KafkaAdminClient(bootstrap_servers=bootstrap, client_id=CLIENT_ID)
        try:
            topics = {TOPIC: {"num_partitions": PARTITIONS, "replication_factor": 1}}
            admin.create_topics(topics, wait_for_metadata=True)
        finally:
            admin.close()
        producer = KafkaProducer(
            bootstrap_servers=bootstrap,
            client_id=CLIENT_ID,
            batch_size=BATCH_BYTES,
            linger_ms=LINGER_MS,
            acks="all",
        )
        try:
            sent = []
            for number in range(records):
                sent.append(producer.send(TOPIC, value, partition=number % PARTITIONS))
                if number % REPORT_RECORDS == 0:
                    report(number)
            producer.flush(FLUSH_TIMEOUT_S)
        finally:
            producer.close(FLUSH_TIMEOUT_S)
    except KafkaError as error:
        raise _failure(str(error)) from error
    confirmed = sum(future.succeeded() for future in sent)
    if confirmed < records:
        raise _failure(f"the broker confirmed {confirmed} of {records}")
    report(records)


def _failure(reason: str) -> DemoError:
    return DemoError(
        f"The demo's records could not be written: {reason}.",
        "Look for space on the disk, and run it again.",
    )
