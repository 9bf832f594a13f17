"""What the proxy knows of real Spark queries, and commits for them, whatever happens to them."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.errors import StreamingQueryException
from support.groups import Position, describe, offsets_of
from support.proxy_process import HOST, WAIT_S, ProxyProcess, until
from support.raw import RawClient, list_offsets
from support.report_poster import ReportPoster
from support.streams import END_S, Stream, feed, known, partition_of

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.loopback import free_ports
from proxy.spark import QuotaListener
from proxy.wire.list_offsets import LATEST

RECORD_BYTES = 100
SOON = {"proxy.progress.log_offset_poller.LOG_END_INTERVAL_S": 1.0}
"""How far a log goes is asked for so often, for tests that wait for it."""
TRIGGER = "200 milliseconds"
STUCK_AFTER_S = 2

Run = Callable[..., ProxyProcess]
Listen = Callable[..., QuotaListener]
MakeStream = Callable[..., Stream]
MakeTopic = Callable[..., str]


def both(query: Stream, offset: int) -> dict[tuple[str, int], int]:
    return {(query.topic, 0): offset, (query.topic, 1): offset}


def until_group_has(query: Stream, group: str, offset: int) -> None:
    """Wait until this offset of both partitions is committed."""
    wanted = both(query, offset)
    try:
        until(lambda: offsets_of(query.kafka, group) == wanted, f"{group} is at {wanted}", END_S)
    except AssertionError as error:
        error.add_note(f"it has {offsets_of(query.kafka, group)}; known is {query.known()}")
        raise


def partitions(query: Stream) -> list[dict[str, Any]]:
    document = query.known()
    return [partition_of(document, query.topic, number) for number in (0, 1)]


def notes(query: Stream) -> set[str]:
    return {note["kind"] for note in query.known()["notes"]}


@pytest.mark.slow
@pytest.mark.usefixtures("no_data_loss")
def test_progress_lag_and_commits(
    kafka: EmbeddedBroker, proxy: Run, listen: Listen, stream: MakeStream, topic: MakeTopic
) -> None:
    """A query works, hangs, is down, fails, and goes on from its checkpoint."""
    name = topic(2)
    group = f"{name}-progress"
    orders = {"name": "orders", "commit_group": group, "stuck_after": f"{STUCK_AFTER_S}s"}
    running = proxy(queries=[orders], constants=SOON)
    listen(running)
    query = stream(running, "orders", name)
    query.feed(50, RECORD_BYTES)
    query.start(TRIGGER)
    query.until(lambda: query.known()["run_batches"] > 0, "a batch is reported")
    for each in partitions(query):
        figures = {key: each[key] for key in ("delivered_to", "completed_to", "high_watermark")}
        assert set(figures.values()) == {50}, figures
        assert (each["lag_records"], each["lag_s"], each["log_start"]) == (0, 0, 0)
        assert each["in_flight"]["records"] == each["skipped_records"] == 0
    labels = {"query": "orders", "topic": query.topic, "partition": "1"}
    metrics = running.metrics()
    names = ("position", "high_watermark", "committed", "lag")
    assert [metrics.value(f"partition_{name}", **labels) for name in names] == [50, 50, 50, 0]
    until_group_has(query, group, 50)

    query.gate.clear()
    hang(query)
    metrics = running.metrics()
    assert metrics.value("partition_stuck", **labels) == 1
    assert metrics.value("partition_lag_seconds", **labels) > STUCK_AFTER_S / 2
    assert describe(kafka.bootstrap, group) == {
        key: Position(current=50, log_end=80, lag=30) for key in both(query, 50)
    }
    query.gate.set()
    query.until(lambda: query.known()["totals"]["lag_records"] == 0, "it goes on")
    assert [each["stuck_since"] for each in partitions(query)] == [None, None]
    assert {"stuck", "unstuck"} <= notes(query)
    until_group_has(query, group, 80)
    query.stop()
    until(lambda: query.known()["state"] == "ended", "its end is reported")

    query.feed(20, RECORD_BYTES)
    until(lambda: query.known()["totals"]["lag_records"] == 40, "its lag is seen while it is down")
    query.start(fails=True)
    with pytest.raises(StreamingQueryException, match="no such order"):
        query.finish()
    until(lambda: query.known()["state"] == "failed", "its failure is reported")
    assert "no such order" in query.known()["error"]
    for each in partitions(query):
        assert each["failed"]["ranges"] == [[80, 100]]
        assert each["completed_to"] == 80
    query.start()
    query.finish()
    until_group_has(query, group, 100)
    query.check_all_read({0: 100, 1: 100})
    document = query.known()
    assert document["totals"].pop("partitions") == 2
    assert not any(document["totals"].values()), document["totals"]
    assert (document["reports"]["lost"], document["reports"]["refused"]) == (0, {})
    assert (document["commit"]["backwards"], document["commit"]["error"]) == (0, None)


def hang(query: Stream) -> None:
    """Let a query have more to read and not get on with it."""
    began_s = time.monotonic()
    query.feed(30, RECORD_BYTES)
    query.until(lambda: query.known()["totals"]["stuck_partitions"] == 2, "it hangs")
    for each in partitions(query):
        assert (each["completed_to"], each["lag_records"]) == (50, 30)
        assert all(start == 50 and end <= 80 for start, end in each["in_flight"]["ranges"])
        assert 0 < each["lag_s"] <= time.monotonic() - began_s + 1
    assert query.known()["totals"]["in_flight_records"] > 0


@pytest.mark.slow
def test_topic_made_anew(
    kafka: EmbeddedBroker, proxy: Run, listen: Listen, stream: MakeStream, topic: MakeTopic
) -> None:
    """The offsets of the other topic of that name begin again, in the consumer group as well."""
    group = "renewed-progress"
    running = proxy(queries=[{"name": "renewed", "commit_group": group}], constants=SOON)
    listen(running)
    query = stream(running, "renewed", topic(2))
    query.feed(40, RECORD_BYTES)
    query.start()
    query.finish()
    until_group_has(query, group, 40)

    with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
        admin.delete_topics([query.topic])[query.topic].result(WAIT_S)
        until(lambda: query.topic not in admin.list_topics(timeout=WAIT_S).topics, "it is gone")
        admin.create_topics([NewTopic(query.topic, 2, 1)])[query.topic].result(WAIT_S)
    query.feed(15, RECORD_BYTES)
    query.start(TRIGGER, {"failOnDataLoss": "false"})
    # Spark goes back to the end of the log, and from there on.
    query.until(lambda: all(each["completed_to"] == 15 for each in partitions(query)), "it is back")
    query.feed(10, RECORD_BYTES)
    query.until(lambda: all(each["completed_to"] == 25 for each in partitions(query)), "it goes on")
    for each in partitions(query):
        assert (each["high_watermark"], each["lag_records"]) == (25, 0)
    assert "recreated" in notes(query)
    until_group_has(query, group, 25)
    # Kafka has them a moment before the proxy knows that it has.
    query.until(lambda: query.known()["commit"]["backwards"] >= 2, "it is counted")
    assert query.known()["commit"]["backwards"] == 2
    assert query.known()["reports"]["refused"] == {}
    assert describe(kafka.bootstrap, group) == {
        key: Position(current=25, log_end=25, lag=0) for key in both(query, 25)
    }


@pytest.mark.slow
@pytest.mark.usefixtures("no_data_loss")
def test_proxy_is_killed_and_comes_back(
    kafka: EmbeddedBroker,
    proxy: Run,
    listen: Listen,
    stream: MakeStream,
    topic: MakeTopic,
    tmp_path: Path,
) -> None:
    """The query goes on, bounded again; the proxy knows where it was, and commits on."""
    group, rate = "survivor-progress", 400
    port, first, last, admin_port = free_ports(4)
    listener = {"bind": f"{HOST}:{port}", "broker_ports": f"{first}-{last}"}
    adaptive = {"batch_interval": "500ms", "min_rate": rate, "max_rate": rate}
    running = proxy(
        listeners=[listener],
        admin_port=admin_port,
        state={"kind": "sqlite", "path": str(tmp_path / "state.db")},
        queries=[{"name": "survivor", "commit_group": group}],
        rules=[{"client-id": "survivor", "consumer_byte_rate": "50MB", "adaptive": adaptive}],
    )
    listen(running)
    query = stream(running, "survivor", topic(2))
    query.start("500 milliseconds")
    for _ in range(2):
        done = len(query.batches)
        query.feed(10, RECORD_BYTES)
        query.until(lambda done=done: len(query.batches) > done, "a batch")
    query.feed(1500, RECORD_BYTES)
    done = len(query.batches)
    query.until(lambda: len(query.batches) >= done + 3, "bounded batches")
    until(lambda: offsets_of(kafka.bootstrap, group).get((query.topic, 0), 0) > 20, "commits")
    before = partitions(query)
    running.kill()
    killed_at = max(query.batches)
    running.start()
    for old, new in zip(before, partitions(query), strict=True):
        assert new["completed_to"] >= 20
        assert new["completed_to"] <= query.ends()[new["partition"]]
        assert old["topic"] == new["topic"]
    query.until_read({0: 1520, 1: 1520})
    query.until(lambda: query.known()["totals"]["lag_records"] == 0, "all is reported")
    until_group_has(query, group, 1520)
    query.stop()
    query.check_all_read({0: 1520, 1: 1520})
    assert max(query.batches) > killed_at
    assert query.known()["commit"]["backwards"] == 0
    assert query.known()["reports"]["refused"] == {}


def bad_reports(
    reporter: ReportPoster,
) -> Iterator[tuple[str, int, str, dict[str, Any] | bytes]]:
    """Yield what is wrong, the status and the reason that it gets, and the report."""
    good = reporter.batch(1, 5, 10)
    yield "no JSON", 400, "malformed", b"batch 1 is done"
    yield "another event", 400, "malformed", reporter.event("finished")
    yield "no batch", 400, "malformed", reporter.event()
    yield "a number as text", 400, "malformed", reporter.event(batch=good, number="7")
    yield "not a number", 400, "malformed", reporter.event(batch=good, age_ms=float("nan"))
    yield "no ids", 400, "malformed", reporter.event(batch=good, run_id="me")
    yield "nameless", 400, "no_client", reporter.event(batch=good, name=None)
    yield "unknown", 404, "unknown_query", reporter.event(batch=good, name="nobody")
    other = {"query_id": str(uuid4()), "run_id": str(uuid4())}
    yield "another query", 409, "client_taken", reporter.event(batch=good, **other)
    yield "an old number", 409, "repeated", reporter.event(batch=good, number=1)
    yield "an old batch", 409, "repeated", reporter.event(batch=reporter.batch(0, None, 5))
    yield "begun again", 409, "repeated", reporter.event("started")
    went_back = reporter.event(batch=reporter.batch(1, 3, 10))
    yield "from below what is done", 409, "out_of_order", went_back
    rows = reporter.event(batch=reporter.batch(1, 5, 10, {"rows": -5}))
    yield "negative rows", 422, "impossible", rows
    yield "backwards", 422, "impossible", reporter.event(batch=reporter.batch(1, 5, 4))
    yield "beyond the log", 422, "impossible", reporter.event(batch=reporter.batch(1, 5, 11))


def test_bad_reports_change_nothing(kafka: EmbeddedBroker, proxy: Run, topic: MakeTopic) -> None:
    running = proxy(queries=[{"name": "liar"}])
    reporter = ReportPoster(running, topic(1), "liar")
    feed(kafka.bootstrap, reporter.topic, 10, RECORD_BYTES, [0])
    assert reporter.post(reporter.event("started"))[0] == 200
    with RawClient(running.bootstrap, "liar") as client:
        client.ask(
            list_offsets(reporter.topic, LATEST)
        )  # as Spark's driver learns the end of the log
    assert reporter.post(reporter.event(batch=reporter.batch(0, None, 5)))[0] == 200

    def shown() -> dict[str, Any]:
        document = known(running, "liar")
        for partition in document["partitions"]:
            del partition["lag_s"]
        others = ("reports", "totals", "advice", "report_age_s")
        return {key: value for key, value in document.items() if key not in others}

    before = shown()
    # A time is told by two clocks, between which the process may have to wait.
    before |= {key: pytest.approx(before[key], abs=0.1) for key in ("last_heard", "last_report")}
    before["batch"]["ended"] = pytest.approx(before["batch"]["ended"], abs=0.1)
    refused: dict[str, int] = {}
    for what, status, reason, report in bad_reports(reporter):
        answered, answer = reporter.post(report)
        assert (what, answered, answer.get("reason")) == (what, status, reason), answer
        assert answer["error"], what
        assert answer["fix"], what
        assert shown() == before, what
        refused[reason] = refused.get(reason, 0) + 1

    def counted() -> int:
        return int(known(running, "liar")["reports"]["refused"].get("impossible", 0))

    until(lambda: counted() == refused["impossible"] - 1, "the last one is shown")  # one: unread
    assert shown() == before
    metrics = running.metrics()
    for reason, count in {**refused, "accepted": 2}.items():
        assert metrics.value("spark_reports_total", result=reason) == count, reason
    assert reporter.post(reporter.event(batch=reporter.batch(1, 5, 10)))[0] == 200
    until(lambda: known(running, "liar")["totals"]["lag_records"] == 0, "the next one is taken in")
