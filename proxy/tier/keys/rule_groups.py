"""Say what clients share by rules, and by what a rule, or its form, tells its clients apart."""

from dataclasses import dataclass
from enum import Flag, auto
from functools import cached_property
from typing import Self

from proxy.quota.entities import QuotaKind
from proxy.quota.rules import ANY, EXACT, PREFIX, UNNAMED, Rule


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

TOPIC_BIT = TOGETHER_BIT << 1
"""Stands for what rules bound of topics: a client may have several of them, besides the others."""


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

    @classmethod
    def of(cls, rule: Rule) -> Self:
        """Return what a rule makes its clients share."""
        return cls(rule.shared_entity, *rule.named)


@dataclass(frozen=True)
class RulePattern:
    """How ties of one form look: which fields they ask for, and which tell their clients apart."""

    user: int
    """UNNAMED, ANY or EXACT."""
    client: int
    """Of its rank: EXACT, PREFIX, LISTENER_ONLY, ANY or UNNAMED."""
    listener: int
    """EXACT or UNNAMED."""
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

    @property
    def is_by_topic(self) -> bool:
        """Whether these are rules with a topic, of which none comes before another one for sure."""
        return self.kinds == TOPIC_BIT

    @property
    def is_prefix(self) -> bool:
        """Whether it asks for how a client id begins."""
        return self.client == PREFIX

    @cached_property
    def conditions(self) -> Field:
        """What decides whether a tie is for a client."""
        found = NO_FIELDS
        if self.user != UNNAMED:
            found |= Field.LOGIN | (Field.USER if self.user == EXACT else NO_FIELDS)
        if self.client in (EXACT, PREFIX):
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

    def precedes(self, other: Self) -> bool:
        """Return whether each rule of this form surely comes before each of the other."""
        if self.is_by_topic or other.is_by_topic:
            return False
        if self.user != other.user:
            return self.user < other.user
        if self.client != other.client:
            return self.client < other.client
        # Of two prefixes the longer one comes first.
        return not self.is_prefix and self.listener < other.listener

    @classmethod
    def of(cls, rule: Rule) -> Self:
        """Return a rule's form."""
        user, client, _, listener = rule.rank
        shared = rule.scope == "shared"
        entity = Field.LISTENER if rule.listener is not None else NO_FIELDS
        if user == EXACT or (user == ANY and not shared):
            entity |= Field.USER
        if client == EXACT or (not shared and client in (PREFIX, ANY)):
            entity |= Field.CLIENT
        if rule.names_only_a_listener and not shared:
            entity |= Field.USER | Field.CLIENT
        # One for all who have exactly these values is the same as one for each value.
        is_named = shared and (client == PREFIX or user == ANY or not entity)
        is_adaptive = rule.adaptive is not None
        if is_adaptive:
            entity = Field.CLIENT  # its queries are known by their client ids, whatever the user
        kinds = sum(KIND_BITS[kind] for kind in rule.ceilings)
        if rule.is_by_topic:
            kinds = TOPIC_BIT
        entity = NO_FIELDS if is_named else entity
        return cls(user, client, listener, kinds, entity, is_named, is_adaptive)

    @classmethod
    def of_clients(cls, *, is_single: bool) -> Self:
        """Return the form of one client id of a `ClientSet`."""
        entity = Field.CLIENT if is_single else NO_FIELDS
        return cls(UNNAMED, EXACT, UNNAMED, TOGETHER_BIT, entity, not is_single)
