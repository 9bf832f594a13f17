"""Which worker owns which slot, and what the relay is told of that."""

from collections import Counter

import pytest

from proxy.tier.slot_map import ListenerPorts, MemberAddresses, SlotMap
from proxy.tier.slots import SLOTS, slot_of
from proxy.quota.entities import ClientIdentity
from proxy.workers.slot_shares import share_slots
from proxy.tier.steering import SlotSteering

NAMES = ["0", "1", "2"]


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 256])
def test_all_have_as_many(workers: int):
    names = [str(number) for number in range(workers)]
    counts = Counter(share_slots(names))
    assert set(counts) == set(names)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_who_is_out_has_none_and_the_others_keep_theirs():
    before, after = share_slots(NAMES), share_slots(NAMES, {"1"})
    assert all(now == was for was, now in zip(before, after, strict=True) if was != "1")
    counts = Counter(after)
    assert set(counts) == {"0", "2"}
    assert abs(counts["0"] - counts["2"]) <= 2


def test_when_all_are_out_none_is():
    assert share_slots(NAMES, NAMES) == share_slots(NAMES)


def slot_map(generation: int = 0, out: tuple[str, ...] = ()) -> SlotMap:
    members = {
        name: MemberAddresses(
            name, {"main": ListenerPorts("proxy", 9092, 100 * int(name), 100 * int(name) + 9)}
        )
        for name in NAMES
    }
    return SlotMap(generation, members, share_slots(NAMES, out))


def client_of(owner: str) -> ClientIdentity:
    owners = share_slots(NAMES)
    number = next(n for n in range(SLOTS) if owners[slot_of(f"c{n}")] == owner)
    return ClientIdentity("main", None, f"c{number}")


def test_in_a_tier_the_fallback_is_on_another_machine():
    names = ["a/0", "a/1", "b/0", "b/1"]
    members = {name: MemberAddresses(name, {}) for name in names}
    owners = [names[slot % len(names)] for slot in range(SLOTS)]
    here = SlotSteering(
        "a/0",
        SlotMap(0, members, owners),
        lambda each: each.client_id or "",
        lambda *_: None,
        lambda _, __: None,
    )
    pairs = set()
    for number in range(SLOTS):
        client = ClientIdentity("main", None, f"c{number}")
        fallback = here.fallback_of(client)
        assert fallback is not None
        pairs.add((owners[slot_of(f"c{number}")], fallback.name))
    assert pairs == {("a/0", "b/0"), ("a/1", "b/0"), ("b/0", "a/0"), ("b/1", "a/0")}


def steering(name: str, learned: list[tuple[int, str, int]] | None = None) -> SlotSteering:
    heard: list[tuple[int, str, int]] = [] if learned is None else learned
    return SlotSteering(
        name,
        slot_map(),
        lambda each: each.client_id or "",
        lambda *each: heard.append(each),
        lambda _, __: None,
    )


def test_the_owner_is_named_with_its_addresses():
    here = steering("0")
    assert here.owner_of(client_of("0")) is None
    assert here.owns(client_of("0"))
    owner = here.owner_of(client_of("2"))
    assert owner is not None
    assert (owner.name, owner.address_of("main", 3)) == ("2", ("proxy", 203))
    assert owner.address_of("main", 10) is owner.address_of("other", 1) is None
    assert owner.bootstrap_of("main") == ("proxy", 9092)


def test_the_fallback_is_another_than_the_owner():
    here = steering("0")
    for name in NAMES:
        fallback = here.fallback_of(client_of(name))
        assert fallback is not None
        assert fallback.name != name


def test_another_map_is_followed():
    here, changes = steering("0"), []
    here.on_change = lambda: changes.append(here.generation)
    before = here.generation
    here.use(slot_map(1, out=("2",)), lambda each: each.client_id or "")
    assert changes == [before + 1]
    owner = here.owner_of(client_of("2"))
    assert owner is None or owner.name == "1"


def test_a_broker_is_announced_once_for_each_address():
    learned: list[tuple[int, str, int]] = []
    here = steering("0", learned)
    for port in (1, 2, 2, 1):
        here.learned(1, "h", port)
    here.told(2, "h", 5)
    here.learned(2, "h", 5)
    assert learned == [(1, "h", 1), (1, "h", 2), (1, "h", 1)]
