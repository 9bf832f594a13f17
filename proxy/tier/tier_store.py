"""The records of a member: the slot of each, and what clients owe while their slot moves."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from itertools import chain

from structlog import get_logger

from proxy.cluster.kafka_client import Bootstrap
from proxy.config import Config
from proxy.debt_records import debts_record, read_debts
from proxy.queries.record_owner import is_unowned_record_key
from proxy.quota.manager import SensorDebt
from proxy.state import Record, SlotStore, Store
from proxy.state.store import SEPARATOR
from proxy.tier.slot_map import SLOTS, slot_of

COMMON_SLOT = slot_of("common")
"""Has what concerns all members: overrides, pauses, audit."""

OWED, WATCH = "owed", "watch"
"""Namespaces of records that name their slot."""

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
            timeout_s=config.limits.connect_timeout_s,
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
        return is_unowned_record_key(key) or self.slots.place(key)[0] in taken


def write_debts(store: Store, debts: Iterable[tuple[int, SensorDebt]]) -> None:
    """Write what clients owe while their slot moves, given with the slots: a record in each slot.

    Blocks. Raises StateError.
    """
    by_slot = defaultdict[int, list[SensorDebt]](list)
    for slot, debt in debts:
        by_slot[slot].append(debt)
    store.put_many(debts_record(slot_key(OWED, slot), each) for slot, each in by_slot.items())


def take_debts(store: Store, slots: Collection[int]) -> list[SensorDebt]:
    """Return what is still owed in these slots, and delete that. Blocks. Raises StateError."""
    keys = [slot_key(OWED, slot) for slot in slots]
    found = [record for key in keys if (record := store.get(key)) is not None]
    if found:
        store.put_many((), delete=[record.key for record in found])
    debts = chain.from_iterable(read_debts(each, MOST_SERVED_ON_MS) or () for each in found)
    return [debt for debt in debts if debt.owed_ms > 0]
