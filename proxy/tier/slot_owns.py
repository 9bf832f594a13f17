"""What a member owns by one map of slots and the keys of clients."""

from dataclasses import dataclass

from proxy.quota.entities import ClientIdentity
from proxy.tier.keys.quota_keys import QuotaKeys
from proxy.tier.slot_map import SlotMap


@dataclass(frozen=True, slots=True)
class SlotOwns:
    """What the member `name` owns; see `proxy.progress.owns.Owns`."""

    name: str
    slot_map: SlotMap
    keys: QuotaKeys

    @property
    def slots(self) -> frozenset[int]:
        """The slots that are this member's."""
        return self.slot_map.slots_of(self.name)

    def client(self, client_id: str) -> bool:
        """Return whether a client is this member's, with its query and its adaptive bound."""
        return self._has(self.keys.slot_of_query(client_id))

    def pipeline(self, name: str) -> bool:
        """Return whether a pipeline is this member's, with its ledger."""
        return self._has(self.keys.slot_of_pipeline(name))

    def has(self, identity: ClientIdentity) -> bool:
        """Return whether a client is this member's."""
        return self._has(self.keys.slot_of(identity))

    def _has(self, slot: int) -> bool:
        return self.slot_map.owners[slot] == self.name
