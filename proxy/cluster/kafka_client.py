"""Finds the broker to ask, and asks it: bootstrap servers, leaders, coordinators, topic names."""

import asyncio
import ssl
from collections import Counter, defaultdict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import asynccontextmanager
from itertools import islice
from secrets import token_hex
from typing import Any, TypeAlias, TypeVar
from uuid import UUID

from kafka.protocol.metadata import FindCoordinatorRequest, MetadataRequest

from .broker_connection import CLIENT_ID, BrokerConnection
from .dial import connect_to_first, start_tls
from .login import Login
from .resolver import Resolver
from .upstream import (
    CONNECTION_CLOSED,
    LOGIN_REFUSED,
    LOOP,
    Address,
    UpstreamError,
    explain_self_loop,
    misread_is_bad_response,
)

ANSWER_TIMEOUT_S = 5.0
"""To connect, and for each answer."""

ASK_AGAIN_S = 0.1

GROUP_COORDINATOR = 0
TRANSACTION_COORDINATOR = 1

METADATA_VERSION = 4
"""The first by which topics are not made by being asked for. Since Kafka 0.11."""

TOPIC_ID_VERSION = 12
"""The first in which topics may be asked for by id. Brokers that take ids in Fetch know it."""

FIND_COORDINATOR_VERSION = 1
"""The first that knows of transactions. Since Kafka 0.11."""

_NO_TOPIC_ID = bytes(16)

MAX_REQUEST_PARTITIONS = 1000
"""In one request. Kafka writes a commit as one record batch of at most 1 MiB, and an offset takes
600 bytes when group and topic have the longest names; nor may decoding hold up the event loop."""

MAX_NAMED = 3
"""So many partitions are named in a message."""

Partition: TypeAlias = tuple[str, int]
"""Topic name and partition number."""

Coordinated: TypeAlias = tuple[int, str]
"""GROUP_COORDINATOR or TRANSACTION_COORDINATOR, and the name of the group or the transactions."""

Item = TypeVar("Item")
Value = TypeVar("Value")


class Bootstrap:
    """The way into a cluster, of at least one server, for all who ask it in one event loop.

    `connect_timeout_s`, which may be set anew, is for each of connection, TLS handshake and login.
    """

    def __init__(
        self,
        servers: Iterable[Address],
        tls: ssl.SSLContext | None = None,
        connect_timeout_s: float = ANSWER_TIMEOUT_S,
        login: Login | None = None,
    ) -> None:
        self.servers = list(dict.fromkeys(servers))
        """First who answered last, at the end who failed last."""
        self.tls = tls
        self.connect_timeout_s = connect_timeout_s
        self.login = login
        self.resolver = Resolver()
        self.loops: Counter[Address] = Counter()
        """Servers that lead to this proxy itself, and how often that was seen."""
        self.probes: dict[str, Address] = {}
        """Which servers are being probed, by the client ids of these connections."""
        self._probe_id = f"{CLIENT_ID}-probe-{token_hex(8)}"

    async def connect(
        self,
        servers: Sequence[Address] = (),
        *,
        limit_s: float | None = None,
        log_in: bool = True,
        probes: bool = False,
    ) -> BrokerConnection:
        """Connect to the first of these, or of the bootstrap servers, that serves us.

        Only opening is a race: handshakes and logins burden a slow broker. `limit_s`: None: as the
        bootstrap; `log_in`: False where a client logs in for itself. `probes`: with a client id of
        `probes`, and, where `servers` are named, also to one of `loops`. Raises UpstreamError: the
        refused login, if any, since the others may only be down.
        """
        limit_s = self.connect_timeout_s if limit_s is None else limit_s
        login = self.login if log_in else None
        errors: list[UpstreamError] = []
        left: list[Address] = []
        for server in servers or self.servers:
            try:
                if server in self.loops and not (probes and servers):
                    raise UpstreamError(LOOP, explain_self_loop(server))
                if login is not None:
                    login.check(server)
                left.append(server)
            except UpstreamError as error:
                errors.append(error)
        while left:
            try:
                server, sock = await connect_to_first(left, limit_s, self.resolver)
            except UpstreamError as error:
                errors.append(error)
                break
            try:
                sock = await start_tls(sock, server, self.tls, limit_s)
                connection = BrokerConnection(sock, server)
                if probes:
                    connection.client_id = f"{self._probe_id}-{server[0]}:{server[1]}"
                    self.probes[connection.client_id] = server
                if login is not None:
                    await connection.log_in(login, limit_s)
            except UpstreamError as error:
                errors.append(error)
                left.remove(server)
                self.failed(server)
            else:
                self._rank(server, 0)
                return connection
        raise next((error for error in errors if error.reason == LOGIN_REFUSED), errors[-1])

    def failed(self, server: Address) -> None:
        """Try this server last from now on, if it is a bootstrap server: it does not serve."""
        self._rank(server, len(self.servers))

    def _rank(self, server: Address, place: int) -> None:
        if server in self.servers:
            self.servers.remove(server)
            self.servers.insert(place, server)


