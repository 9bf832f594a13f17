"""Asks Kafka's brokers over plain sockets, one question at a time; every wait has an end.

The store is called from threads and must know of each request whether it was answered: a client
that retries by itself, in its own time, would leave open what became of a transaction. Messages are
kafka-python's; their versions are the newest that Kafka 2.5 has, and every later one.
"""

import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from kafka.errors import RetriableError, for_code
from kafka.protocol.metadata import FindCoordinatorRequest, MetadataRequest

from metrics.clock import MS_PER_SECOND
from proxy.cluster.login import Login

Address: TypeAlias = tuple[str, int]
"""Host and port."""

ANSWER_TIMEOUT_S = 5.0
"""To connect, and for each answer; less when the deadline is nearer."""

RETRY_INTERVAL_S = 0.1

IDLE_S = 60.0
"""A connection that was not used for so long is opened anew: brokers close idle ones."""

MAX_ANSWER_BYTES = 64 * 2**20
"""A longer answer is none of Kafka's: we ask for far less."""

CLIENT_ID = "kafka-quota-proxy-state"

FENCED = frozenset({47, 48, 49, 59, 90, 120})
"""INVALID_PRODUCER_EPOCH, INVALID_TXN_STATE, INVALID_PRODUCER_ID_MAPPING, UNKNOWN_PRODUCER_ID,
PRODUCER_FENCED, TRANSACTION_ABORTABLE: our transaction, or our producer, is no more."""

UNKNOWN_TOPIC = 3
CONCURRENT_TRANSACTIONS = 51
UNKNOWN_SERVER_ERROR = -1
"""The broker failed over it, as it may when several producers begin under one id at once."""

METADATA_VERSION = 5
FIND_COORDINATOR_VERSION = 2
TRANSACTION_COORDINATOR = 1


_LENGTH = struct.Struct(">i")
_CORRELATION_ID = 1
"""The same for all: there is one question at a time."""

Value = TypeVar("Value")

_WANTS_LOGIN = (
    "; so does a listener that wants a login, which the proxy itself has not (cluster.sasl)"
)


class UnansweredError(Exception):
    """There was no answer, or one that asks to try again; the message says where and why."""


class RefusedError(Exception):
    """The broker said no, and will again."""

    def __init__(self, doing: str, error_code: int, reason: str | None = None) -> None:
        super().__init__(f"{doing}: {name_of(error_code)}{f', {reason}' if reason else ''}")
        self.error_code = error_code


class FencedError(Exception):
    """Our producer may not write any more: another one came, or its transaction timed out."""


