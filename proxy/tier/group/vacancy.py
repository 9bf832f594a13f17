"""See whether a member's place in its group is free, before a successor of it joins."""

import asyncio

from kafka.protocol.admin import DescribeGroupsRequest

from proxy.cluster.kafka_client import GROUP_COORDINATOR, KafkaClient
from proxy.cluster.upstream import NOT_READY, RefusedError, UpstreamError, name_of

DESCRIBE_GROUPS_VERSION = 4
"""The first that tells names (group.instance.id). Since Kafka 2.4."""

VACANCY_INTERVAL_S = 0.1


async def until_vacant(client: KafkaClient, group_id: str, name: str, limit_s: float) -> bool:
    """Return when no process has the place of a member, with whether that is so in time."""
    try:
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    if not await _is_taken(client, group_id, name):
                        return True
                except (UpstreamError, RefusedError):
                    client.forget((GROUP_COORDINATOR, group_id))
                await asyncio.sleep(VACANCY_INTERVAL_S)
    except TimeoutError:
        return False


async def _is_taken(client: KafkaClient, group_id: str, name: str) -> bool:
    def check(error_code: int) -> None:
        if error_code:
            raise UpstreamError(NOT_READY, name_of(error_code))

    coordinator = await client.coordinator((GROUP_COORDINATOR, group_id), check)
    request = DescribeGroupsRequest[DESCRIBE_GROUPS_VERSION](groups=[group_id])
    (group,) = (await client.ask(request, coordinator)).groups
    check(group.error_code)
    return any(member.group_instance_id == name for member in group.members)
