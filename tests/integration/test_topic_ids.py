"""Topic ids become names by asking the cluster."""

import struct
from collections.abc import Callable
from contextlib import closing
from uuid import uuid4

import pytest
from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient
from support.proxy_process import HOST, until
from support.strangers import stranger

from examples.devkit.broker import EmbeddedBroker
from proxy.cluster.kafka_client import ANSWER_TIMEOUT_S, Bootstrap, KafkaClient
from proxy.cluster.upstream import UpstreamError

IMPATIENT_S = 0.1
"""For who never answers."""


def id_of(admin: AdminClient, topic: str) -> bytes:
    found = admin.describe_topics(TopicCollection([topic]))[topic].result(30).topic_id
    return struct.pack(">qq", found.get_most_significant_bits(), found.get_least_significant_bits())


async def test_known_ids_get_their_names(kafka: EmbeddedBroker, topic: Callable[..., str]) -> None:
    with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
        names = {id_of(admin, name): name for name in (topic(2), topic())}
    with closing(KafkaClient(Bootstrap([(HOST, kafka.port)]))) as client:
        assert await client.topic_names(list(names)) == names
        assert await client.topic_names([*names, uuid4().bytes, bytes(16)]) == names
        for unknown in ([], [bytes(16)], [uuid4().bytes]):
            assert await client.topic_names(unknown) == {}


async def test_a_deleted_topic_is_left_out(
    kafka: EmbeddedBroker, topic: Callable[..., str]
) -> None:
    with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
        name = topic()
        topic_id = id_of(admin, name)
        admin.delete_topics([name])[name].result(30)
        until(lambda: name not in admin.list_topics(timeout=10).topics, "deleted")
    with closing(KafkaClient(Bootstrap([(HOST, kafka.port)]))) as client:
        assert await client.topic_names([topic_id]) == {}


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
        limit_s = IMPATIENT_S if frame is None else ANSWER_TIMEOUT_S
        client = KafkaClient(Bootstrap([address]), limit_s)
        with pytest.raises(UpstreamError) as raised:
            await client.topic_names([uuid4().bytes])
    assert raised.value.reason == reason
