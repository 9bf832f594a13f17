"""Finds members of other hosts that cannot be reached where clients are told that they are."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from structlog import get_logger

from proxy.cluster.upstream import Address
from proxy.relay.steering import MemberAddresses
from proxy.tasks import wait_at_most

CONNECT_LIMIT_S = 3.0
"""For a connection to a data port of another member."""

TRY_AGAIN_S = 10.0
"""Between two tries of an address that could not be reached."""

SETTLE_S = 30.0
"""After the IP address behind a name has changed: so long clients may go to the one before, as
their resolvers remember it. The usual time to live of a record in Kubernetes."""

KEPT_IPS = 10_000

AT_ONCE = 20
"""Connections that are tried at the same time."""

SHOWN = 3
"""Addresses in one warning."""

FIX = "see that advertised_host leads to one member each, and that the network lets it through"

_log = get_logger(__name__)


async def _connect(address: Address) -> str:
    """Return the IP address where a member is reached. Raises OSError, with why it is not."""
    host, port = address
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        raise OSError(f"{host}:{port}: no answer in {CONNECT_LIMIT_S:g} s") from None
    except OSError as error:
        raise OSError(f"{host}:{port}: {error.strerror or error}") from None
    ip: str = writer.get_extra_info("peername")[0]
    writer.close()
    return ip


@dataclass(slots=True, eq=False)
class ReachabilityProbe:
    """Tries a data port of each member once when it is new, and again while it cannot be reached.

    What is on a member that does not answer at all is not judged: others say that of it. One that
    comes back with another IP address behind its name counts as reached SETTLE_S later.
    """

    _silent: Callable[[], Collection[str]]
    """Gives the members that do not answer."""
    _on_change: Callable[[], None]
    """Called with news."""
    _connect: Callable[[Address], Awaitable[str]] = _connect
    _clock_s: Callable[[], float] = time.monotonic
    _members: Mapping[Address, str] = field(default_factory=dict)
    _found: dict[Address, str | None] = field(default_factory=dict)
    """Why each that was tried is not reached; None: it is."""
    _ips: dict[Address, str] = field(default_factory=dict)
    """Where each address led last, also of members that are away."""
    _settled_s: dict[Address, float] = field(default_factory=dict)
    """When addresses are settled that lead elsewhere than before."""
    _is_new: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def warning(self) -> str | None:
        """What cannot be reached, where, and what to do; None: all can, as far as is known."""
        found = self._found.items()
        told = sorted(f"{self._members[at]} ({why})" for at, why in found if why is not None)
        if not told:
            return None
        more = "" if len(told) <= SHOWN else f" and {len(told) - SHOWN} more"
        return f"clients may not reach member {', '.join(told[:SHOWN])}{more}; fix: {FIX}"

    @property
    def reached(self) -> frozenset[str]:
        """The members that were reached at all their addresses."""
        unknown = {
            name
            for at, name in self._members.items()
            if self._is_wanted(at) or at in self._settled_s
        }
        return frozenset(self._members.values()) - unknown

    @property
    def problems(self) -> Mapping[str, str]:
        """Why members are not reached where clients are told that they are, by their names."""
        found = self._found.items()
        return {self._members[at]: why for at, why in found if why is not None}

    def use(self, members: Iterable[MemberAddresses]) -> None:
        """Have the watch look at these other members, and forget all others."""
        self._members = {
            listener.data_address: member.name
            for member in members
            for listener in member.listeners.values()
        }
        self._found = {at: why for at, why in self._found.items() if at in self._members}
        self._settled_s = {at: end for at, end in self._settled_s.items() if at in self._members}
        self._is_new.set()

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self._is_new.clear()
            await self.look()
            await wait_at_most(TRY_AGAIN_S, self._is_new.wait())

    async def look(self) -> None:
        """Try what is new, and what could not be reached, once."""
        silent = self._silent()
        wanted = [
            at
            for at, member in self._members.items()
            if self._is_wanted(at) and member not in silent
        ]
        before = self.reached, self.problems.keys()
        now_s = self._clock_s()
        self._settled_s = {at: end_s for at, end_s in self._settled_s.items() if end_s > now_s}
        for first in range(0, len(wanted), AT_ONCE):
            await self._try(wanted[first : first + AT_ONCE])
        if (self.reached, self.problems.keys()) != before:
            self._on_change()

    async def _try(self, addresses: Sequence[Address]) -> None:
        tries = await asyncio.gather(*map(self._connect, addresses), return_exceptions=True)
        for at, ip in zip(addresses, tries, strict=True):
            member = self._members.get(at)
            if member is None or member in self._silent():
                continue
            if not isinstance(ip, str | OSError):
                raise ip
            had_problem = self._found.get(at) is not None
            if isinstance(ip, str):
                self._found[at] = None
                self._follow_ip(at, ip)
                if had_problem:
                    _log.info("a member is reached where clients are sent to", member=member)
                continue
            self._found[at] = str(ip)
            if not had_problem:
                text = "a member is not reached where clients are sent to"
                _log.warning(text, member=member, error=str(ip), fix=FIX)

    def _is_wanted(self, at: Address) -> bool:
        """Return whether an address is to be tried: it is new, or could not be reached."""
        return at not in self._found or self._found[at] is not None

    def _follow_ip(self, at: Address, ip: str) -> None:
        """Record where an address leads, and have it settle if it has led elsewhere before."""
        before = self._ips.pop(at, ip)
        self._ips[at] = ip
        if len(self._ips) > KEPT_IPS:
            del self._ips[next(iter(self._ips))]
        if ip != before:
            self._settled_s[at] = self._clock_s() + SETTLE_S
            text = "the address of a member has changed: it gets clients when resolvers know that"
            _log.info(text, member=self._members[at], was=before, now=ip, in_s=SETTLE_S)
