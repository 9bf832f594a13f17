"""Join forms of rules into classes, so that of two that a client has one follows from the other.

There may be ten thousand rules, but of few forms: what is compared in pairs are forms. A class has
*key fields*, those in which all clients that share anything by it are the same, or a name where
there are none. One class *follows* from another when all clients that share by the other share by
it, too: it is the coarser of the two, and its key is that of all these clients. Where neither
follows, both become one class, until nothing is left to be joined.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import combinations, combinations_with_replacement
from operator import and_, or_

from proxy.quota.disjoint_sets import DisjointSets
from proxy.quota.rules import EXACT, PREFIX, UNNAMED

from .rule_groups import NO_FIELDS, VALUES, Field, RulePattern, Tie

MAX_COMPARED = 48
"""Of more forms than this that do not settle all that others ask for, none are compared: they are
one class, and have one key. Usual rules have less than ten such forms."""

_TiePlace = tuple[str | None, str | None]
"""User and listener of a tie, as far as both of two forms ask for them."""


class EquivalenceClasses:
    """The classes of all ties; forms, and classes, are numbers."""

    def __init__(
        self, forms: Sequence[RulePattern], ties: Sequence[Tie], tie_sets: DisjointSets
    ) -> None:
        """Join what is to be; `forms` are those of the ties, `tie_sets` has what is joined already.

        Ties of one class without key fields that a client can have both of are joined there.
        """
        ties_of: defaultdict[RulePattern, list[int]] = defaultdict(list)
        for tie, form in enumerate(forms):
            ties_of[form].append(tie)
        self._forms, self._ties_of = list(ties_of), list(ties_of.values())
        self._ties, self._tie_sets = ties, tie_sets
        self._covers = [
            form
            for form in self._forms
            if form.conditions in (NO_FIELDS, Field.LOGIN) and not (form.is_set or form.is_by_topic)
        ]
        """Those that are for every client, or every one with a user."""
        self._meetings: dict[tuple[int, int], int] = {}
        self._classes = DisjointSets(len(self._forms))
        self._members: dict[int, list[int]] = {at: [at] for at in range(len(self._forms))}
        self._asked = reduce(
            or_, (each.conditions | each.entity for each in self._forms), NO_FIELDS
        )
        self._join_until_settled()
        for of_class in self._members:
            if self.key_fields(of_class) is None:
                self._name(of_class)
        self.of_tie = [0] * len(ties)
        """The class of each tie."""
        for at, of_form in enumerate(self._ties_of):
            for tie in of_form:
                self.of_tie[tie] = self._classes.find(at)

    def key_fields(self, of_class: int) -> Field | None:
        """Return what a class's keys are made of; None: they are names of `tie_sets`."""
        members = self._members[of_class]
        settled = self._settled(members) & VALUES
        if not settled or all(self._forms[each].is_named for each in members):
            return None
        return settled

    def coarsest(self, of_classes: Sequence[int]) -> int:
        """Return the class that follows from all the others that one client has."""
        return max(
            of_classes,
            key=lambda each: sum(
                self.follows(each, other) for other in of_classes if other != each
            ),
        )

    def follows(self, coarse: int, fine: int) -> bool:
        """Return whether all clients that share by the fine class share by the coarse one, too."""
        members, forms = self._members[fine], self._forms
        known = self._settled(members)
        if self._asked in known:
            return True
        coarse_fields = self.key_fields(coarse)
        if coarse_fields is not None and coarse_fields not in known:
            return False
        for one in members:
            kinds = 0
            for other in self._members[coarse]:
                kinds |= self._kinds(one, other)
            for other, form in enumerate(forms) if kinds else ():
                if self._kinds(one, other) & kinds and form.conditions not in known:
                    return False
            if len(members) > 1 or forms[one].is_adaptive:
                for own in members:
                    if forms[own].kinds & kinds and forms[own].conditions not in known:
                        return False
        return True

    def _settled(self, members: Sequence[int]) -> Field:
        return reduce(and_, (self._forms[each].settled for each in members))

    def _kinds(self, one: int, other: int) -> int:
        """Return in which kinds the other form may be the first; 0: the two never meet.

        For clients for whom the one form is the first in a further kind.
        """
        pair = one, other
        if pair not in self._meetings:
            self._meetings[pair] = self._meet(self._forms[one], self._forms[other])
        return self._meetings[pair]

    def _meet(self, one: RulePattern, other: RulePattern) -> int:
        if one is other or one.kinds == other.kinds:
            return 0  # whichever comes first does so in all kinds
        mine, theirs = self._uncovered(one, other), self._uncovered(other, one)
        if not mine or not theirs or (mine == theirs and mine.bit_count() == 1):
            return 0
        # By one kind alone a client has one first rule.
        return theirs & ~mine if mine.bit_count() == 1 else theirs

    def _uncovered(self, one: RulePattern, other: RulePattern) -> int:
        """Return the kinds in which nothing surely comes first where both are for a client."""
        kinds = one.kinds
        if other.precedes(one) and not (one.is_set or other.is_set):
            kinds &= ~other.kinds
        has_user = one.user != UNNAMED or other.user != UNNAMED
        for cover in self._covers:
            if kinds & cover.kinds and (cover.user == UNNAMED or has_user):
                kinds &= ~cover.kinds if cover.precedes(one) else kinds
        return kinds

    def _join(self, one: int, other: int) -> bool:
        first, second = self._classes.find(one), self._classes.find(other)
        if not self._classes.join(first, second):
            return False
        kept, gone = min(first, second), max(first, second)
        self._members[kept] += self._members.pop(gone)
        return True

    def _join_all(self, alike: Sequence[int]) -> None:
        for each in alike[1:]:
            self._join(alike[0], each)

    def _join_until_settled(self) -> None:
        # A client may have several rules with a topic.
        self._join_all([at for at, form in enumerate(self._forms) if form.is_by_topic])
        # A query has one adaptive bound, whichever rule gives it.
        self._join_all([at for at, form in enumerate(self._forms) if form.is_adaptive])
        self._join_all([at for at, form in enumerate(self._forms) if form.is_set and form.is_named])
        # Those from which not everything else follows.
        partial = [at for at, form in enumerate(self._forms) if self._asked not in form.settled]
        if len(partial) > MAX_COMPARED:
            self._join_all(partial)
        joined = True
        while joined:
            joined = False
            for one, other in combinations(partial, 2):
                first, second = self._classes.find(one), self._classes.find(other)
                if first == second or not (self._kinds(one, other) or self._kinds(other, one)):
                    continue
                if not self.follows(first, second) and not self.follows(second, first):
                    joined = self._join(first, second) or joined

    def _name(self, of_class: int) -> None:
        """Join the ties of a class without key fields, where a client can have two of them."""
        members, forms = self._members[of_class], self._forms
        if len(members) > MAX_COMPARED or any(forms[each].is_by_topic for each in members):
            first, *ties = (tie for each in members for tie in self._ties_of[each])
            for tie in ties:
                self._tie_sets.join(first, tie)
            return
        for one, other in combinations(members, 2):
            if self._kinds(one, other) or self._kinds(other, one):
                self._join_overlaps(one, other, any_kinds=forms[one].is_set or forms[other].is_set)
        adaptive = [each for each in members if forms[each].is_adaptive]
        for one, other in combinations_with_replacement(adaptive, 2):
            self._join_overlaps(one, other, by_client_only=True, any_kinds=True)

    def _join_overlaps(
        self, one: int, other: int, *, by_client_only: bool = False, any_kinds: bool = False
    ) -> None:
        """Join each tie of a form with those of another that can be for the same client.

        Without comparing each with each. `by_client_only`: users and listeners may differ.
        `any_kinds`: no matter which comes first.
        """
        forms = self._forms[one], self._forms[other]
        by_user = not by_client_only and forms[0].user == forms[1].user == EXACT
        by_listener = not by_client_only and forms[0].listener == forms[1].listener == EXACT

        def place_of(at: int) -> _TiePlace:
            tie = self._ties[at]
            return tie.user if by_user else None, tie.listener if by_listener else None

        if not all(form.client in (EXACT, PREFIX) for form in forms):
            self._join_places(one, other, place_of)
            return
        for shorter, longer in ((one, other), (other, one)):
            short, long = self._forms[shorter], self._forms[longer]
            # A rule with a longer prefix comes before one of the same level with a shorter one.
            same_level = long.is_prefix and short.is_prefix and long.user == short.user
            if any_kinds or not same_level or short.kinds & ~long.kinds:
                self._join_beginnings(shorter, longer, place_of)

    def _join_places(self, one: int, other: int, place_of: Callable[[int], _TiePlace]) -> None:
        """Join all ties of one place, where both forms have one there."""
        first: dict[_TiePlace, int] = {}
        for at in self._ties_of[one]:
            first.setdefault(place_of(at), at)
        common = {place for at in self._ties_of[other] if (place := place_of(at)) in first}
        for at in (*self._ties_of[one], *self._ties_of[other]):
            if (place := place_of(at)) in common:
                self._tie_sets.join(first[place], at)

    def _join_beginnings(
        self, shorter: int, longer: int, place_of: Callable[[int], _TiePlace]
    ) -> None:
        """Join what begins alike: client ids, or prefixes, with each prefix they begin with."""
        known: defaultdict[tuple[_TiePlace, str], list[int]] = defaultdict(list)
        for at in self._ties_of[shorter]:
            known[place_of(at), self._ties[at].client_id or ""].append(at)
        lengths = {len(text) for _, text in known} if self._forms[shorter].is_prefix else None
        for at in self._ties_of[longer]:
            text, place = self._ties[at].client_id or "", place_of(at)
            for length in (len(text),) if lengths is None else lengths:
                if length <= len(text) and (found := known.get((place, text[:length]))):
                    for each in found:
                        self._tie_sets.join(each, at)
                    del found[1:]  # they are one set now
