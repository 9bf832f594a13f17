"""Finds members of other machines that cannot be reached where clients are told that they are."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from structlog import get_logger

from proxy.cluster.upstream import Address
from proxy.members.member_names import machine_of
from proxy.members.slot_map import MemberAddresses

CONNECT_LIMIT_S = 3.0
"""For a connection to the bootstrap port of another member."""

TRY_AGAIN_S = 10.0
"""Between two tries of an address that could not be reached."""

AT_ONCE = 20
"""Connections that are tried at the same time."""

SHOWN = 3
"""Addresses in one warning."""

FIX = "see that advertised_host leads to one machine each, and that the network lets it through"

_log = get_logger(__name__)


class Reach:
    """Tries each bootstrap address once when it is new, and again while it cannot be reached.

    What is on a machine that does not answer at all is not judged: others say that of it.
    """

    def __init__(self, silent: Callable[[], Collection[str]]) -> None:
        """`silent` gives the machines that do not answer."""
        self._silent = silent
        self._machines: Mapping[Address, str] = {}
        self._reached: set[Address] = set()
        self._problems: dict[Address, str] = {}
        self._is_new = asyncio.Event()

    @property
    def warning(self) -> str | None:
        """What cannot be reached, where, and what to do; None: all can, as far as is known."""
        if not self._problems:
            return None
        told = sorted(f"{self._machines[at]} ({why})" for at, why in self._problems.items())
        more = "" if len(told) <= SHOWN else f" and {len(told) - SHOWN} more"
        return f"clients may not reach machine {', '.join(told[:SHOWN])}{more}; fix: {FIX}"

    @property
    def problems(self) -> Mapping[str, str]:
        """Why machines are not reached where clients are told that they are, by their names."""
        return {self._machines[at]: why for at, why in self._problems.items()}

    def use(self, members: Iterable[MemberAddresses]) -> None:
        """Have the watch look at these members of other machines, and forget all others."""
        self._machines = {
            (listener.host, listener.bootstrap_port): machine_of(member.name)
            for member in members
            for listener in member.listeners.values()
        }
        self._reached &= self._machines.keys()
        self._problems = {at: why for at, why in self._problems.items() if at in self._machines}
        self._is_new.set()

    async def watch(self) -> None:
        """Try what is new, and what could not be reached, until cancelled."""
        while True:
            self._is_new.clear()
            silent = self._silent()
            wanted = [
                at
                for at, machine in self._machines.items()
                if at not in self._reached and machine not in silent
            ]
            for first in range(0, len(wanted), AT_ONCE):
                await self._try(wanted[first : first + AT_ONCE])
            with suppress(TimeoutError):
                async with asyncio.timeout(TRY_AGAIN_S):
                    await self._is_new.wait()

    async def _try(self, addresses: Sequence[Address]) -> None:
        for at, problem in zip(
            addresses, await asyncio.gather(*map(_problem_of, addresses)), strict=True
        ):
            machine = self._machines.get(at)
            if machine is None or machine in self._silent():
                continue
            if problem is None:
                self._reached.add(at)
                if self._problems.pop(at, None) is not None:
                    _log.info("a machine is reached where clients are sent to", machine=machine)
                continue
            if at not in self._problems:
                text = "a machine is not reached where clients are sent to"
                _log.warning(text, machine=machine, error=problem, fix=FIX)
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
