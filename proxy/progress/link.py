"""Asks the brokers of the real cluster, not through the proxy, over aiokafka's connections.

Of aiokafka only connections and messages are used. Its consumer would read records as soon as it is
assigned partitions, asks for metadata in a way that makes deleted topics anew where the brokers
create topics by themselves, and repeats a commit for a topic that is gone without end.
"""

import asyncio
import logging
import ssl
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from aiokafka.conn import AIOKafkaConnection, create_conn
from aiokafka.errors import (
    IllegalSaslStateError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
    for_code,
)

from proxy.login import Login, closed_by_broker
from proxy.wire.topic_partition import TopicPartition

ANSWER_TIMEOUT_S = 5.0
"""For each step: to connect, and to each answer."""

IDLE_S = 60.0
"""A connection that is not used for so long is closed; the next question opens another."""

CLOSE_TIMEOUT_S = 1.0

MAX_PARTITIONS = 1000
"""In one request. Kafka writes a commit as one record batch of at most 1 MiB, and an offset takes
600 bytes when group and topic have the longest names; nor may decoding hold up the event loop."""

MAX_NAMED = 3
"""So many partitions are named in a message."""

REFUSALS = (IllegalSaslStateError, SaslAuthenticationFailed, UnsupportedSaslMechanismError)
"""How aiokafka says that a login was refused."""

Address: TypeAlias = tuple[str, int]
"""Host and port."""


Value = TypeVar("Value")

# What aiokafka has to say is in our own messages. Without a handler it would go to standard error.
logging.getLogger("aiokafka").addHandler(logging.NullHandler())
# At level DEBUG it writes down requests, and in them passwords.
logging.getLogger("aiokafka").setLevel(logging.INFO)


class LinkError(Exception):
    """The cluster could not be asked, or would not answer; the message says where and why."""


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """How the proxy itself gets to the cluster."""

    bootstrap_servers: tuple[Address, ...]
    """At least one."""
    tls: ssl.SSLContext | None
    client_id: str
    answer_timeout_s: float = ANSWER_TIMEOUT_S
    login: Login | None = None
    """None: no connection is logged in."""


class Link:
    """Connections to brokers, one to each, opened when they are needed."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._open: dict[Address, AIOKafkaConnection] = {}
        self._opening: defaultdict[Address, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._servers = list(access.bootstrap_servers)
        """The one that answered last comes first."""

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return sum(connection.connected() for connection in self._open.values())

    async def ask(self, request: Any, address: Address | None = None) -> Any:
        """Send a request of aiokafka's and return its response.

        Args:
            request: in whatever version the broker and aiokafka both know.
            address: of a broker; None: any bootstrap server that answers.

        Raises LinkError.
        """
        if address is not None:
            return await self._ask_at(address, request)
        for server in self._servers.copy():  # each caller tries all, whatever others do meanwhile
            try:
                response = await self._ask_at(server, request)
            except LinkError as error:
                failure = error
            else:
                self._servers.remove(server)
                self._servers.insert(0, server)
                return response
        raise failure

    async def drop(self, address: Address | None = None) -> None:
        """Close the connection to a broker; None: all."""
        addresses = tuple(self._open) if address is None else (address,)
        closed = [self._open.pop(each).close() for each in addresses if each in self._open]
        if closed:
            await asyncio.wait(closed, timeout=CLOSE_TIMEOUT_S)

    async def _ask_at(self, address: Address, request: Any) -> Any:
        host, port = address
        login, is_new, is_over = self._access.login, False, False
        try:
            async with self._opening[address]:  # who asks meanwhile shares the connection
                connection = self._open.get(address)
                if connection is None or not connection.connected():
                    is_new = True
                    connection = self._open[address] = await self._connect(address)
            return await connection.send(request)
        except TimeoutError:
            reason = f"no answer in {self._access.answer_timeout_s:g} s"
        except Exception as error:  # who knows what answers at that address
            reason = _reason(error, logged_in=login is not None)
            is_over = login is not None and not is_new and _is_closed(error)
        await self.drop(address)
        if is_over:  # brokers may end a session that was long enough (connections.max.reauth.ms)
            return await self._ask_at(address, request)
        raise LinkError(f"{host}:{port}: {reason}")

    async def _connect(self, address: Address) -> AIOKafkaConnection:
        tls, login = self._access.tls, self._access.login
        protocol = "PLAINTEXT" if tls is None else "SSL"
        options: dict[str, Any] = {"security_protocol": protocol}
        if login is not None:
            login.check(address)
            options = {
                "security_protocol": f"SASL_{protocol}",
                "sasl_mechanism": login.credentials.mechanism,
                "sasl_plain_username": login.credentials.username,
                "sasl_plain_password": login.credentials.password,
            }
        try:
            return await create_conn(
                *address,
                client_id=self._access.client_id,
                request_timeout_ms=int(self._access.answer_timeout_s * 1000),
                ssl_context=tls,
                max_idle_ms=int(IDLE_S * 1000),
                **options,
            )
        except REFUSALS as error:
            if login is None:
                raise
            said = error.args[0] if error.args and isinstance(error.args[0], str) else None
            raise login.refused(address, error.errno, said) from None


def name_of(error_code: int) -> str:
    """Return Kafka's name of an error, such as NOT_COORDINATOR."""
    error = for_code(error_code)
    return str(error.message) if error.errno == error_code else f"error {error_code}"


def by_topic(
    partitions: Mapping[TopicPartition, Value],
) -> Iterator[dict[str, list[tuple[int, Value]]]]:
    """Put partitions in the shape that requests have, at most MAX_PARTITIONS at a time."""
    items = iter(partitions.items())
    while part := tuple(islice(items, MAX_PARTITIONS)):
        topics: dict[str, list[tuple[int, Value]]] = {}
        for (topic, number), value in part:
            topics.setdefault(topic, []).append((number, value))
        yield topics


def named(partitions: Iterable[TopicPartition]) -> str:
    """Name the first few of some partitions, and say how many more there are."""
    ordered = sorted(partitions)
    text = ", ".join(f"{topic}-{number}" for topic, number in ordered[:MAX_NAMED])
    more = len(ordered) - MAX_NAMED
    return f"{text} and {more} more" if more > 0 else text


def _is_closed(error: Exception) -> bool:
    return isinstance(error.__cause__ or error, EOFError)


def _reason(error: Exception, *, logged_in: bool) -> str:
    cause = error.__cause__ or error
    if _is_closed(error):
        return closed_by_broker(logged_in=logged_in)
    return str(cause) or type(cause).__name__
