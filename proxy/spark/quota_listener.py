"""Reports to the quota proxy what each streaming query has read, from within the Spark driver.

One file on its own, so that `--py-files` can carry it: Python 3.9, pyspark 3.5 and the standard
library are enough.

    spark.streams.addListener(QuotaListener("http://127.0.0.1:9644", token="..."))
    options = client_options("orders")
    spark.readStream.format("kafka").options(**options).option("subscribe", "orders").load()
"""

from __future__ import annotations

import ast
import atexit
import json
import logging
import math
import os
import random
import re
import selectors
import ssl
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partialmethod
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from queue import Empty, SimpleQueue
from threading import Condition, Thread
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQueryListener

__all__ = ["QuotaListener", "client_options"]

BOOTSTRAP_VARIABLE = "KAFKA_QUOTA_PROXY_BOOTSTRAP_SERVERS"
DEFAULT_BOOTSTRAP = "localhost:19092"
REPORT_PATH = "/v1/spark/batches"

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 1.0
"""Pauses between tries double from the first to the longest while the proxy is away."""

HEARTBEAT_S = 2.0
"""A run of which nothing was sent for so long is reported to be running."""

WATCH_S = 0.2
"""Between two checks whether the proxy has closed the idle connection."""

LOOK_S = 0.5
"""How long Spark may take to answer what a run does; then it is not known."""

LAST_EVENT_S, EXIT_S = 1.0, 2.0
"""How long the end of the driver may wait for Spark's events on the end of its queries, and then
for the last reports to go out."""

MAX_RUNS = 1000
"""Runs that are known at a time; the one known for longest is forgotten first."""

LATEST_S = 60.0
"""How late Spark may report a batch."""

MAX_REASONS = 50
"""Different faults that are logged, each once."""

MAX_ERROR_CHARS, MAX_SHOWN_CHARS, MAX_ANSWER_BYTES = 1000, 400, 64 * 1024

_LEFT_OUT = "\n...\n"
_SENT_BELOW, _FAULT_FROM = 300, 500
_AWAY = frozenset({502, 503, 504})
"""What something before the proxy answers while the proxy is away."""

_SEPARATOR = re.compile(r"[\s,]")
_KAFKA_OFFSETS = re.compile(r"""\{\s*["'][a-zA-Z0-9._-]+["']\s*:\s*\{""")
_STACK_TRACE = "\n\tat "

_TRIGGER = re.compile(r"(\w+)(?:\((\d+)\))?")
_TRIGGER_KINDS = {
    "ProcessingTimeTrigger": "processing_time",
    "AvailableNowTrigger": "available_now",
    "OneTimeTrigger": "once",
    "ContinuousTrigger": "continuous",
}
_BETWEEN_BATCHES = ("Getting offsets from ", "Waiting for ")
_IN_A_BATCH = ("Writing offsets to log", "Processing new data", "No new data but cleaning up state")
"""How Spark's messages begin on what a query does."""

_log = logging.getLogger("quota_listener")


def client_options(
    name: str, bootstrap_servers: str | None = None, by_group: bool = False
) -> dict[str, str]:
    """Return the options of Spark's Kafka source that tie a query to one Kafka client.

    With `kafka.client.id` the driver's look-ups and the executors' fetches all carry `name`, so a
    quota rule `client-id: NAME` bounds the query, and its progress and batches are followed.

    With `by_group` it is `groupIdPrefix` instead. Then the executors' client ids are
    `consumer-NAME-<uuid>-<number>-executor-<n>`, new ones for each start, and the driver's are
    `adminclient-<n>`: a rule `client-id-prefix: consumer-NAME-` bounds what is fetched, but the
    driver's look-ups are not known as this query's, so its batches are never made smaller and
    its reports find no client. Choose it only where client ids are prescribed by others.

    Args:
        name: what the rules of the proxy know the query by; best its `queryName`, too.
        bootstrap_servers: `HOST:PORT,...` of the proxy; None takes the environment variable
            KAFKA_QUOTA_PROXY_BOOTSTRAP_SERVERS, else `localhost:19092`.
        by_group: use the prefix of the consumer group.

    Raises ValueError when a name or an address is empty or has spaces, or a name has commas.
    """
    _check_name("name", name)
    servers = bootstrap_servers
    if servers is None:
        servers = os.environ.get(BOOTSTRAP_VARIABLE) or DEFAULT_BOOTSTRAP
    for server in servers.split(","):
        host, _, port = server.rpartition(":")
        if not host or not port.isdecimal() or _SEPARATOR.search(host):
            expected = "bootstrap servers are HOST:PORT,HOST:PORT without spaces"
            raise ValueError(f"{expected}: {servers!r}")
    key = "groupIdPrefix" if by_group else "kafka.client.id"
    return {"kafka.bootstrap.servers": servers, key: name}


