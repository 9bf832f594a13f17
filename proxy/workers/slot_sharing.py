"""What a supervisor asks about who owns which slots: of its machine alone, or of a tier."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from proxy.admin.gateway.member_client import MemberEndpoint
from proxy.admin.gateway.tier_routes import TierRoutes
from proxy.config import Config
from proxy.config.stores import StateHolder
from proxy.member import Work
from proxy.state import Document, Store


class SlotSharing(Protocol):
    """Says who owns which slots, and has the workers follow."""

    @property
    def tier_routes(self) -> TierRoutes | None:
        """What answers the other machines of a tier."""

    @property
    def first(self) -> str:
        """The name of the worker that writes what concerns all."""

    @property
    def not_ready(self) -> str | None:
        """Why clients should go elsewhere; None: they can be served."""

    @property
    def warning(self) -> str | None:
        """What is wrong although clients can be served."""

    def open_store(self, holder: StateHolder | None) -> Store:
        """Open the state; a `holder` is asked for it. Blocks. Raises StateError."""

    def begin(self) -> AbstractAsyncContextManager[Mapping[str, Any]]:
        """Give what a worker is told of this at its start, until it has begun.

        Nothing is handed over meanwhile.
        """

    def works(self) -> Iterable[Work]:
        """Return what is to run while workers serve; none of it ends by itself."""

    async def join(self, admin_port: int) -> None:
        """Return when clients can be served. Raises StateError, TierError, MembershipError.

        Other machines ask at `admin_port`.
        """

    async def leave(self, *, for_successor: bool) -> None:
        """Give back what others are to have, while workers still run."""

    def watch_key(self) -> str | None:
        """Return the key of a record that may always be written; None: there is none now."""

    def serves_again(self) -> None:
        """Follow that a worker serves that was down, maybe while slots were handed over."""

    @property
    def changed(self) -> Callable[[], None]:
        """Follow that other workers are to own slots, or are elsewhere."""

    def use_rules(self, rules: str) -> None:
        """Follow that the first worker has these rules in force, as `rules_text` writes them."""

    def use_config(self, config: Config) -> None:
        """Follow another configuration."""

    @property
    def owner_of_client(self) -> Callable[[str], str | None]:
        """Return the worker that has the query of a client id; None: nobody has."""

    async def pass_visits(self, owner: str, visits: list[Any]) -> Any:
        """Pass on to an owner what visitors had elsewhere; return what they owe.

        Raises WorkerError, ChannelLostError, PeerError.
        """

    def machines(self) -> Sequence[MemberEndpoint]:
        """Return how the other machines of the tier are asked."""

    def tier(self) -> Document | None:
        """Return what the status shows of the tier; None outside of one."""

    @property
    def take_loads(self) -> Callable[[str, float, Sequence[Sequence[Any]]], None]:
        """Keep what a worker has measured of its slots: its name, for how long, and the rows."""

    @property
    def documents(self) -> Callable[[], Mapping[str, Mapping[str, Any]]]:
        """Return what the status shows of each worker's slots, by its name."""
