"""What drivers were given, what was in the logs beyond it then, and who they are."""

import pytest

from proxy.backpressure.drivers import (
    MAX_INSTANCES,
    MAX_PLANNED,
    MAX_STEP,
    MIN_KNOWN,
    QueryConnection,
    QueryDrivers,
)
from proxy.progress.report import BatchRange

KEYS = ("t", 0), ("t", 1)
DRIVER = QueryConnection(0.0)
KNOWN = 500

LEFT = {
    "the latest plan": ({KEYS[0]: 300, KEYS[1]: 30}, 700 + 0),
    "a plan before it, of which Spark tells late": ({KEYS[0]: 200, KEYS[1]: 20}, 300 + 10),
    "one partition alone": ({KEYS[0]: 100}, 400),
    "an end that was never told, as with maxOffsetsPerTrigger": ({KEYS[0]: 150}, None),
    "another topic": ({("u", 0): 100}, None),
}

GOES_ON = {
    "the next one": (KNOWN, KNOWN + 1, True),
    "after many tries": (KNOWN, KNOWN + MAX_STEP, True),
    "too far ahead, such as an executor's": (KNOWN, KNOWN + MAX_STEP + 1, False),
    "of two brokers asked at once the first": (KNOWN, KNOWN - 1, True),
    "a client that has just begun": (KNOWN, 3, False),
    "numbers that any client has": (MIN_KNOWN - 5, MIN_KNOWN - 1, False),
    "soon after": (MIN_KNOWN - 1, MIN_KNOWN, True),
}


def ranges(ends):
    return {key: BatchRange(None, end) for key, end in ends.items()}


@pytest.mark.parametrize(("ends", "left"), LEFT.values(), ids=LEFT)
def test_what_was_left_when_a_batch_was_planned(ends, left):
    told = QueryDrivers()
    for latest, offset in [((500, 30), (100, 10)), ((500, 30), (200, 20)), ((1000, 30), (300, 30))]:
        for key, real, end in zip(KEYS, latest, offset, strict=True):
            told.record_end(key, real, end, DRIVER, 1.0)
    assert told.left_out(ranges(ends)) == left


def test_plans_of_long_ago_are_forgotten():
    told = QueryDrivers()
    for end in range(MAX_PLANNED + 1):
        told.record_end(KEYS[0], 100, end, DRIVER, 1.0)
    assert told.left_out(ranges({KEYS[0]: 0})) is None
    assert told.left_out(ranges({KEYS[0]: 1})) == 99


def killed(*request_ids: int) -> QueryDrivers:
    """A run whose driver has looked up with these requests, and lost its connections."""
    known = QueryDrivers()
    connection = QueryConnection(opened_ms=0.0)
    known.connect(connection)
    known.record_alive(1.0, 1.0)
    for number in request_ids:
        known.record_lookup(connection, number)
    known.connections.discard(connection)
    return known


def trusts(known: QueryDrivers, *request_ids: int) -> set[bool]:
    """Whether a new connection is the driver's, at each of these look-ups."""
    connection = QueryConnection(opened_ms=10.0)
    known.connect(connection)
    seen = set()
    for number in request_ids:
        known.record_lookup(connection, number)
        seen.add(known.is_driver(connection))
    return seen


@pytest.mark.parametrize(("known", "asked", "is_known"), GOES_ON.values(), ids=GOES_ON)
def test_who_goes_on(known, asked, is_known):
    assert trusts(killed(known), asked) == {is_known}


def test_each_source_of_a_query_has_its_own():
    assert killed(100, 5000, 101, 5001).request_ids == [101, 5001]


def test_only_the_latest_are_kept():
    far = [KNOWN + 2 * MAX_STEP * each for each in range(MAX_INSTANCES + 2)]
    known = killed(*far)
    assert known.request_ids == far[2:]
    assert trusts(known, far[-1] + 1) == {True}
    known = killed(*far)
    known.begin_run(None, None)
    assert trusts(known, far[-1] + 1) == {False}


def lookup_ids(begin):
    """Of an admin client that looks up again and again."""
    return range(begin, begin + 100, 4)


@pytest.mark.parametrize(("begin", "is_driver"), [(6, False), (30, True)])
def test_a_new_driver_never_catches_up_with_one_that_was_killed(begin, is_driver):
    assert trusts(killed(*lookup_ids(6)[:6]), *lookup_ids(begin)) == {is_driver}