class QuotaListener(StreamingQueryListener):  # type: ignore[misc]  # pyspark's types are not read
    """Reports each batch of each query to the proxy; never slows or fails a query.

    Spark's thread only numbers an event and puts it into a bounded queue. A daemon thread sends the
    reports in order and tries again, with pauses that grow, while the proxy is away. What can't be
    sent is dropped, never waited for: the numbers count from 1, so the proxy sees what is missing.
    The last report about a batch of each run stays until it is sent. A proxy that comes back gets
    a heartbeat of each run that lives, and another every HEARTBEAT_S of those that report nothing
    else. Faults go to the logger `quota_listener`, each kind once.

    Reported are queries that read Kafka and have a name; one without needs its id in `clients`.

    Args:
        url: the proxy's admin address, `http://HOST:PORT` or `https://HOST:PORT`.
        token: the text of a token of the proxy that may report: of one in `admin.tokens` with the
            right `report`, or of `admin.token_file`; None when it has none.
        clients: name of a query (id of one without a name) -> the Kafka client id that it reads
            with. A query that is not in it reads with its name.
        queue_size: reports that may wait, from 1. One more drops the oldest one about a batch,
            while there is one with a later batch of its run.
        timeout_s: how long a connect, a send or an answer may take.
        max_retries: how often a report is sent again, from 0; then it is dropped. While the proxy
            is away only what a later report says again is dropped so.
        ca_file: who may sign the proxy's certificate; None takes the system's authorities.
        cert_file: a certificate and its key, where `admin.tls.ca_file` asks for one.

    Raises ValueError when an argument makes no sense; says which and why.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        clients: Mapping[str, str] | None = None,
        queue_size: int = 1000,
        timeout_s: float = 5.0,
        max_retries: int = 10,
        ca_file: str | None = None,
        cert_file: str | None = None,
    ) -> None:
        if queue_size < 1 or max_retries < 0 or not timeout_s > 0:
            expected = "queue_size is at least 1, max_retries at least 0, timeout_s above 0"
            raise ValueError(f"{expected}: {queue_size}, {max_retries}, {timeout_s}")
        self._clients = dict(clients or {})
        for query, client_id in self._clients.items():
            _check_name(f"the client id of {query!r}", client_id)
        self.sent = self.refused = self.dropped = 0
        """Reports that the proxy took, that it did not want (the log says why), and that were given
        up: too many waited, or the proxy was away for too long."""
        self.failures = 0
        """Tries since the proxy answered last."""
        self._url = url
        self._channel = _AdminConnection(url, token, timeout_s, ca_file, cert_file)
        self._sender = uuid.uuid4().hex
        self._queue_size = queue_size
        self._max_retries = max_retries
        self._runs: OrderedDict[str, _Run] = OrderedDict()  # by run id
        self._queue: deque[_Event] = deque()
        self._changed = Condition()
        self._number = 0
        self._breaks = 0  # how often the proxy was found to be away
        self._aside = _Aside()
        self._logged: set[str] = set()
        self._deadline_s = math.inf
        self._thread = Thread(target=self._send_all, name="quota-listener", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def close(self, timeout_s: float = EXIT_S) -> bool:
        """Accept no more events and send what waits; return whether all of it went out in time.

        What did not is dropped. Called by itself at the end of the driver.
        """
        atexit.unregister(self._end)
        with self._changed:
            dropped = self.dropped
            if not self._is_closing:
                self._deadline_s = time.monotonic() + timeout_s
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self.dropped == dropped

    def _end(self) -> None:
        """Close at the end of the driver. Spark's last events come after `stop()` returned."""
        with self._changed:
            self._changed.wait_for(lambda: not self._runs, LAST_EVENT_S)
        self.close()

    # In Spark's threads

    def _put(self, kind: str, event: Any) -> None:
        """Queue an event. It neither raises nor waits."""
        try:
            seen_s = time.monotonic()
            about = event.progress if kind == "progress" else event
            run_id = str(about.runId)
            with self._changed:
                if self._is_closing or not self._follows(kind, about, run_id):
                    return
                run = self._runs.pop(run_id) if kind == "terminated" else self._runs[run_id]
                if run.is_known:
                    self._number += 1
                    if kind == "progress":
                        run.last_number = self._number
                    if len(self._queue) == self._queue_size:
                        self.dropped += 1
                        # The end of a run matters more: the next batch says most of it again.
                        oldest = (i for i, old in enumerate(self._queue) if old.is_said_again)
                        del self._queue[next(oldest, 0)]
                    self._queue.append(_Event(self._number, kind, run, about, seen_s, time.time()))
                self._changed.notify_all()
            if not run.is_known:
                text = "a query without a name is not reported: give it a name with queryName()"
                self._log_once("nameless", text + ", or put its id into clients")
        except Exception:
            self._log_once("event", "an event of Spark is not reported", exc_info=True)

    onQueryStarted = partialmethod(_put, "started")  # noqa: N815  # Spark's name
    """Called within `start()`."""
    onQueryProgress = partialmethod(_put, "progress")  # noqa: N815
    onQueryIdle = partialmethod(_put, "idle")  # noqa: N815
    onQueryTerminated = partialmethod(_put, "terminated")  # noqa: N815

    def _follows(self, kind: str, about: Any, run_id: str) -> bool:
        """Record runs, whose names not every event has; return whether this one is of use."""
        if kind == "started" or (kind == "progress" and _reads_kafka(about)):
            if run_id not in self._runs:
                query_id, name = str(about.id), about.name
                run = _Run(query_id, run_id, name, self._clients.get(name or query_id))
                for other in self._runs.values():
                    # Spark reports the end of a run after the start of the next.
                    other.is_over |= other.query_id == run.query_id
                self._runs[run_id] = run
                if len(self._runs) > MAX_RUNS:
                    self._runs.popitem(last=False)
            if kind == "progress":
                self._runs[run_id].batch_id = about.batchId
        elif kind == "progress":
            self._runs.pop(run_id, None)
        return run_id in self._runs

    # In the thread that sends

    def _send_all(self) -> None:
        while True:
            event = None
            try:
                event = self._next()
                if event is not None:
                    self._send(event)
                elif self._is_closing:
                    break
                else:
                    self._send_heartbeats()
            except Exception:
                self._drop(0 if event is None else 1)
                self._log_once("report", "a report can't be sent", exc_info=True)
        self._channel.close()

    @property
    def _is_closing(self) -> bool:
        return self._deadline_s < math.inf

    def _next(self) -> _Event | None:
        """Wait for an event; None when a heartbeat may be due, or at the end."""
        with self._changed:
            if not self._queue and not self._is_closing:
                self._changed.wait(WATCH_S if self._runs else None)
            if self._queue and not self._is_late():
                return self._queue.popleft()
            if self._is_closing:
                self._drop(len(self._queue))
                self._queue.clear()
            return None

    def _send(self, event: _Event) -> None:
        run = event.run
        report = {**self._report(event.kind, run), **event.report()}
        if event.kind == "started":
            self._look_at(run)
            report["trigger"] = run.trigger
        tries = 0
        while True:
            report["age_ms"] = round((time.monotonic() - event.seen_s + event.late_s) * 1000)
            answer = self._post(report)
            tries += 1
            if answer is not None and answer.status < _FAULT_FROM:
                break
            is_spare = answer is not None or event.is_said_again
            if (is_spare and tries > self._max_retries) or not self._pause():
                self._drop(1)
                return
        self._sent(answer, run, is_alive=event.kind == "started")
        # A repeat of what the proxy took although its answer was lost.
        repeated = HTTPStatus.CONFLICT, "repeated"
        taken_before = tries > 1 and (answer.status, answer.reason) == repeated
        if answer.status < _SENT_BELOW or taken_before:
            self.sent += 1
            return
        text = "the quota proxy at %s refuses reports (HTTP %d%s): %s"
        about, reason = answer.text, answer.reason and f" {answer.reason}"
        if answer.status == HTTPStatus.UNAUTHORIZED:
            about += "; pass token= with the text of the proxy's admin.token_file"
        self._log_once(f"{answer.status}{reason}", text, self._url, answer.status, reason, about)
        self.refused += 1

    def _send_heartbeats(self) -> None:
        """Report that a run lives, where nothing else was sent of it for a while."""
        self._breaks += self._channel.is_closed_by_proxy()
        with self._changed:
            runs = [run for run in self._runs.values() if not run.is_over and run.is_known]
        for run in runs:
            is_due = time.monotonic() - run.sent_s >= HEARTBEAT_S or run.alive_in != self._breaks
            if not is_due or run.refused_in == self._breaks:
                continue
            if not self._look_at(run):
                self._sent(None, run)  # it is looked for again
                continue
            with self._changed:
                if self._queue or self._is_closing:
                    return  # what waits says more
                heartbeat = self._report("running", run)
                heartbeat.update(age_ms=0, last_batch_id=run.batch_id)
                heartbeat.update(under_way=run.under_way, trigger=run.trigger)
            answer = self._post(heartbeat)
            if answer is None or answer.status >= _FAULT_FROM:
                self._pause()
                return
            self._sent(answer, run)
            if answer.status >= _SENT_BELOW:  # a proxy that knows no heartbeats, for one
                run.refused_in = self._breaks
                kind, about = f"heartbeat {answer.status} {answer.reason}", answer.text
                text = "the quota proxy at %s does not hear which queries run (HTTP %d): %s"
                self._log_once(kind, text, self._url, answer.status, about, level=logging.INFO)

    def _report(self, kind: str, run: _Run) -> dict[str, Any]:
        """Return what all reports of a run have."""
        names = {"query_id": run.query_id, "run_id": run.run_id, "name": run.name}
        return {"sender": self._sender, "event": kind, **names, "client_id": run.client_id}

    def _sent(self, answer: _ReportAnswer | None, run: _Run, *, is_alive: bool = True) -> None:
        """Record that something was sent of a run; log what the proxy advises, once."""
        run.sent_s = time.monotonic()
        if is_alive:
            run.alive_in = self._breaks
        for advice in answer.advice if answer is not None else ():
            text = "the quota proxy at %s says of query %s: %s"
            self._log_once(f"advice {advice}", text, self._url, run.name or run.query_id, advice)

    def _look_at(self, run: _Run) -> bool:
        """Ask Spark what a run does, where it can be asked; return whether the run may be alive."""
        look = self._aside.look_at(run)
        run.under_way = look.under_way
        if look.is_there:
            run.was_seen, run.trigger = True, look.trigger
        # Spark has no event on the end of its queries when only spark.stop() is called.
        return look.is_hung or bool(look.is_there) or not run.was_seen

    def _post(self, report: Mapping[str, Any]) -> _ReportAnswer | None:
        """Send once; return the proxy's answer, None while it is away."""
        self._breaks += self._channel.is_closed_by_proxy()
        answer = None
        try:
            answer = self._channel.post(json.dumps(report).encode())
            missed = f"HTTP {answer.status}" if answer.status >= _FAULT_FROM else None
        except (OSError, HTTPException) as error:
            missed = f"{type(error).__name__}: {error}"
        if missed is None:
            if self.failures:
                text = "the quota proxy at %s answers again; %d reports were dropped so far"
                _log.info(text, self._url, self.dropped)
            self.failures = 0
            return answer
        if not self.failures:
            text = "the quota proxy at %s does not answer (%s); queries go on, reports wait"
            _log.warning(text, self._url, _short(missed))
        self.failures += 1
        self._breaks += 1
        return None if answer is None or answer.status in _AWAY else answer

    def _pause(self) -> bool:
        """Wait before the next try; return whether there may be one."""
        # 10 doublings are far beyond the longest, and no overflow.
        longest_s = min(FIRST_PAUSE_S * 2.0 ** min(self.failures, 10), LONGEST_PAUSE_S)
        pause_s = longest_s * random.uniform(0.5, 1)  # so that not all drivers come at once
        with self._changed:
            closing = self._changed.wait_for(lambda: self._is_closing, pause_s)
        if closing:  # there is little time left: the last tries come fast
            time.sleep(FIRST_PAUSE_S)
        return not self._is_late()

    def _is_late(self) -> bool:
        return time.monotonic() >= self._deadline_s

    def _drop(self, reports: int) -> None:
        with self._changed:
            self.dropped += reports

    def _log_once(
        self, kind: str, text: str, *args: object, level: int = logging.WARNING, **how: Any
    ) -> None:
        """Log the first of its kind, while there is room to remember kinds."""
        if kind not in self._logged and len(self._logged) < MAX_REASONS:
            self._logged.add(kind)
            _log.log(level, text, *args, **how)


