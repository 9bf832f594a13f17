"""One address that makes up client ids: its series are bounded, and go when its sensors do."""

import re
from collections import Counter

import pytest
from parts.quota_world import QuotaWorld, sensor_collector
from prometheus_client import generate_latest

from metrics import BoundedLabels
from metrics.clock import clock_ms
from proxy.quota.entities import DEFAULT, ClientIdentity, QuotaKind
from proxy.quota.gate import FetchSizes, GateWaiter
from proxy.quota.meters import ThrottleDecision
from proxy.quota.rules import Rule
from proxy.relay.clients import ClientRegistry
from proxy.wire.apis import FETCH

MADE_UP, ROOM = 1_010, 1_000
BYTE_RATES = (QuotaKind.CONSUMER_BYTE_RATE, QuotaKind.PRODUCER_BYTE_RATE)
HELD_BYTES = 1e9
HOUR_MS = 3_600_000.0
ADDRESS = "10.0.0.66"

SERIES = re.compile(r"kafka_quota_proxy_(\w+)\{.*made-up-\d+", re.ASCII)

WITH_CLIENTS = {
    *("bytes_total", "rate_bytes", "bound_bytes", "violations_total", "expected_throttling"),
}
HELD = {"throttled_responses_total"}
NOT_HELD = {"would_throttle_total", "would_throttle_seconds_total"}


class Proxy(QuotaWorld):
    """What knows of clients by name, with all that is scraped."""

    def __init__(self, *rules: Rule, **settings) -> None:
        super().__init__(*rules, **settings)
        self.prometheus.register(sensor_collector(self.quotas, lambda: self.now_ms))
        self.registry = ClientRegistry(self.instruments.bytes_total)

    def make_up(self, number: int) -> None:
        """A client comes, takes far too much, and goes."""
        identity = ClientIdentity("default", None, f"made-up-{number}")
        self.registry.connected(identity)
        quotas = self.quotas.client(identity, ADDRESS)
        for kind in BYTE_RATES:
            charge = quotas.charge(kind, HELD_BYTES, self.now_ms)
            if charge is not None:
                self.quotas.held(charge, charge.delay_ms, self.now_ms)
        self.registry.byte_counter(identity, FETCH).inc()
        quotas.close()
        self.registry.disconnected(identity)

    def expire(self) -> None:
        for _ in self.quotas.expiring(self.now_ms):
            pass
        for _ in self.registry.forgetting(clock_ms() + HOUR_MS + 1.0):
            pass

    def series(self) -> Counter[str]:
        """How many series name such a client, by metric."""
        lines = generate_latest(self.prometheus).decode().splitlines()
        return Counter(found[1] for line in lines if (found := SERIES.match(line)))

    def label_sets(self) -> int:
        """How many sets of labels take room, that of clients."""
        metrics = vars(self.instruments).values()
        return sum(len(each.children) for each in metrics if isinstance(each, BoundedLabels))


@pytest.mark.parametrize("enforce", [True, False])
def test_series_are_bounded_and_go(enforce):
    bounds = dict.fromkeys(BYTE_RATES, 1.0)
    rule = Rule(client_id=DEFAULT, bounds=bounds, expected=True, enforce=enforce)
    proxy = Proxy(rule, max_client_entities=ROOM)
    for number in range(MADE_UP):
        proxy.make_up(number)
    found = proxy.series()
    assert set(found) == WITH_CLIENTS | (HELD if enforce else NOT_HELD)
    assert found["bytes_total"] > ROOM / 2
    assert max(found.values()) <= ROOM
    proxy.now_ms += 2 * HOUR_MS
    proxy.expire()
    assert proxy.series() == {}
    assert proxy.label_sets() == 0
    proxy.make_up(0)
    assert proxy.series()["bytes_total"] == 1


def test_what_waited_at_the_gate_and_exceeded_nothing_goes_as_well():
    consumer = QuotaKind.CONSUMER_BYTE_RATE
    proxy = Proxy(Rule(client_id=DEFAULT, bounds={consumer: 1000.0}))
    quotas = proxy.client_quotas("made-up-1")
    _, under_way = quotas.grant(1 << 20, FetchSizes(), proxy.now_ms, holds=True)
    waiter = GateWaiter(lambda _: None)
    assert not quotas.admit(consumer, waiter, None, proxy.now_ms)
    under_way.cancel()
    waited = ThrottleDecision(proxy.now_ms, 100, waiter.meter)
    proxy.quotas.held(waited, waited.delay_ms, proxy.now_ms)
    waiter.leave(proxy.now_ms)
    assert proxy.series()["throttled_responses_total"] == 1
    assert "violations_total" not in proxy.series()
    quotas.close()
    proxy.now_ms += 2 * HOUR_MS
    proxy.expire()
    assert proxy.series() == {}
