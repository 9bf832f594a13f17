"""Tells the quota proxy what each streaming query has read, from within the Spark driver.

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
import os
import random
import re
import selectors
import ssl
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from datetime import datetime
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

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 1.0
"""Pauses between tries double from the first to the longest while the proxy is away."""

MAX_DOUBLINGS = 10  # far beyond the longest, and no overflow

HEARTBEAT_S = 2.0
"""A run of which nothing was sent for so long is said to be running."""

WATCH_S = 0.2
"""Between two looks at the idle connection: whether the proxy has closed it."""

LOOK_S = 0.5
"""How long Spark may take to say what a run does; then it is not known."""

LAST_EVENT_S = 1.0
"""How long the end of the driver may wait for Spark to tell of the end of its queries."""

EXIT_S = 2.0
"""How long it may wait then for the last reports to go out."""

MAX_RUNS = 1000
"""Runs of queries that are known at a time; the one known for longest is forgotten first."""

LATEST_S = 60.0
"""How late Spark may tell of a batch."""

MAX_REASONS = 50
"""Different faults that are logged, each once."""

MAX_ERROR_CHARS = 1000
MAX_SHOWN_CHARS = 400
MAX_ANSWER_BYTES = 64 * 1024

_LEFT_OUT = "\n...\n"
_SENT_BELOW = 300
_UNAUTHORIZED = 401
_CONFLICT = 409
_FAULT_FROM = 500
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
_IN_A_BATCH = (
    "Writing offsets to log",
    "Processing new data",
    "No new data but cleaning up state",
)
"""How Spark's messages begin on what a query does."""

_NAME_IT = "give it a name with queryName(), or put its id into clients"

_log = logging.getLogger("quota_listener")


def client_options(
    name: str, bootstrap_servers: str | None = None, by_group: bool = False
) -> dict[str, str]:
    """Give the options of Spark's Kafka source that tie a query to one Kafka client.

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

    Raises:
        ValueError: a name or an address is empty or has spaces, or a name has commas.

    """
    _check_name("name", name)
    servers = bootstrap_servers
    if servers is None:
        servers = os.environ.get(BOOTSTRAP_VARIABLE) or DEFAULT_BOOTSTRAP
    for server in servers.split(","):
        host, _, port = server.rpartition(":")
        if not host or not port.isdecimal() or _SEPARATOR.search(host):
            raise ValueError(
                f"bootstrap servers are HOST:PORT,HOST:PORT without spaces: {servers!r}"
            )
    key = "groupIdPrefix" if by_group else "kafka.client.id"
    return {"kafka.bootstrap.servers": servers, key: name}


