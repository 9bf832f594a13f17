"""What a worker owns by a map and its keys, and what it owes as JSON has it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxy.members.quota_keys import QuotaKeys
from proxy.members.slot_map import SlotMap
from proxy.members.slots import slot_of
from proxy.quota.debts import Debt
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.workers.key_rules import key_of_pipeline


@dataclass(frozen=True, slots=True)
class SlotOwns:
    """What a worker owns by one map and its keys; see `proxy.progress.owns.Owns`."""

    name: str
    slot_map: SlotMap
    keys: QuotaKeys

    def client(self, client_id: str) -> bool:
        """Return whether a client is this member's, with its query and its adaptive bound."""
        return self._has(self.keys.key_of_query(client_id))

    def pipeline(self, name: str) -> bool:
        """Return whether a pipeline is this member's, with its ledger."""
        return self._has(key_of_pipeline(self.keys, name))

    def has(self, identity: ClientIdentity) -> bool:
        """Return whether a client is this member's."""
        return self._has(self.keys.key_of(identity))

    def _has(self, key: str) -> bool:
        return self.slot_map.owners[slot_of(key)] == self.name


@dataclass(frozen=True, slots=True)
class OwnedBoth:
    """What a member owned before and owns afterwards."""

    before: SlotOwns
    after: SlotOwns

    def client(self, client_id: str) -> bool:
        """See Owns."""
        return self.before.client(client_id) and self.after.client(client_id)

    def pipeline(self, name: str) -> bool:
        """See Owns."""
        return self.before.pipeline(name) and self.after.pipeline(name)


def debt_row(debt: Debt) -> list[Any]:
    """Return a debt as JSON has it; `read_debt` reads that."""
    client = debt.identity
    names = [client.listener, client.user, client.client_id]
    return [*names, debt.entity, debt.kind.value, debt.owed_ms]


def identity_of(row: Sequence[Any]) -> ClientIdentity:
    """Return whose the row of a debt, or of a visit, is."""
    listener, user, client_id, *_ = row
    return ClientIdentity(listener, user, client_id)


def read_debt(row: Sequence[Any]) -> Debt:
    """Read a `debt_row`. Raises ValueError for anything else."""
    listener, user, client_id, entity, kind, owed_ms = row
    return Debt(ClientIdentity(listener, user, client_id), entity, QuotaKind(kind), owed_ms)
