"""Join forms of rules into classes, so that of two that a client has one follows from the other.

A class has *key fields*, those in which all clients that share anything by it are the same, or a
name where there are none. One class *follows* from another when all clients that share by the
other share by it, too: it is the coarser of the two, and its key is that of all these clients.
Where neither follows, both become one class, until nothing is left to be joined.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import combinations, combinations_with_replacement
from operator import and_, or_

from proxy.quota.disjoint_sets import DisjointSets

from .overlaps import join_overlaps
from .rule_groups import NO_FIELDS, VALUES, Field, Group, Meetings, Tie

MAX_COMPARED = 48
"""Of more forms than this that do not settle all that others ask for, none are compared: they are
one class, and have one key. Usual rules have less than ten such forms."""


class TieClasses:
    """The classes of all groups of ties."""

    def __init__(
        self, groups: Sequence[Group], ties: Sequence[Tie], tie_sets: DisjointSets
    ) -> None:
        """Join the groups; `tie_sets`: ties that were joined already."""
        self._groups, self._ties, self._tie_sets = groups, ties, tie_sets
        self._forms = forms = [group.form for group in groups]
        self._meetings = Meetings(groups)
        self._classes = DisjointSets(len(groups))
        self._members: dict[int, list[int]] = {at: [at] for at in range(len(groups))}
        self._asked = reduce(or_, (each.conditions | each.entity for each in forms), NO_FIELDS)
        self._partial = [at for at, each in enumerate(forms) if self._asked not in each.settled]
        """Groups from which not everything else follows."""
        self._join_alike()
        if len(self._partial) > MAX_COMPARED:
            self._join_all(self._partial)
        self._join_until_settled()
        self._name()

    def class_of(self, group: int) -> int:
        """Return which class a group belongs to."""
        return self._classes.find(group)

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
        members = self._members[fine]
        known = self._settled(members)
        if self._asked in known:
            return True
        coarse_fields = self.key_fields(coarse)
        if coarse_fields is not None and coarse_fields not in known:
            return False
        meetings, forms = self._meetings, self._forms
        for one in members:
            kinds = 0
            for other in self._members[coarse]:
                kinds |= meetings.kinds(one, other)
            for other, form in enumerate(forms) if kinds else ():
                if meetings.kinds(one, other) & kinds and form.conditions not in known:
                    return False
            if len(members) > 1 or forms[one].is_adaptive:
                for own in members:
                    if forms[own].kinds & kinds and forms[own].conditions not in known:
                        return False
        return True

    def _settled(self, members: Sequence[int]) -> Field:
        return reduce(and_, (self._forms[each].settled for each in members))

    def _join(self, one: int, other: int) -> bool:
        first, second = self._classes.find(one), self._classes.find(other)
        if not self._classes.join(first, second):
            return False
        kept, gone = min(first, second), max(first, second)
        self._members[kept] += self._members.pop(gone)
        return True

    def _join_alike(self) -> None:
        """Join all `ClientSet`s of several clients, and all that has adaptive bounds.

        A query has one adaptive bound, whichever rule gives it.
        """
        forms = self._forms
        self._join_all([at for at, form in enumerate(forms) if form.is_adaptive])
        self._join_all([at for at, form in enumerate(forms) if form.is_set and form.is_named])

    def _join_all(self, alike: Sequence[int]) -> None:
        for each in alike[1:]:
            self._join(alike[0], each)

    def _join_until_settled(self) -> None:
        joined = True
        while joined:
            joined = False
            for one, other in combinations(self._partial, 2):
                first, second = self._classes.find(one), self._classes.find(other)
                if first == second or not self._meet(one, other):
                    continue
                if not self.follows(first, second) and not self.follows(second, first):
                    joined = self._join(first, second) or joined

    def _meet(self, one: int, other: int) -> bool:
        return bool(self._meetings.kinds(one, other) or self._meetings.kinds(other, one))

    def _name(self) -> None:
        """Join the ties of classes without key fields, where a client can have two of them."""
        for of_class, members in self._members.items():
            if self.key_fields(of_class) is not None:
                continue
            if len(members) > MAX_COMPARED:
                first, *ties = (tie for each in members for tie in self._groups[each].ties)
                for tie in ties:
                    self._tie_sets.join(first, tie)
                continue
            for one, other in combinations(members, 2):
                if self._meet(one, other):
                    pair = self._groups[one], self._groups[other]
                    is_set = self._forms[one].is_set or self._forms[other].is_set
                    join_overlaps(self._tie_sets, self._ties, *pair, any_kinds=is_set)
            adaptive = [each for each in members if self._forms[each].is_adaptive]
            for one, other in combinations_with_replacement(adaptive, 2):
                pair = self._groups[one], self._groups[other]
                join_overlaps(
                    self._tie_sets, self._ties, *pair, by_client_only=True, any_kinds=True
                )
