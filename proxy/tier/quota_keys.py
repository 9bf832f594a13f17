"""Give each client the key by which it gets its slot.

A key is made of the client alone, of its user, or of both: what rules count by most. Clients of one
query or pipeline have one key. What other clients share by rules need not have one owner: it is
divided, and leased to the members that serve them. Finer keys than need be are right for rules,
and `is_divided` says where they are finer.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from proxy.quota.entities import DEFAULT, ClientIdentity
from proxy.quota.rules import Rule, entity_of
from proxy.tier.slot_map import slot_of

MAX_KNOWN_KEYS = 20_000
"""So many clients' keys are kept; then all are forgotten, and found again."""

PIPELINE = "pipeline:"
"""How the name of a pipeline's `LinkedClients` begins."""

BY_TOPIC = "topic"
"""Stands for what rules bound of topics, as a quota type for what they bound of all."""


@dataclass(frozen=True, slots=True)
class LinkedClients:
    """All clients of a pipeline, or of one query: they share something besides quotas."""

    name: str
    """Such as `pipeline:orders`, or a query's client id."""
    client_ids: frozenset[str]

    @property
    def ties(self) -> Iterator[tuple[str, bool]]:
        """Its name (True) and its client ids: sets that have one in common have one key."""
        yield self.name, True
        yield from ((each, False) for each in self.client_ids)


class QuotaKeys:
    """The keys of all clients, for one set of rules."""

    def __init__(self, rules: Iterable[Rule], together: Iterable[LinkedClients] = ()) -> None:
        self._key_of_set: dict[str, str] = {}
        self._key_of_id: dict[str, str] = {}
        """Of client ids that are in a set."""
        self._join(together)
        self._query_ids: set[str] = set()
        self._query_prefixes: tuple[str, ...] = ()
        """Of client ids that adaptive rules may be for."""
        self._by_client: set[str] = set()
        """What is bounded for a client id, whoever uses it."""
        self._is_by_both = False
        """Whether anything is bounded for a client id of a user."""
        self._by_user: set[str] = set()
        """The users, or DEFAULT, for whom anything is bounded, whatever their client ids."""
        self._covered: defaultdict[str, set[str]] = defaultdict(set)
        """For them: what no rule for a client id bounds, as one for the user comes first."""
        for rule in rules:
            self._add(rule)
        self._known: dict[ClientIdentity, str] = {}

    def key_of(self, identity: ClientIdentity) -> str:
        """Return the key of a client."""
        key = self._known.get(identity)
        if key is None:
            if len(self._known) >= MAX_KNOWN_KEYS:
                self._known.clear()
            key = self._known[identity] = self._make(identity)
        return key

    def key_of_set(self, name: str) -> str:
        """Return the key that all clients of `LinkedClients` have, also when these are no more."""
        return self._key_of_set.get(name, name)

    def key_of_query(self, client_id: str) -> str:
        """Return the key of a query: right for `LinkedClients`, or with an adaptive bound.

        Where only reports tell of a query, and a rule bounds its user, its client may have another
        key.
        """
        return self._key_of_id.get(client_id) or _written(None, client_id)

    def slot_of(self, identity: ClientIdentity) -> int:
        """Return the slot of a client."""
        return slot_of(self.key_of(identity))

    def slot_of_query(self, client_id: str) -> int:
        """Return the slot of a query, as `key_of_query` has it."""
        return slot_of(self.key_of_query(client_id))

    def slot_of_pipeline(self, name: str) -> int:
        """Return the slot of a pipeline, also of one that is configured no more."""
        return slot_of(self.key_of_set(PIPELINE + name))

    def is_divided(self, rule: Rule) -> bool:
        """Return whether clients whose traffic a rule adds up may have several keys."""
        same = rule.entity_keys
        if "client-id" in same and (rule.user is None or "user" in same):
            return False
        if rule.user is None or "user" not in same:
            return True
        has_queries = self._key_of_id or self._query_ids or self._query_prefixes
        return bool(has_queries) or not self._goes_by_user(rule.user)

    def _make(self, identity: ClientIdentity) -> str:
        user, client_id = identity.user, identity.client_id or ""
        if (of_set := self._key_of_id.get(client_id)) is not None:
            return of_set
        is_query = client_id in self._query_ids or client_id.startswith(self._query_prefixes)
        if user is None or is_query:
            return _written(None, client_id)
        if not self._goes_by_user(user):
            return _written(user if self._is_by_both and not self._by_client else None, client_id)
        return _written(user, None)

    def _goes_by_user(self, user: str) -> bool:
        """Return whether the key of a client that is no query's is made of its user alone."""
        covered = self._covered[DEFAULT]
        if user in self._covered:
            covered = covered | self._covered[user]
        return not self._by_user.isdisjoint((user, DEFAULT)) and self._by_client <= covered

    def _add(self, rule: Rule) -> None:
        bounded = {BY_TOPIC} if rule.is_by_topic else {*map(str, rule.ceilings)}
        if rule.adaptive is not None and rule.client_id not in (None, DEFAULT):
            self._query_ids.add(rule.client_id)
        elif rule.adaptive is not None:
            self._query_prefixes += (rule.client_id_prefix or "",)
        same = rule.entity_keys & {"user", "client-id"}
        if same == {"client-id"} and rule.user is None:
            self._by_client |= bounded
        self._is_by_both |= len(same) > 1
        if rule.user is not None:
            if same == {"user"}:
                self._by_user.add(rule.user)
            if rule.keys.keys() == {"user"}:
                self._covered[rule.user] |= bounded

    def _join(self, together: Iterable[LinkedClients]) -> None:
        """Give all clients of each set one key, and those of sets with a client in common."""
        tied: defaultdict[tuple[str, bool], list[LinkedClients]] = defaultdict(list)
        for clients in together:
            for tie in clients.ties:
                tied[tie].append(clients)
        for first in [tie for tie in tied if tie[1]]:  # each set has a name
            found, following = set[LinkedClients](), [first]
            while following:
                new = set(tied.pop(following.pop(), ())) - found
                found |= new
                following += [tie for clients in new for tie in clients.ties]
            if not found:  # one of a set that was found before
                continue
            names = {clients.name for clients in found}
            client_ids = {each for clients in found for each in clients.client_ids}
            key = _written(None, *client_ids) if len(client_ids) == 1 else min(names)
            self._key_of_set.update(dict.fromkeys(names, key))
            self._key_of_id.update(dict.fromkeys(client_ids, key))


def _written(user: str | None, client_id: str | None) -> str:
    """Return the values of a key, written as an entity is."""
    return entity_of({"user": user, "client-id": client_id})
