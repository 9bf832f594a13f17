"""Who is this member's to follow, where clients are shared among several."""

from dataclasses import dataclass
from typing import Protocol


class Owns(Protocol):
    """What one member owns at one moment. It does not change: who owns more or less has another."""

    def client(self, client_id: str) -> bool:
        """Return whether a client is this member's, with its query and its adaptive bound."""

    def pipeline(self, name: str) -> bool:
        """Return whether a pipeline is this member's, with its ledger."""


class _OwnsAll:
    def client(self, client_id: str) -> bool:  # noqa: ARG002
        return True

    def pipeline(self, name: str) -> bool:  # noqa: ARG002
        return True


owns_all: Owns = _OwnsAll()
"""Of a member that is alone."""


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
