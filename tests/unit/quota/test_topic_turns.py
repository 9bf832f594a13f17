"""Who reads of a topic with a bound has its share, though bytes are known as an answer leaves."""

import itertools

import pytest
from closed_loop import CONSUMER, MB, ClosedLoop, Consumer
from parts.quota_world import QuotaWorld
from prometheus_client import CollectorRegistry, Counter

from proxy.progress.topics import TopicNames
from proxy.quota.rules import Rule
from proxy.relay.topic_traffic import TopicChargeObserver, TopicQuotas
from proxy.wire.apis import APIS, FETCH

VERSION, TOPIC = 12, "orders"
BOUND = 4 * MB
BATCH_BYTES = 16_384
BEGIN_MS, END_MS = 11_000.0, 31_000.0
"""From when on what passes at once at the start is worked off: then answers are large and small."""
ENOUGH = 0.95


def fetch_body(topics: tuple[str, ...]) -> bytes:
    request = APIS[FETCH].request
    partitions = [request.FetchTopic.FetchPartition(partition=0)]
    wanted = [request.FetchTopic(topic=each, partitions=partitions) for each in topics]
    return bytes(request(session_epoch=-1, topics=wanted).encode(version=VERSION))


class TopicConsumer(Consumer):
    """One connection that asks for topics and has the bounded one alone, by no lane."""

    def begin(self, topics: tuple[str, ...]) -> None:
        walks = Counter("walks", "", registry=CollectorRegistry())
        self.topics = TopicQuotas(self.client, TopicNames(), walks)
        self.topics.asks(VERSION, fetch_body(topics), self.world.now_ms)
        self.ask()

    def _try(self) -> None:
        world, holds = self.world, not self.mutes
        topics = self.topics.fetched(world.now_ms)
        if self._waits and self.client.admit(
            CONSUMER, self._waiter, None, world.now_ms, holds=holds, topics=topics
        ):
            self._waits, self._waiter.since_ms = False, None
            granted, fetch = self.topics.expect(
                self.asked_bytes, world.now_ms, holds=holds, paid=self._waiter.paid
            )
            size = max(granted // self.batch_bytes, 1) * self.batch_bytes
            world.at(world.now_ms + self.broker_ms, lambda: self.came(size, fetch))

    def came(self, size: int, fetch: TopicChargeObserver) -> None:
        charge = fetch.charge(size, self.world.now_ms)
        due_ms = self.world.now_ms if charge is None else charge.due_ms
        self.world.at(due_ms, lambda: self.left(size, fetch))

    def left(self, size: int, fetch: TopicChargeObserver) -> None:
        fetch.partitions(TOPIC, [(0, 0, 0, 0, 0, size, None)])
        fetch.ended()
        self._delivered(size)
        self.again()


@pytest.mark.parametrize("topics", [(TOPIC,), (TOPIC, "free")])
@pytest.mark.parametrize("burst_ms", [500.0, None])
@pytest.mark.parametrize("asked_bytes", [MB, 50 * MB])
def test_a_client_with_one_connection_has_its_share_beside_one_with_many(
    asked_bytes: int,
    burst_ms: float | None,
    topics: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quotas = QuotaWorld(Rule(topic=TOPIC, bounds={CONSUMER: BOUND}), burst_ms=burst_ms)
    world = ClosedLoop(quotas.quotas)
    monkeypatch.setattr("proxy.relay.topic_traffic.clock_ms", lambda: world.now_ms)
    numbers = itertools.count()

    def connect(client_id: str, asked_bytes: int, topics: tuple[str, ...]) -> TopicConsumer:
        client, number = quotas.client_quotas(client_id, None, "l"), next(numbers)
        made = TopicConsumer(world, number, asked_bytes, BATCH_BYTES, client=client)
        world.at(0.1 * number, lambda: made.begin(topics))
        return made

    for _ in range(50):
        connect("many", asked_bytes, topics)
    one = connect("one", MB, (TOPIC,))
    world.run(END_MS)
    got = sum(size for _, at_ms, size in one.got if at_ms > BEGIN_MS)
    assert got >= ENOUGH * BOUND / 2 * (END_MS - BEGIN_MS) / 1000
    assert world.rate(BEGIN_MS, END_MS) == pytest.approx(BOUND, rel=0.02)
