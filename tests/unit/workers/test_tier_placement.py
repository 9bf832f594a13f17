"""The slots of a tier go where there is room, and settle."""

from collections import Counter

from proxy.members.slot_balance import REST_S, SlotLoad
from proxy.workers.shown_owners import shown_owners
from proxy.workers.tier_placement import TierPlacement, are_news

SLOTS = 64
HEAVY, LIGHT = SlotLoad(0.0, 0.2), SlotLoad(0.0, 0.001)


def test_who_joins_gets_enough_over_some_rounds() -> None:
    place = TierPlacement(lambda: 0.0)
    owners = ["a", "b"] * (SLOTS // 2)
    rounds = 0
    while (wanted := place(owners, ["a", "b", "c"], {})) != owners:
        assert sum(was != now for was, now in zip(owners, wanted, strict=True)) <= SLOTS // 8
        owners, rounds = list(wanted), rounds + 1
    assert rounds > 1
    assert Counter(owners)["c"] >= 0.7 * SLOTS / 3


def test_slots_of_a_machine_that_is_gone_go_at_once() -> None:
    owners = ["a", "gone"] * (SLOTS // 2)
    assert set(TierPlacement(lambda: 0.0)(owners, ["a", "b"], {})) == {"a", "b"}


def test_slots_of_a_machine_that_is_gone_go_to_those_who_stood_in() -> None:
    names = ["a/0", "a/1", "b/0", "c/0"]
    owners = [names[slot * 7 % len(names)] for slot in range(SLOTS)]
    shown = shown_owners(owners, owners, names, silent={"a"})
    assert TierPlacement(lambda: 0.0)(owners, ["b/0", "c/0"], {}) == shown


def test_load_is_evened_out_a_little_at_a_time_and_rests() -> None:
    clock = [0.0]
    place = TierPlacement(lambda: clock[0])
    owners: list[str | None] = ["a"] * (SLOTS // 2) + ["b"] * (SLOTS // 2)
    loads = {slot: HEAVY if slot < 6 else LIGHT for slot in range(SLOTS)}
    for _ in range(20):
        owners = list(place(owners, ["a", "b"], loads))
        clock[0] += REST_S
    carried = Counter[str | None]()
    for slot, owner in enumerate(owners):
        carried[owner] += loads[slot].share
    assert max(carried.values()) < 1.3 * sum(carried.values()) / 2
    assert place(owners, ["a", "b"], loads) == owners


def test_only_what_counts_is_news() -> None:
    assert are_news({}, {1: HEAVY})
    assert are_news({1: HEAVY}, {2: HEAVY})
    assert not are_news({1: HEAVY}, {1: HEAVY, 2: LIGHT})
