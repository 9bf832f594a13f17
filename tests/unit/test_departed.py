"""What the relay keeps of clients that have left."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from metrics import Instruments, Registry
from metrics.clock import clock_ms
from proxy.quota import ClientIdentity, QuotaManager, QuotaSettings
from proxy.relay.pipes import PipePool
from proxy.relay.services import MAX_GONE_CLIENTS, Limits, Reapers, Services, ThrottleMode

HOUR_MS = 3_600_000.0


@pytest.fixture
async def services():
    instruments = Instruments(CollectorRegistry(), max_label_sets=2 * MAX_GONE_CLIENTS)
    settings = QuotaSettings()
    loop = asyncio.get_running_loop()
    return Services(
        loop=loop,
        limits=Limits(),
        mode=ThrottleMode.DELAY,
        quotas=QuotaManager(settings, instruments, Registry(settings.max_sensors)),
        reapers=Reapers(loop, instruments),
        instruments=instruments,
        pipes=PipePool(),
    )


def client(number, listener="l"):
    return ClientIdentity(listener, None, f"spark-{number}")


def use(services, identity):
    services.client_came(identity)
    services.instruments.bytes_total.of(identity.listener, "", identity.client_id, "Fetch").inc()


def counted(services):
    """Return the client ids that have byte counters, in the order of their coming."""
    (family,) = services.instruments.bytes_total.collect()
    return [sample.labels["client_id"] for sample in family.samples]


@pytest.mark.slow
async def test_50_000_comings_and_goings_leave_the_last_to_go(services):
    for number in range(50_000):
        use(services, client(number))
        if number:
            services.client_left(client(number - 1))

    first_kept = 50_000 - 1 - MAX_GONE_CLIENTS
    assert counted(services) == [f"spark-{n}" for n in range(first_kept, 50_000)]
    assert services.knows_client("spark-49999")
    assert services.knows_client(f"spark-{first_kept}")
    assert not services.knows_client(f"spark-{first_kept - 1}")


async def test_each_is_forgotten_an_hour_after_it_left(services):
    for number in range(3):
        use(services, client(number))
    for number in (2, 0):
        services.client_left(client(number))
    soon_ms = clock_ms() + HOUR_MS / 2

    assert list(services.forgetting(soon_ms)) == []
    assert list(services.forgetting(soon_ms + HOUR_MS)) == [client(2), client(0)]
    assert counted(services) == ["spark-1"]
    assert [services.knows_client(f"spark-{number}") for number in range(3)] == [0, 1, 0]


async def test_one_that_comes_back_between_two_steps_stays(services):
    for number in range(3):
        use(services, client(number))
        services.client_left(client(number))
    steps = services.forgetting(clock_ms() + HOUR_MS)

    assert next(steps) == client(0)
    use(services, client(1))
    use(services, client(0))
    assert list(steps) == [client(2)]
    assert sorted(counted(services)) == ["spark-0", "spark-1"]


async def test_a_client_id_is_known_as_long_as_any_client_has_it(services):
    one, other = client(1), client(1, listener="tenants")
    for identity in (one, one, other):
        use(services, identity)
    for identity in (one, other, one):
        services.client_left(identity)
        assert services.knows_client("spark-1")
    use(services, one)

    assert list(services.forgetting(clock_ms() + HOUR_MS)) == [other]
    assert services.knows_client("spark-1")
    services.client_left(one)
    assert list(services.forgetting(clock_ms() + HOUR_MS)) == [one]
    assert not services.knows_client("spark-1")
