"""By which rules a machine of a tier makes its keys, and whose rules those are."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from structlog import get_logger

from proxy.config import Config
from proxy.members.quota_keys import QuotaKeys
from proxy.members.slots import slot_of
from proxy.state import SlotStore, StateError, Store
from proxy.workers.key_rules import (
    KEYS_KEY,
    KeyRules,
    client_sets,
    digest_of,
    keys_record,
    read_keys,
)
from proxy.workers.shared_keys import identity_of
from proxy.workers.tier_store import RecordSlots

_log = get_logger(__name__)


class TierRules:
    """Those of this machine's own, those that the tier wants, and those in force here."""

    def __init__(self, config: Config) -> None:
        self._own = KeyRules.of(config)
        self.digest = digest_of(self._own.text())
        """Of the rules in this machine's file."""
        self._are_own_whole = False
        """Whether the first worker has said by which rules it goes, those of others included."""
        self.wanted = self.in_force = self._own
        self.records = RecordSlots(self.in_force.keys())

    def read(self, store: Store) -> None:
        """Go by the rules of the tier at once, if there are some. Raises StateError."""
        rules = read_keys(store)
        if rules is not None:
            self.wanted = rules
            self.put_in_force(rules, rules.keys())

    def put_in_force(self, rules: KeyRules, keys: QuotaKeys) -> None:
        """Find slots by these rules, and the keys that they make, from now on."""
        self.in_force, self.records.keys = rules, keys

    def use_rules(self, rules: str) -> None:
        """Follow that the first worker of this machine has these rules in force."""
        self._own = KeyRules(rules, self._own.together)
        self._are_own_whole = True

    def use_config(self, config: Config) -> None:
        """Follow another configuration."""
        self._own = KeyRules(self._own.rules, client_sets(config))
        self.digest = digest_of(KeyRules.of(config).text())

    async def propose(self, store: SlotStore) -> bool:
        """Have all machines make their keys by our rules; return whether those are other ones.

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

    def slot_of_query(self, client_id: str) -> int:
        """Return the slot of a client id's query."""
        return slot_of(self.records.keys.key_of_query(client_id))

    def slot_of_row(self, row: Sequence[Any]) -> int:
        """Return the slot of the client that the row of a debt, or of a visit, is of."""
        return slot_of(self.records.keys.key_of(identity_of(row)))
