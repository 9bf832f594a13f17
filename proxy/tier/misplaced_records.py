"""Hands on what belongs to other slots since the keys are other ones: records, and debts."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence

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

    def __init__(self, name: str, rules: TierRules, peers: Peers) -> None:
        self._name, self._rules, self._peers = name, rules, peers
        self._owed_away: list[Debt] = []
        """What clients owe that other members have since the keys are other ones."""

    async def rekey(self, store: SlotStore, debts: Sequence[Debt], slot_map: SlotMap) -> None:
        """Follow that the keys are other ones; of these debts some are other members' now."""
        self._owed_away = [debt for debt in debts if self._owner_of(debt, slot_map) is not None]
        await asyncio.to_thread(self._move, store)

    async def give(self, store: SlotStore, slot_map: SlotMap) -> bool:
        """Hand records to the members that have their slots by now; return whether some stay.

        Raises StateError.
        """
        await asyncio.to_thread(self._move, store)
        strays = await asyncio.to_thread(store.strays)
        records: defaultdict[str | None, list[Record]] = defaultdict(list)
        for record in strays:
            records[slot_map.owners[self._rules.slot_of_record(record.key)]].append(record)
        owed: defaultdict[str | None, list[Debt]] = defaultdict(list)
        for debt in self._owed_away:
            owed[self._owner_of(debt, slot_map)].append(debt)
        self._owed_away = []
        for owner in {*records, *owed} - {self._name, None}:
            assert owner is not None
            given = records[owner][:GIVEN_AT_ONCE]
            try:
                await self._peers.give(owner, given, owed[owner])
            except PeerError as error:
                _log.debug("records are not handed over yet", member=owner, error=str(error))
            else:
                keys = {record.key for record in given}
                await asyncio.to_thread(store.drop_strays, keys)
                strays = [record for record in strays if record.key not in keys]
        return bool(strays)

    def _move(self, store: SlotStore) -> None:
        """Write records, whose slots are other ones by other keys, to those that are here."""
        strays = store.strays()
        here = [each for each in strays if self._rules.slot_of_record(each.key) in store.taken]
        if here:
            store.put_many(here)
            store.drop_strays({each.key for each in here})

    def _owner_of(self, debt: Debt, slot_map: SlotMap) -> str | None:
        """Return the other member that has a client; None: this one has, or nobody."""
        owner = slot_map.owners[self._rules.keys.slot_of(debt.identity)]
        return None if owner == self._name else owner
