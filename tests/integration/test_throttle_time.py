"""What a throttled response says and when it comes, for old and new versions, in both modes."""

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import pytest
from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient
from support.proxy_process import ProxyProcess, until
from support.raw import RawClient, api_versions, fetch, message, produce

from examples.devkit.broker import EmbeddedBroker
from proxy.wire.apis import METADATA

BOUND_BYTES = 1_000_000
MUTED_BOUND_BYTES = 150_000
"""A record at this rate takes three seconds, and a busy broker less."""

SLOW_BOUND_BYTES = 50_000
"""At this rate the first record is held for some ten seconds."""

RECORD_BYTES = 500_000
RECORDS = 4
HEARTBEAT = 12

OLD, NEW = "ours", "the broker's"

VERSIONS = [
    *[("fetch", version, OLD) for version in (4, 5, 6, 7)],
    *[("fetch", version, NEW) for version in (8, 12, 13, 16, 17, 18)],
    *[("produce", version, OLD) for version in (3, 4, 5)],
    *[("produce", version, NEW) for version in (6, 9, 13)],
]


@pytest.fixture
def request_of(
    kafka: EmbeddedBroker, topic: Callable[..., str], fill: Callable[..., None]
) -> Callable[[str, int], Any]:
    """`request_of(kind, version)` makes a request that costs half a second of the bound."""
    name = topic(config={"max.message.bytes": str(RECORD_BYTES * 2)})
    fill(name, RECORDS, RECORD_BYTES)
    with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
        described = admin.describe_topics(TopicCollection([name]))[name].result(30)
    topic_id = uuid.UUID(int=_unsigned(described.topic_id))

    def make(kind: str, version: int) -> Any:
        if kind == "fetch":
            return fetch(version, name, topic_id=topic_id, max_bytes=RECORD_BYTES)
        return produce(version, name, bytes(RECORD_BYTES), topic_id=topic_id)

    return make


def _unsigned(topic_id: Any) -> int:
    bits = 64
    high, low = topic_id.get_most_significant_bits(), topic_id.get_least_significant_bits()
    return (high % (1 << bits)) << bits | low % (1 << bits)


@pytest.fixture
def bounded(proxy: Callable[..., ProxyProcess]) -> Callable[[str], ProxyProcess]:
    def start(mode: str) -> ProxyProcess:
        rates = {"consumer_byte_rate": BOUND_BYTES, "producer_byte_rate": BOUND_BYTES}
        rules = [
            {"client-id-prefix": "bounded", **rates},
            {
                "client-id-prefix": "muted",
                "consumer_byte_rate": MUTED_BOUND_BYTES,
                "producer_byte_rate": MUTED_BOUND_BYTES,
            },
            {"client-id": "slow", "consumer_byte_rate": SLOW_BOUND_BYTES},
        ]
        return proxy(rules=rules, throttle={"mode": mode})

    return start


def timed(client: RawClient, request: Any) -> tuple[Any, float]:
    started = monotonic()
    return client.ask(request), (monotonic() - started) * 1000


def is_refused(response: Any) -> bool:
    topics = getattr(response, "responses", ())
    parts = [part for each in topics for part in getattr(each, "partitions", ())]
    return any(part.error_code for part in parts) or not topics


def test_delay_mode_tells_old_versions_only(
    bounded: Callable[[str], ProxyProcess], request_of: Callable[[str, int], Any]
) -> None:
    """A new client that is told the time would wait for it a second time."""
    running = bounded("delay")

    def check(kind: str, version: int, who: str) -> None:
        case = f"{kind} version {version}"
        with RawClient(running.bootstrap, f"bounded-{kind}-{version}") as client:
            assert client.ask(request_of(kind, version)).throttle_time_ms == 0, case
            client.send(*[request_of(kind, version) for _ in range(3)])
            told_ms = [client.receive().throttle_time_ms for _ in range(3)]
            assert (told_ms[-1] > 0) is (who == OLD), f"{case}: {told_ms}"
            assert not any(told_ms) or who == OLD, case

    with ThreadPoolExecutor(len(VERSIONS)) as pool:
        list(pool.map(check, *zip(*VERSIONS, strict=True)))


def test_held_response_comes_late_and_whole(
    bounded: Callable[[str], ProxyProcess], request_of: Callable[[str, int], Any]
) -> None:
    running = bounded("delay")
    for kind in ("fetch", "produce"):
        with RawClient(running.bootstrap, f"bounded-late-{kind}") as client:
            started = monotonic()
            answers = [client.ask(request_of(kind, 7)) for _ in range(RECORDS)]
            elapsed_ms = (monotonic() - started) * 1000
        least_ms = (RECORDS * RECORD_BYTES / BOUND_BYTES - 1.1) * 1000
        assert elapsed_ms >= least_ms, kind
        assert not any(map(is_refused, answers)), f"{kind}: never an error in a response"


def test_mute_mode_answers_at_once_and_reads_on_later(
    bounded: Callable[[str], ProxyProcess], request_of: Callable[[str, int], Any]
) -> None:
    running = bounded("mute")

    def check(kind: str, version: int, _: str) -> None:
        case = f"{kind} version {version}"
        with RawClient(running.bootstrap, f"muted-{kind}-{version}") as client:
            told_ms = 0
            for _ in range(RECORDS):
                answer, took_ms = timed(client, request_of(kind, version))
                told_ms = answer.throttle_time_ms
                if told_ms:
                    break
            assert told_ms > 0, case
            assert not is_refused(answer), case
            _, next_ms = timed(client, api_versions(2))
            # The clock of the proxy began before the answer came here, and it counts in whole ms.
            assert next_ms >= told_ms - took_ms - 2, f"{case}: the next request must wait"

    with ThreadPoolExecutor(len(VERSIONS)) as pool:
        list(pool.map(check, *zip(*VERSIONS, strict=True)))


@pytest.mark.parametrize("mode", ["delay", "mute"])
def test_other_connections_of_the_client_go_on(
    bounded: Callable[[str], ProxyProcess], request_of: Callable[[str, int], Any], mode: str
) -> None:
    """Metadata and heartbeats are no bytes: only the connection with the fetch waits."""
    running = bounded(mode)
    with RawClient(running.bootstrap, "slow") as other:
        with RawClient(running.bootstrap, "slow") as reader:
            reader.send(request_of("fetch", 12))
            until(lambda: running.metrics().value("delay_queue_size", api="fetch"), "it is held")
            for _ in range(20):
                other.ask(message(METADATA, 1, topics=[]))
                heartbeat = message(HEARTBEAT, 3, group_id="x", generation_id=1, member_id="y")
                assert other.ask(heartbeat).error_code != 0
            assert running.metrics().value("delay_queue_size", api="fetch") == 1, "is still held"
        if mode == "delay":  # a muted client is not read from, so nobody sees it go
            until(
                lambda: running.metrics().value("delay_queue_size", api="fetch") == 0,
                "what is held for a client that is gone leaves the queue",
            )


def test_request_order_is_kept(
    bounded: Callable[[str], ProxyProcess], request_of: Callable[[str, int], Any]
) -> None:
    """What was asked behind a held fetch comes behind it; `receive` checks the order."""
    running = bounded("delay")
    with RawClient(running.bootstrap, "bounded") as client:
        requests = []
        for _ in range(RECORDS):
            requests += [
                request_of("fetch", 12),
                message(METADATA, 9, topics=None),
                request_of("produce", 8),
                api_versions(3),
            ]
        client.send(*requests)
        answers = [client.receive() for _ in requests]
    assert len(answers) == len(requests)
