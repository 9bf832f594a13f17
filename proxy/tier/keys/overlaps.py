"""Join ties of which one client can have both, without comparing each with each."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from proxy.quota.disjoint_sets import DisjointSets
from proxy.quota.rules import EXACT

from .rule_groups import Group, Tie, longer_may_meet

_Place = tuple[str | None, str | None]
_PlaceOf = Callable[[Tie], _Place]


def join_overlaps(
    sets: DisjointSets,
    ties: Sequence[Tie],
    one: Group,
    other: Group,
    *,
    by_client_only: bool = False,
    any_kinds: bool = False,
) -> None:
    """Join each tie of a group with those of another that can be for the same client.

    `by_client_only`: users and listeners may differ. `any_kinds`: no matter which comes first.
    """
    forms = one.form, other.form
    by_user = not by_client_only and forms[0].user == forms[1].user == EXACT
    by_listener = not by_client_only and forms[0].listener == forms[1].listener == EXACT

    def place_of(tie: Tie) -> _Place:
        return tie.user if by_user else None, tie.listener if by_listener else None

    if not all(form.is_exact or form.is_prefix for form in forms):
        _join_places(sets, ties, one, other, place_of)
        return
    for shorter, longer in ((one, other), (other, one)):
        if any_kinds or longer_may_meet(longer.form, shorter.form):
            _join_beginnings(sets, ties, shorter, longer, place_of)


def _join_places(
    sets: DisjointSets, ties: Sequence[Tie], one: Group, other: Group, place_of: _PlaceOf
) -> None:
    """Join all ties of one place, where both groups have one there."""
    first: dict[_Place, int] = {}
    for at in one.ties:
        first.setdefault(place_of(ties[at]), at)
    common = set()
    for at in other.ties:
        place = place_of(ties[at])
        if place in first:
            common.add(place)
            sets.join(first[place], at)
    for at in one.ties:
        place = place_of(ties[at])
        if place in common:
            sets.join(first[place], at)


def _join_beginnings(
    sets: DisjointSets, ties: Sequence[Tie], shorter: Group, longer: Group, place_of: _PlaceOf
) -> None:
    """Join what begins alike: client ids, or prefixes, with each prefix that they begin with."""
    known: dict[tuple[_Place, str], list[int]] = defaultdict(list)
    lengths = set()
    for at in shorter.ties:
        text = ties[at].client_id or ""
        known[place_of(ties[at]), text].append(at)
        lengths.add(len(text))
    for at in longer.ties:
        text, place = ties[at].client_id or "", place_of(ties[at])
        for length in lengths if shorter.form.is_prefix else (len(text),):
            if length <= len(text) and (found := known.get((place, text[:length]))):
                for each in found:
                    sets.join(each, at)
                del found[1:]  # they are one set now