@dataclass(eq=False)
class _Run:
    """One run of a query, from Spark's first event of it to the one on its end."""

    query_id: str
    run_id: str
    name: str | None
    client_id: str | None
    """That it reads with, where that is not its name."""
    batch_id: int | None = None
    """Of the last batch that Spark reported."""
    last_number: int = 0
    """Of the report about it."""
    is_over: bool = False
    """Whether the query has begun another run."""
    trigger: dict[str, Any] | None = None
    under_way: bool | None = None
    """Whether a batch was, when Spark was asked last."""
    was_seen: bool = False
    """Whether Spark could be asked for it once."""
    sent_s: float = 0.0
    """When something was sent of it."""
    alive_in: int | None = None
    refused_in: int | None = None
    """After which break of the connection the proxy was sent that it lives, and refused that."""

    @property
    def is_known(self) -> bool:
        """Whether it can be reported: by its name, or the client id of its query's id."""
        return self.name is not None or self.client_id is not None


class _Event(NamedTuple):
    """Spark's event, as it waits to be sent."""

    number: int
    kind: str
    run: _Run
    about: Any
    """Spark's event itself; for a batch its progress."""
    seen_s: float
    seen_at_s: float
    """The same on the wall clock."""

    def report(self) -> dict[str, Any]:
        """Return what only reports of events have."""
        error = self.about.exception if self.kind == "terminated" else None
        return {
            "number": self.number,
            "batch": _batch(self.about) if self.kind == "progress" else None,
            "error": error and _ends_of(str(error).partition(_STACK_TRACE)[0]),
        }

    @property
    def late_s(self) -> float:
        """How long after the end of a batch Spark reports it: seconds, where there is much to do.

        More than LATEST_S is taken for a difference of clocks: over Spark Connect there are two.
        """
        if self.kind != "progress":
            return 0.0
        try:
            began = datetime.fromisoformat(self.about.timestamp.replace("Z", "+00:00"))
            took_s = self.about.durationMs["triggerExecution"] / 1000
        except (KeyError, TypeError, ValueError):
            return 0.0
        late_s = self.seen_at_s - began.timestamp() - took_s
        return late_s if 0 < late_s <= LATEST_S else 0.0

    @property
    def is_said_again(self) -> bool:
        """Whether little is lost with it: a later report says most of it, or it is repeated."""
        is_old = self.kind == "progress" and self.number != self.run.last_number
        return is_old or self.kind == "idle"


