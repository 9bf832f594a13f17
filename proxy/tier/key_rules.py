"""By which rules a member makes the keys of clients, and whose rules those are.

What keys are made of is text, in the state of a tier: the same text makes the same keys, so members
that have it agree on who owns a client. The command `check` prints what keys rules come to.
"""

import asyncio
import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Self

from structlog import get_logger

from proxy.config import Config
from proxy.queries.record_owner import RECORDS_OF_CLIENTS, RECORDS_OF_PIPELINES
from proxy.quota.entities import FORESEEN_KINDS, TRAFFIC_KINDS, ClientIdentity
from proxy.quota.rules import Rule, RuleTable
from proxy.state import Record, SlotStore, StateError, Store
from proxy.state.state_records import key_parts
from proxy.state.unpacking import unpack_at_most
from proxy.tier.quota_keys import PIPELINE, LinkedClients, QuotaKeys
from proxy.tier.tier_store import COMMON_SLOT, OWED, WATCH

KEYS_KEY = "tier/keys"
"""Of the record, in the common slot."""

KEYS_SCHEMA = 1
"""Of the record's value."""

MAX_KEYS_BYTES = 16 << 20
"""Unpacked; 10,000 rules come to some 3 MB. Who may write to the topic must not fill our memory."""

DIGEST_CHARS = 12

MEND = "fix: count by what tells these clients apart, for example client-id, or divide it by hand"

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KeyDefinition:
    """The rules, and the clients that belong together."""

    rules: str
    """As `rules_text` writes them."""
    together: tuple[LinkedClients, ...]

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return those of a configuration, its rules as a member has them in force."""
        return cls(rules_text(RuleTable(config.quota_settings.rules).rules), linked_clients(config))

    def keys(self) -> QuotaKeys:
        """Make the keys; of 10,000 rules in 0.5 s. Raises as `Rule.of`."""
        return QuotaKeys(map(Rule.of, json.loads(self.rules)), self.together)

    def text(self) -> str:
        """Return both as JSON."""
        # Versions before this one read a list of prefixes, too.
        sets = [[each.name, sorted(each.client_ids), []] for each in self.together]
        return f"[{self.rules},{_json(sets)}]"

    def record(self) -> Record:
        """Return the record that `read` reads."""
        packed = b64encode(zlib.compress(self.text().encode())).decode()
        return Record.of(KEYS_KEY, packed, KEYS_SCHEMA)

    @classmethod
    def read(cls, store: Store) -> Self | None:
        """Return what the keys of the tier are made of; None: nobody has written it yet.

        Raises StateError: it cannot be read.
        """
        record = store.get(KEYS_KEY)
        if record is None:
            return None
        try:
            record.check_schema(KEYS_SCHEMA)
            rules, sets = json.loads(unpack_at_most(b64decode(str(record.value)), MAX_KEYS_BYTES))
            together = tuple(LinkedClients(name, frozenset(ids)) for name, ids, _ in sets)
            return cls(rules_text(map(Rule.of, rules)), together)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StateError(
                f"the rules that the tier goes by cannot be read: {error}",
                "run versions that go together on all machines of the tier",
            ) from error


class TierKeyRules:
    """Those of this member's own, those that the tier wants, and those in force here."""

    def __init__(self, config: Config) -> None:
        self._own = KeyDefinition.of(config)
        self.digest = digest_of(self._own.text())
        """Of the rules in this member's file."""
        self._are_own_whole = False
        """Whether `_own` has the rules of other sources, too."""
        self.wanted = self.in_force = self._own
        self.keys = self.in_force.keys()
        """Those that the rules in force make."""

    def slot_of_record(self, key: str) -> int:
        """Return the slot of a record's key; for several threads."""
        namespace, name, *_ = (*key_parts(key), "")
        if namespace in (OWED, WATCH) and name.isdecimal():
            return int(name)
        if namespace in RECORDS_OF_CLIENTS:
            return self.keys.slot_of_query(name)
        if namespace in RECORDS_OF_PIPELINES:
            return self.keys.slot_of_pipeline(name)
        return COMMON_SLOT

    def read(self, store: Store) -> None:
        """Go by the rules of the tier at once, if there are some. Raises StateError."""
        rules = KeyDefinition.read(store)
        if rules is not None:
            self.wanted = self.in_force = rules
            self.keys = rules.keys()

    async def use_rules(self, rules: Iterable[Rule]) -> None:
        """Follow that this member has these rules in force."""
        text = await asyncio.to_thread(rules_text, rules)
        self._own = KeyDefinition(text, self._own.together)
        self._are_own_whole = True

    def use_config(self, config: Config) -> None:
        """Follow another configuration."""
        self._own = KeyDefinition(self._own.rules, linked_clients(config))
        self.digest = digest_of(KeyDefinition.of(config).text())

    async def propose(self, store: SlotStore) -> bool:
        """Have all members make their keys by our rules; return whether those are other ones.

        Raises StateError.
        """
        if not self._are_own_whole:
            return False
        record = await asyncio.to_thread(self._own.record)
        if store.get(KEYS_KEY) == record:
            return False
        await asyncio.to_thread(store.put_many, [record])
        self.wanted = self._own
        return True

    def follow(self, keys: Collection[str], store: Store) -> bool:
        """Want what the tier goes by if that is among these records that came."""
        if KEYS_KEY not in keys:
            return False
        try:
            self.wanted = KeyDefinition.read(store) or self.wanted
        except StateError as error:
            _log.error("the rules of the tier are not followed", error=str(error))
        return True


