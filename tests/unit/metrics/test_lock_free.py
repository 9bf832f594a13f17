"""A histogram without locks shows what prometheus_client's own would."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from metrics import BoundedLabels, HistogramChild

BUCKETS = (0.001, 0.5, 1.0, 20.0)


def make() -> BoundedLabels[HistogramChild]:
    child = partial(HistogramChild, "h_seconds", BUCKETS)
    return BoundedLabels(child, "H.", ("api",), (), 1)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, *BUCKETS, 0.7, 21.0, 1e9]))))
def test_the_text_is_that_of_prometheus_clients(observed):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = make()
    ours.register(histogram)
    oracle = Histogram("h_seconds", "H.", ["api"], registry=theirs, buckets=BUCKETS)
    oracle.disable_created = True
    for api, value in observed:
        histogram.of(api).observe(value)
        oracle.labels(api).observe(value)
    lines = generate_latest(theirs).decode().splitlines()
    assert generate_latest(ours).decode().splitlines() == [
        line for line in lines if "_created" not in line
    ]


def test_a_child_is_made_once():
    histogram = make()
    for api in ("Fetch", "Produce"):  # one more than there is room for
        assert histogram.of(api) is histogram.of(api)
    with pytest.raises(ValueError, match="2 label values"):
        make().of("Metadata", "more")


@pytest.mark.parametrize("buckets", [(), (1.0, 0.5), (1.0, 1.0)])
def test_buckets_must_ascend(buckets):
    with pytest.raises(ValueError, match="must ascend"):
        HistogramChild("h", buckets)
