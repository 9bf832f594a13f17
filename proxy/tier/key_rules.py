"""What quota keys are made of, as text: in the state of a tier, and from one process to another.

The same text makes the same keys, so members that have the same text agree on who owns a client.
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Self

from proxy.config import Config
from proxy.quota.rules import Rule, RuleTable
from proxy.state import Record, StateError, Store
from proxy.tier.keys.quota_keys import PIPELINE, QuotaKeys
from proxy.tier.keys.rule_groups import ClientSet

KEYS_KEY = "tier/keys"
"""Of the record, in the common slot."""

KEYS_SCHEMA = 1
"""Of the record's value."""

DIGEST_CHARS = 12


@dataclass(frozen=True, slots=True)
class KeyRules:
    """The rules, and the clients that belong together."""

    rules: str
    """As `rules_text` writes them."""
    together: tuple[ClientSet, ...]

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return those of a configuration, its rules as a member has them in force."""
        return cls(rules_text(RuleTable(config.quota_settings.rules).rules), client_sets(config))

    def keys(self) -> QuotaKeys:
        """Make the keys; of 10,000 rules in 0.5 s. Raises as `read`."""
        return QuotaKeys(read_rules(self.rules), self.together)

    def text(self) -> str:
        """Return both as JSON; `read` reads that."""
        # Versions before this one read a list of prefixes, too.
        sets = [[each.name, sorted(each.client_ids), []] for each in self.together]
        return f"[{self.rules},{_json(sets)}]"

    @classmethod
    def read(cls, text: str) -> Self:
        """Read a `text`. Raises ValueError, KeyError or TypeError for anything else."""
        rules, sets = json.loads(text)
        together = tuple(ClientSet(name, frozenset(ids)) for name, ids, _ in sets)
        return cls(_json(rules), together)


def rules_text(rules: Iterable[Rule]) -> str:
    """Return rules as JSON, in their order: of two with the same keys the first one wins.

    Of 10,000 rules it takes 0.1 s.
    """
    return _json([rule.document() for rule in rules])


def read_rules(text: str) -> tuple[Rule, ...]:
    """Read a `rules_text`. Raises as `Rule.of`."""
    return tuple(map(Rule.of, json.loads(text)))


def digest_of(text: str) -> str:
    """Return some characters that differ where the text does."""
    return sha256(text.encode()).hexdigest()[:DIGEST_CHARS]


def digest_in_force(table: RuleTable, *, enforce: bool) -> str:
    """Return the digest of what clients are held to; `enforce`: whether any is held at all."""
    pauses = sorted(each.name for each in table.pauses)
    return digest_of(f"[{rules_text(table.rules)},{_json([pauses, enforce])}]")


def client_sets(config: Config) -> tuple[ClientSet, ...]:
    """Return the clients that belong together: of each pipeline, and of each query."""
    return (*_pipelines(config), *_queries(config))


def keys_record(rules: KeyRules) -> Record:
    """Return the record that `read_keys` reads."""
    packed = b64encode(zlib.compress(rules.text().encode())).decode()
    return Record.of(KEYS_KEY, packed, KEYS_SCHEMA)


def read_keys(store: Store) -> KeyRules | None:
    """Return what the keys of the tier are made of; None: nobody has written it yet.

    Raises StateError: it cannot be read.
    """
    record = store.get(KEYS_KEY)
    if record is None:
        return None
    try:
        record.check_form(KEYS_SCHEMA)
        found = KeyRules.read(zlib.decompress(b64decode(str(record.value))).decode())
        return replace(found, rules=rules_text(read_rules(found.rules)))
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise StateError(
            f"the rules that the tier goes by cannot be read: {error}",
            "run versions that go together on all machines of the tier",
        ) from error


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _pipelines(config: Config) -> Iterator[ClientSet]:
    of_query = {query.name: query.client_id for query in config.queries}
    for pipeline in config.pipelines:
        members = {member for stage in pipeline.stages for member in stage.members}
        sources = {source.client_id for source in pipeline.sources}
        ids = frozenset({of_query.get(each, each) for each in members} | sources)
        yield ClientSet(PIPELINE + pipeline.name, ids)


def _queries(config: Config) -> Iterator[ClientSet]:
    for query in config.queries:
        yield ClientSet(query.client_id, frozenset((query.client_id,)))
