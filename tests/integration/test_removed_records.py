"""Records that are removed from the log while the reports of a query are late."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from support.proxy_process import WAIT_S, ProxyProcess, until
from support.raw import RawClient, fetch, list_offsets
from support.report_poster import ReportPoster
from support.streams import feed, known

from examples.devkit.broker import EmbeddedBroker
from proxy.wire.list_offsets import EARLIEST

Run = Callable[..., ProxyProcess]
MakeTopic = Callable[..., str]

NAME = "late"
RECORD_BYTES = 100
FETCH_VERSION = 12
REPORTED, ALL = 4_200, 12_000
"""Offsets of the first batch, whose report comes in time, and of all."""

BATCH = 1_300
"""Offsets of each later batch."""

ALL_BYTES = 8 << 20
"""Room for all records in one response, whose parts are then not all seen."""


class LateQuery:
    """A query that a test reads and reports for; what it reads passes through the proxy."""

    def __init__(self, kafka: EmbeddedBroker, proxy: Run, topic: str, folder: Path) -> None:
        self._kafka = kafka
        self.topic = topic
        state = {"kind": "sqlite", "path": str(folder / "state.db")}
        self.running = proxy(queries=[{"name": NAME}], state=state)
        self._poster = ReportPoster(self.running, topic, NAME)
        self._batches = 0

    def feed(self, count: int) -> None:
        feed(self._kafka.bootstrap, self.topic, count, RECORD_BYTES, [0])

    def post(self, event: str, **fields: Any) -> None:
        status, answer = self._poster.post(self._poster.event(event, **fields))
        assert status == 200, answer

    def report(self, start: int | None, end: int, rows: int) -> None:
        """Post the report of the next batch."""
        self.post("progress", batch=self._poster.batch(self._batches, start, end, rows=rows))
        self._batches += 1

    def fetch(self, client: RawClient, offset: int, max_bytes: int = ALL_BYTES) -> int:
        """Read from an offset; return the error code."""
        ask = fetch(FETCH_VERSION, self.topic, offset=offset, max_bytes=max_bytes)
        ((partition,),) = ([*each.partitions] for each in client.ask(ask).responses)
        return int(partition.error_code)

    def client(self) -> RawClient:
        return RawClient(self.running.bootstrap, NAME)

    def remove_below(self, offset: int) -> None:
        """Let the broker remove records, and the driver learn it."""
        cut = TopicPartition(self.topic, 0, offset)
        with AdminClient({"bootstrap.servers": self._kafka.bootstrap}) as admin:
            assert admin.delete_records([cut])[cut].result(WAIT_S).low_watermark == offset
        with self.client() as driver:
            driver.ask(list_offsets(self.topic, EARLIEST))
        until(lambda: self.partition()["log_start"] == offset, "it is shown")

    def restart(self) -> None:
        """Kill the proxy and start it again."""
        self.running.kill()
        self.running.start()

    def partition(self) -> dict[str, Any]:
        (found,) = known(self.running, NAME)["partitions"]
        return dict(found)

    def lost(self) -> tuple[list[list[int]], int]:
        """Give the ranges that are shown as skipped, and their records, by document and metric.

        What a client has fetched is known a moment after its answer.
        """
        labels = {"query": NAME, "topic": self.topic}

        def agreed() -> dict[str, Any] | None:
            shown, metrics = self.partition(), self.running.metrics()
            counted = metrics.value("partition_skipped_records_total", **labels)
            return shown if counted == shown["skipped_records"] else None

        shown = until(agreed, "document and metric say the same")
        return [[each["from"], each["to"]] for each in shown["skipped"]], shown["skipped_records"]


@pytest.fixture
def query(kafka: EmbeddedBroker, proxy: Run, topic: MakeTopic, tmp_path: Path) -> LateQuery:
    """A query whose first batch is reported and kept in the state."""
    query = LateQuery(kafka, proxy, topic(1), tmp_path)
    query.feed(REPORTED)
    query.post("started")
    with query.client() as client:
        assert query.fetch(client, 0) == 0
        assert query.fetch(client, REPORTED) == 0
    query.report(None, REPORTED, REPORTED)
    return query


@pytest.mark.parametrize("restarts", [False, True], ids=["runs on", "was killed meanwhile"])
def test_what_was_read_before_is_not_lost(query: LateQuery, restarts: bool) -> None:
    query.feed(ALL - REPORTED)
    with query.client() as client:
        assert query.fetch(client, REPORTED) == 0  # all that is there, in one answer
    if restarts:
        until(lambda: query.partition()["completed_to"] == REPORTED, "it is reported")
        query.restart()
    query.remove_below(ALL)
    assert query.lost() == ([], 0)
    query.feed(BATCH)
    with query.client() as client:
        assert query.fetch(client, ALL) == 0
    assert query.lost() == ([], 0)
    for start in range(REPORTED, ALL, BATCH):
        query.report(start, start + BATCH, BATCH)
    until(lambda: query.partition()["completed_to"] == ALL, "it is shown")
    assert query.partition()["lag_records"] == BATCH
    assert query.lost() == ([], 0)
    assert [line for line in query.running.log() if line.get("kind") == "skipped"] == []


@pytest.mark.parametrize("restarts", [False, True], ids=["runs on", "was killed meanwhile"])
def test_what_was_not_read_is_lost_once(query: LateQuery, restarts: bool) -> None:
    there_from = 9_000
    query.feed(ALL - REPORTED)
    if restarts:
        query.restart()
    query.remove_below(there_from)
    assert query.lost() == ([], 0)
    with query.client() as client:
        assert query.fetch(client, REPORTED) == 1  # out of range
        assert query.fetch(client, there_from) == 0
    lost = [[REPORTED, there_from]], there_from - REPORTED
    until(lambda: query.lost() == lost, "it is shown")
    for start in range(REPORTED, ALL, BATCH):
        query.report(start, start + BATCH, min(max(start + BATCH - there_from, 0), BATCH))
    until(lambda: query.partition()["completed_to"] == ALL, "it is shown")
    assert query.lost() == lost
    text = "4800 records skipped, offsets 4200 to before 9000: retention"
    (warning,) = query.running.logged(text)
    assert (warning["level"], warning["query"]) == ("warning", NAME)
