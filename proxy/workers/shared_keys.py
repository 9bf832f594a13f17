"""The keys by which clients get their slots, the same in all workers of a machine at a time.

The supervisor says by which rules they are made: rules come into force a moment later in one worker
than in another, and meanwhile two must not both take a client for the other's.
"""

import pickle
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from proxy.config import Config
from proxy.members.client_set import ClientSet
from proxy.members.quota_keys import QuotaKeys
from proxy.members.slot_map import SlotMap
from proxy.members.slots import slot_of
from proxy.quota.debts import Debt
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.rules import Rule, RuleTable

PIPELINE = "pipeline:"


@dataclass(frozen=True, slots=True)
class KeyRules:
    """What the keys are made of."""

    rules: tuple[Rule, ...]
    together: tuple[ClientSet, ...]

    @classmethod
    def of(cls, config: Config) -> "KeyRules":
        """Return what the keys of a configuration are made of, its rules as a table has them.

        So they are the same as those that a worker says it has in force.
        """
        return cls(RuleTable(config.quota_settings.rules).rules, client_sets(config))

    def keys(self) -> QuotaKeys:
        """Make the keys; of 10,000 rules in 0.1 s."""
        return QuotaKeys(self.rules, self.together)

    def pack(self) -> str:
        """Return it as `unpack` reads it."""
        sets = [(each.name, each.client_ids, each.prefixes) for each in self.together]
        return b64encode(pickle.dumps((_plain(self.rules), sets))).decode()

    @classmethod
    def unpack(cls, text: str) -> "KeyRules":
        """Read what `pack` has written."""
        rules, sets = pickle.loads(b64decode(text))
        return cls(_rules(rules), tuple(ClientSet(*each) for each in sets))


def client_sets(config: Config) -> tuple[ClientSet, ...]:
    """Return the clients that belong together: of each pipeline, and of each query."""
    return (*_pipelines(config), *_queries(config))


def pack_rules(rules: Sequence[Rule]) -> str:
    """Return rules as `unpack_rules` reads them."""
    return b64encode(pickle.dumps(_plain(rules))).decode()


def unpack_rules(text: str) -> tuple[Rule, ...]:
    """Read what `pack_rules` has written."""
    return _rules(pickle.loads(b64decode(text)))


def _plain(rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """Return rules in a form that can be pickled: their bounds are views."""
    names = [each.name for each in fields(Rule) if each.init]
    return [
        {name: getattr(rule, name) for name in names} | {"bounds": dict(rule.bounds)}
        for rule in rules
    ]


def _rules(plain: Sequence[Mapping[str, Any]]) -> tuple[Rule, ...]:
    return tuple(Rule(**each) for each in plain)


@dataclass(frozen=True, slots=True)
class SlotOwns:
    """What a worker owns by one map and its keys; see `proxy.progress.owns.Owns`."""

    name: str
    slot_map: SlotMap
    keys: QuotaKeys

    def client(self, client_id: str) -> bool:
        """Return whether a client is this member's, with its query and its adaptive bound."""
        return self._has(self.keys.key_of_query(client_id))

    def pipeline(self, name: str) -> bool:
        """Return whether a pipeline is this member's, with its ledger."""
        return self._has(key_of_pipeline(self.keys, name))

    def has(self, identity: ClientIdentity) -> bool:
        """Return whether a client is this member's."""
        return self._has(self.keys.key_of(identity))

    def _has(self, key: str) -> bool:
        return self.slot_map.owners[slot_of(key)] == self.name


@dataclass(frozen=True, slots=True)
class OwnedBoth:
    """What a member owned before and owns afterwards."""

    before: SlotOwns
    after: SlotOwns

    def client(self, client_id: str) -> bool:
        """See Owns."""
        return self.before.client(client_id) and self.after.client(client_id)

    def pipeline(self, name: str) -> bool:
        """See Owns."""
        return self.before.pipeline(name) and self.after.pipeline(name)


def key_of_pipeline(keys: QuotaKeys, name: str) -> str:
    """Return the key of a pipeline, also of one that is configured no more."""
    try:
        return keys.key_of_set(PIPELINE + name)
    except KeyError:
        return PIPELINE + name


def debt_row(debt: Debt) -> list[Any]:
    """Return a debt as JSON has it; `read_debt` reads that."""
    client = debt.identity
    names = [client.listener, client.user, client.client_id]
    return [*names, debt.entity, debt.kind.value, debt.owed_ms]


def identity_of(row: Sequence[Any]) -> ClientIdentity:
    """Return whose the row of a debt, or of a visit, is."""
    listener, user, client_id, *_ = row
    return ClientIdentity(listener, user, client_id)


def read_debt(row: Sequence[Any]) -> Debt:
    """Read a `debt_row`. Raises ValueError for anything else."""
    listener, user, client_id, entity, kind, owed_ms = row
    return Debt(ClientIdentity(listener, user, client_id), entity, QuotaKind(kind), owed_ms)


def _pipelines(config: Config) -> Iterator[ClientSet]:
    of_query = {query.name: query.client_id for query in config.queries}
    for pipeline in config.pipeline_settings:
        members = {member for stage in pipeline.stages for member in stage.members}
        sources = {source.client_id for source in pipeline.sources}
        ids = frozenset({of_query.get(each, each) for each in members} | sources)
        yield ClientSet(PIPELINE + pipeline.name, ids)


def _queries(config: Config) -> Iterator[ClientSet]:
    for query in config.queries:
        yield ClientSet(query.client_id, frozenset((query.client_id,)))
