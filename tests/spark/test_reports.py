"""What a report says of an event, and which events are reported."""

import logging
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from listening.events import DESCRIPTION, DURATIONS_MS, ROWS, TIMESTAMP, Run, source
from listening.receiver import Receiver

from proxy.spark import QuotaListener

Listen = Callable[..., QuotaListener]

JSON = '{"t":{"0":5,"1":7}}'
OFFSETS = {"t": {"0": 5, "1": 7}}


def test_every_event(receiver: Receiver, listen: Listen) -> None:
    listener, run = listen(clients={"orders": "etl"}), Run("orders")
    listener.onQueryStarted(run.started())
    listener.onQueryProgress(run.batch())
    listener.onQueryIdle(run.idle())
    listener.onQueryTerminated(run.terminated("it broke\n\tat a.b.C(C.scala:1)\n\tat d"))
    assert listener.close(10)
    common = {
        "query_id": str(run.query_id),
        "run_id": str(run.run_id),
        "name": "orders",
        "client_id": "etl",
        "batch": None,
        "error": None,
    }
    batch = {
        "batch_id": 0,
        "timestamp": TIMESTAMP,
        "rows": ROWS,
        "durations_ms": DURATIONS_MS,
        "sources": [
            {
                "description": DESCRIPTION,
                "start": None,
                "end": {"t": {"0": ROWS}},
                "latest": {"t": {"0": ROWS}},
                "rows": ROWS,
            }
        ],
    }
    reports = [dict(report) for report in receiver.taken]
    assert len({report.pop("sender") for report in reports}) == 1
    assert all(report.pop("age_ms") >= 0 for report in reports)
    assert reports == [
        {**common, "number": 1, "event": "started", "trigger": None},
        {**common, "number": 2, "event": "progress", "batch": batch},
        {**common, "number": 3, "event": "idle"},
        {**common, "number": 4, "event": "terminated", "error": "it broke"},
    ]
    assert (listener.sent, listener.refused, listener.dropped) == (4, 0, 0)


def test_senders_differ(receiver: Receiver, listen: Listen) -> None:
    for _ in range(2):
        listener = listen()
        listener.onQueryStarted(Run("orders").started())
        assert listener.close(10)
    assert receiver.numbers() == [1, 1]
    first, second = (uuid.UUID(report["sender"]) for report in receiver.taken)
    assert first != second


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param(JSON, OFFSETS, id="JSON"),
        pytest.param(str(OFFSETS), OFFSETS, id="text of a dict"),
        pytest.param(OFFSETS, OFFSETS, id="dict"),
        pytest.param({"t": {0: 5, 1: 7}}, OFFSETS, id="partitions as numbers"),
        pytest.param("None", None, id="text of none"),
        pytest.param(None, None, id="none"),
        pytest.param("{}", {}, id="no topics yet"),
        pytest.param("17", None, id="number"),
        pytest.param('{"logOffset":3}', None, id="files"),
        pytest.param('{"t":{"0":"5"}}', None, id="offset as text"),
        pytest.param('{"t":{"0":true}}', None, id="offset as bool"),
        pytest.param('{"t":{"zero":5}}', None, id="partition with a name"),
        pytest.param('{"t":{"0":5', None, id="cut off"),
        pytest.param("x" * 10_000, None, id="no offsets at all"),
    ],
)
def test_offsets(receiver: Receiver, listen: Listen, told: Any, expected: Any) -> None:
    listener, run = listen(), Run("orders")
    listener.onQueryProgress(run.progress(0, source(told, JSON, told)))
    assert listener.close(10)
    (reported,) = receiver.taken[0]["batch"]["sources"]
    assert (reported["start"], reported["end"], reported["latest"]) == (expected, OFFSETS, expected)


def test_offsets_from_spark_connect(receiver: Receiver, listen: Listen) -> None:
    listener, run = listen(), Run("orders")
    listener.onQueryProgress(run.connect_progress(0, None, OFFSETS))
    listener.onQueryProgress(run.connect_progress(1, OFFSETS, {"t": {"0": 9, "1": 9}}))
    assert listener.close(10)
    first, second = (report["batch"]["sources"][0] for report in receiver.taken)
    assert (first["start"], first["end"]) == (None, OFFSETS)
    assert (second["start"], second["end"]) == (OFFSETS, {"t": {"0": 9, "1": 9}})
    assert [report["batch"]["rows"] for report in receiver.taken] == [ROWS, ROWS]


def test_only_kafka_sources_are_in_a_report(receiver: Receiver, listen: Listen) -> None:
    listener, run = listen(), Run("joined")
    rate = source("3", "4", "4", "RateStreamV2")
    listener.onQueryProgress(run.progress(0, rate, source("None", JSON, JSON)))
    assert listener.close(10)
    (report,) = receiver.taken
    assert [part["description"] for part in report["batch"]["sources"]] == [DESCRIPTION]


