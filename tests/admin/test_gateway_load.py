"""Long documents of many members: how long they take, and for how long the gateway does not run."""

import asyncio
import contextlib
from time import perf_counter

import pytest
from admin_world import CONSUMER, MIB, AdminWorld
from gateway_world import GatewayWorld

from proxy.quota.rules import Rule

CLIENTS = 10_000
LONGEST_S = 20.0
"""For one answer, on a machine that runs other tests as well."""
LONGEST_STALL_S = 0.25
"""Of the loop that the gateway and, here, all members share; by itself it is much shorter."""

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def crowded() -> AdminWorld:
    return AdminWorld((Rule(client_id="<default>", bounds={CONSUMER: MIB}),))


async def test_ten_thousand_clients_of_each_of_three_members():
    tier = GatewayWorld(make_world=crowded)
    for name, world in tier.worlds.items():
        for number in range(CLIENTS):
            world.connect(f"client-{name}-{number}")(1.0 + number)
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            began_s = perf_counter()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, perf_counter() - began_s - 0.001)

    async with tier.asked(timeout_s=LONGEST_S) as ask:
        watching = asyncio.create_task(watch())
        for path in ("/v1/status?by=client&limit=1000", "/v1/clients?limit=1000", "/metrics"):
            began_s = perf_counter()
            answer = await ask("GET", path)
            took_s, size = perf_counter() - began_s, len(answer.text)
            print(f"{path}: {took_s:.2f} s, {size / 1e6:.1f} MB, pause {longest_s:.3f} s")  # noqa: T201
            assert answer.status == 200
            assert took_s < LONGEST_S
            longest_s = 0.0 if path == "/metrics" else longest_s
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        rows = (await ask("GET", "/v1/status?limit=1000")).json
        assert rows["bounded"] == 3 * CLIENTS
        assert [row["rate"] for row in rows["clients"][:3]] == [1000.0] * 3
        assert longest_s < LONGEST_STALL_S
