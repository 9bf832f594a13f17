"""Slots are Kafka's partitions of a key."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.tier.slot_map import SLOTS, slot_of


@given(st.integers(1, 5000))
def test_known_hashes(slots):
    """From Kafka's own `UtilsTest`."""
    cases = {
        "21": -973932308,
        "foobar": -790332482,
        "a-little-bit-long-string": -985981536,
        "a-little-bit-longer-string": -1486304829,
        "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        "abc": 479470107,
    }
    assert {key: slot_of(key, slots) for key in cases} == {
        key: (value & 0x7FFFFFFF) % slots for key, value in cases.items()
    }


@given(st.text(), st.integers(1, 5000))
def test_a_slot_is_in_range(key, slots):
    assert 0 <= slot_of(key, slots) < slots


def test_keys_spread_over_all_slots():
    counts = [0] * SLOTS
    for number in range(100 * SLOTS):
        counts[slot_of(f"client-id={number}")] += 1
    assert min(counts) > 50
    assert max(counts) < 150


def test_text_that_is_no_utf8_has_a_slot():
    assert 0 <= slot_of("client-id=\udcff") < SLOTS
