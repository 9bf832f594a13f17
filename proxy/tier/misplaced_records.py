"""Hands on what belongs to other slots since the keys are other ones: records, and debts."""

import asyncio
from collections.abc import Callable, Sequence

from structlog import get_logger

from proxy.quota.debts import Debt
from proxy.state import Record, SlotStore
from proxy.tier.peers import PeerError, Peers
from proxy.tier.slot_map import SlotMap
from proxy.tier.tier_rules import TierRules

GIVEN_AT_ONCE = 500
"""Records in one message to another member."""

_log = get_logger(__name__)


class MisplacedRecords:
    """Those in the slots of the member `name` that belong to others by the rules in force."""

    def __init__(
        self, name: str, store: Callable[[], SlotStore], rules: TierRules, peers: Peers
    ) -> None:
        self._name, self._store, self._rules, self._peers = name, store, rules, peers
        self._owed_away: list[Debt] = []
        """What clients owe that other members have since the keys are other ones."""

    async def rekey(self, debts: Sequence[Debt], slot_map: SlotMap) -> None:
        """Follow that the keys are other ones; of these debts some are other members' now."""
        self._owed_away = [debt for debt in debts if self._owner_of(debt, slot_map) is not None]
        await asyncio.to_thread(self._move)

    async def give(self, slot_map: SlotMap) -> bool:
        """Hand records to the members that have their slots by now; return whether some stay.

        Raises StateError.
        """
        await asyncio.to_thread(self._move)
        store, owners = self._store(), slot_map.owners
        strays = await asyncio.to_thread(store.strays)
        records: dict[str, list[Record]] = {}
        for record in strays:
            if (owner := owners[self._rules.slot_of_record(record.key)]) is not None:
                records.setdefault(owner, []).append(record)
        owed: dict[str, list[Debt]] = {}
        for debt in self._owed_away:
            if (owner := self._owner_of(debt, slot_map)) is not None:
                owed.setdefault(owner, []).append(debt)
        self._owed_away = []
        for owner in sorted({*records, *owed} - {self._name}):
            given = records.get(owner, [])[:GIVEN_AT_ONCE]
            try:
                await self._peers.give(owner, given, owed.get(owner, []))
            except PeerError as error:
                _log.debug("records are not handed over yet", member=owner, error=str(error))
            else:
                keys = {record.key for record in given}
                await asyncio.to_thread(store.drop_strays, keys)
                strays = [record for record in strays if record.key not in keys]
        return bool(strays)

    def _move(self) -> None:
        """Write records, whose slots are other ones by other keys, to those that are here."""
        store = self._store()
        strays = store.strays()
        here = [each for each in strays if self._rules.slot_of_record(each.key) in store.taken]
        if here:
            store.put_many(here)
            store.drop_strays({each.key for each in here})

    def _owner_of(self, debt: Debt, slot_map: SlotMap) -> str | None:
        """Return the other member that has a client; None: this one has, or nobody."""
        owner = slot_map.owners[self._rules.keys.slot_of(debt.identity)]
        return None if owner == self._name else owner
