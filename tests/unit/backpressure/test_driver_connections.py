"""A client is known again by the numbers of its requests."""

import pytest

from proxy.backpressure.driver_connections import (
    MAX_INSTANCES,
    MAX_STEP,
    MIN_KNOWN,
    ClientInstances,
    DriverConnections,
    LookupConnection,
)

KNOWN = 500

CASES = {
    "the next one": (KNOWN, KNOWN + 1, True),
    "after many tries": (KNOWN, KNOWN + MAX_STEP, True),
    "too far ahead, such as an executor's": (KNOWN, KNOWN + MAX_STEP + 1, False),
    "of two brokers asked at once the first": (KNOWN, KNOWN - 1, True),
    "a client that has just begun": (KNOWN, 3, False),
    "numbers that any client has": (MIN_KNOWN - 5, MIN_KNOWN - 1, False),
    "soon after": (MIN_KNOWN - 1, MIN_KNOWN, True),
}


@pytest.mark.parametrize(("known", "asked", "is_known"), CASES.values(), ids=CASES)
def test_who_goes_on(known, asked, is_known):
    instances = ClientInstances()
    instances.record(known)
    assert instances.has(asked) == is_known


def test_each_source_of_a_query_has_its_own():
    instances = ClientInstances()
    for number in (100, 5000, 101, 5001):
        instances.record(number)
    assert instances.latest == [101, 5001]


def test_only_the_latest_are_kept():
    instances = ClientInstances()
    far = [KNOWN + 2 * MAX_STEP * each for each in range(MAX_INSTANCES + 2)]
    for number in far:
        instances.record(number)
    assert instances.latest == far[2:]
    again = DriverConnections()
    again.resume(instances.latest, 0.0)
    assert again.instances.has(far[-1] + 1)
    again.begin_run()
    assert not again.instances.has(far[-1] + 1)


def lookup_ids(begin):
    """Of an admin client that looks up again and again."""
    return range(begin, begin + 100, 4)


@pytest.mark.parametrize(("begin", "is_driver"), [(6, False), (30, True)])
def test_a_new_driver_never_catches_up_with_one_that_was_killed(begin, is_driver):
    connections = DriverConnections()
    killed = LookupConnection(opened_ms=0.0)
    connections.add(killed)
    connections.record_alive(1.0, 1.0)
    for number in lookup_ids(6)[:6]:
        connections.record_lookup(killed, number)
    connections.remove(killed)
    new = LookupConnection(opened_ms=10.0)
    connections.add(new)
    for number in lookup_ids(begin):
        connections.record_lookup(new, number)
        assert connections.is_driver(new) is is_driver