def rules_text(rules: Iterable[Rule]) -> str:
    """Return rules as JSON, in their order: of two with the same keys the first one wins.

    Of 10,000 rules it takes 0.1 s.
    """
    return _json([rule.document() for rule in rules])


def digest_of(text: str) -> str:
    """Return some characters that differ where the text does."""
    return sha256(text.encode()).hexdigest()[:DIGEST_CHARS]


def digest_in_force(table: RuleTable, *, enforce: bool) -> str:
    """Return the digest of what clients are held to; `enforce`: whether any is held at all."""
    pauses = sorted(each.name for each in table.pauses)
    return digest_of(f"[{rules_text(table.rules)},{_json([pauses, enforce])}]")


def linked_clients(config: Config) -> tuple[LinkedClients, ...]:
    """Return the clients that belong together: of each pipeline, and of each query."""
    of_query = {query.name: query.client_id for query in config.queries}
    found: list[LinkedClients] = []
    for pipeline in config.pipelines:
        members = {member for stage in pipeline.stages for member in stage.members}
        sources = {source.client_id for source in pipeline.sources}
        ids = frozenset({of_query.get(each, each) for each in members} | sources)
        found.append(LinkedClients(PIPELINE + pipeline.name, ids))
    for query in config.queries:
        found.append(LinkedClients(query.client_id, frozenset((query.client_id,))))
    return tuple(found)


def make_quota_keys(config: Config, table: RuleTable) -> QuotaKeys:
    """Return the keys by which members share the clients."""
    return QuotaKeys(table.rules, linked_clients(config))


def find_undivided_rules(config: Config, table: RuleTable, keys: QuotaKeys) -> Iterator[str]:
    """Yield a line for each rule of which every member has the whole number of connections."""
    for rule in table.rules if config.tier is not None else ():
        counted = [kind for kind in rule.bounds if kind not in TRAFFIC_KINDS]
        if counted and keys.is_divided(rule):
            yield (
                f"{rule.title}: its clients are at several members, each of which allows "
                f"{' and '.join(counted)} by itself; {MEND}"
            )


def explain_key(
    config: Config, table: RuleTable, keys: QuotaKeys, identity: ClientIdentity
) -> Iterator[str]:
    """Yield a client's quota key with its slot, and what it shares with clients of others."""
    yield f"quota key: {keys.key_of(identity)!r}, slot {keys.slot_of(identity)}"
    matches = [table.match(kind, identity) for kind in TRAFFIC_KINDS]
    rules = [match.rule for match in matches if match is not None]
    for kind in sorted(FORESEEN_KINDS):
        rules += table.rules_by_topic(kind, identity)
    divided = {rule.title for rule in rules if config.tier is not None and keys.is_divided(rule)}
    for title in sorted(divided):
        yield f"     {title}: each member that serves its clients has a part of what they share"


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
