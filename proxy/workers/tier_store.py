"""The state of a machine of a tier, as its workers have it."""

from collections.abc import Collection, Iterable

from structlog import get_logger

from proxy.members.quota_keys import QuotaKeys
from proxy.members.slots import slot_of
from proxy.queries.record_owner import OwnerKind, owner_of
from proxy.state import Record, SlotStore, Store
from proxy.state.store import SEPARATOR
from proxy.workers.key_rules import key_of_pipeline

COMMON_SLOT = slot_of("common")
"""Has what concerns all members: overrides, pauses, audit."""

OWED, WATCH = "owed", "watch"
"""Namespaces of records that name their slot."""

_log = get_logger(__name__)


def slot_key(namespace: str, slot: int) -> str:
    """Return the key of a record that names its slot."""
    return f"{namespace}{SEPARATOR}{slot}"


class RecordSlots:
    """Gives the slot of each record, by `keys`, which may be set anew; for several threads."""

    def __init__(self, keys: QuotaKeys) -> None:
        self.keys = keys

    def __call__(self, key: str) -> int:
        """Return the slot of a record's key."""
        namespace, _, rest = key.partition(SEPARATOR)
        if namespace in (OWED, WATCH) and rest.isdecimal():
            return int(rest)
        owner = owner_of(key)
        if owner is None:
            return COMMON_SLOT
        if owner.kind is OwnerKind.CLIENT:
            return slot_of(self.keys.key_of_query(owner.name))
        return slot_of(key_of_pipeline(self.keys, owner.name))


class TierStore(Store):
    """Writes together what members ask for together, as far as this machine has the slots.

    What belongs to a client, or a pipeline, that another machine has now is that one's to write;
    here it is left out, as otherwise nothing that is asked for with it could be kept.
    """

    def __init__(self, slots: SlotStore, slot_of_record: RecordSlots) -> None:
        self.slots = slots
        self._slot_of = slot_of_record

    def get(self, key: str) -> Record | None:
        """See Store."""
        return self.slots.get(key)

    def items(self, prefix: str) -> list[Record]:
        """See Store."""
        return self.slots.items(prefix)

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> int:
        """See Store. Raises StateError also for what concerns all, where another keeps that."""
        new, gone = list(records), list(delete)
        if not new and not gone:
            return 0
        if taken := self.slots.taken:  # else this machine is in no group, and that is the error
            kept = [record for record in new if self._is_ours(record.key, taken)]
            left_out = len(new) - len(kept)
            new, gone = kept, [key for key in gone if self._is_ours(key, taken)]
            if left_out:
                _log.warning("not written, as another machine has it now", records=left_out)
        return self.slots.put_many(new, delete=gone)

    def close(self) -> None:
        """See Store."""
        self.slots.close()

    def _is_ours(self, key: str, taken: Collection[int]) -> bool:
        return owner_of(key) is None or self._slot_of(key) in taken
