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
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from threading import Condition, Thread
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pyspark.sql.streaming import StreamingQueryListener

__all__ = ["QuotaListener", "client_options"]

BOOTSTRAP_VARIABLE = "KAFKA_QUOTA_PROXY_BOOTSTRAP_SERVERS"
DEFAULT_BOOTSTRAP = "localhost:19092"
REPORT_PATH = "/v1/spark/batches"

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
"""Pauses between tries double from the first to the longest while the proxy is away."""

MAX_DOUBLINGS = 10  # far beyond the longest, and no overflow

LAST_EVENT_S = 1.0
"""How long the end of the driver may wait for Spark to tell of the end of its queries."""

EXIT_S = 2.0
"""How long it may wait then for the last reports to go out."""

MAX_RUNS = 1000
"""Runs of queries that are known at a time; the one known for longest is forgotten first."""

MAX_REASONS = 50
"""Different faults that are logged, each once."""

MAX_ERROR_CHARS = 1000
MAX_SHOWN_CHARS = 300
MAX_ANSWER_BYTES = 64 * 1024

_LEFT_OUT = "\n...\n"
_SENT_BELOW = 300
_UNAUTHORIZED = 401
_CONFLICT = 409
_FAULT_FROM = 500

_SEPARATOR = re.compile(r"[\s,]")
_KAFKA_OFFSETS = re.compile(r"""\{\s*["'][a-zA-Z0-9._-]+["']\s*:\s*\{""")
_STACK_TRACE = "\n\tat "
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
    Faults go to the logger `quota_listener`, each kind once.

    Reported are queries that read Kafka and have a name; one without needs its id in `clients`.

    Args:
        url: the proxy's admin address, `http://HOST:PORT` or `https://HOST:PORT`.
        token: the text of the proxy's `admin.token_file`; None when it has none.
        clients: name of a query (id of one without a name) -> the Kafka client id that it reads
            with. A query that is not in it reads with its name.
        queue_size: reports that may wait, from 1. One more drops the oldest one about a batch.
        timeout_s: how long a connect, a send or an answer may take.
        max_retries: how often a report is sent again, from 0; then it is dropped.
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
        self._names: OrderedDict[str, str | None] = OrderedDict()  # by run id
        self._queue: deque[_Event] = deque()
        self._changed = Condition()
        self._number = 0
        self._failures = 0
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
            self._changed.wait_for(lambda: not self._names, LAST_EVENT_S)
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
                name = self._names.pop(run_id) if kind == "terminated" else self._names[run_id]
                known = name is not None or query_id in self._clients
                if known:
                    self._number += 1
                    self._put(_Event(self._number, kind, query_id, run_id, name, about, seen_s))
                self._changed.notify_all()
            if not known:
                self._log_once("nameless", "a query without a name is not reported: %s", _NAME_IT)
        except Exception:
            self._log_once("event", "an event of Spark is not reported", exc_info=True)

    def _follows(self, kind: str, about: Any, run_id: str) -> bool:
        """Learn the names of runs, which not every event tells; say whether this one is of use."""
        if kind == "started" or (kind == "progress" and _reads_kafka(about)):
            self._names[run_id] = about.name
            if len(self._names) > MAX_RUNS:
                self._names.popitem(last=False)
        elif kind == "progress":
            self._names.pop(run_id, None)
        return run_id in self._names

    def _put(self, event: _Event) -> None:
        if len(self._queue) == self._queue_size:
            self.dropped += 1
            # The end of a run matters more than a batch: the next batch says most of it again.
            oldest = (i for i, waiting in enumerate(self._queue) if waiting.kind == "progress")
            del self._queue[next(oldest, 0)]
        self._queue.append(event)

    def _send_all(self) -> None:
        """Send until the end; the own thread runs this."""
        while (event := self._next()) is not None:
            try:
                self._send(event)
            except Exception:
                self._drop(1)
                self._log_once("report", "a report can't be sent", exc_info=True)
        self._channel.close()

    def _next(self) -> _Event | None:
        """Wait for an event; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._deadline_s is not None)
            if self._queue and not self._late():
                return self._queue.popleft()
            self._drop(len(self._queue))
            self._queue.clear()
            return None

    def _send(self, event: _Event) -> None:
        report = _report(event, self._sender, self._clients.get(event.name or event.query_id))
        for attempt in range(self._max_retries + 1):
            if attempt and not self._pause():
                break
            report["age_ms"] = round((time.monotonic() - event.seen_s) * 1000)
            try:
                answer = self._channel.post(json.dumps(report).encode())
            except (OSError, HTTPException) as error:
                self._missed(f"{type(error).__name__}: {error}")
                continue
            if answer.status >= _FAULT_FROM:
                self._missed(f"HTTP {answer.status}")
                continue
            self._reached()
            # A repeat of what the proxy took although its answer was lost.
            taken_before = attempt and (answer.status, answer.reason) == (_CONFLICT, "repeated")
            if answer.status < _SENT_BELOW or taken_before:
                self.sent += 1
            else:
                self._log_refusal(answer)
                self.refused += 1
            return
        self._drop(1)

    def _pause(self) -> bool:
        """Wait before the next try; say whether there may be one."""
        longest_s = min(FIRST_PAUSE_S * 2.0 ** min(self._failures, MAX_DOUBLINGS), LONGEST_PAUSE_S)
        pause_s = longest_s * random.uniform(0.5, 1)  # so that not all drivers come at once
        with self._changed:
            closing = self._changed.wait_for(lambda: self._deadline_s is not None, pause_s)
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
        if kind not in self._logged and len(self._logged) < MAX_REASONS:
            self._logged.add(kind)
            _log.warning(text, *args, exc_info=exc_info)


class _Event(NamedTuple):
    """What Spark told, as it waits to be sent."""

    number: int
    kind: str
    query_id: str
    run_id: str
    name: str | None
    about: Any
    """Spark's event; for a batch its progress."""
    seen_s: float


class _Answer(NamedTuple):
    """What the proxy said to a report."""

    status: int
    reason: str
    """The code of a refusal; empty when there is none."""
    text: str
    """What is wrong and how to mend it, in one short line."""


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
            if self._closed_by_proxy():
                self._connection.close()
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

    def _closed_by_proxy(self) -> bool:
        """Say whether the idle connection has something to read, which can only be its end."""
        if self._connection.sock is None:
            return False
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection.sock, selectors.EVENT_READ)
            return bool(selector.select(0))


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
    except (ValueError, TypeError, AttributeError, RecursionError):
        reason, text = "", content.decode("utf-8", "replace")
    return _Answer(status, _short(str(reason)), _short(text))


def _short(text: str) -> str:
    return " ".join(text[:MAX_SHOWN_CHARS].split())


def _ends_of(text: str) -> str:
    """Leave out the middle of a long error: what went wrong in Python code stands at its end."""
    if len(text) <= MAX_ERROR_CHARS:
        return text
    kept = (MAX_ERROR_CHARS - len(_LEFT_OUT)) // 2
    return text[:kept] + _LEFT_OUT + text[-kept:]


def _report(event: _Event, sender: str, client_id: str | None) -> dict[str, Any]:
    """Make the report of an event; `age_ms` is added when it is sent."""
    error = event.about.exception if event.kind == "terminated" else None
    return {
        "sender": sender,
        "number": event.number,
        "event": event.kind,
        "query_id": event.query_id,
        "run_id": event.run_id,
        "name": event.name,
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
