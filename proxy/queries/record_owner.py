"""Whose a record of the state is: of a client, of a pipeline, or of all members together."""

from collections.abc import Callable
from dataclasses import dataclass

from proxy.backpressure import backpressure_record
from proxy.pipeline.ledger import LEDGER_RECORDS
from proxy.pipeline.nodes import FLOW_RECORDS
from proxy.progress.progress_records import FORMAT as PROGRESS
from proxy.progress.progress_records import ReadRecords, read_progress_records
from proxy.progress.query_registry import Ownership
from proxy.state import Record, Store
from proxy.state.state_records import key_parts
from proxy.state.store import SEPARATOR

RECORDS_OF_CLIENTS = PROGRESS.namespace, backpressure_record.BOUND_RECORDS.namespace
RECORDS_OF_PIPELINES = FLOW_RECORDS.namespace, LEDGER_RECORDS["root"].namespace
"""What a client, or a pipeline, has, by what the keys begin with: its id, or name, comes next.

In progress that an earlier program wrote that is the label of the query: see `read_owned`.
"""
ALL_OWNED_RECORDS = RECORDS_OF_CLIENTS + RECORDS_OF_PIPELINES


@dataclass(frozen=True, slots=True)
class OwnedDifference:
    """What `owns` has and `other` has too, or has not: what stays, what has come, what goes."""

    owns: Ownership
    other: Ownership
    is_others: bool

    def client(self, client_id: str) -> bool:
        """See Ownership."""
        return self.owns.client(client_id) and self.other.client(client_id) is self.is_others

    def pipeline(self, name: str) -> bool:
        """See Ownership."""
        return self.owns.pipeline(name) and self.other.pipeline(name) is self.is_others


def is_unowned_record_key(key: str) -> bool:
    """Return whether the record of a key is of no client and no pipeline, as an override."""
    return key_parts(key)[0] not in ALL_OWNED_RECORDS


OwnedRecords = dict[str, list[Record]]
"""By what the keys begin with."""


def read_owned(
    store: Store, owns: Ownership, client_of: Callable[[str, str], str]
) -> tuple[ReadRecords, OwnedRecords]:
    """Return what a member owns: what its records of progress say, and the others. In a thread.

    `client_of` returns the client id of a query by the label and the client id of its record: a
    configured query may have another one now. Records of progress that cannot be read are those of
    the client that their key names. Raises StateError.
    """
    mine: ReadRecords = {}
    for key, said in read_progress_records(store.items(PROGRESS.prefix)).items():
        client_id = key_parts(key)[1]
        if not isinstance(said, str):
            client_id = client_of(said.label, said.client_id)
        if owns.client(client_id):
            mine[key] = said
    records: OwnedRecords = {}
    others = (each for each in ALL_OWNED_RECORDS if each != PROGRESS.namespace)
    for namespace in others:
        is_owned = owns.client if namespace in RECORDS_OF_CLIENTS else owns.pipeline
        found = store.items(namespace + SEPARATOR)
        records[namespace] = [record for record in found if is_owned(key_parts(record.key)[1])]
    return mine, records
