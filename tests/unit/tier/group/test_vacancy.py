"""A successor joins when nobody has its machine's place any more, or after a while."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.cluster import kafka_client
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.upstream import RefusedError, UpstreamError
from proxy.tier.group.group_member import until_vacant

BROKER = ("kafka", 9092)
GROUP = "quota-proxy-tier-t"
NOT_COORDINATOR = 16
LIMIT_S = 5.0


class Coordinator(KafkaClient):
    """Answers with one step after the other, and then with the last one again."""

    def __init__(self, *steps: Any) -> None:
        super().__init__(Bootstrap([BROKER]))
        self._steps = list(steps)
        self.asked = 0
        self.forgotten: list[object] = []

    async def coordinator(self, key: tuple[int, str], check: Callable[[int], None]) -> Any:
        assert key[1] == GROUP
        check(0)
        return BROKER

    async def ask(self, request: Any, broker: Any = None) -> Any:
        assert (request.groups, broker) == ([GROUP], BROKER)
        step = self._steps[min(self.asked, len(self._steps) - 1)]
        self.asked += 1
        if isinstance(step, Exception):
            raise step
        code, names = step if isinstance(step, tuple) else (0, step)
        members = [SimpleNamespace(group_instance_id=name) for name in names]
        return SimpleNamespace(groups=[SimpleNamespace(error_code=code, members=members)])

    def forget(self, *keys: object) -> None:
        self.forgotten += keys


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_client, "ASK_AGAIN_S", 0.0)


async def look(coordinator: Coordinator, limit_s: float = LIMIT_S) -> bool:
    return await until_vacant(coordinator, GROUP, "a", limit_s)


@pytest.mark.parametrize("names", [[], ["b"], [None, "ab"]])
async def test_a_free_place_is_seen_at_once(names: list[str | None]) -> None:
    coordinator = Coordinator(names)
    assert await look(coordinator)
    assert coordinator.asked == 1


async def test_it_waits_until_the_one_before_has_left() -> None:
    coordinator = Coordinator(["a", "b"], ["b", "a"], ["b"])
    assert await look(coordinator)
    assert coordinator.asked == 3


@pytest.mark.parametrize(
    "problem", [UpstreamError("timeout", ""), RefusedError("no login", 58), (NOT_COORDINATOR, [])]
)
async def test_a_coordinator_that_is_not_there_is_looked_for_again(problem: Any) -> None:
    coordinator = Coordinator(problem, ["a"], [])
    assert await look(coordinator)
    assert coordinator.asked == 3
    assert len(coordinator.forgotten) == 1


async def test_it_does_not_wait_for_good() -> None:
    assert not await look(Coordinator(["a"]), limit_s=0.02)


async def test_who_is_cancelled_ends() -> None:
    waiting = asyncio.create_task(look(Coordinator(["a"])))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
