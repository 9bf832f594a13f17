"""A producer that writes records at a steady rate, each with a number of its own."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from kafka import KafkaProducer

CLIENT_ID = "feed"
STEP_S = 0.05
"""Between two bursts of records: short against a trigger interval."""
LINGER_MS = 5
FLUSH_TIMEOUT_S = 60.0
FILLER = b"x" * 180
"""Behind a record's number."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write for a given time to all partitions in turn; say how many records were confirmed."""
    options = _parser().parse_args(arguments)
    producer = KafkaProducer(
        bootstrap_servers=options.bootstrap, client_id=CLIENT_ID, linger_ms=LINGER_MS, acks="all"
    )
    started_s = time.monotonic()
    sent: list[Any] = []  # futures; the client has no types
    try:
        while (elapsed_s := time.monotonic() - started_s) < options.seconds:
            while (number := len(sent)) < elapsed_s * options.rate:
                partition = number % options.partitions
                record = b"%d %s" % (number, FILLER)
                sent.append(producer.send(options.topic, record, partition=partition))
            time.sleep(STEP_S)
        producer.flush(FLUSH_TIMEOUT_S)
    finally:
        producer.close(FLUSH_TIMEOUT_S)
    sys.stdout.write(json.dumps({"rows_in": sum(each.succeeded() for each in sent)}) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", required=True, help="HOST:PORT of the broker")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--partitions", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True, help="records per second")
    parser.add_argument("--seconds", type=float, required=True)
    return parser


if __name__ == "__main__":
    main()
