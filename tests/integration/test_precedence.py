"""Which quota a real connection is charged to, the shared ones among them, and which one wins."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.clients import CLIENTS, Access, Client
from support.proxy_process import ProxyProcess, until
from support.raw import RawClient, api_versions, fetch, message

from examples.devkit.broker import EmbeddedBroker
from proxy.wire.apis import METADATA

PASSWORDS = {"alice": "alice-secret", "bob": "bob.secret"}
PLENTY_BYTES = 10**9

RULES = [
    {"user": "alice", "client-id": "etl"},
    {"user": "alice", "client-id": "<default>"},
    {"user": "<default>", "client-id": "etl"},
    {"user": "<default>"},
]
"""Every bound is its own, so that it tells which rule was taken."""

LOGINS = [
    ("alice", "etl", 0),
    ("alice", "other", 1),
    ("bob", "etl", 2),
    ("bob", "other", 3),
]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_users_who_log_in(
    kafka: EmbeddedBroker,
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    fill: Callable[..., None],
    client: Client,
) -> None:
    name = topic()
    fill(name, 1, 1000)
    rules = [
        {**rule, "consumer_byte_rate": PLENTY_BYTES + number} for number, rule in enumerate(RULES)
    ]
    running = proxy(bootstrap_servers=kafka.sasl_bootstrap, rules=rules)
    for user, client_id, number in LOGINS:
        access = Access(running.bootstrap, client_id, user=user, password=PASSWORDS[user])
        assert client.consume(access, name, 1).count == 1
        metrics = running.metrics()
        assert metrics.value("bytes_total", user=user, client_id=client_id, api="Fetch") > 0
        bounds = {s.value for s in metrics.samples if s.name.endswith("_bound_bytes")}
        assert bounds == {PLENTY_BYTES + seen for seen in range(number + 1)}, (user, client_id)


def test_listener_prefix_and_exact_id(
    proxy: Callable[..., ProxyProcess], topic: Callable[..., str], fill: Callable[..., None]
) -> None:
    name = topic()
    fill(name, 1, 1000)
    keys = [
        {"client-id": "app-1"},
        {"client-id-prefix": "app-"},
        {"client-id-prefix": "app-1"},
        {"listener": "tenants"},
        {"client-id": "<default>"},
    ]
    rules = [{**key, "consumer_byte_rate": PLENTY_BYTES + n} for n, key in enumerate(keys)]
    running = proxy(rules=rules, listeners=[{}, {"name": "tenants"}])
    seen: set[float] = set()
    for listener, client_id, number in [
        ("default", "app-1", 0),
        ("default", "app-2", 1),
        ("default", "app-11", 2),
        ("default", "else", 4),
        ("tenants", "else", 3),
    ]:
        with RawClient(running.bootstrap_of(listener), client_id) as client:
            client.ask(fetch(12, name))
        bounds = {
            sample.value
            for sample in running.metrics().samples
            if sample.name.endswith("_bound_bytes")
        }
        assert bounds - seen == {PLENTY_BYTES + number}, (listener, client_id)
        seen = bounds


def test_shared_quota_is_one_for_all(
    proxy: Callable[..., ProxyProcess], topic: Callable[..., str], fill: Callable[..., None]
) -> None:
    """Four clients that would each stay below the bound are held together."""
    name = topic()
    fill(name, 1, 500_000)
    bound = {"consumer_byte_rate": 1_000_000}
    rules = [
        {"client-id-prefix": "together-", "scope": "shared", **bound},
        {"client-id-prefix": "alone-", **bound},
    ]
    running = proxy(rules=rules)

    def read(client_id: str) -> None:
        with RawClient(running.bootstrap, client_id) as client:
            client.ask(fetch(12, name))

    with ThreadPoolExecutor() as pool:
        list(pool.map(read, [f"{kind}-{n}" for kind in ("together", "alone") for n in range(4)]))
    held = running.metrics().labels("throttled_responses_total", "quota_entity")
    assert len(held) == 1
    assert "together-" in held.pop()


def test_request_percentage_and_the_largest_delay(
    proxy: Callable[..., ProxyProcess], topic: Callable[..., str], fill: Callable[..., None]
) -> None:
    """Metadata is held by the share of time. Of two quotas that hold a fetch, one is counted."""
    name = topic()
    fill(name, 1, 500_000)
    tiny = 0.0001
    rules = [
        {"client-id": "busy", "request_percentage": tiny},
        {"client-id": "both", "request_percentage": tiny, "consumer_byte_rate": 200_000},
    ]
    running = proxy(rules=rules, throttle={"max_delay": "300ms"})
    with RawClient(running.bootstrap, "busy") as client:
        for _ in range(3):
            client.ask(message(METADATA, 1, topics=None))
        metrics = running.metrics()
        assert metrics.value("throttle_seconds_count", quota="request_percentage") >= 1
        assert metrics.value("throttled_responses_total", quota="consumer_byte_rate") == 0
        held = metrics.value("throttled_responses_total")
        for api_key in (12, 14):  # heartbeat, sync: a late answer would cost the membership
            client.ask(message(api_key, 0, group_id="g", generation_id=1, member_id="m"))
        assert running.metrics().value("throttled_responses_total") == held
    with RawClient(running.bootstrap, "both") as client:
        client.ask(fetch(12, name))
        assert running.metrics().value("throttled_responses_total") == held + 1
        client.ask(api_versions(3))
    until(lambda: running.metrics().value("connections") == 0, "all are gone")
