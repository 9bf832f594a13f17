"""Signs of life: which runs live, told to a proxy that comes back, and now and then."""

import logging
import threading
from collections.abc import Callable

import pytest
from aiohttp import web
from listening.events import Run
from listening.receiver import Receiver, Report, refuse, take

from proxy.spark import QuotaListener, quota_listener

Listen = Callable[..., QuotaListener]


@pytest.fixture
def run() -> Run:
    return Run("orders")


def look_every(monkeypatch: pytest.MonkeyPatch, pause_s: float) -> None:
    monkeypatch.setattr(quota_listener, "FIRST_LOOKS_S", pause_s)
    monkeypatch.setattr(quota_listener, "LOOK_EVERY_S", pause_s)


def wait_for_heartbeats(receiver: Receiver, count: int) -> list[Report]:
    receiver.wait_for(lambda: len(receiver.heartbeats) >= count, f"{count} heartbeats")
    return receiver.heartbeats


def test_a_proxy_that_comes_back_gets_a_heartbeat(
    receiver: Receiver, listen: Listen, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_every(monkeypatch, 1000.0)
    listener = listen(clients={"orders": "etl"})
    listener.onQueryStarted(run.started())
    listener.onQueryProgress(run.batch(7))
    receiver.wait_for_numbers(1, 2)
    assert receiver.heartbeats == []
    receiver.stop()
    receiver.start()
    heartbeat = wait_for_heartbeats(receiver, 1)[0]
    assert heartbeat.pop("sender") == receiver.taken[0]["sender"]
    assert heartbeat == {
        "event": "running",
        "query_id": str(run.query_id),
        "run_id": str(run.run_id),
        "name": "orders",
        "client_id": "etl",
        "age_ms": 0,
        "last_batch_id": 7,
        "is_waiting": None,
        "trigger": None,
        "known_age_ms": None,
    }
    listener.onQueryIdle(run.idle())
    assert listener.close(10)
    assert receiver.numbers() == [1, 2, 3]
    assert (len(receiver.heartbeats), listener.sent, listener.dropped) == (1, 3, 0)


def test_what_waits_comes_before_the_heartbeat(
    receiver: Receiver, listen: Listen, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_every(monkeypatch, 1000.0)
    seen: list[str] = []

    async def note(request: object, report: Report) -> object:
        seen.append(report["event"])
        return await take(request, report)  # type: ignore[arg-type]

    listener = listen()
    listener.onQueryStarted(run.started())
    receiver.wait_for_numbers(1)
    receiver.stop()
    listener.onQueryProgress(run.batch(0))
    listener.onQueryProgress(run.batch(1))
    receiver.behaviour = note  # type: ignore[assignment]
    receiver.start()
    assert wait_for_heartbeats(receiver, 1)[0]["last_batch_id"] == 1
    receiver.wait_for_numbers(1, 2, 3)
    assert seen[:3] == ["progress", "progress", "running"]


def test_each_run_that_lives_is_told_now_and_then(
    receiver: Receiver, listen: Listen, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_every(monkeypatch, 0.0)
    listener, other, nameless = listen(), Run("other"), Run(None)
    listener.onQueryStarted(nameless.started())
    listener.onQueryStarted(run.started())
    listener.onQueryStarted(other.started())
    wait_for_heartbeats(receiver, 6)
    names = [heartbeat["name"] for heartbeat in receiver.heartbeats]
    assert {"orders", "other"} == set(names)
    assert all("number" not in heartbeat for heartbeat in receiver.heartbeats)
    listener.onQueryTerminated(other.terminated())
    again = Run("orders", run.query_id)
    listener.onQueryStarted(again.started())  # the end of the run before comes late
    receiver.wait_for_numbers(1, 2, 3, 4)
    told = len(receiver.heartbeats)
    wait_for_heartbeats(receiver, told + 3)
    assert {heartbeat["run_id"] for heartbeat in receiver.heartbeats[told + 1 :]} == {
        str(again.run_id)
    }
    listener.onQueryTerminated(run.terminated())
    listener.onQueryTerminated(again.terminated())
    assert listener.close(10)
    assert receiver.numbers() == [1, 2, 3, 4, 5, 6]


def test_a_closed_listener_leaves_no_thread(
    receiver: Receiver, listen: Listen, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_every(monkeypatch, 0.0)
    before = set(threading.enumerate())
    listener = listen()
    listener.onQueryStarted(run.started())
    wait_for_heartbeats(receiver, 1)
    made = set(threading.enumerate()) - before
    assert listener.close(10)
    for thread in made:
        if thread.name.startswith("quota-listener"):
            thread.join(10)
            assert not thread.is_alive()


def test_a_proxy_that_knows_no_heartbeats_hears_one_for_each_connection(
    receiver: Receiver,
    listen: Listen,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    look_every(monkeypatch, 0.0)
    unknown = refuse(400, "malformed", "event: Input should be 'started'")

    async def old(request: object, report: Report) -> object:
        behaviour = unknown if report["event"] == "running" else take
        return await behaviour(request, report)  # type: ignore[arg-type]

    receiver.behaviour = old  # type: ignore[assignment]
    listener = listen()
    listener.onQueryStarted(run.started())
    wait_for_heartbeats(receiver, 1)
    for batch in range(5):
        listener.onQueryProgress(run.batch(batch))
        receiver.wait_for_numbers(*range(1, batch + 3))
    assert len(receiver.heartbeats) == 1
    receiver.hang_up()
    wait_for_heartbeats(receiver, 2)
    assert listener.close(10)
    assert [(r.levelname, "HTTP 400" in r.getMessage()) for r in caplog.records] == [("INFO", True)]
    assert (listener.refused, listener.dropped) == (0, 0)


def test_advice_is_logged_once(
    receiver: Receiver, listen: Listen, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def advise(_request: web.Request, _report: Report) -> web.Response:
        return web.json_response({"advice": ["add a rule", "write batch_interval: 2s"]})

    receiver.behaviour = advise
    listener = listen()
    listener.onQueryStarted(run.started())
    listener.onQueryIdle(run.idle())
    assert listener.close(10)
    assert [record.getMessage().partition(" says ")[2] for record in caplog.records] == [
        "of query orders: add a rule",
        "of query orders: write batch_interval: 2s",
    ]
    assert listener.sent == 2


def test_information_is_logged_once_for_all_queries(
    receiver: Receiver, listen: Listen, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def inform(_request: web.Request, report: Report) -> web.Response:
        return web.json_response({"information": [f"{report['name']} reads past the proxy"]})

    receiver.behaviour = inform
    listener = listen()
    for each in (run, Run("other")):
        listener.onQueryStarted(each.started())
        listener.onQueryIdle(each.idle())
    assert listener.close(10)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage().endswith("perhaps of others: orders reads past the proxy")


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ([], 0),
        ({"advice": None}, 0),
        ({"advice": 5}, 0),
        ({"advice": "add a rule"}, 0),
        ({"information": {"add": "a rule"}}, 0),
        ({"advice": [[1], None]}, 2),
        ("x", 0),
        (None, 0),
    ],
)
def test_an_odd_answer_is_no_fault(
    receiver: Receiver,
    listen: Listen,
    run: Run,
    body: object,
    shown: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def answer(_request: web.Request, _report: Report) -> web.Response:
        return web.json_response(body)

    receiver.behaviour = answer
    listener = listen()
    listener.onQueryStarted(run.started())
    assert listener.close(10)
    assert (listener.sent, listener.dropped) == (1, 0)
    assert len(caplog.records) == shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ProcessingTimeTrigger(2000)", {"kind": "processing_time", "interval_ms": 2000}),
        ("ProcessingTimeTrigger(0)", {"kind": "processing_time", "interval_ms": 0}),
        ("AvailableNowTrigger", {"kind": "available_now", "interval_ms": None}),
        ("OneTimeTrigger", {"kind": "once", "interval_ms": None}),
        ("ContinuousTrigger(500)", {"kind": "continuous", "interval_ms": 500}),
        ("RealTimeTrigger(500)", {"kind": "real_time", "interval_ms": 500}),
        ("AnotherTrigger(500)", None),
        ("", None),
    ],
)
def test_triggers(text: str, expected: object) -> None:
    assert quota_listener.parse_trigger(text) == expected


@pytest.mark.parametrize(
    ("is_active", "message", "expected"),
    [
        (False, "Initializing sources", None),  # a batch may be done again from the checkpoint
        # What was looked up before is done, but a batch of what was just looked up may follow.
        (True, "Getting offsets from KafkaV2[Subscribe[t]]", False),
        (True, "Writing offsets to log", False),
        (True, "Processing new data", False),
        (False, "Processing new data", True),
        (True, "No new data but cleaning up state", False),
        (True, "Waiting for data to arrive", True),
        (False, "Waiting for next trigger", True),
        (True, "Reconfiguring", None),
    ],
)
def test_between_batches(is_active: bool, message: str, expected: bool | None) -> None:
    assert quota_listener.is_between_batches(is_active, message) is expected
