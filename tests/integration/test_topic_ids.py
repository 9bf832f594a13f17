"""Topic ids become names by asking the cluster."""

import struct
from collections.abc import Callable
from uuid import uuid4

import pytest
from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient
from support.proxy_process import HOST, until
from support.strangers import stranger

from proxy.devkit.broker import EmbeddedBroker
from proxy.relay.cluster import Cluster
from proxy.relay.topic_ids import resolve
from proxy.relay.upstream import UpstreamError

CONNECT_S = 5.0
IMPATIENT_S = 0.1
"""For who never answers."""


def id_of(admin: AdminClient, topic: str) -> bytes:
    found = admin.describe_topics(TopicCollection([topic]))[topic].result(30).topic_id
    return struct.pack(">qq", found.get_most_significant_bits(), found.get_least_significant_bits())


async def test_known_ids_get_their_names(kafka: EmbeddedBroker, topic: Callable[..., str]) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    names = {id_of(admin, name): name for name in (topic(2), topic())}
    cluster = Cluster(((HOST, kafka.port),), None, CONNECT_S)
    assert await resolve(cluster, list(names)) == names
    assert await resolve(cluster, [*names, uuid4().bytes, bytes(16)]) == names
    for unknown in ([], [bytes(16)], [uuid4().bytes]):
        assert await resolve(cluster, unknown) == {}


async def test_a_deleted_topic_is_left_out(
    kafka: EmbeddedBroker, topic: Callable[..., str]
) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    name = topic()
    topic_id = id_of(admin, name)
    admin.delete_topics([name])[name].result(30)
    until(lambda: name not in admin.list_topics(timeout=10).topics, "deleted")
    assert await resolve(Cluster(((HOST, kafka.port),), None, CONNECT_S), [topic_id]) == {}


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (struct.pack(">iiB", 10, 0, 0) + b"?" * 5, "bad_response"),
        (struct.pack(">ii", 4, 0), "bad_response"),
        (struct.pack(">ii", 12, 0) + b"\xff" * 8, "bad_response"),
        (struct.pack(">i", -1), "bad_response"),
        (b"", "closed"),
        (None, "timeout"),
    ],
    ids=["garbage", "no tags", "endless tags", "negative", "closed", "silent"],
)
async def test_something_else_answers(frame: bytes | None, reason: str) -> None:
    async with stranger(frame) as address:
        cluster = Cluster((address,), None, IMPATIENT_S if frame is None else CONNECT_S)
        with pytest.raises(UpstreamError) as raised:
            await resolve(cluster, [uuid4().bytes])
    assert raised.value.reason == reason
