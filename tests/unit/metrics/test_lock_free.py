"""A histogram without locks shows what prometheus_client's own would."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from metrics.lock_free import LockFreeHistogram

BUCKETS = (0.001, 0.5, 1.0, 20.0)


def make(registry: CollectorRegistry | None = None) -> LockFreeHistogram:
    return LockFreeHistogram("h_seconds", "H.", ["api"], registry, buckets=BUCKETS)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, *BUCKETS, 0.7, 21.0, 1e9]))))
def test_the_text_is_that_of_prometheus_clients(observed):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = make(ours)
    oracle = Histogram("h_seconds", "H.", ["api"], registry=theirs, buckets=BUCKETS)
    oracle.disable_created = True
    for api, value in observed:
        histogram.labels(api).observe(value)
        oracle.labels(api).observe(value)
    lines = generate_latest(theirs).decode().splitlines()
    assert generate_latest(ours).decode().splitlines() == [
        line for line in lines if "_created" not in line
    ]


def test_a_child_is_made_once():
    histogram = make()
    assert histogram.labels("Fetch") is histogram.labels("Fetch")
    with pytest.raises(ValueError, match="2 label values"):
        histogram.labels("Fetch", "more")


@pytest.mark.parametrize("buckets", [(), (1.0, 0.5), (1.0, 1.0)])
def test_buckets_must_ascend(buckets):
    with pytest.raises(ValueError, match="must ascend"):
        LockFreeHistogram("h", "H.", [], buckets=buckets)
