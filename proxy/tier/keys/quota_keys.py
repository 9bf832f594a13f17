"""Give each client the key by which it gets its slot: the same for all clients that share anything.

Two clients share what a rule adds up for both, an adaptive bound, a pipeline or a query. Coarser
keys than need be are right, only finer ones are not: so it is forms of rules that are compared,
and what cannot be told apart in that way has one key. All rules with a topic are one class: its
keys are made of what each of them tells clients apart by, and where that is nothing, all their
clients have one key. Not seen to: sensors of clients for whom
there was no room (`OTHER`), which each member has for itself.
"""

from collections import defaultdict
from collections.abc import Iterable

from proxy.quota.disjoint_sets import DisjointSets
from proxy.quota.entities import CONSUMER_BYTE_RATE, FORESEEN_KINDS, ClientIdentity, QuotaKind
from proxy.quota.rules import ESCAPES, Rule, RuleTable
from proxy.tier.slot_map import slot_of

from .rule_groups import ClientSet, Field, RulePattern, Tie
from .tie_classes import EquivalenceClasses

MAX_KNOWN_KEYS = 20_000
"""So many clients' keys are kept; then all are forgotten, and found again."""

NO_TIE = -1

MAX_EXPLAINED = 5
"""Of what shares a key, at most so many names are told."""

PIPELINE = "pipeline:"
"""How the name of a pipeline's `ClientSet` begins."""


