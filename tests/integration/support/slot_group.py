"""Members of a real group, without anything but their membership."""

import asyncio
from contextlib import closing
from itertools import count
from typing import Any

from kafka.protocol.consumer import JoinGroupRequest, LeaveGroupRequest, SyncGroupRequest

from examples.devkit.loopback import HOST
from proxy.cluster.kafka_client import GROUP_COORDINATOR, Bootstrap, KafkaClient
from proxy.cluster.upstream import UpstreamError, error_name
from proxy.state.kafka.slot_table import GroupFence

PROTOCOL = "quota-proxy"
TIMEOUT_MS = 60_000
JOIN_S = 0.3
"""Then who has joined joins again: another one came after it."""

UNKNOWN_MEMBER_ID = 25
MEMBER_ID_REQUIRED = 79
RETRIABLE = frozenset({14, 15, 16})
"""The coordinator is not ready, not found, or another one."""


class SlotGroup:
    """A group whose generations are made when a test wants one; nobody sends heartbeats."""

    def __init__(self, port: int, group_id: str) -> None:
        self._servers = [(HOST, port)]
        self.group_id = group_id
        self._members: dict[str, str] = {}
        self._numbers = count()

    def generation(self, *names: str) -> tuple[GroupFence, ...]:
        """Make a generation of exactly these members; return the fence of each."""
        return asyncio.run(self._generation(names))

    async def _generation(self, names: tuple[str, ...]) -> tuple[GroupFence, ...]:
        for gone in self._members.keys() - set(names):
            members = [(self._members.pop(gone), None)]
            request = LeaveGroupRequest[3](group_id=self.group_id, members=members)
            check(await self._ask(request))
        for name in names:
            if name not in self._members:
                await self._get_id(name)
        joined = await self._join_all(names)
        (generation,) = {each.generation_id for each in joined.values()}

        async def sync(name: str) -> None:
            request = SyncGroupRequest[3](
                group_id=self.group_id,
                generation_id=generation,
                member_id=self._members[name],
                group_instance_id=None,
                assignments=[(member.member_id, b"") for member in joined[name].members],
            )
            check(await self._ask(request))

        await asyncio.gather(*map(sync, names))
        return tuple(GroupFence(self.group_id, generation, self._members[name]) for name in names)

    async def _get_id(self, name: str) -> None:
        """Have the group give a member its id."""
        response = await self._join("", b"")
        assert response.error_code == MEMBER_ID_REQUIRED
        self._members[name] = response.member_id

    async def _join_all(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Have all join until they are in one generation."""
        tasks: dict[str, asyncio.Task[Any]] = {}
        while True:
            # Whoever joins with other metadata than before makes all join anew.
            metadata = b"%d" % next(self._numbers)
            for name in names:
                if name not in tasks or tasks[name].done():
                    tasks[name] = asyncio.create_task(self._join(self._members[name], metadata))
            _, pending = await asyncio.wait(tasks.values(), timeout=JOIN_S)
            if not pending:
                joined = {name: task.result() for name, task in tasks.items()}
                # Every ten minutes Kafka forgets groups without members, and the ids that it gave.
                forgotten = [name for name in names if joined[name].error_code == UNKNOWN_MEMBER_ID]
                for name in forgotten:
                    await self._get_id(name)
                if not forgotten:
                    for each in joined.values():
                        check(each)
                    if len({each.generation_id for each in joined.values()}) == 1:
                        return joined

    async def _join(self, member_id: str, metadata: bytes) -> Any:
        request = JoinGroupRequest[5](
            group_id=self.group_id,
            session_timeout_ms=TIMEOUT_MS,
            rebalance_timeout_ms=TIMEOUT_MS,
            member_id=member_id,
            group_instance_id=None,
            protocol_type=PROTOCOL,
            protocols=[(PROTOCOL, metadata)],
        )
        return await self._ask(request)

    async def _ask(self, request: Any) -> Any:
        """Ask the coordinator over a connection of its own."""
        key = GROUP_COORDINATOR, self.group_id
        with closing(KafkaClient(Bootstrap(self._servers), 30.0)) as client:

            async def attempt() -> Any:
                response = await client.ask(request, await client.coordinator(key, check_code))
                if response.error_code in RETRIABLE:
                    check_code(response.error_code)
                return response

            async with client.within(30.0):
                return await client.retry(attempt)


def check(response: Any) -> None:
    assert not response.error_code, error_name(response.error_code)


def check_code(error_code: int) -> None:
    if error_code:
        raise UpstreamError("not_ready", error_name(error_code))
