"""Hands on what belongs to other slots since the keys are other ones: records, and debts."""

import asyncio
from collections.abc import Sequence
from typing import Any

from structlog import get_logger

from proxy.members.member_names import machine_of
from proxy.members.slot_map import SlotMap
from proxy.state import Record
from proxy.workers.peers import PeerError, Peers
from proxy.workers.tier_rules import TierRules
from proxy.workers.tier_state import TierState

GIVEN_AT_ONCE = 500
"""Records in one message to another machine."""

_log = get_logger(__name__)


class StrayRecords:
    """Those in the slots of `machine` that belong to others by the rules in force."""

    def __init__(self, machine: str, state: TierState, rules: TierRules, peers: Peers) -> None:
        self._machine, self._state, self._rules, self._peers = machine, state, rules, peers
        self._owed_away: list[list[Any]] = []
        """What clients owe that other machines have since the keys are other ones."""

    async def rekey(self, debts: Sequence[list[Any]], slot_map: SlotMap) -> None:
        """Follow that the keys are other ones; of these debts some are other machines' now."""
        self._owed_away = [row for row in debts if self._machine_of(row, slot_map) is not None]
        await asyncio.to_thread(self._move)

    async def give(self, slot_map: SlotMap) -> bool:
        """Hand records to the machines that have their slots by now; return whether some stay.

        Raises StateError.
        """
        await asyncio.to_thread(self._move)
        store, owners = self._state.store, slot_map.owners
        strays = await asyncio.to_thread(store.strays)
        records: dict[str, list[Record]] = {}
        for record in strays:
            if (owner := owners[self._rules.records(record.key)]) is not None:
                records.setdefault(machine_of(owner), []).append(record)
        owed: dict[str, list[list[Any]]] = {}
        for row in self._owed_away:
            if (machine := self._machine_of(row, slot_map)) is not None:
                owed.setdefault(machine, []).append(row)
        self._owed_away = []
        for machine in sorted({*records, *owed} - {self._machine}):
            given = records.get(machine, [])
            try:
                await self._peers.give(machine, given[:GIVEN_AT_ONCE], owed.get(machine, []))
            except PeerError as error:
                _log.debug("records are not handed over yet", machine=machine, error=str(error))
            else:
                keys = {record.key for record in given[:GIVEN_AT_ONCE]}
                await asyncio.to_thread(store.drop_strays, keys)
                strays = [record for record in strays if record.key not in keys]
        return bool(strays)

    def _move(self) -> None:
        """Write records, whose slots are other ones by other keys, to those that are here."""
        store = self._state.store
        strays = store.strays()
        here = [each for each in strays if self._rules.records(each.key) in store.taken]
        if here:
            store.put_many(here)
            store.drop_strays({each.key for each in here})

    def _machine_of(self, row: Sequence[Any], slot_map: SlotMap) -> str | None:
        """Return the other machine that has a client; None: this one has, or nobody."""
        owner = slot_map.owners[self._rules.slot_of_row(row)]
        machine = None if owner is None else machine_of(owner)
        return None if machine == self._machine else machine
