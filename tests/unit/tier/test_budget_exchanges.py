"""A member uses a lease only as the answer to what it asked, of whom it asked."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web
from parts.quota_world import QuotaWorld

from proxy.quota.budget_leases import ASK_EVERY_MS, RATE_LEASE_MS, SKEW_MS, VOTE_MS
from proxy.quota.entities import CONSUMER_BYTE_RATE, ClientIdentity
from proxy.quota.rules import Budget, Rule, Share
from proxy.tier import budget_exchanges
from proxy.tier.budget_exchanges import BudgetLeasing, lease_owner_slot
from proxy.tier.peer_client import BUDGETS_PATH, PeerClient
from proxy.tier.peers import Peers
from proxy.tier.quota_keys import QuotaKeys
from proxy.tier.slot_map import SLOTS

HOST = "127.0.0.1"
NEAR, FAR, OTHER = "near/0", "far/0", "other/0"
BUDGETS = [Budget(name=name, bounds={CONSUMER_BYTE_RATE: 1e6}) for name in ("asked", "unasked")]
RULES = [
    Rule(client_id=each.name, bounds={}, share=Share(each), number=number)
    for number, each in enumerate(BUDGETS)
]
ASKED, UNASKED = (f"consumer_byte_rate:{each.shared_entity}" for each in BUDGETS)
RATE, WRONG_RATE = 1000.0, 9000.0
STEP_MS = SKEW_MS / 2
LIMIT_S = 60.0

Answer = Callable[[int], Sequence[Sequence[Any]]]
"""Makes the leases for the message of a number."""


class FarOwner:
    """A member that answers demands at a real port."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.demands: list[Any] = []

    async def _leases(self, request: web.Request) -> web.Response:
        document = await request.json()
        self.demands += document["demands"]
        return web.json_response({"leases": self._answer(document["votes"][1])})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post(BUDGETS_PATH, self._leases)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, 0).start()
            yield f"http://{HOST}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def turns() -> None:
    """Let everything that is ready now run."""
    for _ in range(10):
        await asyncio.sleep(0)


def lease(sensor: str, number: int, rate: float) -> list[Any]:
    return [sensor, number, rate, 0.0, RATE_LEASE_MS]


@pytest.mark.parametrize(
    ("answer", "used"),
    [
        pytest.param(lambda number: [lease(ASKED, number, RATE)], RATE, id="what was asked"),
        pytest.param(
            lambda number: [lease(ASKED, number + 1, WRONG_RATE), lease(ASKED, number, RATE)],
            RATE,
            id="another message's beside it",
        ),
        pytest.param(
            lambda number: [lease(UNASKED, number, WRONG_RATE), lease(ASKED, number, RATE)],
            RATE,
            id="another owner's beside it",
        ),
        pytest.param(lambda number: [lease(ASKED, number - 1, WRONG_RATE)], 0.0, id="too late"),
    ],
)
async def test_only_what_was_asked_for_is_used(
    answer: Answer, used: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = QuotaWorld(*RULES)
    monkeypatch.setattr(budget_exchanges, "clock_ms", lambda: world.now_ms)
    monkeypatch.setattr(budget_exchanges, "LEASE_LOOK_S", 0.0)
    owners: list[str | None] = [FAR] * SLOTS
    owners[lease_owner_slot(BUDGETS[1].shared_entity)] = OTHER
    far, client, keys = FarOwner(answer), PeerClient(), QuotaKeys(())
    async with far.running() as url:
        peers = Peers(client)
        peers.use({FAR: url})
        members = frozenset({NEAR, FAR, OTHER})
        exchanges = BudgetLeasing(
            NEAR, world.quotas, peers, lambda: (owners, members), lambda: keys
        )
        clients = [
            world.quotas.client(ClientIdentity("default", None, rule.client_id)) for rule in RULES
        ]

        async def pass_ms(ms: float) -> None:
            """Let time pass, as one that looks at its leases sees it, and its clients go on."""
            for _ in range(int(ms / STEP_MS)):
                world.pass_ms(STEP_MS)
                for each in clients:
                    each.charge(CONSUMER_BYTE_RATE, 1.0, world.now_ms)
                await turns()

        async def asked(count: int) -> None:
            async with asyncio.timeout(LIMIT_S):
                while len(far.demands) < count:
                    await turns()

        running = asyncio.create_task(exchanges.run())
        await pass_ms(VOTE_MS)
        await asked(1)
        await pass_ms(ASK_EVERY_MS)
        await asked(2)  # so that the first one's answer is known
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    await client.close()
    assert {demand[1] for demand in far.demands} == {ASKED}
    assert {name: each.leased for name, each in world.quotas.leased.items()} == {
        ASKED: used,
        UNASKED: 0.0,
    }
