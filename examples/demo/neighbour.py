"""A consumer without quota that reads the topic over and over, beside the query that has one.

It prints once a second, as a JSON object a line, for how long it had to wait for records.
"""

import json
import sys
import time

from kafka import KafkaConsumer, TopicPartition

from metrics.clock import MS_PER_SECOND

POLL_TIMEOUT_MS = 1000
RECORDS_PER_POLL = 200
FETCH_BYTES = 256 * 1024
FETCH_MAX_WAIT_MS = 20
"""How long the broker may wait for records: a partition that was read to its end is begun anew."""
CATCH_UP_S = 1.0
"""How much lost time it makes up for, to keep its pace."""
REPORT_INTERVAL_S = 1.0


def main(bootstrap: str, client_id: str, topic: str, bytes_per_second: float) -> None:
    """Read at that pace until the process is ended."""
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap,
        client_id=client_id,
        group_id=None,
        max_poll_records=RECORDS_PER_POLL,
        max_partition_fetch_bytes=FETCH_BYTES,
        fetch_max_wait_ms=FETCH_MAX_WAIT_MS,
        # In pure Python the checksums take longer than all the rest, and would be taken for waits.
        check_crcs=False,
    )
    numbers = sorted(consumer.partitions_for_topic(topic) or ())
    ends = consumer.end_offsets([TopicPartition(topic, number) for number in numbers])
    consumer.assign(list(ends))
    for partition in ends:
        consumer.seek(partition, 0)
    waits_s: list[float] = []
    waiting_since_s = due_s = report_s = time.monotonic()
    is_first = True
    while True:
        batches = consumer.poll(POLL_TIMEOUT_MS)
        now_s = time.monotonic()
        # The first wait has the connecting in it.
        if not is_first:
            waits_s.append(now_s - waiting_since_s)
        if now_s >= report_s:
            report_s = now_s + REPORT_INTERVAL_S
            line = {
                "mean_wait_ms": round(sum(waits_s) / max(len(waits_s), 1) * MS_PER_SECOND, 1),
                "longest_wait_ms": round(max(waits_s, default=0.0) * MS_PER_SECOND, 1),
            }
            sys.stdout.write(f"{json.dumps(line)}\n")
            sys.stdout.flush()
        if not batches:
            continue
        is_first = False
        for partition, records in batches.items():
            due_s += sum(len(record.value) for record in records) / bytes_per_second
            if records[-1].offset + 1 >= ends[partition]:
                consumer.seek(partition, 0)
        due_s = max(due_s, now_s - CATCH_UP_S)
        time.sleep(max(due_s - now_s, 0.0))
        waiting_since_s = time.monotonic()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