class _ReportAnswer(NamedTuple):
    """The proxy's answer to a report."""

    status: int
    reason: str
    """The code of a refusal; empty when there is none."""
    text: str
    """What is wrong and how to mend it, in one short line."""
    advice: tuple[str, ...] = ()
    """What is to be mended although the report was taken, each in a short line."""


class _AdminConnection:
    """One kept connection to the proxy. Raises OSError and HTTPException when it fails."""

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout_s: float,
        ca_file: str | None,
        cert_file: str | None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the proxy's admin address is http://HOST:PORT: {url!r}")
        if "@" in parts.netloc:
            raise ValueError("the address holds a password: the proxy wants a token")
        if parts.query or parts.fragment:
            raise ValueError(f"the proxy's admin address ends with its path: {url!r}")
        self._path = parts.path.rstrip("/") + REPORT_PATH
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            token = token.strip()  # a file ends with a line feed
            if not token or not token.isascii() or not token.isprintable():
                raise ValueError("the token is empty or has characters that no HTTP header takes")
            self._headers["Authorization"] = f"Bearer {token}"
        for name, file in (("ca_file", ca_file), ("cert_file", cert_file)):
            if parts.scheme == "http" and file is not None:
                raise ValueError(f"a {name} needs an https address: {url!r}")
        host, port = parts.hostname, parts.port
        self._connection = HTTPConnection(host, port, timeout=timeout_s)
        if parts.scheme == "https":
            try:
                context = ssl.create_default_context(cafile=ca_file)
            except OSError as error:
                raise ValueError(f"ca_file {ca_file!r} can't be read: {error}") from error
            try:
                if cert_file is not None:
                    context.load_cert_chain(cert_file)
            except OSError as error:
                raise ValueError(f"cert_file {cert_file!r} can't be used: {error}") from error
            self._connection = HTTPSConnection(host, port, timeout=timeout_s, context=context)
        self.close = self._connection.close

    def post(self, body: bytes) -> _ReportAnswer:
        try:
            self._connection.request("POST", self._path, body, self._headers)
            with self._connection.getresponse() as response:
                content = response.read(MAX_ANSWER_BYTES)
                if not response.isclosed():  # an answer that has no end
                    self._connection.close()
                return _read_answer(response.status, content)
        except BaseException:
            self._connection.close()
            raise

    def is_closed_by_proxy(self) -> bool:
        """Return whether the idle connection can be read, which is its end: it is closed then."""
        if self._connection.sock is None:
            return False
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection.sock, selectors.EVENT_READ)
            is_closed = bool(selector.select(0))
        if is_closed:
            self._connection.close()
        return is_closed


