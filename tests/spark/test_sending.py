"""How reports reach the proxy, and what happens while they can't."""

import logging
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from aiohttp import web
from listening.events import Run
from listening.receiver import (
    HOST,
    Behaviour,
    Gate,
    Receiver,
    Report,
    fail,
    hang,
    hang_up,
    refuse,
    take,
    trickle,
    trickle_head,
    unavailable,
)

from proxy.spark import QuotaListener, quota_listener

Listen = Callable[..., QuotaListener]

TIMEOUT_S = 1.0
HANGS_S = 60
"""For how long a report to a proxy that hangs waits for its answer."""


def first_times(count: int, behaviour: Behaviour) -> Behaviour:
    """Behave so for the first reports, and take all others."""
    left = [count]

    async def answer(request: web.Request, report: Report) -> web.StreamResponse:
        left[0] -= 1
        return await (behaviour if left[0] >= 0 else take)(request, report)

    return answer


@pytest.fixture
def run() -> Run:
    return Run("orders")


def test_connection_is_kept(receiver: Receiver, listen: Listen, run: Run) -> None:
    listener = listen()
    listener.onQueryStarted(run.started())
    for batch in range(20):
        listener.onQueryProgress(run.batch(batch))
    receiver.wait_for_numbers(*range(1, 22))
    assert len(receiver.connections) == 1