class KafkaClient:
    """Asks brokers over connections of its own, one to each, opened when they are needed.

    A broker is asked one thing at a time; a connection that it closed is opened anew. `limit_s`, to
    connect and for each answer: None: the bootstrap's `connect_timeout_s`.
    """

    def __init__(self, bootstrap: Bootstrap, limit_s: float | None = ANSWER_TIMEOUT_S) -> None:
        self._bootstrap = bootstrap
        self._limit_s = limit_s
        self._open: dict[Address, BrokerConnection] = {}
        self._asking: defaultdict[Address | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._found: dict[Partition | Coordinated, Address] = {}
        self._failure = UpstreamError("timeout", "")

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return sum(connection.is_open for connection in self._open.values())

    async def ask(self, request: Any, broker: Address | None = None) -> Any:
        """Send a request of kafka-python's, made with its version, and return the response.

        `broker`: None: one with an open connection, or any bootstrap server. Raises UpstreamError.
        """
        if broker is not None:
            return await self._ask_at(broker, request)
        left = list(self._bootstrap.servers)  # each caller tries all, whatever others do meanwhile
        while True:
            async with self._asking[None]:  # who asks meanwhile shares the connection
                broker = next((each for each, made in self._open.items() if made.is_open), None)
                if broker is None:
                    made = await self._bootstrap.connect(left, limit_s=self._limit_s)
                    broker = made.broker
                    self._open[broker] = made
            try:
                return await self._ask_at(broker, request)
            except UpstreamError:
                self._bootstrap.failed(broker)
                left = [each for each in left if each != broker]
                if not left:
                    raise

    def close(self) -> None:
        """Close all connections; the next request opens others."""
        while self._open:
            self._open.popitem()[1].close()

    async def metadata(self, topics: Iterable[str] = ()) -> Any:
        """Return what the cluster says of itself and of these topics; asking makes none."""
        wanted = [MetadataRequest.MetadataRequestTopic(name=topic) for topic in topics]
        request = MetadataRequest[METADATA_VERSION](topics=wanted, allow_auto_topic_creation=False)
        return await self.ask(request)

    async def leaders(self, partitions: Collection[Partition]) -> dict[Address, list[Partition]]:
        """Return these partitions by their leader, without those that have none or are gone."""
        if unknown := {each for each in partitions if each not in self._found}:
            response = await self.metadata(sorted({topic for topic, _ in unknown}))
            with misread_is_bad_response():
                await self._learn_leaders(response, unknown)
        by_leader: dict[Address, list[Partition]] = {}
        for some in request_chunks(partitions):
            await asyncio.sleep(0)  # to look up thousands takes milliseconds
            for leader, led in self.known_leaders(some).items():
                by_leader.setdefault(leader, []).extend(led)
        return by_leader

    async def _learn_leaders(self, response: Any, wanted: Set[Partition]) -> None:
        """Keep the leaders of the wanted partitions, of which the response is emptied.

        What was read is freed: of a million partitions at once that takes 0.1 s.
        """
        brokers = {broker.node_id: (broker.host, broker.port) for broker in response.brokers}
        walked = 0
        while response.topics:
            topic = response.topics[-1]
            if topic.partitions:
                part = topic.partitions.pop()
                partition = topic.name, part.partition_index
                if partition in wanted and part.leader_id in brokers:
                    self._found[partition] = brokers[part.leader_id]
            else:
                response.topics.pop()
            walked += 1
            if not walked % MAX_REQUEST_PARTITIONS:
                await asyncio.sleep(0)

    def known_leaders(self, partitions: Iterable[Partition]) -> dict[Address, list[Partition]]:
        """Return by their leader those of these partitions for which one was found before."""
        by_leader: dict[Address, list[Partition]] = {}
        for partition in partitions:
            leader = self._found.get(partition)
            if leader is not None:
                by_leader.setdefault(leader, []).append(partition)
        return by_leader

    async def coordinator(self, key: Coordinated, check: Callable[[int], object]) -> Address:
        """Return the broker of a group or transactions; `check` raises what its code means."""
        if key not in self._found:
            request = FindCoordinatorRequest[FIND_COORDINATOR_VERSION](key=key[1], key_type=key[0])
            response = await self.ask(request)
            check(response.error_code)
            self._found[key] = response.host, response.port
        return self._found[key]

    def forget(self, *keys: Partition | Coordinated) -> None:
        """Forget these leaders and coordinators: they are looked for when they are needed."""
        for key in keys:
            self._found.pop(key, None)

    def forget_all(self) -> None:
        """Forget all leaders and coordinators."""
        self._found.clear()

    async def topic_names(self, ids: Collection[bytes]) -> dict[bytes, str]:
        """Return names by id (16 bytes), without ids unknown, maybe just made or just deleted."""
        wanted = [
            MetadataRequest.MetadataRequestTopic(topic_id=UUID(bytes=each), name=None)
            for each in set(ids) - {_NO_TOPIC_ID}
        ]
        if not wanted:
            return {}
        request = MetadataRequest[TOPIC_ID_VERSION](topics=wanted, allow_auto_topic_creation=False)
        response = await self.ask(request)
        with misread_is_bad_response():
            topics = [each for each in response.topics if not each.error_code]
            return {topic.topic_id.bytes: topic.name for topic in topics}

    async def retry(self, attempt: Callable[[], Awaitable[Value]]) -> Value:
        """Call until there is no UpstreamError, in the time that `within` gives."""
        while True:
            try:
                with misread_is_bad_response():
                    return await attempt()
            except UpstreamError as error:
                self._failure = error
            await asyncio.sleep(ASK_AGAIN_S)

    @asynccontextmanager
    async def within(self, limit_s: float, failing: str = "no answer") -> AsyncIterator[None]:
        """Bound the time of one task's attempts; raise the latest UpstreamError when it is over."""
        servers = ", ".join(f"{host}:{port}" for host, port in self._bootstrap.servers)
        self._failure = UpstreamError("timeout", f"{servers}: {failing} in {limit_s:g} s")
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise self._failure from None

    async def _ask_at(self, broker: Address, request: Any) -> Any:
        limit_s = self._bootstrap.connect_timeout_s if self._limit_s is None else self._limit_s
        try:
            async with self._asking[broker]:
                connection = self._open.get(broker)
                if connection is None or not connection.is_open:
                    if connection is not None:
                        connection.close()
                    connection = await self._bootstrap.connect((broker,), limit_s=limit_s)
                    self._open[broker] = connection
                may_be_over = connection.login_may_be_over
                try:
                    return await connection.ask(request, limit_s)
                except UpstreamError as error:
                    if not may_be_over or error.reason != CONNECTION_CLOSED:
                        raise
        except BaseException:
            self._found = {key: found for key, found in self._found.items() if found != broker}
            raise
        # With the next request brokers end a login that is old enough (connections.max.reauth.ms).
        return await self._ask_at(broker, request)


def request_chunks(items: Iterable[Item]) -> Iterator[tuple[Item, ...]]:
    """Yield the items, at most MAX_REQUEST_PARTITIONS at a time."""
    left = iter(items)
    while part := tuple(islice(left, MAX_REQUEST_PARTITIONS)):
        yield part


def chunks_by_topic(
    partitions: Mapping[Partition, Value],
) -> Iterator[dict[str, list[tuple[int, Value]]]]:
    """Yield partitions in the shape of requests, at most MAX_REQUEST_PARTITIONS at a time."""
    for part in request_chunks(partitions.items()):
        topics: dict[str, list[tuple[int, Value]]] = {}
        for (topic, number), value in part:
            topics.setdefault(topic, []).append((number, value))
        yield topics


def format_partitions(partitions: Iterable[Partition]) -> str:
    """Return the names of the first few, and how many more there are."""
    ordered = sorted(partitions)
    text = ", ".join(f"{topic}-{number}" for topic, number in ordered[:MAX_NAMED])
    more = len(ordered) - MAX_NAMED
    return f"{text} and {more} more" if more > 0 else text