class _Look(NamedTuple):
    """What Spark knows of a run."""

    is_there: bool | None = None
    """None: Spark can't be asked, as with Spark Connect."""
    trigger: dict[str, Any] | None = None
    under_way: bool | None = None
    """Whether a batch is planned and not yet done; None when that is not known."""
    is_hung: bool = False
    """Whether Spark took too long to answer."""


class _Aside:
    """Asks Spark, which may hang, in a daemon thread of its own, made when it is wanted."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[_Run, SimpleQueue[_Look]]] = SimpleQueue()
        self._thread: Thread | None = None
        self._is_busy = False

    def look_at(self, run: _Run) -> _Look:
        """Return what Spark knows of a run; waits LOOK_S at most."""
        if self._is_busy:  # still, with what took too long before
            return _Look(is_hung=True)
        if self._thread is None:
            self._thread = Thread(target=self._run, name="quota-listener-look", daemon=True)
            self._thread.start()
        answer: SimpleQueue[_Look] = SimpleQueue()
        self._is_busy = True
        self._asked.put((run, answer))
        try:
            return answer.get(timeout=LOOK_S)
        except Empty:
            return _Look(is_hung=True)

    def _run(self) -> None:
        while True:
            run, answer = self._asked.get()
            answer.put(_look_at(run.query_id, run.run_id))
            self._is_busy = False


def _look_at(query_id: str, run_id: str) -> _Look:
    """Ask the JVM for a run. What is asked is Spark's own, not its public API: it may fail."""
    try:
        session = SparkSession._instantiatedSession
        if session is None:
            return _Look()
        key = session._jvm.java.util.UUID.fromString(query_id)
        query = session._jsparkSession.sharedState().activeStreamingQueries().get(key)
        if query is None or query.runId().toString() != run_id or not query.isActive():
            return _Look(is_there=False)
        trigger = read_trigger(query.trigger().toString())
        status = query.status()
        return _Look(True, trigger, is_under_way(status.isTriggerActive(), status.message()))
    except Exception:
        return _Look()


