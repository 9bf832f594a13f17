"""A producer that writes records at a steady rate, each with a number of its own."""

import json
import sys
import time
from typing import Any

from kafka import KafkaProducer

CLIENT_ID = "feed"
STEP_S = 0.05
"""Between two bursts of records: short against a trigger interval."""
LINGER_MS = 5
FLUSH_TIMEOUT_S = 60.0
FILLER = b"x" * 180
"""Behind a record's number."""


def main(bootstrap: str, topic: str, partitions: int, rate: float, seconds: float) -> None:
    """Write so many records per second to all partitions in turn, for so long.

    Then say how many of them were confirmed.
    """
    producer = KafkaProducer(
        bootstrap_servers=bootstrap, client_id=CLIENT_ID, linger_ms=LINGER_MS, acks="all"
    )
    started_s = time.monotonic()
    sent: list[Any] = []  # futures; the client has no types
    try:
        while (elapsed_s := time.monotonic() - started_s) < seconds:
            while (number := len(sent)) < elapsed_s * rate:
                record = b"%d %s" % (number, FILLER)
                sent.append(producer.send(topic, record, partition=number % partitions))
            time.sleep(STEP_S)
        producer.flush(FLUSH_TIMEOUT_S)
    finally:
        producer.close(FLUSH_TIMEOUT_S)
    sys.stdout.write(json.dumps({"rows_in": sum(each.succeeded() for each in sent)}) + "\n")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
