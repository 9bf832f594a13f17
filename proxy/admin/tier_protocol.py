"""What the admin site asks about the members of its tier; the tier implements it."""

from collections.abc import Sequence
from typing import Any, Protocol

from proxy.admin.peer_client import PeerClient, Target
from proxy.quota.entities import ClientIdentity
from proxy.quota.manager import Debt
from proxy.state import Document, Record

VisitRows = Sequence[Sequence[Any]]
"""Of visits: listener, user, client id, address, kind and amount."""


class Tier(Protocol):
    """What the admin site asks about the members of its tier."""

    name: str
    """Of this member, such as `proxy-2/0`."""
    client: PeerClient
    """Asks the others."""

    def members(self) -> Sequence[Target]:
        """Return all members, this one included."""

    @property
    def leader(self) -> str:
        """The name of the member that owns the common slot, and so writes what concerns all."""

    def owner_of(self, client_id: str) -> str | None:
        """Return the name of the member that owns a client id; None while nobody does.

        It is called in threads, too.
        """

    def is_visitor(self, client: ClientIdentity) -> bool:
        """Return whether another member owns a client."""

    @property
    def not_ready(self) -> str | None:
        """Why clients should go to other members; None: this one can serve them."""

    @property
    def warning(self) -> str | None:
        """What is wrong although clients can be served."""

    def slots(self) -> Document:
        """Return what the status shows of this member's own slots; empty: nothing."""

    def document(self) -> Document | None:
        """Return the `tier` of the status; None while it is not known, or none is configured.

        It has `name`, `generation`, and `machines`, each with its `name` and `rules`, a digest of
        the rules that it goes by, None where it is not known.
        """

    def overview(self) -> Document:
        """Return who owns which slots. Raises ApiError while this member is in no tier."""

    def alive(self) -> Document:
        """Return what this member says as a sign of life. Raises ApiError as `overview`."""

    async def visited(self, rows: VisitRows) -> VisitRows:
        """Charge what visitors had elsewhere; return what their sensors owe.

        Raises ValueError for rows that are no visits.
        """

    def lease(self, document: Document) -> Sequence[Sequence[Any]]:
        """Return what is leased of what this member may lease: `proxy.tier.budget_exchanges`.

        Raises ValueError, KeyError, TypeError or AttributeError for what holds no demands.
        """

    async def keep(self, records: Sequence[Record], debts: Sequence[Debt]) -> None:
        """Keep records, and what clients owe, as this member's own.

        Raises StateError when they are not its own, or cannot be kept.
        """