class QuotaListener(StreamingQueryListener):  # type: ignore[misc]  # pyspark's types are not read
    """Reports each batch of each query to the proxy; never slows or fails a query.

    Spark's thread only numbers an event and puts it into a bounded queue. A daemon thread sends the
    reports in order and tries again, with pauses that grow, while the proxy is away. What can't be
    sent is dropped, never waited for: the numbers count from 1, so the proxy sees what is missing.
    The last report about a batch of each run stays until it is sent. A proxy that comes back is
    told at once which runs live, and every HEARTBEAT_S of those that report nothing else.
    Faults go to the logger `quota_listener`, each kind once.

    Reported are queries that read Kafka and have a name; one without needs its id in `clients`.

    Args:
        url: the proxy's admin address, `http://HOST:PORT` or `https://HOST:PORT`.
        token: the text of the proxy's `admin.token_file`; None when it has none.
        clients: name of a query (id of one without a name) -> the Kafka client id that it reads
            with. A query that is not in it reads with its name.
        queue_size: reports that may wait, from 1. One more drops the oldest one about a batch,
            while there is one with a later batch of its run.
        timeout_s: how long a connect, a send or an answer may take.
        max_retries: how often a report is sent again, from 0; then it is dropped. While the proxy
            is away only what a later report says again is dropped so.
        ca_file: who may sign the proxy's certificate; None takes the system's authorities.

    Raises:
        ValueError: an argument makes no sense; says which and why.

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
    ) -> None:
        if queue_size < 1 or max_retries < 0 or not timeout_s > 0:
            raise ValueError(
                "queue_size is at least 1, max_retries at least 0, timeout_s above 0: "
                f"{queue_size}, {max_retries}, {timeout_s}"
            )
        self._clients = dict(clients or {})
        for query, client_id in self._clients.items():
            _check_name(f"the client id of {query!r}", client_id)
        self.sent = 0
        """Reports that the proxy took."""
        self.refused = 0
        """Reports that the proxy did not want; the log says why."""
        self.dropped = 0
        """Reports given up: too many waited, or the proxy was away for too long."""
        self._url = url
        self._channel = _Channel(url, token, timeout_s, ca_file)
        self._sender = uuid.uuid4().hex
        self._queue_size = queue_size
        self._max_retries = max_retries
        self._runs: OrderedDict[str, _Run] = OrderedDict()  # by run id
        self._queue: deque[_Event] = deque()
        self._changed = Condition()
        self._number = 0
        self._failures = 0
        self._breaks = 0  # how often the proxy was found to be away
        self._aside = _Aside("quota-listener-look")
        self._logged: set[str] = set()
        self._deadline_s: float | None = None
        self._thread = Thread(target=self._send_all, name="quota-listener", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802  # Spark's name
        """Take Spark's event: a run starts. Called within `start()`."""
        self._take("started", event)

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """Take Spark's event: a batch has ended."""
        self._take("progress", event)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Take Spark's event: there was nothing to read."""
        self._take("idle", event)

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """Take Spark's event: a run was stopped or has failed."""
        self._take("terminated", event)

    def close(self, timeout_s: float = EXIT_S) -> bool:
        """Take no more events and send what waits; say whether all of it went out in time.

        What did not is dropped. Called by itself at the end of the driver.
        """
        atexit.unregister(self._end)
        with self._changed:
            dropped = self.dropped
            if self._deadline_s is None:
                self._deadline_s = time.monotonic() + timeout_s
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self.dropped == dropped

    def _end(self) -> None:
        """Close at the end of the driver. Spark tells of a query's end after `stop()` returned."""
        with self._changed:
            self._changed.wait_for(lambda: not self._runs, LAST_EVENT_S)
        self.close()

    def _take(self, kind: str, event: Any) -> None:
        """Queue what Spark tells. Spark's threads run this, so it neither raises nor waits."""
        try:
            seen_s = time.monotonic()
            about = event.progress if kind == "progress" else event
            query_id, run_id = str(about.id), str(about.runId)
            with self._changed:
                if self._deadline_s is not None or not self._follows(kind, about, run_id):
                    return
                run = self._runs.pop(run_id) if kind == "terminated" else self._runs[run_id]
                known = run.name is not None or query_id in self._clients
                if known:
                    self._number += 1
                    self._put(_Event(self._number, kind, run, about, seen_s, time.time()))
                self._changed.notify_all()
            if not known:
                self._log_once("nameless", "a query without a name is not reported: %s", _NAME_IT)
        except Exception:
            self._log_once("event", "an event of Spark is not reported", exc_info=True)

    def _follows(self, kind: str, about: Any, run_id: str) -> bool:
        """Learn of runs, whose names not every event tells; say whether this one is of use."""
        if kind == "started" or (kind == "progress" and _reads_kafka(about)):
            if run_id not in self._runs:
                self._begin_run(_Run(str(about.id), run_id, about.name))
            if kind == "progress":
                self._runs[run_id].batch_id = about.batchId
        elif kind == "progress":
            self._runs.pop(run_id, None)
        return run_id in self._runs

    def _begin_run(self, run: _Run) -> None:
        for other in self._runs.values():
            # Spark tells the end of a run after the start of the next.
            other.is_over |= other.query_id == run.query_id
        self._runs[run.run_id] = run
        if len(self._runs) > MAX_RUNS:
            self._runs.popitem(last=False)

    def _put(self, event: _Event) -> None:
        if event.kind == "progress":
            event.run.last_number = event.number
        if len(self._queue) == self._queue_size:
            self.dropped += 1
            # The end of a run matters more than a batch: the next batch says most of it again.
            oldest = (i for i, waiting in enumerate(self._queue) if waiting.is_said_again)
            del self._queue[next(oldest, 0)]
        self._queue.append(event)

    def _send_all(self) -> None:
        """Send until the end; the own thread runs this."""
        while True:
            event = None
            try:
                event = self._next()
                if event is not None:
                    self._send(event)
                elif self._is_closing:
                    break
                else:
                    self._greet()
            except Exception:
                self._drop(0 if event is None else 1)
                self._log_once("report", "a report can't be sent", exc_info=True)
        self._channel.close()

    @property
    def _is_closing(self) -> bool:
        return self._deadline_s is not None

    def _next(self) -> _Event | None:
        """Wait for an event; None when it is time to look whether a greeting is due, or the end."""
        with self._changed:
            if not self._queue and not self._is_closing:
                self._changed.wait(WATCH_S if self._runs else None)
            if self._queue and not self._late():
                return self._queue.popleft()
            if self._is_closing:
                self._drop(len(self._queue))
                self._queue.clear()
            return None

    def _send(self, event: _Event) -> None:
        run = event.run
        report = _report(event, self._sender, self._clients.get(run.name or run.query_id))
        if event.kind == "started":
            self._look_at(run)
            report["trigger"] = run.trigger
        tries = 0
        while True:
            age_s = time.monotonic() - event.seen_s + event.late_s
            report["age_ms"] = round(age_s * 1000)
            answer = self._post(report)
            tries += 1
            if answer is not None and answer.status < _FAULT_FROM:
                break
            is_spare = answer is not None or event.is_said_again
            if (is_spare and tries > self._max_retries) or not self._pause():
                self._drop(1)
                return
        self._pass_on(answer, run)
        run.sent_s = time.monotonic()
        if event.kind == "started":
            run.told_in = self._breaks
        # A repeat of what the proxy took although its answer was lost.
        taken_before = tries > 1 and (answer.status, answer.reason) == (_CONFLICT, "repeated")
        if answer.status < _SENT_BELOW or taken_before:
            self.sent += 1
        else:
            self._log_refusal(answer)
            self.refused += 1

    def _greet(self) -> None:
        """Say of each run that lives that it does, where nothing else has said so for a while."""
        if self._channel.is_closed_by_proxy():
            self._breaks += 1
        with self._changed:
            runs = [run for run in self._runs.values() if self._is_greeted(run)]
        for run in runs:
            is_due = run.told_in != self._breaks or _since(run.sent_s) >= HEARTBEAT_S
            if not is_due or run.refused_in == self._breaks:
                continue
            if not self._look_at(run):
                run.sent_s, run.told_in = time.monotonic(), self._breaks  # it is looked for again
                continue
            with self._changed:
                if self._queue or self._is_closing:
                    return  # what waits says more
                greeting = _greeting(run, self._sender, self._clients)
            answer = self._post(greeting)
            if answer is None or answer.status >= _FAULT_FROM:
                self._pause()
                return
            self._pass_on(answer, run)
            run.sent_s, run.told_in = time.monotonic(), self._breaks
            if answer.status >= _SENT_BELOW:  # a proxy that knows no greetings, for one
                run.refused_in = self._breaks
                if self._is_new(f"greeting {answer.status} {answer.reason}"):
                    text = "the quota proxy at %s does not hear which queries run (HTTP %d): %s"
                    _log.info(text, self._url, answer.status, answer.text)

    def _pass_on(self, answer: _Answer, run: _Run) -> None:
        """Log what the proxy advises, once."""
        for advice in answer.advice:
            text = "the quota proxy at %s says of query %s: %s"
            self._log_once(f"advice {advice}", text, self._url, run.name or run.query_id, advice)

    def _is_greeted(self, run: _Run) -> bool:
        return not run.is_over and (run.name is not None or run.query_id in self._clients)

    def _look_at(self, run: _Run) -> bool:
        """Ask Spark what a run does, where it can be asked; say whether the run may be alive."""
        look = self._aside.result(lambda: _look_at(run.query_id, run.run_id), LOOK_S)
        run.under_way = look.under_way if look is not None else None
        if look is not None and look.is_there:
            run.was_seen, run.trigger = True, look.trigger
        # Spark does not tell of the end of its queries when only spark.stop() is called.
        return look is None or bool(look.is_there) or not run.was_seen

    def _post(self, report: Mapping[str, Any]) -> _Answer | None:
        """Send once; return what the proxy says, None while it is away."""
        if self._channel.is_closed_by_proxy():
            self._breaks += 1
        try:
            answer = self._channel.post(json.dumps(report).encode())
        except (OSError, HTTPException) as error:
            self._missed(f"{type(error).__name__}: {error}")
            return None
        if answer.status >= _FAULT_FROM:
            self._missed(f"HTTP {answer.status}")
            return None if answer.status in _AWAY else answer
        self._reached()
        return answer

    def _pause(self) -> bool:
        """Wait before the next try; say whether there may be one."""
        longest_s = min(FIRST_PAUSE_S * 2.0 ** min(self._failures, MAX_DOUBLINGS), LONGEST_PAUSE_S)
        pause_s = longest_s * random.uniform(0.5, 1)  # so that not all drivers come at once
        with self._changed:
            closing = self._changed.wait_for(lambda: self._is_closing, pause_s)
        if closing:  # there is little time left: the last tries come fast
            time.sleep(FIRST_PAUSE_S)
        return not self._late()

    def _late(self) -> bool:
        return self._deadline_s is not None and time.monotonic() >= self._deadline_s

    def _drop(self, reports: int) -> None:
        with self._changed:
            self.dropped += reports

    def _missed(self, why: str) -> None:
        if not self._failures:
            text = "the quota proxy at %s does not answer (%s); queries go on, reports wait"
            _log.warning(text, self._url, _short(why))
        self._failures += 1
        self._breaks += 1

    def _reached(self) -> None:
        if self._failures:
            text = "the quota proxy at %s answers again; %d reports were dropped so far"
            _log.info(text, self._url, self.dropped)
        self._failures = 0

    def _log_refusal(self, answer: _Answer) -> None:
        text = "the quota proxy at %s refuses reports (HTTP %d%s): %s"
        about = answer.text
        if answer.status == _UNAUTHORIZED:
            about = f"{about}; pass token= with the text of the proxy's admin.token_file"
        reason = answer.reason and f" {answer.reason}"
        self._log_once(f"{answer.status}{reason}", text, self._url, answer.status, reason, about)

    def _log_once(self, kind: str, text: str, *args: object, exc_info: bool = False) -> None:
        if self._is_new(kind):
            _log.warning(text, *args, exc_info=exc_info)

    def _is_new(self, kind: str) -> bool:
        """Say whether this is the first of its kind, while there is room to remember kinds."""
        if kind in self._logged or len(self._logged) >= MAX_REASONS:
            return False
        self._logged.add(kind)
        return True


