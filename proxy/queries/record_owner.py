"""Whose a record of the state is: of a client, of a pipeline, or of all members together."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from proxy.backpressure import backpressure_record
from proxy.pipeline.ledger import LEDGER_RECORDS
from proxy.pipeline.nodes import FLOW_RECORDS
from proxy.progress.progress_records import FORMAT as PROGRESS
from proxy.progress.progress_records import ReadRecords, read_records
from proxy.progress.query_registry import Owns, owns_all
from proxy.state import Record, Store
from proxy.state.journal import key_parts
from proxy.state.store import SEPARATOR


class OwnerKind(StrEnum):
    """What a record belongs to."""

    CLIENT = "client"
    PIPELINE = "pipeline"


OWNED_RECORDS = {
    PROGRESS.namespace: OwnerKind.CLIENT,
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


@dataclass(frozen=True, slots=True)
class OwnedBeside:
    """What `owns` has and `other` has too, or has not: what stays, what has come, what goes."""

    owns: Owns
    other: Owns
    is_others: bool

    def client(self, client_id: str) -> bool:
        """See Owns."""
        return self.owns.client(client_id) and self.other.client(client_id) is self.is_others

    def pipeline(self, name: str) -> bool:
        """See Owns."""
        return self.owns.pipeline(name) and self.other.pipeline(name) is self.is_others


def owner_of(key: str) -> RecordOwner | None:
    """Return whose the record of a key is; None: it concerns all members, as overrides do.

    Of progress that an earlier program wrote it is the label of the query, in the place of its
    client id: see `read_owned`.
    """
    namespace, name, *_ = (*key_parts(key), "")
    kind = OWNED_RECORDS.get(namespace)
    return RecordOwner(kind, name) if kind is not None else None


OwnedRecords = dict[str, list[Record]]
"""By what the keys begin with."""


def read_owned(
    store: Store, owns: Owns, client_of: Callable[[str, str], str]
) -> tuple[ReadRecords, OwnedRecords]:
    """Return what a member owns: what its records of progress say, and the others. In a thread.

    `client_of` returns the client id of a query by the label and the client id of its record: a
    configured query may have another one now. Records of progress that cannot be read are those of
    the client that their key names. Raises StateError.
    """
    progress = read_records(store.items(PROGRESS.prefix))
    others = [each for each in OWNED_RECORDS if each != PROGRESS.namespace]
    records = {each: store.items(each + SEPARATOR) for each in others}
    if owns is owns_all:
        return progress, records
    mine: ReadRecords = {}
    for key, said in progress.items():
        client_id = key_parts(key)[1]
        if not isinstance(said, str):
            client_id = client_of(said.label, said.client_id)
        if owns.client(client_id):
            mine[key] = said
    has = {OwnerKind.CLIENT: owns.client, OwnerKind.PIPELINE: owns.pipeline}
    for namespace, found in records.items():
        is_owned = has[OWNED_RECORDS[namespace]]
        records[namespace] = [record for record in found if is_owned(key_parts(record.key)[1])]
    return mine, records
