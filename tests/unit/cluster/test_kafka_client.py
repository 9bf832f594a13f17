"""One connection to each broker, opened when it is needed, however many ask at a time."""

import asyncio
import struct
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from kafka.protocol.metadata import MetadataRequest, MetadataResponse
from kafka.protocol.sasl import SaslAuthenticateResponse, SaslHandshakeResponse

from proxy.cluster.kafka_client import (
    ANSWER_TIMEOUT_S,
    MAX_REQUEST_PARTITIONS,
    METADATA_VERSION,
    Bootstrap,
    KafkaClient,
)
from proxy.cluster.login import Credentials, Login
from proxy.cluster.upstream import CONNECTION_CLOSED, NonRetriableError, UpstreamError, error_name

HOST = "127.0.0.1"
HANDSHAKE, AUTHENTICATE = 17, 36
MOMENT_S = 0.05
MANY = 20_000


class Broker:
    """Answers Metadata and logins; closes a connection after so many answers to Metadata."""

    def __init__(self, answers: int = 1000, *, silent: bool = False) -> None:
        self.answers = answers
        self.silent = silent
        self.asked = 0
        self.opened = 0
        self.writers: set[asyncio.StreamWriter] = set()
        self.address = (HOST, 0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self.writers.add(writer)
        left = self.answers
        while head := await reader.read(4):
            request = await reader.readexactly(int.from_bytes(head, "big"))
            api_key = int.from_bytes(request[:2], "big")
            if self.silent:
                continue
            if api_key == HANDSHAKE:
                answer = SaslHandshakeResponse(version=1, error_code=0, mechanisms=["PLAIN"])
            elif api_key == AUTHENTICATE:
                answer = SaslAuthenticateResponse(
                    version=0, error_code=0, error_message=None, auth_bytes=b""
                )
            elif left:
                left -= 1
                self.asked += 1
                answer = self.metadata()
            else:
                break
            frame = request[4:8] + answer.encode()
            writer.write(struct.pack(">i", len(frame)) + frame)
        self.writers.discard(writer)
        writer.close()

    def metadata(self) -> MetadataResponse:
        broker = MetadataResponse.MetadataResponseBroker
        return MetadataResponse[METADATA_VERSION](
            brokers=[broker(node_id=1, host=HOST, port=self.address[1], rack=None)],
            cluster_id=None,
            controller_id=1,
            topics=[],
        )

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator["Broker"]:
        async with await asyncio.start_server(self.serve, HOST, 0) as server:
            self.address = server.sockets[0].getsockname()[:2]
            yield self


@contextmanager
def client_of(*brokers: Broker, login: Login | None = None, **options) -> Iterator[KafkaClient]:
    client = KafkaClient(Bootstrap([each.address for each in brokers], login=login), **options)
    yield client
    client.close()
    assert client.connections == 0


async def ended(broker: Broker) -> None:
    """Wait until the broker has seen the end of all connections."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        while broker.writers:  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0)


async def test_who_asks_at_the_same_time_shares_one_connection() -> None:
    async with Broker().at_work() as broker:
        with client_of(broker) as client:
            answers = await asyncio.gather(*(client.metadata() for _ in range(3)))
            at = await asyncio.gather(
                *(
                    client.ask(MetadataRequest[METADATA_VERSION](topics=[]), broker.address)
                    for _ in range(3)
                )
            )
            assert [len(answer.brokers) for answer in (*answers, *at)] == [1] * 6
            assert (broker.asked, broker.opened, client.connections) == (6, 1, 1)
        await ended(broker)


async def test_a_connection_that_was_closed_is_opened_anew() -> None:
    async with Broker().at_work() as broker:
        with client_of(broker) as client:
            await client.metadata()
            for writer in broker.writers:
                writer.close()
            await ended(broker)
            assert client.connections == 0
            await client.metadata()
            assert (broker.opened, client.connections) == (2, 1)


async def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.cluster.broker_connection.IDLE_S", MOMENT_S)
    async with Broker().at_work() as broker:
        with client_of(broker) as client:
            await client.metadata()
            await ended(broker)
            assert client.connections == 0
            await client.metadata()
            assert broker.opened == 2


async def test_a_login_that_is_too_old_is_done_anew() -> None:
    """Brokers close such a connection with the next request."""
    async with Broker(answers=2).at_work() as broker:
        with client_of(broker, login=Login(Credentials("PLAIN", "user", "pencil"))) as client:
            for _ in range(5):
                await client.metadata()
            assert (broker.asked, broker.opened) == (5, 3)


async def test_without_a_login_the_end_of_a_connection_is_an_error() -> None:
    async with Broker(answers=2).at_work() as broker:
        with client_of(broker) as client:
            for _ in range(2):
                await client.metadata()
            with pytest.raises(
                UpstreamError, match=f"{broker.address[1]}: the broker closed"
            ) as no:
                await client.metadata()
            assert no.value.reason == CONNECTION_CLOSED


async def test_who_gives_up_leaves_no_answer_to_another_question() -> None:
    async with Broker(silent=True).at_work() as broker:
        with client_of(broker) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(MOMENT_S):
                    await client.metadata()
            assert client.connections == 0
            broker.silent = False
            assert (await client.metadata()).brokers
            assert broker.opened == 2


async def test_who_waits_is_not_harmed_by_who_gives_up() -> None:
    async with Broker(silent=True).at_work() as broker:
        with client_of(broker) as client:
            impatient = asyncio.create_task(client.metadata())
            await asyncio.sleep(MOMENT_S)
            patient = asyncio.create_task(client.metadata())
            await asyncio.sleep(MOMENT_S)
            broker.silent = False
            impatient.cancel()
            assert (await patient).brokers


async def test_who_gives_up_while_an_answer_is_decoded_leaves_no_thread_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing ends a thread: who asks again and again would have more and more of them."""
    may_end, decode = threading.Event(), MetadataResponse.decode

    def slow(kind, *arguments, **options):
        may_end.wait()
        return decode.__func__(kind, *arguments, **options)

    monkeypatch.setattr("proxy.cluster.broker_connection.DECODED_HERE_BYTES", 0)
    monkeypatch.setattr(MetadataResponse, "decode", classmethod(slow))
    async with Broker().at_work() as broker:
        with client_of(broker, limit_s=MOMENT_S) as client:
            asking = asyncio.create_task(client.metadata())
            done, _ = await asyncio.wait((asking,), timeout=10 * MOMENT_S)
            may_end.set()
            assert not done
            with pytest.raises(UpstreamError) as caught:
                await asking
            assert caught.value.reason == "timeout"


async def test_what_fails_is_tried_again_within_its_time() -> None:
    async with Broker(silent=True).at_work() as silent, Broker(answers=0).at_work() as broken:
        tries = 0

        async def attempt() -> None:
            nonlocal tries
            tries += 1
            await client.metadata()

        for broker, message in ((silent, "no answer in 0.3 s"), (broken, "closed the connection")):
            tries = 0
            with client_of(broker) as client, pytest.raises(UpstreamError, match=message):
                async with client.within(0.3):
                    await client.retry(attempt)
            assert (tries > 1) is (broker is broken)


class ToldOfMany(KafkaClient):
    """Is told of far more partitions than it asks for."""

    async def metadata(self, topics: Iterable[str] = ()) -> MetadataResponse:
        topic = MetadataResponse.MetadataResponseTopic
        part = topic.MetadataResponsePartition(leader_id=1)
        many = [topic(name="many", partitions=[part] * MANY)]
        none = [topic(name="none", partitions=[])] * MANY
        wanted = [topic(name=name, partitions=[part]) for name in topics]
        broker = MetadataResponse.MetadataResponseBroker(node_id=1, host=HOST, port=9)
        return MetadataResponse(version=4, brokers=[broker], topics=[*many, *wanted, *none])


async def test_what_was_not_asked_for_is_walked_in_turns_and_not_kept() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    client = ToldOfMany(Bootstrap([(HOST, 9)]))
    counting = asyncio.create_task(count_turns())
    assert await client.leaders({("asked", 0)}) == {(HOST, 9): [("asked", 0)]}
    counting.cancel()
    assert turns > 2 * MANY / MAX_REQUEST_PARTITIONS - 2
    assert client.known_leaders([("many", 0)]) == {}


async def test_a_refusal_is_not_tried_again() -> None:
    async def attempt() -> None:
        raise NonRetriableError("no", 29)

    client = KafkaClient(Bootstrap([(HOST, 1)]))
    with pytest.raises(NonRetriableError):
        async with client.within(ANSWER_TIMEOUT_S):
            await client.retry(attempt)


@pytest.mark.parametrize(
    ("code", "name"), [(16, "NOT_COORDINATOR"), (-1, "UNKNOWN"), (9999, "error 9999")]
)
def test_errors_have_kafkas_names(code: int, name: str) -> None:
    assert error_name(code) == name
