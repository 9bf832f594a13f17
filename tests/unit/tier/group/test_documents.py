"""What members tell one another survives the way, fits, and anything else is refused."""

import random
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts.even_placement import even
from structlog.testing import capture_logs
from tier_machines import announcement, load, member, subscription

from proxy.relay.steering import AdvertisedListener, MemberAddresses
from proxy.tier.group.assignor import LARGE_GROUP_BYTES, group_metadata_size, sync_group_assignments
from proxy.tier.group.group_documents import (
    MAX_DOCUMENT_BYTES,
    MAX_SUBSCRIPTION_BYTES,
    AnnouncedMember,
    Assignment,
    RefusedMember,
    Subscription,
    UserDataError,
    pack,
    unpack,
)
from proxy.tier.slot_balance import SlotLoad
from proxy.tier.slot_map import SlotMap

CLOCK_S = 1_700_000_000

slots = st.integers(0, 255)


@given(st.sets(slots), st.sets(slots), st.text())
def test_a_subscription_is_read_as_it_was_written(
    owned: set[int], some: set[int], url: str
) -> None:
    said = replace(
        announcement("a"),
        admin_url=url,
        loads={slot: load(slot) for slot in sorted(some)},
        is_leaving=bool(some),
    )
    sent = subscription("a", owned, said=said, generation=7, releasing=frozenset(some))
    assert Subscription.decode(sent.encode()) == sent


def test_an_assignment_is_read_as_it_was_written() -> None:
    members = {name: member(name) for name in ("a/0", "b/0")}
    sent = Assignment(
        5,
        SlotMap(members, ["a/0", None, "b/0"]),
        {1: "a/0"},
        {
            "a": AnnouncedMember("http://a", "p", "d1", 17),
            "b": AnnouncedMember("http://b", "q", "d2", 20),
        },
        {"id": RefusedMember("c", "why")},
        frozenset({"q"}),
        {1: "b/0"},
        {0: SlotLoad(0.0, 0.0), 2: SlotLoad(0.0, 1.25)},
    )
    assert Assignment.decode(sent.encode()) == sent
    assert sent.rules_digests == {"d1": ["a"], "d2": ["b"]}
    assert sent.clocks_apart_s == 3
    assert not sent.is_settled


@given(st.binary(max_size=200))
def test_bytes_of_others_are_no_documents(data: bytes) -> None:
    for kind in (Subscription, Assignment):
        with pytest.raises(UserDataError):
            kind.decode(data)
        with pytest.raises(UserDataError):
            kind.decode(zlib.compress(data))


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": None},
        {"addresses": {"name": "x"}},
        {"addresses": {"name": "a", "listeners": {"in": {}}}},
        {"owned": [256]},
        {"owned": [-1]},
        {"owned": {"a/0": [1]}},
        {"loads": [[1, 2]]},
        {"slots": "many"},
        {"releasing": 3},
    ],
)
def test_documents_of_another_shape_are_refused(change: dict) -> None:
    document = unpack(subscription("a", {3}).encode())
    with pytest.raises(UserDataError, match="not as a proxy writes it"):
        Subscription.decode(pack(document | change))


@pytest.mark.parametrize(
    "change", [{"owners": ["b"]}, {"owners": 3}, {"members": [{}]}, {"members": {"a": {"name": 1}}}]
)
def test_maps_of_another_shape_are_refused(change: dict) -> None:
    document = unpack(Assignment(5, SlotMap({}, [None])).encode())
    document["slot_map"] |= change
    with pytest.raises(UserDataError, match="not as a proxy writes it"):
        Assignment.decode(pack(document))


def test_a_number_of_slots_that_no_memory_holds_is_only_compared_with() -> None:
    sent = replace(announcement("a"), slots=10**15, owned=frozenset({10**14}))
    assert Subscription.decode(sent.encode()) == sent
    with pytest.raises(ValueError, match="not among 0 to"):
        replace(sent, owned=frozenset({10**15}))


def test_another_form_is_named() -> None:
    document = unpack(subscription("a").encode()) | {"form": 1}
    with pytest.raises(UserDataError, match="of form 1, and this version reads form 2"):
        Subscription.decode(pack(document))


def test_a_bomb_is_not_unpacked() -> None:
    with pytest.raises(UserDataError, match="too long"):
        unpack(zlib.compress(b" " * (MAX_DOCUMENT_BYTES + 1)))


def test_of_what_a_member_says_of_itself_less_is_unpacked() -> None:
    sent = replace(announcement("a"), state_topic="x" * MAX_SUBSCRIPTION_BYTES)
    with pytest.raises(UserDataError, match="too long"):
        Subscription.decode(sent.encode())


def test_a_member_with_very_many_ports_and_peers_is_read() -> None:
    ports = {node_id: 20_000 + node_id for node_id in range(4_000)}
    listener = AdvertisedListener("a.example.internal", 19_092, ports=ports)
    places = MemberAddresses("a/1", {f"listener-{n}": listener for n in range(4)})
    reached = frozenset(f"machine-{n}.example.internal/{n}" for n in range(1_000))
    loads = dict.fromkeys(range(256), SlotLoad(1 / 3, 1 / 7))
    sent = replace(announcement("a"), addresses=places, reached=reached, loads=loads)
    assert Subscription.decode(sent.encode()) == sent


def sizes(members: int, count: int) -> tuple[int, int, int]:
    """Return the bytes of the longest subscription, of an assignment, and of all in a group."""
    chance = random.Random(7)
    names = [f"quota-proxy-{number // 8}/{number % 8}" for number in range(members)]
    said = {}
    owners: list[str | None] = [None] * count
    order = list(range(count))
    chance.shuffle(order)
    for place, slot in enumerate(order):
        owners[slot] = names[place % len(names)]
    for name in names:
        base = announcement(name, slots=count)
        owned = {slot for slot, owner in enumerate(owners) if owner == name}
        loads = {slot: load(slot)._replace(bytes_per_s=chance.random() * 1e8) for slot in owned}
        full = replace(base, loads=loads, rules_digest=chance.randbytes(6).hex())
        said[name] = subscription(
            name, owned, said=full, generation=9, process=chance.randbytes(4).hex()
        ).encode()
    listed = {
        name: AnnouncedMember(
            f"http://{name}:8080",
            chance.randbytes(4).hex(),
            "d" * 12,
            CLOCK_S + chance.randrange(9),
        )
        for name in names
    }
    loads = {slot: SlotLoad(0.0, chance.random()) for slot in range(count)}
    slot_map = SlotMap({name: member(name) for name in names}, owners)
    data = Assignment(9, slot_map, {}, listed, loads=loads).encode()
    return max(map(len, said.values())), len(data), group_metadata_size(said, data)


@pytest.mark.parametrize(("members", "count"), [(10, 256), (50, 256), (110, 256), (20, 4096)])
def test_large_tiers_fit_well_into_the_record_of_their_group(members: int, count: int) -> None:
    assert sizes(members, count)[-1] < LARGE_GROUP_BYTES


@pytest.mark.parametrize(("members", "warnings"), [(20, 0), (200, 1)])
def test_a_tier_that_hardly_fits_is_warned_of(members: int, warnings: int) -> None:
    said = {str(number): subscription(f"m{number}/0").encode() for number in range(members)}
    with capture_logs() as lines:
        gets, is_another_round_wanted = sync_group_assignments(said, None, 1, even)
    assert is_another_round_wanted
    assert set(gets) == set(said)
    assert len(lines) == warnings
