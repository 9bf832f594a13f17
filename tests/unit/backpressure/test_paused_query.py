"""A query whose quota is paused stays the query that it is: its batches are still shaped."""

import pytest
from parts.quota_world import QuotaWorld

from proxy.backpressure.backpressure import Backpressure
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.rules import AdaptiveSettings, QuotaManagerSettings, QuotaPause, Rule, RuleTable

RULE = Rule(
    client_id="orders",
    bounds={QuotaKind.CONSUMER_BYTE_RATE: 1e6},
    adaptive=AdaptiveSettings(batch_interval_ms=1000.0, initial_rate=500.0),
)
CLIENT = ClientIdentity("default", "anna", "orders")


@pytest.mark.parametrize("keys", [{}, {"client-id": "orders"}, {"user": "anna"}])
def test_it_is_the_same_before_and_after(keys: dict[str, str]) -> None:
    world = QuotaWorld(RULE)
    backpressure = Backpressure(world.quotas)
    before = backpressure.of_identity(CLIENT, 0.0)
    assert before is not None
    for pauses in ([QuotaPause(keys, 1.0)], []):
        table = RuleTable((RULE,), pauses=pauses)
        world.quotas.update(QuotaManagerSettings(rules=(RULE,)), table)
        backpressure.tick(1.0)
        assert backpressure.of_identity(CLIENT, 1.0) is before
        assert not before.clamp.detached
        assert before.clamp.rate is not None
