"""What the relay keeps of clients that have left."""

import pytest
from prometheus_client import CollectorRegistry

from metrics import Instruments
from metrics.clock import clock_ms
from proxy.quota.entities import ClientIdentity
from proxy.relay.clients import MAX_GONE_CLIENTS, ClientRegistry
from proxy.wire.apis import FETCH

HOUR_MS = 3_600_000.0


@pytest.fixture
def bytes_total():
    return Instruments(CollectorRegistry(), max_label_sets=2 * MAX_GONE_CLIENTS).bytes_total


@pytest.fixture
def clients(bytes_total):
    return ClientRegistry(bytes_total)


def client(number, listener="l"):
    return ClientIdentity(listener, None, f"spark-{number}")


def use(clients, identity):
    clients.connected(identity)
    clients.byte_counter(identity, FETCH).inc()


def counted(bytes_total):
    """Return the client ids that have byte counters, in the order of their coming."""
    (family,) = bytes_total.collect()
    return [sample.labels["client_id"] for sample in family.samples]


@pytest.mark.slow
def test_50_000_comings_and_goings_leave_the_last_to_go(clients, bytes_total):
    for number in range(50_000):
        use(clients, client(number))
        if number:
            clients.disconnected(client(number - 1))

    first_kept = 50_000 - 1 - MAX_GONE_CLIENTS
    assert counted(bytes_total) == [f"spark-{n}" for n in range(first_kept, 50_000)]
    assert clients.knows("spark-49999")
    assert clients.knows(f"spark-{first_kept}")
    assert not clients.knows(f"spark-{first_kept - 1}")


def test_each_is_forgotten_an_hour_after_it_left(clients, bytes_total):
    for number in range(3):
        use(clients, client(number))
    for number in (2, 0):
        clients.disconnected(client(number))
    soon_ms = clock_ms() + HOUR_MS / 2

    assert list(clients.forgetting(soon_ms)) == []
    assert list(clients.forgetting(soon_ms + HOUR_MS)) == [client(2), client(0)]
    assert counted(bytes_total) == ["spark-1"]
    assert [clients.knows(f"spark-{number}") for number in range(3)] == [0, 1, 0]


def test_one_that_comes_back_between_two_steps_stays(clients, bytes_total):
    for number in range(3):
        use(clients, client(number))
        clients.disconnected(client(number))
    steps = clients.forgetting(clock_ms() + HOUR_MS)

    assert next(steps) == client(0)
    use(clients, client(1))
    use(clients, client(0))
    assert list(steps) == [client(2)]
    assert sorted(counted(bytes_total)) == ["spark-0", "spark-1"]


def test_a_client_id_is_known_as_long_as_any_client_has_it(clients, bytes_total):
    one, other = client(1), client(1, listener="tenants")
    for identity in (one, one, other):
        use(clients, identity)
    for identity in (one, other, one):
        clients.disconnected(identity)
        assert clients.knows("spark-1")
    use(clients, one)

    assert list(clients.forgetting(clock_ms() + HOUR_MS)) == [other]
    assert clients.knows("spark-1")
    clients.disconnected(one)
    assert list(clients.forgetting(clock_ms() + HOUR_MS)) == [one]
    assert not clients.knows("spark-1")