@pytest.mark.parametrize("end", ["17", '{"logOffset":3}', "None", '[{"t":{"0":1}}]'])
def test_a_query_without_kafka_takes_no_number(
    receiver: Receiver, listen: Listen, end: str
) -> None:
    listener, other, run = listen(), Run("files"), Run("orders")
    listener.onQueryStarted(other.started())  # nothing tells yet what it reads
    listener.onQueryProgress(other.progress(0, source("None", end, end)))
    listener.onQueryIdle(other.idle())
    listener.onQueryTerminated(other.terminated())
    listener.onQueryStarted(run.started())
    assert listener.close(10)
    assert [(report["name"], report["number"]) for report in receiver.taken] == [
        ("files", 1),
        ("orders", 2),
    ]


def test_a_query_without_a_name(
    receiver: Receiver, listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    nameless, known = Run(None), Run(None)
    listener = listen(clients={str(known.query_id): "etl"})
    for run in (nameless, known, nameless):
        listener.onQueryStarted(run.started())
        listener.onQueryProgress(run.batch())
        listener.onQueryTerminated(run.terminated())
    assert listener.close(10)
    assert receiver.numbers() == [1, 2, 3]
    assert {(report["name"], report["client_id"]) for report in receiver.taken} == {(None, "etl")}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "queryName()" in caplog.text


def test_a_query_that_ran_before_the_listener(receiver: Receiver, listen: Listen) -> None:
    """Its name is not known before its first batch; without one nobody can say whose it is."""
    listener, run, other = listen(), Run("orders"), Run("other")
    listener.onQueryIdle(run.idle())
    listener.onQueryTerminated(other.terminated())
    listener.onQueryProgress(run.batch())
    listener.onQueryIdle(run.idle())
    assert listener.close(10)
    told = [(report["number"], report["event"], report["name"]) for report in receiver.taken]
    assert told == [(1, "progress", "orders"), (2, "idle", "orders")]


def test_runs_that_never_end_are_forgotten(receiver: Receiver, listen: Listen) -> None:
    listener, first = listen(queue_size=2), Run("first")
    listener.onQueryStarted(first.started())
    for _ in range(1000):
        listener.onQueryStarted(Run("other").started())
    listener.onQueryIdle(first.idle())
    listener.onQueryStarted(Run("last").started())
    assert listener.close(10)
    assert receiver.taken[-1]["name"] == "last"
    assert receiver.taken[-1]["number"] == 1002


def test_a_large_report(receiver: Receiver, listen: Listen) -> None:
    listener, run = listen(), Run("orders")
    offsets = {"topic": {str(partition): 1 << 40 for partition in range(10_000)}}
    listener.onQueryProgress(run.connect_progress(0, None, offsets))
    assert listener.close(20)
    assert receiver.taken[0]["batch"]["sources"][0]["end"] == offsets


def test_the_error_is_short(receiver: Receiver, listen: Listen) -> None:
    listener, run = listen(), Run("orders")
    listener.onQueryStarted(run.started())
    listener.onQueryTerminated(run.terminated("it broke " + "x" * 1_000_000 + " ValueError"))
    assert listener.close(10)
    error = receiver.taken[1]["error"]
    assert len(error) <= 1000
    assert error.startswith("it broke xxx")
    assert error.endswith("xxx ValueError")
    assert "x\n...\nx" in error


@pytest.mark.parametrize("event", [None, object(), "text"])
def test_callbacks_never_raise(
    receiver: Receiver, listen: Listen, caplog: pytest.LogCaptureFixture, event: Any
) -> None:
    listener, run = listen(), Run("orders")
    for callback in (
        listener.onQueryStarted,
        listener.onQueryProgress,
        listener.onQueryIdle,
        listener.onQueryTerminated,
    ):
        callback(event)
    listener.onQueryStarted(run.started())
    assert listener.close(10)
    assert receiver.numbers() == [1]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_only_the_queries_that_are_named(
    receiver: Receiver, listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    by_name, by_id, other, nameless = Run("orders"), Run("payments"), Run("other"), Run(None)
    listener = listen(queries=["orders", str(by_id.query_id)])
    for run in (by_name, by_id, other, nameless):
        listener.onQueryStarted(run.started())
        listener.onQueryProgress(run.batch())
        listener.onQueryTerminated(run.terminated())
    assert listener.close(10)
    assert {report["name"] for report in receiver.taken} == {"orders", "payments"}
    assert receiver.numbers() == [1, 2, 3, 4, 5, 6]
    assert caplog.records == []


@pytest.mark.parametrize(
    "queries", ["orders", [], [""], [5], [None], {"orders": "etl"}, 5, b"orders", iter(["orders"])]
)
def test_queries_that_are_no_list_of_names(receiver: Receiver, queries: Any) -> None:
    with pytest.raises(ValueError, match="queries is a list of names or ids of queries"):
        QuotaListener(receiver.url, queries=queries)
