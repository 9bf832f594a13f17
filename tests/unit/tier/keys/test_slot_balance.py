"""How slots are placed: one owner each, evenly, few at a time, and nothing moves for nothing."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.tier.slot_balance import (
    LEAST_LOAD,
    MEMBER_BYTES_PER_S,
    MOST_LOAD,
    MOVES_PER_ROUND,
    SlotLoad,
    overloaded_slots,
    place_slots,
    stand_in_of,
)

SLOTS = 256
NAMES = [f"m{at}" for at in range(8)]
groups = st.sets(st.sampled_from(NAMES), min_size=1)
owner_lists = st.lists(st.sampled_from([None, *NAMES]), min_size=SLOTS, max_size=SLOTS)
load_maps = st.dictionaries(
    st.integers(0, SLOTS - 1),
    st.builds(SlotLoad, st.floats(0, MEMBER_BYTES_PER_S), st.floats(0, 1)),
)


def settle(owners, members, loads=None, rounds=20):
    """GroupIdentity until nothing moves; return the owners, and how many rounds it took."""
    for count in range(rounds):
        following = place_slots(owners, members, loads or {})
        if following == owners:
            return owners, count
        owners = following
    raise AssertionError("never settles")


@settings(max_examples=200, deadline=None)
@given(owner_lists, groups, load_maps)
def test_each_slot_has_an_owner_and_few_move(owners, members, loads):
    after = place_slots(owners, members, loads)
    assert set(after) <= members
    names = sorted(members)
    stayed = [
        owner if owner in members else stand_in_of(slot, names) for slot, owner in enumerate(owners)
    ]
    moved = sum(one != other for one, other in zip(stayed, after, strict=True))
    assert moved <= SLOTS * MOVES_PER_ROUND
    assert after == place_slots(owners, names[::-1], dict(reversed(loads.items())))


@settings(max_examples=200, deadline=None)
@given(owner_lists, groups, load_maps)
def test_it_settles_soon(owners, members, loads):
    _, rounds = settle(owners, members, loads)
    assert rounds <= 1 + 1 / MOVES_PER_ROUND


@settings(max_examples=100, deadline=None)
@given(owner_lists, groups)
def test_where_nothing_is_carried_counts_are_even(owners, members):
    after, _ = settle(owners, members)
    counts = Counter(after)
    part = SLOTS / len(members)
    assert all(LEAST_LOAD * part <= counts[name] <= MOST_LOAD * part for name in members)


def test_slots_of_a_member_that_left_stay_with_their_stand_ins():
    owners, _ = settle([None] * SLOTS, NAMES[:4])
    after = place_slots(owners, NAMES[:3], {})
    assert all(
        now == (was if was != NAMES[3] else stand_in_of(slot, NAMES[:3]))
        for slot, (was, now) in enumerate(zip(owners, after, strict=True))
    )


def test_small_loads_move_nothing_however_uneven():
    owners = ["m0"] * 4 + ["m1"] * 4
    loads = {slot: SlotLoad(0, 0.002 if slot < 4 else 0.0) for slot in range(8)}
    assert place_slots(owners, ["m0", "m1"], loads) == owners


def test_a_slot_that_is_not_measured_counts_as_the_average():
    owners = ["m0", "m1"] * 4
    loads = {slot: SlotLoad(0, 0.1) for slot in range(0, 8, 2)}
    assert place_slots(owners, ["m0", "m1"], loads) == owners


def test_a_slot_that_fills_a_member_is_told_of_and_stays_while_others_leave_it():
    owners = ["m0"] * 3 + ["m1"]
    loads = {0: SlotLoad(0, 0.9), 1: SlotLoad(0, 0.1), 2: SlotLoad(0, 0.1), 3: SlotLoad(0, 0.1)}
    assert overloaded_slots(loads, ["m0", "m1"]) == [0]
    assert overloaded_slots({0: SlotLoad(MEMBER_BYTES_PER_S, 0)}, ["m0", "m1"]) == [0]
    assert overloaded_slots({}, []) == []
    after, _ = settle(owners, ["m0", "m1"], loads)
    assert after[0] == "m0"
    assert "m1" in after[1:3]