class _Run:
    """One run of a query, from what Spark told of it until it told of its end."""

    def __init__(self, query_id: str, run_id: str, name: str | None) -> None:
        self.query_id = query_id
        self.run_id = run_id
        self.name = name
        self.batch_id: int | None = None
        """Of the last batch that Spark told of."""
        self.last_number = 0
        """Of the report about it."""
        self.is_over = False
        """Whether the query has begun another run."""
        self.trigger: dict[str, Any] | None = None
        self.under_way: bool | None = None
        """Whether a batch was, at the last look."""
        self.was_seen = False
        """Whether Spark could be asked for it once."""
        self.sent_s = 0.0
        """When something was sent of it."""
        self.told_in: int | None = None
        """After which break of the connection the proxy was told that it lives."""
        self.refused_in: int | None = None
        """After which break the proxy did not want to hear that."""


class _Event(NamedTuple):
    """What Spark told, as it waits to be sent."""

    number: int
    kind: str
    run: _Run
    about: Any
    """Spark's event; for a batch its progress."""
    seen_s: float
    seen_at_s: float
    """The same on the wall clock."""

    @property
    def late_s(self) -> float:
        """How long after the end of a batch Spark told of it: seconds, where there is much to do.

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
        is_last = self.kind == "progress" and self.number == self.run.last_number
        return self.kind == "idle" or (self.kind == "progress" and not is_last)


class _Answer(NamedTuple):
    """What the proxy said to a report."""

    status: int
    reason: str
    """The code of a refusal; empty when there is none."""
    text: str
    """What is wrong and how to mend it, in one short line."""
    advice: tuple[str, ...] = ()
    """What is to be mended although the report was taken, each in a short line."""


class _Channel:
    """One kept connection to the proxy. Raises OSError and HTTPException when it fails."""

    def __init__(self, url: str, token: str | None, timeout_s: float, ca_file: str | None) -> None:
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
        self._connection: HTTPConnection
        if parts.scheme == "https":
            context = _trust(ca_file)
            self._connection = HTTPSConnection(
                parts.hostname, parts.port, timeout=timeout_s, context=context
            )
        elif ca_file is None:
            self._connection = HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        else:
            raise ValueError(f"a ca_file needs an https address: {url!r}")

    def post(self, body: bytes) -> _Answer:
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

    def close(self) -> None:
        self._connection.close()

    def is_closed_by_proxy(self) -> bool:
        """Say whether the idle connection has something to read, which can only be its end.

        It is closed here too then: the next post opens another one.
        """
        if self._connection.sock is None:
            return False
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection.sock, selectors.EVENT_READ)
            is_closed = bool(selector.select(0))
        if is_closed:
            self._connection.close()
        return is_closed


class _Aside:
    """Runs what may hang in a daemon thread of its own, made when it is wanted."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._works: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: Thread | None = None
        self._is_busy = False

    def result(self, work: Callable[[], _Look], patience_s: float) -> _Look | None:
        """Return what `work`, which may not raise, gives; None when it takes too long."""
        if self._is_busy:  # still, with what took too long before
            return None
        if self._thread is None:
            self._thread = Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        results: SimpleQueue[_Look] = SimpleQueue()
        self._is_busy = True
        self._works.put(lambda: results.put(work()))
        try:
            return results.get(timeout=patience_s)
        except Empty:
            return None

    def _run(self) -> None:
        while True:
            work = self._works.get()
            work()
            self._is_busy = False


