"""The cluster is asked for the names of topic ids a few at a time: anybody may write to any id."""

import asyncio

from parts.quota_world import QuotaWorld

from proxy.cluster.kafka_client import Bootstrap
from proxy.progress.query import ProgressSettings
from proxy.queries import queries
from proxy.queries.queries import RESOLVE_AT_ONCE, Queries
from proxy.relay.intercept_queue import InterceptQueue

MADE_UP, LIMIT_S = 2_000, 30
KNOWN_ID = bytes(16 * [255])


class KnownTopic:
    """In the place of a KafkaClient, at a cluster with one topic."""

    def __init__(self, *_, **__):
        self.asked = []

    async def topic_names(self, ids):
        self.asked.append(len(ids))
        await asyncio.sleep(0)
        return {KNOWN_ID: "orders"} if KNOWN_ID in ids else {}

    def close(self):
        pass


async def test_ids_that_nobody_knows_are_asked_for_in_steps(monkeypatch):
    cluster = KnownTopic()
    monkeypatch.setattr(queries, "KafkaClient", lambda *_, **__: cluster)
    world, told = QuotaWorld(), asyncio.Event()
    made = Queries(
        *(ProgressSettings(), [], world.quotas, Bootstrap([("127.0.0.1", 1)]), world.instruments),
        metrics=world.prometheus,
        knows_client=lambda _: True,
        unshown=InterceptQueue(lambda *_: None),
    )
    names = made.following.names
    (resolve,) = (each for each in made.works() if "names" in each.__name__)
    work = asyncio.create_task(resolve())
    for number in range(MADE_UP):
        names.when_known(number.to_bytes(16, "big"), lambda _: None)
    names.when_known(KNOWN_ID, lambda _: told.set())
    await asyncio.wait_for(told.wait(), LIMIT_S)
    work.cancel()
    assert max(cluster.asked) == RESOLVE_AT_ONCE
    assert sum(cluster.asked) == MADE_UP + 1
