"""Finds other members that cannot be reached where clients are told that they are."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from structlog import get_logger

from proxy.cluster.upstream import Address
from proxy.tier.slot_map import MemberAddresses

CONNECT_LIMIT_S = 3.0
"""For a connection to a data port of another member."""

TRY_AGAIN_S = 10.0
"""Between two tries of an address that could not be reached."""

AT_ONCE = 20
"""Connections that are tried at the same time."""

SHOWN = 3
"""Addresses in one warning."""

FIX = "see that advertised_host leads to one member each, and that the network lets it through"

_log = get_logger(__name__)


class ReachabilityProbe:
    """Tries a data port of each member once when it is new, and again while it cannot be reached.

    What is on a member that does not answer at all is not judged: others say that of it.
    """

    def __init__(
        self, silent: Callable[[], Collection[str]], on_change: Callable[[], None]
    ) -> None:
        """`silent` gives the members that do not answer; `on_change` is called with news."""
        self._silent, self._on_change = silent, on_change
        self._members: Mapping[Address, str] = {}
        self._reached: set[Address] = set()
        self._problems: dict[Address, str] = {}
        self._is_new = asyncio.Event()

    @property
    def warning(self) -> str | None:
        """What cannot be reached, where, and what to do; None: all can, as far as is known."""
        if not self._problems:
            return None
        told = sorted(f"{self._members[at]} ({why})" for at, why in self._problems.items())
        more = "" if len(told) <= SHOWN else f" and {len(told) - SHOWN} more"
        return f"clients may not reach member {', '.join(told[:SHOWN])}{more}; fix: {FIX}"

    @property
    def reached(self) -> frozenset[str]:
        """The members that were reached at all their addresses."""
        known = frozenset(self._members[at] for at in self._reached)
        return known - {name for at, name in self._members.items() if at not in self._reached}

    @property
    def problems(self) -> Mapping[str, str]:
        """Why members are not reached where clients are told that they are, by their names."""
        return {self._members[at]: why for at, why in self._problems.items()}

    def use(self, members: Iterable[MemberAddresses]) -> None:
        """Have the watch look at these other members, and forget all others."""
        self._members = {
            listener.data_address: member.name
            for member in members
            for listener in member.listeners.values()
        }
        self._reached &= self._members.keys()
        self._problems = {at: why for at, why in self._problems.items() if at in self._members}
        self._is_new.set()

    async def watch(self) -> None:
        """Try what is new, and what could not be reached, until cancelled."""
        while True:
            self._is_new.clear()
            silent = self._silent()
            wanted = [
                at
                for at, member in self._members.items()
                if at not in self._reached and member not in silent
            ]
            before = self.reached, set(self._problems)
            for first in range(0, len(wanted), AT_ONCE):
                await self._try(wanted[first : first + AT_ONCE])
            if (self.reached, set(self._problems)) != before:
                self._on_change()
            with suppress(TimeoutError):
                async with asyncio.timeout(TRY_AGAIN_S):
                    await self._is_new.wait()

    async def _try(self, addresses: Sequence[Address]) -> None:
        for at, problem in zip(
            addresses, await asyncio.gather(*map(_problem_of, addresses)), strict=True
        ):
            member = self._members.get(at)
            if member is None or member in self._silent():
                continue
            if problem is None:
                self._reached.add(at)
                if self._problems.pop(at, None) is not None:
                    _log.info("a member is reached where clients are sent to", member=member)
                continue
            if at not in self._problems:
                text = "a member is not reached where clients are sent to"
                _log.warning(text, member=member, error=problem, fix=FIX)
            self._problems[at] = problem


async def _problem_of(address: Address) -> str | None:
    """Return why an address is not reached; None if it is."""
    host, port = address
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"{host}:{port}: no answer in {CONNECT_LIMIT_S:g} s"
    except OSError as error:
        return f"{host}:{port}: {error.strerror or error}"
    writer.close()
    return None
