"""Shares the slots among the workers, and hands them over when the map or the keys change.

One map and its keys are in force at a time. What begins gets these; while slots are handed over
nobody begins: two workers must not both take a client for their own.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from proxy.members.quota_keys import QuotaKeys
from proxy.members.slot_map import MemberAddresses, SlotMap
from proxy.members.slots import slot_of
from proxy.workers.handing_over import let_go, take_up
from proxy.workers.key_rules import KeyRules
from proxy.workers.post import Post


@dataclass(frozen=True, slots=True)
class WorkerShares:
    """Who has which clients at a time."""

    slot_map: SlotMap
    key_rules: KeyRules
    keys: QuotaKeys
    """By `key_rules`."""

    def told(self) -> Mapping[str, Any]:
        """Return it as workers read it."""
        return {"slot_map": self.slot_map.document(), "keys": self.key_rules.text()}

    def owner_of_query(self, client_id: str) -> str | None:
        """Return the worker that has a client's query."""
        return self.slot_map.owners[slot_of(self.keys.key_of_query(client_id))]


class SharedMap:
    """Keeps one map in force among a machine's workers.

    `addresses` gives where clients reach each worker now, `owners` who is to own each slot, and
    `handed_over` is told of the owners that all workers follow.
    """

    def __init__(
        self,
        posts: Sequence[Post],
        key_rules: KeyRules,
        addresses: Callable[[Post], MemberAddresses],
        owners: Callable[[], Sequence[str]],
        handed_over: Callable[[Sequence[str | None]], None],
    ) -> None:
        self._posts = posts
        self._addresses = addresses
        self._owners = owners
        self._handed_over = handed_over
        self._key_rules = key_rules
        self._generation = 0
        self._shares: WorkerShares | None = None
        self._running = asyncio.Lock()
        self._beginning = 0
        self._nobody_begins = asyncio.Event()
        self._nobody_begins.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def shares(self) -> WorkerShares:
        """What is in force."""
        if self._shares is None:
            self._shares = self._wanted(self._key_rules.keys())
        return self._shares

    def owner_of_query(self, client_id: str) -> str | None:
        """Return the worker that has a client's query."""
        return self.shares.owner_of_query(client_id)

    @property
    def key_rules(self) -> KeyRules:
        """Of what the keys are made, or are about to be."""
        return self._key_rules

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[WorkerShares]:
        """Give what is in force to a worker that begins, until it has begun.

        Several may begin at the same time, but none while slots are handed over.
        """
        async with self._running:
            self._beginning += 1
            self._nobody_begins.clear()
        try:
            yield self.shares
        finally:
            self._beginning -= 1
            if not self._beginning:
                self._nobody_begins.set()

    def use_keys(self, key_rules: KeyRules) -> None:
        """Make keys by other rules from now on."""
        if key_rules != self._key_rules:
            self._key_rules = key_rules
            self.share()

    def share(self) -> None:
        """Have all workers follow their addresses, the keys or the crash loops, which changed."""
        self._generation += 1
        task = asyncio.create_task(self._hand_over(self._generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Hand nothing over any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _wanted(self, keys: QuotaKeys) -> WorkerShares:
        members = {post.name: self._addresses(post) for post in self._posts}
        slot_map = SlotMap(self._generation, members, self._owners())
        return WorkerShares(slot_map, self._key_rules, keys)

    async def _hand_over(self, generation: int) -> None:
        """Have clients let go by those who had them, then taken up by those who have them now.

        Of several changes that wait only the last one is made.
        """
        async with self._running:
            await self._nobody_begins.wait()
            if generation != self._generation:
                return
            key_rules, keys = self._key_rules, self.shares.keys
            if key_rules != self.shares.key_rules:
                keys = await asyncio.to_thread(key_rules.keys)
            wanted = self._wanted(keys)
            owed = await let_go(self._posts, wanted.slot_map, key_rules)
            self._shares = wanted  # also for who begins next, whatever comes of the rest
            await take_up(self._posts, owed)
            self._handed_over(wanted.slot_map.owners)
