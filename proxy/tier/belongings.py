"""What a member leaves, and takes, when slots move: debts, queries, bounds, pipelines."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from structlog import get_logger

from metrics.clock import clock_ms
from proxy.progress.owns import OwnedBeside
from proxy.queries.queries import Queries
from proxy.quota.debts import Debt, SharedQuotas
from proxy.relay.relay import Relay
from proxy.slices import Slices
from proxy.state import StateError, Store
from proxy.tier.slot_owns import SlotOwns

CUT_OFF_LIMIT_S = 2.0
"""For answers in flight at a member that has lost its place."""

_log = get_logger(__name__)


class Belongings:
    """What one member has of the clients in its slots.

    `lead_for_all` has the member write what concerns all, or leave that; it raises StateError.
    """

    def __init__(
        self,
        queries: Queries,
        shared: SharedQuotas,
        store: Store,
        relay: Relay,
        slices: Slices,
        lead_for_all: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._queries, self._shared, self._store = queries, shared, store
        self._relay, self._slices, self._lead_for_all = relay, slices, lead_for_all
        self._closing: asyncio.TimerHandle | None = None
        """Closes what still waits for a cluster that cannot be reached."""

    async def leave(self, before: SlotOwns, after: SlotOwns) -> list[Debt]:
        """Write and forget what is owned no more; return what those clients owe."""
        await self._queries.let_go(owns=OwnedBeside(before, after, is_others=True))
        return self._shared.debts(
            lambda client: before.has(client) and not after.has(client), clock_ms()
        )

    async def take(self, owns: SlotOwns, debts: Iterable[Debt]) -> None:
        """Take up what is owned from now on, and have its clients owe this. Raises StateError."""
        owed = [debt for debt in debts if owns.has(debt.identity)]
        self._shared.take_debts(owed, clock_ms())
        await self._queries.take_up(self._store, owns=owns)

    async def pace(self, owns: SlotOwns, slots: frozenset[int]) -> None:
        """Hold the clients of these slots to their bounds at once: another member had them."""
        walk = self._shared.keep_strictly(
            lambda client: owns.keys.slot_of(client) in slots, clock_ms
        )
        await self._slices.collect(walk)

    async def lead(self, is_leader: bool) -> None:
        """Write what concerns all from now on, or leave that to another member; log what fails."""
        try:
            await self._lead_for_all(is_leader)
        except StateError as error:
            _log.error("what concerns all members is not read", error=str(error))

    def cut_off(self, is_cut_off: bool) -> None:
        """Follow whether this member has lost its place in the tier.

        Its clients are let go then, and new ones refused: they go to other members. Those that wait
        for the cluster, which may be out of reach, do so for CUT_OFF_LIMIT_S.
        """
        self._relay.is_cut_off = is_cut_off
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        if is_cut_off:
            loop = asyncio.get_running_loop()
            self._closing = loop.call_later(CUT_OFF_LIMIT_S, self._close_waiting)

    def _close_waiting(self) -> None:
        self._relay.close_draining()
        self.cut_off(is_cut_off=True)  # others may come meanwhile
