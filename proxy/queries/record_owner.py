"""Whose a record of the state is: of a client, of a pipeline, or of all members together."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from proxy.backpressure import backpressure_record
from proxy.pipeline.ledger import LEDGER_RECORDS
from proxy.pipeline.nodes import FLOW_RECORDS
from proxy.progress import progress_records
from proxy.progress.owns import Owns, owns_all
from proxy.state import Record, Store
from proxy.state.journal import key_parts
from proxy.state.store import SEPARATOR


class OwnerKind(StrEnum):
    """What a record belongs to."""

    CLIENT = "client"
    PIPELINE = "pipeline"


OWNED_RECORDS = {
    progress_records.FORMAT.namespace: OwnerKind.CLIENT,
    backpressure_record.BOUND_RECORDS.namespace: OwnerKind.CLIENT,
    FLOW_RECORDS.namespace: OwnerKind.PIPELINE,
    LEDGER_RECORDS["root"].namespace: OwnerKind.PIPELINE,
}
"""What a client or a pipeline has, by what the keys begin with."""


@dataclass(frozen=True, slots=True)
class RecordOwner:
    """A client by its id, or a pipeline by its name."""

    kind: OwnerKind
    name: str

    def is_among(self, owns: Owns) -> bool:
        """Return whether that member has it."""
        return (owns.client if self.kind is OwnerKind.CLIENT else owns.pipeline)(self.name)


def owner_of(key: str) -> RecordOwner | None:
    """Return whose the record of a key is; None: it concerns all members, as overrides do.

    Of progress that an earlier program wrote it is the label of the query, in the place of its
    client id: see `owned`.
    """
    namespace, name, *_ = (*key_parts(key), "")
    kind = OWNED_RECORDS.get(namespace)
    return RecordOwner(kind, name) if kind is not None else None


def owned(
    records: Iterable[Record], owns: Owns, client_of: Callable[[str, str], str]
) -> list[Record]:
    """Return the records that belong to clients and pipelines of a member.

    `client_of` returns the client id of a query by the label and the client id of its record: a
    configured query may have another one now. Records of progress that cannot be read are those of
    the client that their key names.
    """
    found: list[Record] = []
    for record in records:
        owner = owner_of(record.key)
        if owner is not None and record.key.startswith(progress_records.FORMAT.prefix):
            with suppress(ValueError):
                entry = progress_records.read_record(record)
                owner = RecordOwner(owner.kind, client_of(entry.label, entry.client_id))
        if owner is not None and owner.is_among(owns):
            found.append(record)
    return found


OwnedRecords = dict[str, list[Record]]
"""By what the keys begin with."""


def read_owned(store: Store, owns: Owns, client_of: Callable[[str, str], str]) -> OwnedRecords:
    """Return what is written of what a member owns. Raises StateError."""
    found = {each: store.items(each + SEPARATOR) for each in OWNED_RECORDS}
    if owns is owns_all:
        return found
    return {each: owned(records, owns, client_of) for each, records in found.items()}