class _Look(NamedTuple):
    """What Spark knows of a run."""

    is_there: bool | None = None
    """None: Spark can't be asked, as with Spark Connect."""
    trigger: dict[str, Any] | None = None
    under_way: bool | None = None
    """Whether a batch is planned and not yet done; None when that is not known."""


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
        trigger = _trigger(query.trigger().toString())
        status = query.status()
        return _Look(True, trigger, _is_under_way(status.isTriggerActive(), status.message()))
    except Exception:
        return _Look()


def _trigger(text: str) -> dict[str, Any] | None:
    """Read Spark's text of a trigger, such as `ProcessingTimeTrigger(2000)`; None if unknown."""
    match = _TRIGGER.fullmatch(text)
    kind = _TRIGGER_KINDS.get(match[1]) if match else None
    if match is None or kind is None:
        return None
    return {"kind": kind, "interval_ms": int(match[2]) if match[2] else None}


def _is_under_way(is_trigger_active: bool, message: str) -> bool | None:
    """Say whether a batch is under way. A trigger is active while the end of a log is asked for."""
    if not is_trigger_active and message.startswith(_BETWEEN_BATCHES + _IN_A_BATCH):
        return False
    if message.startswith(_BETWEEN_BATCHES):
        return False
    return True if message in _IN_A_BATCH else None