class QuotaKeys:
    """The keys of all clients, for one set of rules.

    `table` is that of the rules, if it was made before: for thousands it takes long.
    """

    def __init__(
        self,
        rules: Iterable[Rule],
        together: Iterable[ClientSet] = (),
        table: RuleTable | None = None,
    ) -> None:
        self._rules = tuple(rules)
        self._table = RuleTable(self._rules) if table is None else table
        self._kinds = [kind for kind in QuotaKind if self._table.count(kind)]
        self._ties: list[Tie] = [Tie.of(rule) for rule in self._rules]
        self._tie_of_rule = {id(rule): at for at, rule in enumerate(self._rules)}
        self._ties += (
            Tie(clients.name, None, client_id, None)
            for clients in together
            for client_id in sorted(clients.client_ids)
        )
        self._tie_sets = DisjointSets(len(self._ties))
        self._tie_of_set: dict[str, int] = {}
        self._tie_of_client_id: dict[str, int] = {}
        """Of client ids that are in a set; if one is in several, these are joined."""
        forms = [*map(RulePattern.of, self._rules), *self._join_sets()]
        self._classes = EquivalenceClasses(forms, self._ties, self._tie_sets)
        self._fields = {each: self._classes.key_fields(each) for each in {*self._classes.of_tie}}
        self._coarsest: dict[frozenset[int], int] = {}
        self._names = self._name_sets()
        self._known: dict[ClientIdentity | str, str] = {}
        """Keys of clients, and of queries by their client ids."""

    def key_of(self, identity: ClientIdentity) -> str:
        """Return the key of a client."""
        key = self._known.get(identity)
        if key is None:
            tie, fields = self._deciding(identity)
            if fields is None:
                key = self._names[self._tie_sets.find(tie)]
            else:
                key = _values_of(fields, identity)
            self._remember(identity, key)
        return key

    def key_of_set(self, name: str) -> str:
        """Return the key that all clients of a `ClientSet` have, also of one that is no more."""
        tie = self._tie_of_set.get(name)
        if tie is None:
            return name
        return self.key_of(ClientIdentity("", None, self._ties[tie].client_id))

    def key_of_query(self, client_id: str) -> str:
        """Return the key of a query: right for those of a `ClientSet`, or with an adaptive bound.

        Where only reports tell of a query, and a rule for its user or listener bounds its client,
        the client may have another key.
        """
        key = self._known.get(client_id)
        if key is None:
            key = self.key_of(self._client_of(client_id))
            self._remember(client_id, key)
        return key

    def slot_of(self, identity: ClientIdentity) -> int:
        """Return the slot of a client."""
        return slot_of(self.key_of(identity))

    def slot_of_query(self, client_id: str) -> int:
        """Return the slot of a query, as `key_of_query` has it."""
        return slot_of(self.key_of_query(client_id))

    def slot_of_pipeline(self, name: str) -> int:
        """Return the slot of a pipeline, also of one that is configured no more."""
        return slot_of(self.key_of_set(PIPELINE + name))

    def _client_of(self, client_id: str) -> ClientIdentity:
        """Return a client of a query."""
        identity = ClientIdentity("", None, client_id)
        for rule in self._table.rules if client_id not in self._tie_of_client_id else ():
            if rule.adaptive is not None:
                # A client for whom as few other rules are as can be: one first here always is.
                like = ClientIdentity(rule.listener or "", rule.user, client_id)
                match = self._table.match(CONSUMER_BYTE_RATE, like)
                if match is not None and match.rule is rule:
                    return like
        return identity

    def explain(self, identity: ClientIdentity) -> str:
        """Return, for people, with whom a client shares its key."""
        tie, fields = self._deciding(identity)
        if tie == NO_TIE:
            return f"all clients with its client id: nothing bounds {identity.client_id or ''!r}"
        if fields is not None:
            return f"all clients with {_values_of(fields, identity)}"
        find = self._tie_sets.find
        alike = (each.name for at, each in enumerate(self._ties) if find(at) == find(tie))
        names = list(dict.fromkeys(alike))
        shown = "; ".join(names[:MAX_EXPLAINED])
        rest = f"; and {len(names) - MAX_EXPLAINED} more" if len(names) > MAX_EXPLAINED else ""
        overlap = ", which overlap" if len(names) > 1 else ""
        return f"all clients of {shown}{rest}{overlap}"

    def _remember(self, of: ClientIdentity | str, key: str) -> None:
        if len(self._known) >= MAX_KNOWN_KEYS:
            self._known.clear()
        self._known[of] = key

    def _deciding(self, identity: ClientIdentity) -> tuple[int, Field | None]:
        """Return by which tie a client has its key, of the coarsest class; or NO_TIE.

        With the fields that the key is made of; None: it is the name of the tie's set.
        """
        matches = (self._table.match(kind, identity) for kind in self._kinds)
        by_topic = (self._table.rule_by_topic(kind, identity) for kind in FORESEEN_KINDS)
        rules = (*(each.rule for each in matches if each), *filter(None, by_topic))
        found = dict.fromkeys(self._tie_of_rule[id(each)] for each in rules)
        of_set = self._tie_of_client_id.get(identity.client_id or "")
        ties = [*found, *(() if of_set is None else (of_set,))]
        if not ties:
            return NO_TIE, Field.CLIENT
        by_class = {self._classes.of_tie[tie]: tie for tie in ties}
        if len(by_class) == 1:
            return ties[0], self._fields[next(iter(by_class))]
        classes = frozenset(by_class)
        if classes not in self._coarsest:
            self._coarsest[classes] = self._classes.coarsest(sorted(classes))
        coarsest = self._coarsest[classes]
        return by_class[coarsest], self._fields[coarsest]

    def _join_sets(self) -> Iterable[RulePattern]:
        """Join the ties of each set, and of sets that have a client in common; return their forms.

        What is joined and has one client id alone is told by that.
        """
        positions = range(len(self._rules), len(self._ties))
        for at in positions:
            name, client_id = self._ties[at].name, self._ties[at].client_id or ""
            self._tie_sets.join(self._tie_of_set.setdefault(name, at), at)
            self._tie_sets.join(self._tie_of_client_id.setdefault(client_id, at), at)
        joined = [self._tie_sets.find(at) for at in positions]
        client_ids: defaultdict[int, set[str | None]] = defaultdict(set)
        for at, found in zip(positions, joined, strict=True):
            client_ids[found].add(self._ties[at].client_id)
        return [RulePattern.of_clients(is_single=len(client_ids[found]) == 1) for found in joined]

    def _name_sets(self) -> dict[int, str]:
        """Return the name of each set of ties: that of a `ClientSet` in it, or else of a rule."""
        first: dict[int, tuple[bool, str]] = {}
        for at, tie in enumerate(self._ties):
            found, place = self._tie_sets.find(at), (at < len(self._rules), tie.name)
            first[found] = min(first.get(found, place), place)
        return {found: name for found, (_, name) in first.items()}


def _values_of(fields: Field, identity: ClientIdentity) -> str:
    """Return a client's values of these fields, written as an entity is."""
    values: list[tuple[str, str]] = []
    if Field.LISTENER in fields:
        values.append(("listener", identity.listener))
    if Field.USER in fields and identity.user is not None:
        values.append(("user", identity.user))
    if Field.CLIENT in fields:
        values.append(("client-id", identity.client_id or ""))
    return ",".join(f"{name}={value.translate(ESCAPES)}" for name, value in values)