class Deadline:
    """A moment by which something must be done."""

    def __init__(self, limit_s: float) -> None:
        self._at_s = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until then, 0 when it has passed."""
        return max(self._at_s - time.monotonic(), 0.0)

    @property
    def left_ms(self) -> int:
        """The same in whole milliseconds, as requests have it."""
        return int(self.left_s * MS_PER_SECOND)

    def retry(self, attempt: Callable[[], Value]) -> Value:
        """Call until there is an answer; the last UnansweredError when there is none in time."""
        while True:
            try:
                return attempt()
            except UnansweredError:
                if self.left_s <= RETRY_INTERVAL_S:
                    raise
            time.sleep(RETRY_INTERVAL_S)


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    used_s: float


class Link:
    """Connections to brokers, opened when they are needed, and where what is to be found.

    Not for several threads at a time.
    """

    def __init__(
        self,
        servers: Sequence[Address],
        tls: ssl.SSLContext | None,
        login: Login | None = None,
    ) -> None:
        self._servers = tuple(servers)
        self._tls = tls
        self._login = login
        self._open: dict[Address, _Connection] = {}
        self._next_server = 0
        self._places: dict[tuple[str, str], Address] = {}

    def ask(self, request: Any, deadline: Deadline, address: Address | None = None) -> Any:
        """Send a request of kafka-python's, made with its version, and return the response.

        Args:
            request: as it is to be sent, without header.
            deadline: after it nothing is waited for.
            address: of a broker; None: any bootstrap server that answers.

        Raises UnansweredError.
        """
        if address is not None:
            return self._ask_at(address, request, deadline)
        for attempt in range(len(self._servers)):
            server = self._servers[self._next_server % len(self._servers)]
            try:
                return self._ask_at(server, request, deadline)
            except UnansweredError:
                self._next_server += 1
                if attempt == len(self._servers) - 1:
                    raise
        raise AssertionError("a cluster has at least one bootstrap server")

    def metadata(self, topic: str, deadline: Deadline) -> Any:
        """Return what the cluster says of itself and the topic, which is not made by asking."""
        wanted = MetadataRequest.MetadataRequestTopic(name=topic)
        request = MetadataRequest[METADATA_VERSION](
            topics=[wanted], allow_auto_topic_creation=False
        )
        return self.ask(request, deadline)

    def leader(self, topic: str, deadline: Deadline) -> Address:
        """Return the broker that leads the topic's only partition."""
        place = ("leader", topic)
        if place not in self._places:
            answer = self.metadata(topic, deadline)
            (found,) = answer.topics
            if found.error_code == UNKNOWN_TOPIC:
                raise UnansweredError(f"topic {topic} is gone")
            self.check(found.error_code, f"look for topic {topic}")
            (partition,) = [part for part in found.partitions if part.partition_index == 0]
            self.check(partition.error_code, f"look for the leader of topic {topic}")
            brokers = {broker.node_id: (broker.host, broker.port) for broker in answer.brokers}
            if partition.leader_id not in brokers:
                raise UnansweredError(f"topic {topic} has no leader")
            self._places[place] = brokers[partition.leader_id]
        return self._places[place]

    def coordinator(self, transactional_id: str, deadline: Deadline) -> Address:
        """Return the broker that looks after the transactions."""
        place = ("coordinator", transactional_id)
        if place not in self._places:
            request = FindCoordinatorRequest[FIND_COORDINATOR_VERSION](
                key=transactional_id, key_type=TRANSACTION_COORDINATOR
            )
            answer = self.ask(request, deadline)
            self.check(answer.error_code, "look for the transaction coordinator")
            self._places[place] = (answer.host, answer.port)
        return self._places[place]

    def check(self, error_code: int, doing: str) -> None:
        """Raise as the function `check`; when it may pass, also look for all brokers anew."""
        try:
            check(error_code, doing)
        except UnansweredError:
            self.forget()
            raise

    def forget(self) -> None:
        """Close all connections, and look anew for leader and coordinator."""
        self._places.clear()
        while self._open:
            _, connection = self._open.popitem()
            connection.socket.close()

    def _ask_at(self, address: Address, request: Any, deadline: Deadline) -> Any:
        host, port = address
        limit = Deadline(min(ANSWER_TIMEOUT_S, deadline.left_s))
        try:
            connection = self._connection(address, limit)
            response = _ask(connection, request, limit)
        except TimeoutError:
            reason = "no answer in time"
        except Exception as error:  # who knows what answers at that address
            reason = _reason(error, logged_in=self._login is not None)
        else:
            self._open[address].used_s = time.monotonic()
            return response
        self.forget()
        raise UnansweredError(reason if "login of user" in reason else f"{host}:{port}: {reason}")

    def _connection(self, address: Address, limit: Deadline) -> socket.socket:
        known = self._open.get(address)
        if known is not None:
            if time.monotonic() - known.used_s < IDLE_S:
                return known.socket
            known.socket.close()
        if self._login is not None:
            self._login.check(address)
        made = socket.create_connection(address, max(limit.left_s, 0.001))
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                _wait_at_most(made, limit)
                made = self._tls.wrap_socket(made, server_hostname=address[0])
            if self._login is not None:
                exchange = self._login.exchange(address)
                request = next(exchange)
                while request is not None:
                    request = exchange.send(_ask(made, request, limit))
        except BaseException:
            made.close()
            raise
        self._open[address] = _Connection(made, time.monotonic())
        return made


def check(error_code: int, doing: str, reason: str | None = None) -> None:
    """Raise what an error code of Kafka means to us; do nothing for 0."""
    if not error_code:
        return
    if error_code in FENCED:
        raise FencedError(name_of(error_code))
    if error_code == UNKNOWN_SERVER_ERROR or issubclass(for_code(error_code), RetriableError):
        raise UnansweredError(f"{doing}: {name_of(error_code)}")
    raise RefusedError(doing, error_code, reason)


def name_of(error_code: int) -> str:
    """Return Kafka's name of an error, such as NOT_COORDINATOR."""
    error = for_code(error_code)
    return str(getattr(error, "message", "")) or f"error {error_code}"


def _ask(connection: socket.socket, request: Any, limit: Deadline) -> Any:
    request.with_header(correlation_id=_CORRELATION_ID, client_id=CLIENT_ID)
    _wait_at_most(connection, limit)
    connection.sendall(request.encode(header=True, framed=True))
    body = _answer(connection, limit)
    return request.header.get_response_class().decode(body, header=True)


def _answer(connection: socket.socket, limit: Deadline) -> bytes:
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, limit))
    if not 0 < length <= MAX_ANSWER_BYTES:
        raise ValueError("what answers is not Kafka, or wants TLS (cluster.tls)")
    return _read(connection, length, limit)


def _read(connection: socket.socket, size: int, limit: Deadline) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        _wait_at_most(connection, limit)
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _wait_at_most(connection: socket.socket, limit: Deadline) -> None:
    if not limit.left_s:
        raise TimeoutError
    connection.settimeout(limit.left_s)


def _reason(error: Exception, *, logged_in: bool) -> str:
    if isinstance(error, EOFError):
        return "the broker closed the connection" + ("" if logged_in else _WANTS_LOGIN)
    return str(error) or type(error).__name__