def _trust(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ValueError(f"ca_file {ca_file!r} can't be read: {error}") from error


def _read_answer(status: int, content: bytes) -> _Answer:
    """Read the proxy's JSON; anything else that answers there is shown as it is."""
    try:
        said = json.loads(content)
        parts = [said[key] for key in ("error", "fix") if key in said]
        reason, text = said.get("reason", ""), "; ".join(map(str, parts))
        advice = tuple(_short(str(each)) for each in said.get("advice", ()))
    except (ValueError, TypeError, AttributeError, RecursionError):
        reason, text, advice = "", content.decode("utf-8", "replace"), ()
    return _Answer(status, _short(str(reason)), _short(text), advice)


def _short(text: str) -> str:
    return " ".join(text[:MAX_SHOWN_CHARS].split())


def _ends_of(text: str) -> str:
    """Leave out the middle of a long error: what went wrong in Python code stands at its end."""
    if len(text) <= MAX_ERROR_CHARS:
        return text
    kept = (MAX_ERROR_CHARS - len(_LEFT_OUT)) // 2
    return text[:kept] + _LEFT_OUT + text[-kept:]


def _since(at_s: float) -> float:
    return time.monotonic() - at_s


def _greeting(run: _Run, sender: str, clients: Mapping[str, str]) -> dict[str, Any]:
    """Make the report that a run lives. It has no number: Spark told nothing."""
    return {
        "sender": sender,
        "event": "running",
        "query_id": run.query_id,
        "run_id": run.run_id,
        "name": run.name,
        "client_id": clients.get(run.name or run.query_id),
        "age_ms": 0,
        "last_batch_id": run.batch_id,
        "under_way": run.under_way,
        "trigger": run.trigger,
    }


def _report(event: _Event, sender: str, client_id: str | None) -> dict[str, Any]:
    """Make the report of an event; `age_ms` is added when it is sent."""
    error = event.about.exception if event.kind == "terminated" else None
    return {
        "sender": sender,
        "number": event.number,
        "event": event.kind,
        "query_id": event.run.query_id,
        "run_id": event.run.run_id,
        "name": event.run.name,
        "client_id": client_id,
        "batch": _batch(event.about) if event.kind == "progress" else None,
        "error": error and _ends_of(str(error).partition(_STACK_TRACE)[0]),
    }


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
    """Say at a glance whether a source's offsets have the shape {topic: {partition: offset}}."""
    return any(_KAFKA_OFFSETS.match(str(source.endOffset)) for source in progress.sources)


def _read_offsets(value: Any) -> dict[str, dict[str, int]] | None:
    """Read a source's offsets, None when they are not of the shape {topic: {partition: offset}}.

    pyspark gives text: JSON from the JVM, a Python dict's text from Spark Connect, and "None" when
    there are none, as at the start of a query's first batch.
    """
    if isinstance(value, str):
        value = _read_text(value)
    if not isinstance(value, dict):
        return None
    for topic, partitions in value.items():
        if not isinstance(topic, str) or not isinstance(partitions, dict):
            return None
        for partition, offset in partitions.items():
            if not str(partition).isdecimal() or type(offset) is not int:
                return None
    return {t: {str(p): offset for p, offset in found.items()} for t, found in value.items()}


def _read_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _check_name(what: str, name: str) -> None:
    if not name or _SEPARATOR.search(name):
        raise ValueError(f"{what} is not empty and has no spaces or commas: {name!r}")
