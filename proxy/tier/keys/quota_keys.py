"""Give each client the key by which it gets its slot: the same for all clients that share anything.

Two clients share what a rule adds up for both, an adaptive bound, a pipeline or a query. Coarser
keys than need be are right, only finer ones are not: so it is forms of rules that are compared,
and what cannot be told apart in that way has one key. Not seen to: sensors of clients for whom
there was no room (`OTHER`), which each member has for itself.
"""

from collections.abc import Iterable, Iterator

from proxy.quota.disjoint_sets import DisjointSets
from proxy.quota.entities import CONSUMER_BYTE_RATE, ClientIdentity, QuotaKind
from proxy.quota.rules import ESCAPES, Rule, RuleTable

from .client_set import ClientSet
from .rule_groups import (
    Field,
    RuleForm,
    Tie,
    form_of_clients,
    group_by_form,
    tie_of,
    ties_of_set,
)
from .tie_classes import TieClasses

MAX_KNOWN_KEYS = 20_000
"""So many clients' keys are kept; then all are forgotten, and found again."""

MAX_EXPLAINED = 5
"""Of what shares a key, at most so many names are told."""


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
        self._sets = tuple(together)
        self._ties: list[Tie] = [tie_of(rule) for rule in self._rules]
        self._tie_of_rule = {id(rule): at for at, rule in enumerate(self._rules)}
        self._exact: dict[str, int] = {}
        self._prefixes: dict[str, int] = {}
        forms = [RuleForm.of(rule) for rule in self._rules]
        set_ties = list(self._add_sets())
        self._tie_sets = DisjointSets(len(self._ties))
        self._join_sets(set_ties)
        forms += self._forms_of_sets(set_ties)
        groups = group_by_form(forms)
        self._classes = TieClasses(groups, self._ties, self._tie_sets)
        self._class_of_tie = [0] * len(self._ties)
        for at, group in enumerate(groups):
            for tie in group.ties:
                self._class_of_tie[tie] = self._classes.class_of(at)
        self._names = self._name_sets()
        self._coarsest: dict[frozenset[int], int] = {}
        self._fields = {each: self._classes.key_fields(each) for each in set(self._class_of_tie)}
        self._lengths = sorted({len(prefix) for prefix in self._prefixes})
        self._known: dict[ClientIdentity, str] = {}
        self._known_queries: dict[str, str] = {}

    def key_of(self, identity: ClientIdentity) -> str:
        """Return the key of a client."""
        key = self._known.get(identity)
        if key is None:
            if len(self._known) >= MAX_KNOWN_KEYS:
                self._known.clear()
            key = self._known[identity] = self._find(identity)
        return key

    def key_of_set(self, name: str) -> str:
        """Return the key that all clients of a `ClientSet` have. Raises KeyError: no such set."""
        for clients in self._sets:
            if clients.name == name:
                client_id = min((*clients.client_ids, *clients.prefixes))
                return self.key_of(ClientIdentity("", None, client_id))
        raise KeyError(name)

    def key_of_query(self, client_id: str) -> str:
        """Return the key of a query: right for those of a `ClientSet`, or with an adaptive bound.

        Where only reports tell of a query, and a rule for its user or listener bounds its client,
        the client may have another key.
        """
        if client_id not in self._known_queries:
            if len(self._known_queries) >= MAX_KNOWN_KEYS:
                self._known_queries.clear()
            self._known_queries[client_id] = self.key_of(self._client_of(client_id))
        return self._known_queries[client_id]

    def _client_of(self, client_id: str) -> ClientIdentity:
        """Return a client of a query."""
        identity = ClientIdentity("", None, client_id)
        for rule in self._table.rules if self._set_of(client_id) is None else ():
            if rule.adaptive is not None:
                # A client for whom as few other rules are as can be: one first here always is.
                like = ClientIdentity(rule.listener or "", rule.user, client_id)
                match = self._table.match(CONSUMER_BYTE_RATE, like)
                if match is not None and match.rule is rule:
                    return like
        return identity

    def explain(self, identity: ClientIdentity) -> str:
        """Return, for people, with whom a client shares its key."""
        ties = self._ties_of(identity)
        if not ties:
            return f"all clients with its client id: nothing bounds {identity.client_id or ''!r}"
        tie = self._deciding(ties)
        fields = self._fields[self._class_of_tie[tie]]
        if fields is not None:
            return f"all clients with {self._values(fields, identity)}"
        names = self._names_in(self._tie_sets.find(tie))
        shown = "; ".join(names[:MAX_EXPLAINED])
        rest = f"; and {len(names) - MAX_EXPLAINED} more" if len(names) > MAX_EXPLAINED else ""
        overlap = ", which overlap" if len(names) > 1 else ""
        return f"all clients of {shown}{rest}{overlap}"

    def _find(self, identity: ClientIdentity) -> str:
        ties = self._ties_of(identity)
        if not ties:
            return self._values(Field.CLIENT, identity)
        tie = self._deciding(ties)
        fields = self._fields[self._class_of_tie[tie]]
        if fields is None:
            return self._names[self._tie_sets.find(tie)]
        return self._values(fields, identity)

    def _ties_of(self, identity: ClientIdentity) -> list[int]:
        """Return by what a client shares anything, without repetition."""
        matches = (self._table.match(kind, identity) for kind in self._kinds)
        found = dict.fromkeys(self._tie_of_rule[id(each.rule)] for each in matches if each)
        of_set = self._set_of(identity.client_id or "")
        return [*found, *(() if of_set is None else (of_set,))]

    def _set_of(self, client_id: str) -> int | None:
        """Return a tie of the set that a client is in. If it is in several, they are joined."""
        if (exact := self._exact.get(client_id)) is not None:
            return exact
        for length in self._lengths:
            if (found := self._prefixes.get(client_id[:length])) is not None:
                return found
        return None

    def _deciding(self, ties: list[int]) -> int:
        """Return the tie of the coarsest class."""
        by_class = {self._class_of_tie[tie]: tie for tie in ties}
        if len(by_class) == 1:
            return ties[0]
        classes = frozenset(by_class)
        if classes not in self._coarsest:
            self._coarsest[classes] = self._classes.coarsest(sorted(classes))
        return by_class[self._coarsest[classes]]

    @staticmethod
    def _values(fields: Field, identity: ClientIdentity) -> str:
        """Return a client's values of these fields, written as an entity is."""
        values: list[tuple[str, str]] = []
        if Field.LISTENER in fields:
            values.append(("listener", identity.listener))
        if Field.USER in fields and identity.user is not None:
            values.append(("user", identity.user))
        if Field.CLIENT in fields:
            values.append(("client-id", identity.client_id or ""))
        return ",".join(f"{name}={value.translate(ESCAPES)}" for name, value in values)

    def _add_sets(self) -> Iterator[tuple[int, bool]]:
        """Add the ties of the sets; yield the position of each, and whether it is a prefix."""
        for clients in self._sets:
            for is_prefix, tie in ties_of_set(clients):
                at = len(self._ties)
                self._ties.append(tie)
                yield at, is_prefix

    def _join_sets(self, set_ties: Iterable[tuple[int, bool]]) -> None:
        """Join the ties of each set, and sets that have a client in common."""
        first: dict[str, int] = {}
        exact: list[int] = []
        for at, is_prefix in set_ties:
            tie = self._ties[at]
            assert tie.client_id is not None
            self._tie_sets.join(first.setdefault(tie.name, at), at)
            known = self._prefixes if is_prefix else self._exact
            self._tie_sets.join(known.setdefault(tie.client_id, at), at)
            exact.append(at)
        for at in exact:
            text = self._ties[at].client_id or ""
            for length in {len(prefix) for prefix in self._prefixes}:
                if (found := self._prefixes.get(text[:length])) is not None and length <= len(text):
                    self._tie_sets.join(found, at)

    def _forms_of_sets(self, set_ties: Iterable[tuple[int, bool]]) -> list[RuleForm]:
        """Return the forms of the sets' ties; a set of one client id is told by that."""
        texts: dict[int, set[tuple[str, bool]]] = {}
        for at, is_prefix in set_ties:
            text = self._ties[at].client_id or ""
            texts.setdefault(self._tie_sets.find(at), set()).add((text, is_prefix))
        return [
            form_of_clients(
                is_prefix=is_prefix,
                is_single=not is_prefix and len(texts[self._tie_sets.find(at)]) == 1,
            )
            for at, is_prefix in set_ties
        ]

    def _name_sets(self) -> dict[int, str]:
        """Return the name of each set of ties: that of a `ClientSet` in it, or else of a rule."""
        first: dict[int, tuple[bool, str]] = {}
        for at, tie in enumerate(self._ties):
            found, place = self._tie_sets.find(at), (at < len(self._rules), tie.name)
            first[found] = min(first.get(found, place), place)
        return {found: name for found, (_, name) in first.items()}

    def _names_in(self, tie_set: int) -> list[str]:
        return list(
            dict.fromkeys(
                tie.name for at, tie in enumerate(self._ties) if self._tie_sets.find(at) == tie_set
            )
        )
