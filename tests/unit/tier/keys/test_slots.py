"""Slots are Kafka's partitions of a key."""

from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner import default as oracle

from proxy.tier.slots import SLOTS, murmur2, slot_of


@given(st.binary(max_size=64))
def test_the_hash_is_kafkas(data):
    assert murmur2(data) == oracle.murmur2(data) & 0xFFFFFFFF


def test_known_hashes():
    """From Kafka's own `UtilsTest`."""
    cases = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    assert {data: murmur2(data) for data in cases} == {
        data: value & 0xFFFFFFFF for data, value in cases.items()
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
