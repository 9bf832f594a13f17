"""Whose a record of the state is: of a client, of a pipeline, or of all members together."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote

from proxy.backpressure import backpressure_record
from proxy.pipeline.completion_records import LEDGER_RECORDS
from proxy.pipeline.controller import FLOW_RECORDS
from proxy.progress import progress_records
from proxy.progress.owns import Owns
from proxy.progress.progress_records import ReadRecords
from proxy.state import Record, Store
from proxy.state.store import SEPARATOR

PREFIXES = (
    progress_records.FORMAT.prefix,
    backpressure_record.FORMAT.prefix,
    FLOW_RECORDS.prefix,
    LEDGER_RECORDS["root"].prefix,
)
"""What the keys of all records begin with that a client or a pipeline has."""

_OF_CLIENTS = {progress_records.FORMAT.namespace, backpressure_record.FORMAT.namespace}
_OF_PIPELINES = {FLOW_RECORDS.namespace, LEDGER_RECORDS["root"].namespace}


class OwnerKind(StrEnum):
    """What a record belongs to."""

    CLIENT = "client"
    PIPELINE = "pipeline"


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
    namespace, _, rest = key.partition(SEPARATOR)
    name = unquote(rest.partition(SEPARATOR)[0], errors="surrogatepass")
    if namespace in _OF_CLIENTS:
        return RecordOwner(OwnerKind.CLIENT, name)
    return RecordOwner(OwnerKind.PIPELINE, name) if namespace in _OF_PIPELINES else None


def owned(
    records: Iterable[Record], owns: Owns, client_of: Callable[[str, str], str]
) -> list[Record]:
    """Return the records that belong to clients and pipelines of a member.

    `client_of` returns the client id of a query by its label and the client id of its record: a
    configured query may have another one now. Records of progress that cannot be read are those of
    the client that their key names.
    """
    return [record for record in records if _is_owned(record, owns, client_of)]


def read_owned(
    store: Store, owns: Owns, client_of: Callable[[str, str], str]
) -> tuple[ReadRecords, list[Record]]:
    """Return what is written of progress of what a member owns, and all records of it.

    Raises StateError.
    """
    found: list[Record] = []
    for prefix in PREFIXES:
        found += owned(store.items(prefix), owns, client_of)
    prefix = progress_records.FORMAT.prefix
    of_progress = (record for record in found if record.key.startswith(prefix))
    return progress_records.read_records(of_progress), found


def _is_owned(record: Record, owns: Owns, client_of: Callable[[str, str], str]) -> bool:
    owner = owner_of(record.key)
    if owner is None:
        return False
    if record.key.startswith(progress_records.FORMAT.prefix):
        try:
            entry = progress_records.read_record(record)
        except ValueError:
            return owner.is_among(owns)
        return owns.client(client_of(entry.label, entry.client_id))
    return owner.is_among(owns)
