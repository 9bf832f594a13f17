"""What drivers were told, and what was in the logs beyond it then."""

import pytest

from proxy.backpressure.advertised_ends import MAX_PLANNED, AdvertisedEnds
from proxy.progress.report import BatchRange

KEYS = ("t", 0), ("t", 1)
DRIVER = object()

LEFT = {
    "the latest plan": ({KEYS[0]: 300, KEYS[1]: 30}, 700 + 0),
    "a plan before it, of which Spark tells late": ({KEYS[0]: 200, KEYS[1]: 20}, 300 + 10),
    "one partition alone": ({KEYS[0]: 100}, 400),
    "an end that was never told, as with maxOffsetsPerTrigger": ({KEYS[0]: 150}, None),
    "another topic": ({("u", 0): 100}, None),
}


def ranges(ends):
    return {key: BatchRange(None, end) for key, end in ends.items()}


@pytest.mark.parametrize(("ends", "left"), LEFT.values(), ids=LEFT)
def test_what_was_left_when_a_batch_was_planned(ends, left):
    told = AdvertisedEnds()
    for latest, offset in [((500, 30), (100, 10)), ((500, 30), (200, 20)), ((1000, 30), (300, 30))]:
        for key, real, end in zip(KEYS, latest, offset, strict=True):
            told.record(key, real, end, DRIVER, 1.0)
    assert told.left(ranges(ends)) == left


def test_plans_of_long_ago_are_forgotten():
    told = AdvertisedEnds()
    for end in range(MAX_PLANNED + 1):
        told.record(KEYS[0], 100, end, DRIVER, 1.0)
    assert told.left(ranges({KEYS[0]: 0})) is None
    assert told.left(ranges({KEYS[0]: 1})) == 99
