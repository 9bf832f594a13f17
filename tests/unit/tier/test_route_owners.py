"""Where clients are sent while the owner of their slot is away."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.tier.ownership import owners_or_stand_ins

MEMBERS = ["a/0", "a/1", "b/0", "c/0"]
owners = st.lists(st.sampled_from([*MEMBERS, "gone/0", None]), min_size=8, max_size=8)


def test_the_owner_is_the_route() -> None:
    assert owners_or_stand_ins(["a/0", "b/0"], MEMBERS, ()) == ["a/0", "b/0"]


def test_nobody_is_the_route_where_nobody_serves() -> None:
    assert owners_or_stand_ins(["a/0", None], MEMBERS, MEMBERS) == [None, None]
    assert owners_or_stand_ins(["a/0"], (), ()) == [None]


def test_stand_ins_share_the_slots_of_a_silent_member() -> None:
    routes = owners_or_stand_ins(["b/0"] * 6, MEMBERS, ["b/0"])
    assert sorted(routes) == ["a/0", "a/0", "a/1", "a/1", "c/0", "c/0"]


@given(owners, st.sets(st.sampled_from(MEMBERS)))
def test_who_serves_keeps_its_clients_and_others_have_a_stand_in_that_serves(
    latest: list[str | None], silent: set[str]
) -> None:
    serving = {name for name in MEMBERS if name not in silent}
    routes = owners_or_stand_ins(latest, MEMBERS, silent)
    for name, wanted in zip(routes, latest, strict=True):
        if wanted in serving:
            assert name == wanted
        else:
            assert name in serving if serving else name is None


@given(owners, st.sets(st.sampled_from(MEMBERS)), st.permutations(MEMBERS))
def test_every_member_that_knows_the_same_has_the_same_routes(
    latest: list[str | None], silent: set[str], members: list[str]
) -> None:
    routes = owners_or_stand_ins(latest, MEMBERS, silent)
    assert owners_or_stand_ins(latest, members, sorted(silent)) == routes
