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
import io
import json
import logging
import math
import os
import random
import re
import selectors
import socket
import ssl
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partialmethod
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import takewhile
from queue import SimpleQueue
from threading import Condition, Thread
from types import SimpleNamespace
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

LOOK_EVERY_S, FIRST_LOOKS_S = 1.0, 0.5
"""Between two looks at what Spark knows of a run; before its first batch is done. Each look is
followed by reports on the batches that it found, or by one that the run is running."""

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
    "RealTimeTrigger": "real_time",
}
_BETWEEN_BATCHES = "Waiting for "
_IN_A_BATCH = ("Writing offsets to log", "Processing new data", "No new data but cleaning up state")
_LOOKING_UP = "Getting offsets from "
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
    The last report about a batch of each run stays until it is sent. Spark's events come late where
    other listeners are slow: so each LOOK_EVERY_S the daemon thread asks Spark itself which batches
    are done, and reports those, or that the run is running. A proxy that comes back hears of each
    run that lives. Faults go to the logger `quota_listener`, each kind once.

    Reported are queries that read Kafka and have a name; one without needs its id in `clients`.
    With `queries` no others are.

    Args:
        url: the proxy's admin address, `http://HOST:PORT` or `https://HOST:PORT`.
        token: the text of a token of the proxy that may report: of one in `admin.tokens` with the
            right `report`, or of `admin.token_file`; None when it has none.
        clients: name of a query (id of one without a name) -> the Kafka client id that it reads
            with. A query that is not in it reads with its name.
        queries: names of the queries that are reported, or their ids; None: all.
        queue_size: reports that may wait, from 1. One more drops the oldest one about a batch,
            while there is one with a later batch of its run.
        timeout_s: how long a connect, a send or an answer may take.
        max_retries: how often a report is sent again, from 0; then it is dropped. While the proxy
            is away only what a later report says again is dropped so.
        ca_file: who may sign the proxy's certificate; None takes the system's authorities.
        cert_file: a certificate and its key, where `admin.tls.ca_file` asks for one. Both files are
            read again when a connection is refused for a certificate.

    Raises ValueError when an argument makes no sense; says which and why.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        clients: Mapping[str, str] | None = None,
        queries: Collection[str] | None = None,
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
        if queries is not None and not _are_names(queries):
            expected = "queries is a list of names or ids of queries, at least one, or None for all"
            raise ValueError(f"{expected}: {queries!r}")
        self._queries = None if queries is None else frozenset(queries)
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
        self._asked: SimpleQueue[_Run | None] = SimpleQueue()  # None: the end
        self._looking: set[_Run] = set()  # runs that Spark is asked for and has not answered
        self._looker: Thread | None = None  # one of its own, as Spark may be slow
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
        self._asked.put(None)
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
                    self._add(kind, run, about, seen_s)
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

    def _add(self, kind: str, run: _Run, about: Any, seen_s: float) -> None:
        """Queue an event of a run with its number, unless it is known already."""
        if kind == "progress":
            if run.batch_id is not None and about.batchId <= run.batch_id:
                return
            run.batch_id = about.batchId
        self._number += 1
        if kind == "progress":
            run.last_number = self._number
        if len(self._queue) == self._queue_size:
            self.dropped += 1
            # The end of a run matters more: the next batch says most of it again.
            oldest = (i for i, old in enumerate(self._queue) if old.is_said_again)
            del self._queue[next(oldest, 0)]
        self._queue.append(_Event(self._number, kind, run, about, seen_s, time.time()))

    def _follows(self, kind: str, about: Any, run_id: str) -> bool:
        """Record runs, whose names not every event has; return whether this one is of use."""
        if kind == "started" or (kind == "progress" and _reads_kafka(about)):
            if run_id not in self._runs:
                query_id, name = str(about.id), about.name
                if self._queries is not None and self._queries.isdisjoint((query_id, name)):
                    return False
                run = _Run(query_id, run_id, name, self._clients.get(name or query_id))
                for other in self._runs.values():
                    # Spark reports the end of a run after the start of the next.
                    other.is_over |= other.query_id == run.query_id
                self._runs[run_id] = run
                if len(self._runs) > MAX_RUNS:
                    self._runs.popitem(last=False)
        elif kind == "progress":
            self._runs.pop(run_id, None)
        return run_id in self._runs

    # In the thread that looks, made when it is wanted

    def _look_on(self) -> None:
        while (run := self._asked.get()) is not None:
            asked_s = time.monotonic()
            look = _look_at(run.query_id, run.run_id, run.batch_id)
            seen_s = time.monotonic()
            with self._changed:  # however late
                self._looking.discard(run)
                run.look = look._replace(done=())
                if not self._is_closing and self._runs.get(run.run_id) is run:
                    if look.is_there:
                        run.trigger, run.known_s = look.trigger, asked_s
                    for progress in look.done:  # batches that were not known to be done
                        self._add("progress", run, progress, seen_s)
                self._changed.notify_all()

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
        report = event.report()
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
        """Look at each run now and then; report what it has done, or else that it lives."""
        self._breaks += self._channel.is_closed_by_proxy()
        with self._changed:
            runs = [run for run in self._runs.values() if not run.is_over and run.is_known]
        for run in runs:
            pause_s = FIRST_LOOKS_S if run.batch_id is None else LOOK_EVERY_S
            is_due = time.monotonic() - run.looked_s >= pause_s or run.alive_in != self._breaks
            if not is_due:
                continue
            is_alive = self._look_at(run)
            with self._changed:
                if self._queue or self._is_closing:
                    return  # what waits says more
                heartbeat = run.heartbeat()
            if not is_alive or run.refused_in == self._breaks:
                continue
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

    def _sent(self, answer: _ReportAnswer, run: _Run, *, is_alive: bool = True) -> None:
        """Record that something was sent of a run; log what the proxy advises, once."""
        if is_alive:
            run.alive_in = self._breaks
        for advice in answer.advice:
            text = "the quota proxy at %s says of query %s: %s"
            self._log_once(f"advice {advice}", text, self._url, run.name or run.query_id, advice)
        for about in answer.information:  # once for all queries that it may be about
            text = "the quota proxy at %s says of query %s, and perhaps of others: %s"
            who = run.name or run.query_id
            self._log_once("information", text, self._url, who, about, level=logging.INFO)

    def _look_at(self, run: _Run) -> bool:
        """Ask Spark what a run does, where it can be asked; return whether the run may be alive.

        Wait LOOK_S at most, and for no earlier look.
        """
        with self._changed:
            is_known = run not in self._looking
            if is_known:
                if self._looker is None:
                    name = "quota-listener-look"
                    self._looker = Thread(target=self._look_on, name=name, daemon=True)
                    self._looker.start()
                limit_s = 0.0 if self._looking else LOOK_S
                self._looking.add(run)
                self._asked.put(run)
                is_known = self._changed.wait_for(lambda: run not in self._looking, limit_s)
        run.looked_s = time.monotonic()
        run.is_waiting = run.look.is_waiting if is_known else None
        # Spark has no event on the end of its queries when only spark.stop() is called.
        return not is_known or bool(run.look.is_there) or run.known_s is None

    def _post(self, report: Mapping[str, Any]) -> _ReportAnswer | None:
        """Send once; return the proxy's answer, None while it is away."""
        self._breaks += self._channel.is_closed_by_proxy()
        answer = None
        try:
            answer = self._channel.post(json.dumps({"sender": self._sender, **report}).encode())
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


