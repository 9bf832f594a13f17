"""Asks the cluster for the names of topics that clients only name by their ids."""

import asyncio
from collections.abc import Collection
from typing import Any
from uuid import UUID

from kafka.protocol.metadata import MetadataRequest, MetadataResponse

from proxy.relay.ask import ask
from proxy.relay.cluster import Cluster
from proxy.relay.upstream import UpstreamError

_VERSION = 12
"""The first in which topics may be asked for by id. Brokers that take ids in Fetch know it."""

_NO_ID = bytes(16)
"""Kafka's way to say that there is none."""


async def resolve(cluster: Cluster, ids: Collection[bytes]) -> dict[bytes, str]:
    """Return the names of these topics by id, 16 bytes each; ids that are not known are left out.

    A topic that was just deleted or made may be among those left out. Raises UpstreamError.
    """
    asked = {each for each in ids if each != _NO_ID}
    if not asked:
        return {}
    limit_s = 2 * cluster.connect_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            channel = await cluster.connect(None)
            try:
                body = await ask(channel, _by_ids(asked), tagged=True)
            finally:
                channel.sock.close()
    except TimeoutError:
        raise UpstreamError("timeout", f"no answer in {limit_s:g} s") from None
    except OSError as error:
        raise UpstreamError("closed", str(error)) from None
    try:
        topics = MetadataResponse.decode(body, version=_VERSION).topics
        return {topic.topic_id.bytes: topic.name for topic in topics if not topic.error_code}
    except Exception as error:  # who knows what answers at that address
        raise UpstreamError("bad_response", f"no Metadata: {error}") from error


def _by_ids(ids: Collection[bytes]) -> Any:
    topic = MetadataRequest.MetadataRequestTopic
    return MetadataRequest(
        version=_VERSION,
        topics=[topic(version=_VERSION, topic_id=UUID(bytes=each), name=None) for each in ids],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=False,
    )
