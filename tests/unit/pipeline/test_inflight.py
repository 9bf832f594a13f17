import pytest

from proxy.pipeline.inflight import MaxPending

CASES = [
    # limits, sizes in flight, full
    pytest.param((None, None), [10**12] * 3, False, id="without limits never"),
    pytest.param((2, None), [0], False, id="below the batches"),
    pytest.param((2, None), [0, 0], True, id="at the batches"),
    pytest.param((None, 100), [60, 39], False, id="below the bytes"),
    pytest.param((None, 100), [60, 40], True, id="at the bytes"),
    pytest.param((5, 100), [200], True, id="either limit is enough"),
    pytest.param((1, None), [], False, id="nothing in flight"),
]


@pytest.mark.parametrize(("limits", "sizes", "full"), CASES)
def test_is_full_at_either_limit(limits, sizes, full):
    pending = MaxPending(*limits)
    for size in sizes:
        pending.add(size)
    assert (pending.batches, pending.size_bytes) == (len(sizes), sum(sizes))
    assert pending.full() is full


def test_has_room_again_when_one_ends():
    pending = MaxPending(max_batches=2)
    pending.add(10)
    pending.add(20)
    pending.remove(10)
    assert not pending.full()
    assert (pending.batches, pending.size_bytes) == (1, 20)


def test_other_limits_keep_what_is_in_flight():
    pending = MaxPending()
    pending.add(10)
    pending.limit(1, None)
    assert pending.full()
    with pytest.raises(ValueError, match="max_bytes"):
        pending.limit(None, 0)
    assert pending.full()


@pytest.mark.parametrize("limits", [(0, None), (None, 0), (-1, None)])
def test_refuses_limits_that_would_stop_everything(limits):
    with pytest.raises(ValueError, match="must be 1 or more"):
        MaxPending(*limits)


def test_refuses_more_ends_than_begins():
    pending = MaxPending()
    with pytest.raises(ValueError, match="more ended"):
        pending.remove(0)
    pending.add(5)
    with pytest.raises(ValueError, match="more ended"):
        pending.remove(6)
    with pytest.raises(ValueError, match="cannot be"):
        pending.add(-1)