class _Look(NamedTuple):
    """What Spark knows of a run."""

    is_there: bool | None = None
    """None: Spark can't be asked, as with Spark Connect."""
    trigger: dict[str, Any] | None = None
    is_waiting: bool | None = None
    """Whether it is between two batches; None when that is not known."""
    done: Sequence[Any] = ()
    """The progress of batches of Kafka that were not known to be done, in order."""


@dataclass(eq=False)
class _Run:
    """One run of a query, from Spark's first event of it to the one on its end."""

    query_id: str
    run_id: str
    name: str | None
    client_id: str | None
    """That it reads with, where that is not its name."""
    batch_id: int | None = None
    """Of the last batch that is known to be done."""
    last_number: int = 0
    """Of the report about it."""
    is_over: bool = False
    """Whether the query has begun another run."""
    look: _Look = _Look()  # noqa: RUF009 - it does not change
    """What Spark said last."""
    trigger: dict[str, Any] | None = None
    is_waiting: bool | None = None
    """Whether it is between two batches; None where Spark did not say it in time."""
    looked_s: float = -math.inf
    """When Spark was asked last."""
    known_s: float | None = None
    """When it was asked what it has answered: all batches that were done by then are known. None
    where it never answered."""
    alive_in: int | None = None
    refused_in: int | None = None
    """After which break of the connection the proxy was sent that it lives, and refused that."""

    def report(self, kind: str, **what: Any) -> dict[str, Any]:
        """Return a report of the run, without its sender."""
        names = {"query_id": self.query_id, "run_id": self.run_id, "name": self.name}
        return {"event": kind, **names, "client_id": self.client_id, **what}

    def heartbeat(self) -> dict[str, Any]:
        """Return the report that it is running."""
        age_ms = None if self.known_s is None else round((time.monotonic() - self.known_s) * 1000)
        about = {"last_batch_id": self.batch_id, "is_waiting": self.is_waiting}
        return self.report("running", age_ms=0, trigger=self.trigger, known_age_ms=age_ms, **about)

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
        """Return the report of the event, without when it was."""
        error = self.about.exception if self.kind == "terminated" else None
        error = error and _ends_of(str(error).partition(_STACK_TRACE)[0])
        batch = _batch(self.about) if self.kind == "progress" else None
        return self.run.report(self.kind, number=self.number, batch=batch, error=error)

    @property
    def late_s(self) -> float:
        """How long after it an event is reported: seconds, where Spark has much to do.

        More than LATEST_S is taken for a difference of clocks: over Spark Connect there are two.
        """
        if self.kind not in ("progress", "idle"):
            return 0.0
        try:
            began = datetime.fromisoformat(self.about.timestamp.replace("Z", "+00:00"))
            is_batch = self.kind == "progress"
            took_s = self.about.durationMs["triggerExecution"] / 1000 if is_batch else 0.0
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
    information: tuple[str, ...] = ()
    """What may be as it is meant to be, each in a short line."""


