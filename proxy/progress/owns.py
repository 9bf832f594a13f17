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
class OwnedSince:
    """What `after` owns and `before` did not: what has come, or with both exchanged, what goes."""

    before: Owns
    after: Owns

    def client(self, client_id: str) -> bool:
        """See Owns."""
        return self.after.client(client_id) and not self.before.client(client_id)

    def pipeline(self, name: str) -> bool:
        """See Owns."""
        return self.after.pipeline(name) and not self.before.pipeline(name)
