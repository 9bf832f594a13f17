"""Nobody begins while slots are handed over; the debts of one that has gone go along."""

import asyncio
from pathlib import Path
from typing import Any

from proxy.tier.slot_map import ListenerPorts, MemberAddresses
from proxy.quota.debts import Debt
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.workers.control_channel import ChannelLostError
from proxy.tier.key_rules import KeyRules
from proxy.workers.post import Post
from proxy.launcher.restarts import LOOP_CRASHES
from proxy.workers.shared_map import SharedMap
from proxy.workers.slot_shares import share_slots

TURNS = 20


class CalledPost(Post):
    """A post without a process, which notes what it is called for."""

    def __init__(self, number: int, calls: list[tuple[str, str]]) -> None:
        super().__init__(number, Path("nowhere"))
        self.calls = calls
        self.is_there = True
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.owed: list[Any] = []

    async def call(self, method: str, limit_s: float = 1.0, **params: Any) -> Any:
        assert limit_s > 0
        if not self.is_there:
            raise ChannelLostError("it is not there")
        self.calls.append((self.name, method))
        await self.may_answer.wait()
        if method == "take_up":
            self.owed = params["owed"]
        return []


def addresses(post: Post) -> MemberAddresses:
    return MemberAddresses(post.name, {"main": ListenerPorts("h", 9092, ports={})})


def handover() -> tuple[SharedMap, list[CalledPost], list[tuple[str, str]]]:
    calls: list[tuple[str, str]] = []
    posts = [CalledPost(number, calls) for number in range(2)]

    def owners() -> list[str]:
        looping = [post.name for post in posts if post.restarts.is_looping]
        return share_slots([post.name for post in posts], looping)

    made = SharedMap(posts, KeyRules("[]", ()), addresses, owners, lambda _: None)
    return made, posts, calls


def loops(post: Post) -> None:
    for _ in range(LOOP_CRASHES + 1):
        post.restarts.crashed(1.0)
    assert post.restarts.is_looping


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def test_who_begins_waits_for_a_handover_and_gets_the_next_map() -> None:
    made, (one, _), calls = handover()
    async with made.begin() as shares:
        before = shares
    assert set(before.slot_map.owners) == {"0", "1"}
    one.may_answer.clear()
    loops(one)
    made.share()
    await turns()
    assert calls == [("0", "let_go"), ("1", "let_go")]
    assert made.shares is before  # it is not in force yet

    async def begin() -> set[str | None]:
        async with made.begin() as later:
            return set(later.slot_map.owners)

    begins = asyncio.create_task(begin())
    await turns()
    assert not begins.done()
    one.may_answer.set()
    assert await begins == {"1"}
    await made.stop()


async def test_a_handover_waits_for_who_begins() -> None:
    made, (one, _), calls = handover()
    async with made.begin() as first, made.begin() as second:
        assert first is second
        loops(one)
        made.share()
        made.share()
        await turns()
        assert calls == []
    await turns()
    assert calls.count(("1", "take_up")) == 1  # of two changes that waited the last one
    assert made.owner_of_query("any") == "1"
    await made.stop()


async def test_what_clients_of_one_that_has_gone_owe_goes_along() -> None:
    made, (one, other), _ = handover()
    client = ClientIdentity("main", None, "c")
    one.debts.keep([Debt(client, "client-id=c", QuotaKind.CONSUMER_BYTE_RATE, 9e6)])
    one.is_there = False
    loops(one)
    made.share()
    await turns()
    (row,) = other.owed
    assert row[:4] == ["main", None, "c", "client-id=c"]
    await made.stop()