class _TimedResponse(HTTPResponse):
    """An answer of which all is to come in the socket's time limit, however slowly it trickles."""

    def __init__(self, sock: socket.socket, *given: Any, **more: Any) -> None:
        super().__init__(sock, *given, **more)
        self.fp = io.BufferedReader(_TimedRaw(sock, self.fp.detach()))


class _TimedRaw(io.RawIOBase):
    """What comes over a socket, read with what is left of its time limit."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase) -> None:
        self._sock, self._raw = sock, raw
        self._end_s = time.monotonic() + (sock.gettimeout() or 0.0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


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
        self._place, self._timeout_s = (parts.hostname, parts.port), timeout_s
        self._files = (ca_file, cert_file) if parts.scheme == "https" else None
        self._prepare()

    def _prepare(self) -> None:
        """Make the connection, with the certificates that the files have now.

        Raises ValueError.
        """
        if self._files is None:
            self._connection = HTTPConnection(*self._place, timeout=self._timeout_s)
        else:
            context = _tls_context(*self._files)
            self._connection = HTTPSConnection(
                *self._place, timeout=self._timeout_s, context=context
            )
        self._connection.response_class = _TimedResponse

    def close(self) -> None:
        self._connection.close()

    def post(self, body: bytes) -> _ReportAnswer:
        try:
            if self._connection.sock is not None:
                self._connection.sock.settimeout(self._connection.timeout)
            self._connection.request("POST", self._path, body, self._headers)
            with self._connection.getresponse() as response:
                content = response.read(MAX_ANSWER_BYTES)
                if not response.isclosed():  # an answer that has no end
                    self._connection.close()
                return _read_answer(response.status, content)
        except BaseException as error:
            self._connection.close()
            if isinstance(error, ssl.SSLError):  # our files may have been renewed as well
                with suppress(ValueError):
                    self._prepare()
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


def _tls_context(ca_file: str | None, cert_file: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ValueError(f"ca_file {ca_file!r} can't be read: {error}") from error
    try:
        if cert_file is not None:
            context.load_cert_chain(cert_file)
    except OSError as error:
        raise ValueError(f"cert_file {cert_file!r} can't be used: {error}") from error
    return context


def _look_at(query_id: str, run_id: str, batch_id: int | None) -> _Look:
    """Ask the JVM for a run, and for its batches after `batch_id`.

    What is asked is Spark's own, not its public API: it may fail.
    """
    try:
        session = SparkSession._instantiatedSession  # noqa: SLF001
        if session is None:
            return _Look()
        jvm, of_jvm = session._jvm, session._jsparkSession  # noqa: SLF001
        key = jvm.java.util.UUID.fromString(query_id)
        query = of_jvm.sharedState().activeStreamingQueries().get(key)
        if query is None or query.runId().toString() != run_id or not query.isActive():
            return _Look(is_there=False)
        trigger = parse_trigger(query.trigger().toString())
        status = query.status()
        is_waiting = is_between_batches(status.isTriggerActive(), status.message())
        # After the status: then it knows of all batches that were done before the run waited.
        return _Look(True, trigger, is_waiting, batches_after(batch_id, query))
    except Exception:
        return _Look()


def batches_after(batch_id: int | None, query: Any) -> list[Any]:
    """Return the progress of later batches of Kafka, of those that Spark keeps: the last 100.

    A trigger that planned no batch has a progress, too, with the number of the next one.
    """
    known, last = -1 if batch_id is None else batch_id, query.lastProgress()
    if last is None or last.batchId() + _is_done(last) <= known + 1:
        return []
    later = takewhile(lambda kept: kept.batchId() > known, reversed(query.recentProgress()))
    found = [_read_progress(kept.json()) for kept in later if _is_done(kept)]
    return [each for each in reversed(found) if _reads_kafka(each)]


def _is_done(progress: Any) -> bool:
    """Return whether a progress of the JVM is that of a batch."""
    return bool(progress.durationMs().containsKey("addBatch"))


def _read_progress(text: str) -> Any:
    """Read the JSON of a progress: one call to the JVM, where each field of it would be one."""
    read = json.loads(text)
    read["sources"] = [SimpleNamespace(**source) for source in read["sources"]]
    return SimpleNamespace(**read)


def parse_trigger(text: str) -> dict[str, Any] | None:
    """Read Spark's text of a trigger, such as `ProcessingTimeTrigger(2000)`; None if unknown."""
    match = _TRIGGER.fullmatch(text)
    if match is None or match[1] not in _TRIGGER_KINDS:
        return None
    return {"kind": _TRIGGER_KINDS[match[1]], "interval_ms": int(match[2]) if match[2] else None}


