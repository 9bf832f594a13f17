"""Who is in the tier, and what the others are told."""

from dataclasses import replace

from parts.even_placement import even
from tier_machines import announcement, member, subscription

from proxy.tier.group.assignor import admit_members, assign
from proxy.tier.group.group_documents import UserDataError


def test_of_two_with_one_name_the_later_is_refused_until_the_older_has_gone() -> None:
    first, _ = assign({"1": subscription("a")}, None, 1, even)
    older = subscription("a", {0}, generation=1)
    later = subscription("a", process="other")
    said = {"0": later, "1": older}
    second, _ = assign(said, first, 2, even)
    assert second.members["a"].process == older.process
    assert list(second.refused) == ["0"]
    assert "another process has the machine name a" in second.refused["0"].reason
    third, _ = assign({"0": replace(later, generation=2)}, second, 3, even)
    assert not third.refused
    assert third.members["a"].process == "other"


def test_the_cluster_that_slots_are_owned_for_is_the_tiers() -> None:
    stranger = announcement("b", cluster_id="two")
    said = {
        "1": subscription("a", {0}),
        "2": subscription("b", said=stranger),
        "3": subscription("c", said=replace(stranger, addresses=member("c"))),
    }
    admitted, refused = admit_members(said, None)
    assert list(admitted) == ["a"]
    assert set(refused) == {"2", "3"}
    assert "its clients reach cluster two, and those of the tier cluster one" in refused["2"].reason


def test_another_number_of_slots_is_refused() -> None:
    said = {
        "1": subscription("a", {0}),
        "2": subscription("b", said=announcement("b", slots=512)),
    }
    _, refused = admit_members(said, None)
    assert "it has 512 slots, and the tier has 256" in refused["2"].reason


def test_a_member_with_another_state_topic_is_refused() -> None:
    one, two = (replace(announcement(name), state_topic=topic) for name, topic in ("at", "bu"))
    said = {
        "1": subscription("b", said=two),
        "2": subscription("a", {0}, said=one),
        "3": subscription("c"),  # of an earlier version
    }
    admitted, refused = admit_members(said, None)
    assert set(admitted) == {"a", "c"}
    reason = "its state is in topic u, and that of the tier in t: correct state.topic"
    assert refused["1"].reason == reason


def test_what_cannot_be_read_is_refused_with_its_reason() -> None:
    admitted, refused = admit_members(
        {"1": subscription("a"), "2": UserDataError("of form 2")}, None
    )
    assert list(admitted) == ["a"]
    assert refused["2"].reason == "its announcement is of form 2"


def test_who_is_refused_lets_go_what_it_has() -> None:
    said = {
        "1": subscription("a", range(200), generation=4),
        "2": subscription("b", {255}, generation=4, said=announcement("b", cluster_id="two")),
    }
    previous = replace(assign(said, None, 4, even)[0], unheard=frozenset())
    decided, _ = assign(said, previous, 5, even)
    assert decided.slot_map.owners[255] is None
    assert decided.releasing[255] == "b"
    assert decided.slot_map.owners[:255] == ["a"] * 255


def owners_beside(newcomer: str, *, reached: bool = False) -> set[str | None]:
    """Return who owns slots after a member comes to one that owns all."""
    first = assign({"1": subscription("a/0")}, None, 1, even)[0]
    seen = announcement("a/0")
    said = {
        "1": subscription(
            "a/0",
            first.slot_map.slots_of("a/0"),
            generation=1,
            said=replace(seen, reached=frozenset({newcomer} if reached else ())),
        ),
        "2": subscription(newcomer),
    }
    second = assign(said, first, 2, even)[0]
    return {*second.slot_map.owners, *second.targets.values()} - {None}


def test_a_newcomer_gets_slots_when_a_member_of_another_machine_has_reached_it() -> None:
    assert owners_beside("b/0") == {"a/0"}
    assert owners_beside("b/0", reached=True) == {"a/0", "b/0"}


def test_members_of_one_machine_get_slots_whatever_they_reach_of_each_other() -> None:
    assert owners_beside("a/1") == {"a/0", "a/1"}
