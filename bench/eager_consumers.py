"""Consumers of one client id, each with a connection, that always want more: a process of its own.

They are librdkafka's, with its defaults. Each reads one partition of a topic over and over, and
begins at one of the bootstrap addresses, chosen at random. Each line on stdout is a time of the
monotonic clock in seconds, and how many bytes they have received since the line before, as
librdkafka counts them. It ends with its stdin.
"""

import argparse
import json
import random
import sys
import threading
import time

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

STATISTICS_MS = 100
LINE_INTERVAL_S = 0.1
POLL_S = 0.5
MOST_AT_ONCE = 50


def main() -> None:
    """Read until stdin ends."""
    parser = argparse.ArgumentParser(prog="bench.eager_consumers", description=__doc__)
    parser.add_argument("--bootstraps", required=True, help="addresses, by commas")
    parser.add_argument("--client-id", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--connections", type=int, required=True)
    options = parser.parse_args()
    addresses = options.bootstraps.split(",")
    tally = _Tally()
    for partition in range(options.connections):
        first = random.choice(addresses)
        # A client of several proxies names them all, in an order of its own.
        bootstrap = ",".join([first, *(each for each in addresses if each != first)])
        threading.Thread(
            target=_read,
            args=(bootstrap, options.client_id, options.topic, partition, tally),
            daemon=True,
        ).start()
    threading.Thread(target=tally.print_on, daemon=True).start()
    sys.stdin.read()


class _Tally:
    """What all consumers have received since the last line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received_bytes = 0

    def add(self, size: int) -> None:
        with self._lock:
            self._received_bytes += size

    def print_on(self) -> None:
        while True:
            time.sleep(LINE_INTERVAL_S)
            with self._lock:
                size, self._received_bytes = self._received_bytes, 0
            if size:
                print(f"{time.monotonic():.3f} {size}", flush=True)


def _read(bootstrap: str, client_id: str, topic: str, partition: int, tally: _Tally) -> None:
    received: dict[str, int] = {}

    def take(statistics: str) -> None:
        counts: dict[str, int] = {}
        for name, broker in json.loads(statistics)["brokers"].items():
            # A broker keeps its id and its count when it gets another address, and so another name.
            # For a moment two of them have one id.
            key = name if broker["nodeid"] < 0 else str(broker["nodeid"])
            counts[key] = max(counts.get(key, 0), broker["rxbytes"])
        for key, now in counts.items():
            before = received.get(key, 0)
            tally.add(now - before if now >= before else now)
            received[key] = now

    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "client.id": client_id,
            "group.id": f"{client_id}-{partition}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "statistics.interval.ms": STATISTICS_MS,
            "stats_cb": take,
            "log_level": 0,
        }
    )
    start = TopicPartition(topic, partition, OFFSET_BEGINNING)
    consumer.assign([start])
    while True:
        for message in consumer.consume(MOST_AT_ONCE, POLL_S):
            error = message.error()
            if error is not None and error.name() == "_PARTITION_EOF":
                consumer.seek(start)


if __name__ == "__main__":
    main()
