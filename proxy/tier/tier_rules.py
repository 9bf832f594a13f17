"""By which rules a member makes the keys of clients, and whose rules those are."""

import asyncio
from collections.abc import Collection, Iterable

from structlog import get_logger

from proxy.config import Config
from proxy.queries.record_owner import OwnerKind, owner_of
from proxy.quota.rules import Rule
from proxy.state import SlotStore, StateError, Store
from proxy.state.store import SEPARATOR
from proxy.tier.key_rules import (
    KEYS_KEY,
    KeyRules,
    client_sets,
    digest_of,
    keys_record,
    read_keys,
    rules_text,
)
from proxy.tier.records import COMMON_SLOT, OWED, WATCH

_log = get_logger(__name__)


class TierRules:
    """Those of this member's own, those that the tier wants, and those in force here."""

    def __init__(self, config: Config) -> None:
        self._own = KeyRules.of(config)
        self.digest = digest_of(self._own.text())
        """Of the rules in this member's file."""
        self._are_own_whole = False
        """Whether `_own` has the rules of other sources, too."""
        self.wanted = self.in_force = self._own
        self.keys = self.in_force.keys()
        """Those that the rules in force make."""

    def slot_of_record(self, key: str) -> int:
        """Return the slot of a record's key; for several threads."""
        namespace, _, rest = key.partition(SEPARATOR)
        if namespace in (OWED, WATCH) and rest.isdecimal():
            return int(rest)
        owner = owner_of(key)
        if owner is None:
            return COMMON_SLOT
        if owner.kind is OwnerKind.CLIENT:
            return self.keys.slot_of_query(owner.name)
        return self.keys.slot_of_pipeline(owner.name)

    def read(self, store: Store) -> None:
        """Go by the rules of the tier at once, if there are some. Raises StateError."""
        rules = read_keys(store)
        if rules is not None:
            self.wanted = self.in_force = rules
            self.keys = rules.keys()

    async def use_rules(self, rules: Iterable[Rule]) -> None:
        """Follow that this member has these rules in force."""
        text = await asyncio.to_thread(rules_text, rules)
        self._own = KeyRules(text, self._own.together)
        self._are_own_whole = True

    def use_config(self, config: Config) -> None:
        """Follow another configuration."""
        self._own = KeyRules(self._own.rules, client_sets(config))
        self.digest = digest_of(KeyRules.of(config).text())

    async def propose(self, store: SlotStore) -> bool:
        """Have all members make their keys by our rules; return whether those are other ones.

        Raises StateError.
        """
        if not self._are_own_whole:
            return False
        record = await asyncio.to_thread(keys_record, self._own)
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
            self.wanted = read_keys(store) or self.wanted
        except StateError as error:
            _log.error("the rules of the tier are not followed", error=str(error))
        return True
