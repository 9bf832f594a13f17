"""Put rules of the same form together, and say for two forms whether one follows from the other.

There may be ten thousand rules, but of few forms: what is compared in pairs are forms.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from functools import cached_property
from typing import Self

from proxy.quota.entities import DEFAULT, QuotaKind
from proxy.quota.rules import ANY, EXACT, UNNAMED, Rule


class Field(Flag):
    """What is known of a client."""

    LISTENER = auto()
    USER = auto()
    LOGIN = auto()
    """Whether there is a user."""
    CLIENT = auto()


NO_FIELDS = Field(0)

VALUES = Field.LISTENER | Field.USER | Field.CLIENT
"""What a key can be made of."""

KIND_BITS = {kind: 1 << position for position, kind in enumerate(QuotaKind)}

TOGETHER_BIT = 1 << len(KIND_BITS)
"""Stands for what clients of one `ClientSet` share, as `KIND_BITS` for what a quota bounds."""


@dataclass(frozen=True, slots=True)
class ClientSet:
    """All clients of a pipeline, or of one query: they share something besides quotas."""

    name: str
    """Such as `pipeline:orders`, or a query's client id."""
    client_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Tie:
    """What makes its clients share something: a rule, or clients that were said to be together."""

    name: str
    user: str | None
    client_id: str | None
    """Exact, or how it begins; None: any."""
    listener: str | None


@dataclass(frozen=True)
class RuleForm:
    """How ties of one group look: which fields they ask for, and which tell their clients apart."""

    user: int
    """UNNAMED, ANY or EXACT."""
    client: int
    """Of its rank: EXACT, PREFIX, LISTENER_ONLY, ANY or UNNAMED."""
    listener: int
    """EXACT or UNNAMED."""
    is_exact: bool
    """Whether it asks for one client id."""
    is_prefix: bool
    kinds: int
    """Bits of what is shared."""
    entity: Field
    """Clients with the same values of these share something."""
    is_named: bool
    """Whether all clients of one tie share something, more than `entity` says."""
    is_adaptive: bool = False

    @property
    def is_set(self) -> bool:
        """Whether these are ties of `ClientSet`s."""
        return self.kinds == TOGETHER_BIT

    @cached_property
    def conditions(self) -> Field:
        """What decides whether a tie is for a client."""
        found = NO_FIELDS
        if self.user != UNNAMED:
            found |= Field.LOGIN | (Field.USER if self.user == EXACT else NO_FIELDS)
        if self.is_exact or self.is_prefix:
            found |= Field.CLIENT
        return found | (Field.LISTENER if self.listener == EXACT else NO_FIELDS)

    @cached_property
    def settled(self) -> Field:
        """In what all clients that share by one tie are the same."""
        if self.is_set or self.is_adaptive:  # it is not by one tie alone that they share
            return self.entity
        # Those of a prefix differ in their client ids.
        asked = self.conditions & ~Field.CLIENT if self.is_prefix else self.conditions
        found = self.entity | asked
        return found | Field.LOGIN if Field.USER in found else found

    @classmethod
    def of(cls, rule: Rule) -> Self:
        """Return a rule's form."""
        user, client, _, listener = rule.rank
        is_prefix = rule.client_id_prefix is not None
        is_exact = rule.client_id not in (None, DEFAULT)
        shared = rule.scope == "shared"
        entity = Field.LISTENER if rule.listener is not None else NO_FIELDS
        if user == EXACT or (user == ANY and not shared):
            entity |= Field.USER
        if is_exact or (not shared and (is_prefix or rule.client_id is not None)):
            entity |= Field.CLIENT
        if rule.names_only_a_listener and not shared:
            entity |= Field.USER | Field.CLIENT
        # One for all who have exactly these values is the same as one for each value.
        is_named = shared and (is_prefix or user == ANY or not entity)
        is_adaptive = rule.adaptive is not None
        if is_adaptive:
            entity = Field.CLIENT  # its queries are known by their client ids, whatever the user
        kinds = sum(KIND_BITS[kind] for kind in rule.bounds)
        return cls(
            *(user, client, listener, is_exact, is_prefix, kinds),
            *(NO_FIELDS if is_named else entity, is_named, is_adaptive),
        )


@dataclass(frozen=True, slots=True)
class Group:
    """All ties of one form."""

    form: RuleForm
    ties: tuple[int, ...]
    """Positions among all ties."""


def tie_of(rule: Rule) -> Tie:
    """Return what a rule makes its clients share."""
    client_id = rule.client_id_prefix
    if client_id is None and rule.client_id != DEFAULT:
        client_id = rule.client_id
    return Tie(
        rule.shared_entity, None if rule.user == DEFAULT else rule.user, client_id, rule.listener
    )


def form_of_clients(*, is_single: bool) -> RuleForm:
    """Return the form of one client id of a `ClientSet`."""
    return RuleForm(
        *(UNNAMED, EXACT, UNNAMED, True, False, TOGETHER_BIT),
        *(Field.CLIENT if is_single else NO_FIELDS, not is_single),
    )


def group_by_form(forms: Iterable[RuleForm]) -> list[Group]:
    """Return the groups of ties, given the form of each."""
    members: dict[RuleForm, list[int]] = {}
    for position, form in enumerate(forms):
        members.setdefault(form, []).append(position)
    return [Group(form, tuple(ties)) for form, ties in members.items()]


def comes_first(one: RuleForm, other: RuleForm) -> bool:
    """Return whether each rule of one form surely comes before each of the other."""
    if one.user != other.user:
        return one.user < other.user
    if one.client != other.client:
        return one.client < other.client
    # Of two prefixes the longer one comes first.
    return not one.is_prefix and one.listener < other.listener


class Meetings:
    """Which kinds a client can share by two groups at once, given what comes before them."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._covers = [
            form
            for form in (group.form for group in groups)
            if form.conditions in (NO_FIELDS, Field.LOGIN) and not form.is_set
        ]
        """Those that are for every client, or every one with a user."""
        self._known: dict[tuple[int, int], int] = {}

    def kinds(self, one: int, other: int) -> int:
        """Return in which kinds the other group may be the first; 0: the two never meet.

        For clients for whom the one group is the first in a further kind.
        """
        pair = one, other
        if pair not in self._known:
            self._known[pair] = self._find(self._groups[one].form, self._groups[other].form)
        return self._known[pair]

    def _find(self, one: RuleForm, other: RuleForm) -> int:
        if one is other or one.kinds == other.kinds:
            return 0  # whichever comes first does so in all kinds
        mine, theirs = self._uncovered(one, other), self._uncovered(other, one)
        if not mine or not theirs or (mine == theirs and mine.bit_count() == 1):
            return 0
        # By one kind alone a client has one first rule.
        return theirs & ~mine if mine.bit_count() == 1 else theirs

    def _uncovered(self, one: RuleForm, other: RuleForm) -> int:
        """Return the kinds in which nothing surely comes first where both are for a client."""
        kinds = one.kinds
        if comes_first(other, one) and not (one.is_set or other.is_set):
            kinds &= ~other.kinds
        has_user = one.user != UNNAMED or other.user != UNNAMED
        for cover in self._covers:
            if kinds & cover.kinds and (cover.user == UNNAMED or has_user):
                kinds &= ~cover.kinds if comes_first(cover, one) else kinds
        return kinds


def longer_may_meet(longer: RuleForm, shorter: RuleForm) -> bool:
    """Return whether a rule with a longer prefix leaves a kind to one with a shorter prefix."""
    same_level = longer.is_prefix and shorter.is_prefix and longer.user == shorter.user
    return not same_level or bool(shorter.kinds & ~longer.kinds)