def read_trigger(text: str) -> dict[str, Any] | None:
    """Read Spark's text of a trigger, such as `ProcessingTimeTrigger(2000)`; None if unknown."""
    match = _TRIGGER.fullmatch(text)
    if match is None or match[1] not in _TRIGGER_KINDS:
        return None
    return {"kind": _TRIGGER_KINDS[match[1]], "interval_ms": int(match[2]) if match[2] else None}


def is_under_way(is_trigger_active: bool, message: str) -> bool | None:
    """Return whether a batch is under way; a trigger is active, too, while log ends are looked up.

    None when Spark's message says nothing of it.
    """
    is_done = not is_trigger_active and message.startswith(_IN_A_BATCH)
    if is_done or message.startswith(_BETWEEN_BATCHES):
        return False
    return True if message in _IN_A_BATCH else None


def _read_answer(status: int, content: bytes) -> _ReportAnswer:
    """Read the proxy's JSON; anything else that answers there is shown as it is."""
    try:
        said = json.loads(content)
        text = "; ".join(str(said[key]) for key in ("error", "fix") if key in said)
        reason = said.get("reason", "")
        advice = tuple(_short(str(each)) for each in said.get("advice", ()))
    except (ValueError, TypeError, AttributeError, RecursionError):
        reason, text, advice = "", content.decode("utf-8", "replace"), ()
    return _ReportAnswer(status, _short(str(reason)), _short(text), advice)


