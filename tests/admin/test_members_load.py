"""Long documents of many members: they are whole."""

import pytest
from admin_world import CONSUMER, MIB, AdminWorld
from tier_world import TierWorld

from proxy.quota.rules import Rule

CLIENTS = 10_000
LIMIT_S = 100.0
"""For one answer, on a machine that runs other tests as well."""

pytestmark = pytest.mark.slow


def crowded() -> AdminWorld:
    return AdminWorld((Rule(client_id="<default>", bounds={CONSUMER: MIB}),))


async def test_ten_thousand_clients_of_each_of_three_members():
    tier = TierWorld(["a/0", "a/1", "a/2"], make_world=crowded)
    for name, world in tier.worlds.items():
        for number in range(CLIENTS):
            world.connect(f"client-{name}-{number}")(1.0 + number)
    async with tier.asked(timeout_s=LIMIT_S) as of:
        for path in ("/v1/status?by=client&limit=1000", "/v1/clients?limit=1000", "/metrics"):
            assert (await of("a/1")("GET", path)).status == 200
        rows = (await of("a/1")("GET", "/v1/status?limit=1000")).json
        assert rows["bounded"] == 3 * CLIENTS
        assert [row["rate"] for row in rows["clients"][:3]] == [1000.0] * 3