def is_between_batches(is_trigger_active: bool, message: str) -> bool | None:
    """Return whether a run waits: all that it looked up is done, or it planned nothing of it.

    None when Spark's message says nothing of it.
    """
    is_done = not is_trigger_active and message.startswith(_IN_A_BATCH)
    if is_done or message.startswith(_BETWEEN_BATCHES):
        return True
    return False if message.startswith((*_IN_A_BATCH, _LOOKING_UP)) else None


def _read_answer(status: int, content: bytes) -> _ReportAnswer:
    """Read the proxy's JSON; anything else that answers there is shown as it is.

    Raises HTTPException where it says that it has taken the report, and not in JSON.
    """
    try:
        said = json.loads(content)
        text = "; ".join(str(said[key]) for key in ("error", "fix") if key in said)
        reason = said.get("reason", "")
        lists = [said.get(key, []) for key in ("advice", "information")]
        if not all(isinstance(each, list) for each in lists):
            raise TypeError("no answer of the proxy")
        advice, information = (tuple(_short(str(each)) for each in given) for given in lists)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        shown = _short(content.decode("utf-8", "replace"))
        if status < _SENT_BELOW and isinstance(error, (ValueError, RecursionError)):
            raise HTTPException(f"HTTP {status} from what is no quota proxy: {shown}") from None
        return _ReportAnswer(status, "", shown)
    return _ReportAnswer(status, _short(str(reason)), _short(text), advice, information)


def _short(text: str) -> str:
    line = " ".join(text[:MAX_SHOWN_CHARS].split())
    return "".join(each if each.isprintable() else "\ufffd" for each in line)


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


def _are_names(given: Any) -> bool:
    is_list = isinstance(given, Collection) and not isinstance(given, (str, bytes, Mapping))
    return is_list and bool(given) and all(isinstance(each, str) and each for each in given)


def _check_name(what: str, name: str) -> None:
    if not name or _SEPARATOR.search(name):
        raise ValueError(f"{what} is not empty and has no spaces or commas: {name!r}")