def test_idle_connection_that_the_proxy_closed_is_no_fault(
    receiver: Receiver, listen: Listen, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    listener = listen()
    listener.onQueryStarted(run.started())
    receiver.wait_for_numbers(1)
    receiver.hang_up()
    listener.onQueryIdle(run.idle())
    receiver.wait_for_numbers(1, 2)
    assert not caplog.records


@pytest.mark.parametrize("path", ["", "/", "/quota", "/quota/"])
def test_token_and_path(receiver: Receiver, listen: Listen, run: Run, path: str) -> None:
    paths: list[str] = []

    async def answer(request: web.Request, report: Report) -> web.StreamResponse:
        paths.append(request.path)
        return await take(request, report)

    receiver.behaviour = answer
    listener = listen(receiver.url + path, token="secret\n")
    listener.onQueryStarted(run.started())
    assert listener.close(10)
    assert paths == [path.rstrip("/") + "/v1/spark/batches"]
    assert receiver.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in repr(listener)


@pytest.mark.parametrize(
    "behaviour",
    [fail, hang_up, hang, trickle_head, trickle],
    ids=["fail", "hang_up", "hang", "trickle_head", "trickle"],
)
def test_proxy_away_for_a_while(
    receiver: Receiver,
    listen: Listen,
    run: Run,
    caplog: pytest.LogCaptureFixture,
    behaviour: Behaviour,
) -> None:
    caplog.set_level(logging.INFO)
    receiver.behaviour = first_times(2, behaviour)
    listener = listen(timeout_s=TIMEOUT_S)
    listener.onQueryStarted(run.started())
    listener.onQueryProgress(run.batch())
    receiver.wait_for(lambda: 2 in receiver.numbers(), "the second report")
    asked = [report["number"] for report in receiver.asked]
    assert asked[:3] == [1, 1, 1]
    assert asked == sorted(asked)  # no report overtakes another
    assert listener.close(10)
    assert (listener.sent, listener.dropped) == (2, 0)
    # Not what py4j says of a Spark that another test has ended.
    own = [record for record in caplog.records if record.name == "quota_listener"]
    assert [record.levelname for record in own] == ["WARNING", "INFO"]


def test_nobody_listens(receiver: Receiver, listen: Listen, run: Run) -> None:
    receiver.stop()
    listener = listen()
    listener.onQueryStarted(run.started())
    for batch in range(5):
        listener.onQueryProgress(run.batch(batch))
    receiver.start()
    receiver.wait_for_numbers(1, 2, 3, 4, 5, 6)


def test_age_is_that_at_sending(receiver: Receiver, listen: Listen, run: Run) -> None:
    receiver.behaviour = gate = Gate()
    listener = listen()
    listener.onQueryStarted(run.started())
    listener.onQueryIdle(run.idle())
    told_s = time.monotonic()
    receiver.wait_for(lambda: receiver.asked, "the first report")
    until(lambda: time.monotonic() > told_s + 0.05)
    gate.open()
    receiver.wait_for_numbers(1, 2)
    assert receiver.taken[1]["age_ms"] >= 49


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def test_given_up_after_retries(receiver: Receiver, listen: Listen, run: Run) -> None:
    async def fail_second(request: web.Request, report: Report) -> web.StreamResponse:
        return await (fail if report.get("number") == 2 else take)(request, report)

    receiver.behaviour = fail_second
    listener = listen(max_retries=2)
    listener.onQueryStarted(run.started())
    listener.onQueryProgress(run.batch())
    listener.onQueryIdle(run.idle())
    receiver.wait_for_numbers(1, 3)
    assert [report["number"] for report in receiver.asked] == [1, 2, 2, 2, 3]
    assert listener.close(10)
    assert (listener.sent, listener.dropped) == (2, 1)


@pytest.mark.parametrize("how", ["no connection", "unavailable"])
def test_what_each_run_told_last_outlives_every_outage(
    receiver: Receiver, listen: Listen, run: Run, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_listener, "LONGEST_PAUSE_S", quota_listener.FIRST_PAUSE_S)
    receiver.behaviour = unavailable
    if how == "no connection":
        receiver.stop()
    listener, other = listen(max_retries=0), Run("other")
    listener.onQueryStarted(run.started())
    for batch in range(3):
        listener.onQueryProgress(run.batch(batch))  # 2 to 4
    listener.onQueryIdle(run.idle())
    listener.onQueryProgress(other.batch())
    listener.onQueryTerminated(other.terminated())
    until(lambda: listener.failures > 10)
    assert listener.dropped == 0  # the first one stays, and the others behind it
    receiver.behaviour = take
    if how == "no connection":
        receiver.start()
    receiver.wait_for(lambda: 7 in receiver.numbers(), "the last report")
    assert {1, 4, 6, 7} <= set(receiver.numbers())


def test_full_queue_drops_the_oldest_batches(receiver: Receiver, listen: Listen, run: Run) -> None:
    receiver.behaviour = gate = Gate()
    listener = listen(queue_size=4)
    listener.onQueryStarted(run.started())
    receiver.wait_for(lambda: receiver.asked, "the first report")
    for batch in range(5):
        listener.onQueryProgress(run.batch(batch))  # 2 to 6
    listener.onQueryTerminated(run.terminated())
    again = Run("orders", run.query_id)
    listener.onQueryStarted(again.started())
    assert listener.dropped == 3
    gate.open()
    receiver.wait_for_numbers(1, 5, 6, 7, 8)
    assert [report["event"] for report in receiver.taken[-2:]] == ["terminated", "started"]


def test_full_queue_keeps_the_last_batch_of_each_run(
    receiver: Receiver, listen: Listen, run: Run
) -> None:
    receiver.behaviour = gate = Gate()
    listener, other = listen(queue_size=3), Run("other")
    listener.onQueryStarted(run.started())
    receiver.wait_for(lambda: receiver.asked, "the first report")
    listener.onQueryProgress(run.batch())
    for batch in range(3):
        listener.onQueryProgress(other.batch(batch))  # 3 to 5
    gate.open()
    receiver.wait_for_numbers(1, 2, 4, 5)


def test_full_queue_without_batches_drops_the_oldest(
    receiver: Receiver, listen: Listen, run: Run
) -> None:
    receiver.behaviour = gate = Gate()
    listener = listen(queue_size=2)
    listener.onQueryStarted(run.started())
    receiver.wait_for(lambda: receiver.asked, "the first report")
    for _ in range(3):
        listener.onQueryIdle(run.idle())
    gate.open()
    receiver.wait_for_numbers(1, 3, 4)
    assert listener.dropped == 1


def test_refusals_are_logged_once_for_each_reason(
    receiver: Receiver, listen: Listen, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    listener = listen()
    answers = [(422, "impossible"), (422, "impossible"), (409, "out_of_order"), (409, "repeated")]
    for number, (status, reason) in enumerate(answers, 1):
        receiver.behaviour = refuse(status, reason, "end below start")
        listener.onQueryStarted(run.started())
        receiver.wait_for(lambda n=number: len(receiver.asked) == n, "a report")
        until(lambda n=number: listener.refused == n)
    assert len(receiver.asked) == len(answers)  # no retries
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert "HTTP 422 impossible): end below start; mend it" in messages[0]
    receiver.behaviour = take
    listener.onQueryStarted(run.started())
    receiver.wait_for_numbers(5)


def test_wrong_token_is_explained(
    receiver: Receiver, listen: Listen, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.behaviour = refuse(401, "", "the token is wrong", "send the header")
    listener = listen(token="wrong-one")
    listener.onQueryStarted(run.started())
    assert listener.close(10)
    assert "the token is wrong" in caplog.text
    assert "pass token= with the text of the proxy's admin.token_file" in caplog.text
    assert "wrong-one" not in caplog.text


@pytest.mark.parametrize("text", ["<html>not here</html>", "[1]", "", "\x00" * 100_000, "[" * 9000])
def test_refusal_by_something_else(
    receiver: Receiver, listen: Listen, run: Run, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    async def answer(_request: web.Request, _report: Report) -> web.Response:
        return web.Response(status=404, text=text)

    receiver.behaviour = answer
    listener = listen()
    listener.onQueryStarted(run.started())
    listener.onQueryIdle(run.idle())
    assert listener.close(10)
    assert listener.refused == 2
    assert len(caplog.records) == 1
    assert len(caplog.text) < 1000


@pytest.mark.parametrize("text", ["<html>welcome</html>", "", "[" * 9000])
def test_something_else_that_takes_everything(
    receiver: Receiver, listen: Listen, run: Run, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    async def answer(_request: web.Request, _report: Report) -> web.Response:
        return web.Response(text=text)

    caplog.set_level(logging.INFO)
    receiver.behaviour = first_times(2, answer)
    listener = listen()
    listener.onQueryStarted(run.started())
    assert listener.close(10)
    assert (listener.sent, listener.failures) == (1, 0)
    said = [each.getMessage() for each in caplog.records if each.name == "quota_listener"]
    assert "HTTP 200 from what is no quota proxy" in said[0]
    assert "answers again" in said[1]
    assert len(said) == 2


def test_what_is_said_there_is_logged_as_one_line_of_text(
    receiver: Receiver, listen: Listen, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.behaviour = refuse(400, "x", "\ud800 \x1b[31m\nred", "é")
    listener = listen()
    listener.onQueryStarted(run.started())
    assert listener.close(10)
    assert caplog.records[0].getMessage().endswith("(HTTP 400 x): \ufffd \ufffd[31m red; é")


def test_reasons_without_end_are_not_all_logged(
    receiver: Receiver, listen: Listen, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(_request: web.Request, report: Report) -> web.Response:
        return web.json_response({"reason": f"r{report['number']}"}, status=400)

    receiver.behaviour = answer
    listener = listen()
    for _ in range(80):
        listener.onQueryStarted(run.started())
    assert listener.close(20)
    assert listener.refused == 80
    assert len(caplog.records) == 50


def test_repeat_after_a_lost_answer_counts_as_sent(
    receiver: Receiver, listen: Listen, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    lost = [True]

    async def lose_first(request: web.Request, report: Report) -> web.StreamResponse:
        first, lost[0] = lost[0], False
        return await (hang_up if first else refuse(409, "repeated"))(request, report)

    receiver.behaviour = lose_first
    listener = listen()
    listener.onQueryStarted(run.started())
    assert listener.close(10)
    assert (listener.sent, listener.refused) == (1, 0)
    assert "refuses" not in caplog.text


def test_a_port_that_speaks_no_http(listen: Listen, run: Run) -> None:
    with socket.create_server((HOST, 0)) as server:
        listener = listen(f"http://{HOST}:{server.getsockname()[1]}", max_retries=0)
        listener.onQueryStarted(run.started())
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"\x00\x00\x00\x01not HTTP\r\n\r\n")
            until(lambda: listener.failures > 0)
            listener.close(0)
    until(lambda: listener.dropped == 1)
    assert listener.sent == 0


def test_close_is_bounded_and_callbacks_never_wait(
    receiver: Receiver, listen: Listen, run: Run
) -> None:
    receiver.behaviour = hang
    listener = listen(timeout_s=HANGS_S, queue_size=10)
    slowest_s = 0.0
    for batch in range(100):
        began_s = time.monotonic()
        listener.onQueryProgress(run.batch(batch))
        slowest_s = max(slowest_s, time.monotonic() - began_s)
    assert slowest_s < HANGS_S
    began_s = time.monotonic()
    assert not listener.close(0.1)
    assert time.monotonic() - began_s < HANGS_S
    listener.onQueryStarted(run.started())  # ignored
    assert listener.sent == 0


def test_close_without_work(listen: Listen) -> None:
    listener = listen()
    assert listener.close()
    assert listener.close()


SCRIPT = """
import sys, threading
from listening.events import Run
from proxy.spark import QuotaListener
listener, run = QuotaListener(sys.argv[1], timeout_s=600), Run("orders")
listener.onQueryStarted(run.started())
def stop():
    threading.main_thread().join()  # Spark tells it late
    listener.onQueryTerminated(run.terminated())
threading.Thread(target=stop, daemon=True).start()
"""


@pytest.mark.parametrize("behaviour", [take, hang], ids=lambda b: b.__name__)
def test_end_of_the_driver(receiver: Receiver, behaviour: Behaviour) -> None:
    receiver.behaviour = behaviour
    paths = [str(Path(__file__).parent), *sys.path]
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, receiver.url],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=300,  # the script's own wait would be 600 s
        check=True,
    )
    assert ended.stderr == ""
    assert receiver.numbers() == ([1, 2] if behaviour is take else [])


def test_https(listen: Listen, run: Run, tmp_path: Path) -> None:
    ours, other = trustme.CA(), trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.issue_cert(HOST).configure_cert(context)
    for name, authority in (("ours", ours), ("other", other)):
        authority.cert_pem.write_to_path(str(tmp_path / name))
    receiver = Receiver(tls=context).start()
    try:
        stranger = listen(receiver.url, ca_file=str(tmp_path / "other"), max_retries=0)
        stranger.onQueryStarted(run.started())
        until(lambda: stranger.failures > 0)
        assert not stranger.close(0)
        until(lambda: stranger.dropped == 1)
        assert stranger.sent == 0
        listener = listen(receiver.url, ca_file=str(tmp_path / "ours"))
        for _ in range(5):
            listener.onQueryStarted(run.started())
        receiver.wait_for_numbers(1, 2, 3, 4, 5)
        assert len(receiver.connections) == 1
    finally:
        receiver.stop()


def test_authorities_that_are_renewed(listen: Listen, run: Run, tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    old.issue_cert(HOST).configure_cert(context)
    trusted = tmp_path / "trusted"
    old.cert_pem.write_to_path(str(trusted))
    receiver = Receiver(tls=context).start()
    try:
        listener = listen(receiver.url, ca_file=str(trusted))
        listener.onQueryStarted(run.started())
        receiver.wait_for_numbers(1)
        new.issue_cert(HOST).configure_cert(context)
        receiver.hang_up()
        listener.onQueryStarted(run.started())
        until(lambda: listener.failures > 0)
        trusted.write_text("no certificate")
        until(lambda: listener.failures > 2)
        new.cert_pem.write_to_path(str(trusted))
        receiver.wait_for_numbers(1, 2)
    finally:
        receiver.stop()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "127.0.0.1:9644"}, "http://HOST:PORT"),
        ({"url": "ftp://host:1"}, "http://HOST:PORT"),
        ({"url": "http://"}, "http://HOST:PORT"),
        ({"url": "http://user:secret@host:1"}, "wants a token"),
        ({"url": "http://host:99999"}, "(?i)port"),
        ({"url": "http://host:1/?a=b"}, "ends with its path"),
        ({"token": ""}, "token"),
        ({"token": "two\nlines"}, "token"),
        ({"token": "schlüssel"}, "token"),
        ({"queue_size": 0}, "queue_size"),
        ({"max_retries": -1}, "max_retries"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"clients": {"orders": "a b"}}, "client id of 'orders'"),
        ({"ca_file": "/nowhere/ca.pem"}, "https"),
        ({"url": "https://host:1", "ca_file": "/nowhere/ca.pem"}, "/nowhere/ca.pem"),
        ({"cert_file": "/nowhere/me.pem"}, "https"),
        ({"url": "https://host:1", "cert_file": "/nowhere/me.pem"}, "/nowhere/me.pem"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    given = {"url": "http://host:1", **arguments}
    with pytest.raises(ValueError, match=message):
        QuotaListener(**given)  # type: ignore[arg-type]
