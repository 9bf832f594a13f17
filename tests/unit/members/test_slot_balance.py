"""How slots are shared out: one owner each, evenly, slowly, and nothing moves for nothing."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.members.slot_balance import (
    LEAST_MOVED,
    MAX_IMBALANCE,
    MEMBER_BYTES_PER_S,
    MIN_LOAD,
    MOVES_PER_CALL,
    MOVES_PER_ROUND,
    REST_S,
    SlotLoad,
    find_moves,
    overloaded_slots,
    placed_slots,
)

SLOTS = 256
NAMES = [f"m{at}" for at in range(8)]
groups = st.sets(st.sampled_from(NAMES), min_size=1)
owner_lists = st.lists(st.sampled_from([None, *NAMES]), min_size=SLOTS, max_size=SLOTS)
load_maps = st.dictionaries(
    st.integers(0, SLOTS - 1),
    st.builds(SlotLoad, st.floats(0, MEMBER_BYTES_PER_S), st.floats(0, 1)),
)


def settle(owners, members, rounds=100):
    for count in range(rounds):
        following = placed_slots(owners, members)
        if following == owners:
            return owners, count
        owners = following
    raise AssertionError("never settles")


def moved(before, after):
    return sum(one != other for one, other in zip(before, after, strict=True))


@settings(max_examples=200, deadline=None)
@given(owner_lists, groups)
def test_each_slot_has_an_owner_and_few_move_that_had_one(owners, members):
    after = placed_slots(owners, members)
    assert len(after) == SLOTS
    assert set(after) <= members
    kept = [slot for slot in range(SLOTS) if owners[slot] in members]
    assert sum(after[slot] != owners[slot] for slot in kept) <= SLOTS * MOVES_PER_ROUND
    assert after == placed_slots(owners, sorted(members, reverse=True))


@settings(max_examples=100, deadline=None)
@given(owner_lists, groups)
def test_counts_become_even_and_then_stay(owners, members):
    after, rounds = settle(owners, members)
    counts = Counter(after)
    assert max(counts.values()) - min(counts[name] for name in members) <= 1
    assert rounds <= 1 / MOVES_PER_ROUND + 1


def test_a_member_that_left_has_its_slots_given_evenly_and_no_others_move():
    owners, _ = settle([None] * SLOTS, NAMES[:4])
    after = placed_slots(owners, NAMES[:3])
    assert moved(owners, after) == SLOTS // 4
    assert sorted(Counter(after).values()) == [85, 85, 86]


def test_a_member_that_joined_gets_its_share_over_some_rounds():
    owners, _ = settle([None] * SLOTS, NAMES[:1])
    first = placed_slots(owners, NAMES[:2])
    assert moved(owners, first) == SLOTS * MOVES_PER_ROUND
    after, rounds = settle(owners, NAMES[:2])
    assert Counter(after) == {"m0": SLOTS // 2, "m1": SLOTS // 2}
    assert rounds == 4


def member_loads(owners, loads, members):
    found = dict.fromkeys(members, 0.0)
    for slot, owner in enumerate(owners):
        found[owner] += loads[slot].share if slot in loads else 0.0
    return found


@settings(max_examples=200, deadline=None)
@given(groups, load_maps, st.randoms(use_true_random=False))
def test_load_is_evened_out_a_few_slots_at_a_time(members, loads, random):
    owners = [random.choice(sorted(members)) for _ in range(SLOTS)]
    moved_s, now_s = {}, 0.0
    for _ in range(200):
        before = member_loads(owners, loads, members)
        moves = find_moves(owners, loads, members, now_s, moved_s)
        if not moves and not any(now_s - at_s < REST_S for at_s in moved_s.values()):
            break
        assert len(moves) <= SLOTS * MOVES_PER_CALL
        for move in moves:
            assert owners[move.slot] == move.source
            assert now_s - moved_s.get(move.slot, -REST_S) >= REST_S
            owners[move.slot] = move.target
            moved_s[move.slot] = now_s
        after = member_loads(owners, loads, members)
        for move in moves:
            assert max(after[move.source], after[move.target]) < max(before.values())
            assert loads[move.slot].share > 0
        now_s += REST_S / 4
    else:
        raise AssertionError("never settles")
    found = member_loads(owners, loads, members)
    mean = sum(found.values()) / len(found)
    for name, total in found.items():
        own = [loads[slot].share for slot in loads if owners[slot] == name]
        own = [share for share in own if share > LEAST_MOVED * total / owners.count(name)]
        limit = max(MIN_LOAD, mean * (1 + MAX_IMBALANCE))
        # Or else no slot of it is small enough for the one that has the least.
        assert total <= limit * (1 + 1e-6) or total <= min(found.values()) + min(own) + 1e-6


def test_noise_moves_nothing():
    owners, _ = settle([None] * SLOTS, NAMES[:4])
    for number in range(50):
        loads = {
            slot: SlotLoad(0, 0.01 * (1 + 0.2 * ((slot * 7 + number * 13) % 11 - 5) / 5))
            for slot in range(SLOTS)
        }
        assert find_moves(owners, loads, NAMES[:4], 0.0, {}) == []


def test_small_loads_move_nothing_however_uneven():
    owners = ["m0"] * 4
    loads = {slot: SlotLoad(0, MIN_LOAD / 5) for slot in range(4)}
    assert find_moves(owners, loads, ["m0", "m1"], 0.0, {}) == []


def test_a_slot_that_moved_rests():
    owners = ["m0"] * 2 + ["m1"]
    loads = {slot: SlotLoad(0, 0.4) for slot in range(2)}
    assert find_moves(owners, loads, ["m0", "m1"], 100.0, dict.fromkeys(range(2), 99.0)) == []
    assert len(find_moves(owners, loads, ["m0", "m1"], 99.0 + REST_S, {0: 99.0, 1: 99.0})) == 1


def test_a_slot_that_fills_a_member_is_told_of_and_stays_while_others_leave_it():
    owners = ["m0"] * 3 + ["m1"]
    loads = {0: SlotLoad(0, 0.9), 1: SlotLoad(0, 0.1), 2: SlotLoad(0, 0.1), 3: SlotLoad(0, 0.1)}
    assert overloaded_slots(loads, ["m0", "m1"]) == [0]
    assert overloaded_slots({0: SlotLoad(MEMBER_BYTES_PER_S, 0)}, ["m0", "m1"]) == [0]
    assert overloaded_slots({}, []) == []
    found = find_moves(owners, loads, ["m0", "m1"], 0.0, {})
    assert {move.slot for move in found} <= {1, 2}
    assert found