def _short(text: str) -> str:
    return " ".join(text[:MAX_SHOWN_CHARS].split())


def _ends_of(text: str) -> str:
    """Leave out the middle of a long error: what went wrong in Python code stands at its end."""
    kept = (MAX_ERROR_CHARS - len(_LEFT_OUT)) // 2
    return text if len(text) <= MAX_ERROR_CHARS else text[:kept] + _LEFT_OUT + text[-kept:]


def _batch(progress: Any) -> dict[str, Any]:
    return {
        "batch_id": progress.batchId,
        "timestamp": progress.timestamp,
        "rows": progress.numInputRows,
        "durations_ms": dict(progress.durationMs),
        "sources": [
            {
                "description": source.description,
                "start": _read_offsets(source.startOffset),
                "end": end,
                "latest": _read_offsets(source.latestOffset),
                "rows": source.numInputRows,
            }
            for source in progress.sources
            if (end := _read_offsets(source.endOffset)) is not None
        ],
    }


def _reads_kafka(progress: Any) -> bool:
    """Return whether a source's offsets seem to have the shape {topic: {partition: offset}}."""
    return any(_KAFKA_OFFSETS.match(str(source.endOffset)) for source in progress.sources)


def _read_offsets(value: Any) -> dict[str, dict[str, int]] | None:
    """Read a source's offsets, None when they are not of the shape {topic: {partition: offset}}.

    pyspark gives text: JSON from the JVM, a Python dict's text from Spark Connect, and "None" when
    there are none, as at the start of a query's first batch.
    """
    if isinstance(value, str):
        value = _read_text(value)
    try:
        read = {
            topic: {str(partition): offset for partition, offset in offsets.items()}
            for topic, offsets in value.items()
        }
    except AttributeError:
        return None
    is_sound = all(
        isinstance(topic, str)
        and all(map(str.isdecimal, offsets))
        and all(type(offset) is int for offset in offsets.values())
        for topic, offsets in read.items()
    )
    return read if is_sound else None


def _read_text(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def _check_name(what: str, name: str) -> None:
    if not name or _SEPARATOR.search(name):
        raise ValueError(f"{what} is not empty and has no spaces or commas: {name!r}")
