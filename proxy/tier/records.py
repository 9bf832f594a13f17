"""The records of a member: the slot of each, and what clients owe while their slot moves."""

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from structlog import get_logger

from metrics.clock import MS_PER_SECOND
from proxy.cluster.kafka_client import Bootstrap
from proxy.config import Config
from proxy.queries.record_owner import owner_of
from proxy.quota.debts import Debt
from proxy.state import Record, SlotStore, Store
from proxy.state.store import SEPARATOR
from proxy.tier.slot_map import SLOTS, slot_of

COMMON_SLOT = slot_of("common")
"""Has what concerns all members: overrides, pauses, audit."""

OWED, WATCH = "owed", "watch"
"""Namespaces of records that name their slot."""

DEBT_SNAPSHOT_SCHEMA = 2
"""Of what clients owe."""

MOST_SERVED_ON_MS = 5000.0
"""For so long the one before serves on while a slot moves: what then passes makes up for the time,
and a client owes as much at the end as when that was written."""

_log = get_logger(__name__)


def slot_key(namespace: str, slot: int) -> str:
    """Return the key of a record that names its slot."""
    return f"{namespace}{SEPARATOR}{slot}"


class TierStore(SlotStore):
    """The tier's state, as a member has it. Opening it blocks. Raises StateError.

    It writes together what is asked for together, as far as this member has the slots. What belongs
    to a client, or a pipeline, that another member has now is that one's to write; here it is left
    out, as otherwise nothing that is asked for with it could be kept.
    """

    def __init__(
        self, config: Config, way: Bootstrap, member: str, slot_of_record: Callable[[str], int]
    ) -> None:
        assert config.tier is not None
        super().__init__(
            way,
            config.state.topic,
            tier=config.tier.name,
            machine=member,
            slots=SLOTS,
            common=COMMON_SLOT,
            slot_of_record=slot_of_record,
            timeout_s=config.limits.connect_timeout,
        )

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> None:
        """See Store. Raises StateError also for what concerns all, where another keeps that."""
        new, gone = list(records), list(delete)
        if not new and not gone:
            return
        if taken := self.slots.taken:  # else this member is in no group, and that is the error
            kept = [record for record in new if self._is_ours(record.key, taken)]
            left_out = len(new) - len(kept)
            new, gone = kept, [key for key in gone if self._is_ours(key, taken)]
            if left_out:
                _log.warning("not written, as another member has it now", records=left_out)
        super().put_many(new, delete=gone)

    def _is_ours(self, key: str, taken: Collection[int]) -> bool:
        return owner_of(key) is None or self.slots.place(key)[0] in taken


def write_debts(store: Store, debts: Iterable[tuple[int, Debt]]) -> None:
    """Write what clients owe while their slot moves, given with the slots: a record in each slot.

    Blocks. Raises StateError.
    """
    by_slot: dict[int, list[dict[str, Any]]] = {}
    for slot, debt in debts:
        by_slot.setdefault(slot, []).append(debt.document())
    at_s = time.time()
    records = [
        Record.of(slot_key(OWED, slot), {"at_s": at_s, "owed": rows}, DEBT_SNAPSHOT_SCHEMA)
        for slot, rows in by_slot.items()
    ]
    store.put_many(records)


def take_debts(store: Store, slots: Collection[int]) -> list[Debt]:
    """Return what is still owed in these slots, and delete that. Blocks. Raises StateError.

    The clock that it was written by may be another one: what is owed never becomes more.
    """
    keys = {slot_key(OWED, slot) for slot in slots}
    found = [record for key in keys if (record := store.get(key)) is not None]
    if not found:
        return []
    store.put_many((), delete=[record.key for record in found])
    debts: list[Debt] = []
    for record in found:
        try:
            record.check_schema(DEBT_SNAPSHOT_SCHEMA)
            document: Any = record.value
            passed_ms = (time.time() - float(document["at_s"])) * MS_PER_SECOND
            passed_ms = max(0.0, passed_ms - MOST_SERVED_ON_MS)
            left = [Debt.of(row).after(passed_ms) for row in document["owed"]]
            debts += [debt for debt in left if debt.owed_ms > 0]
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("debts not taken over", record=record.key, error=str(error))
    return debts
