"""Connections that have sent no request yet, and which of them gives its place to a newcomer.

Whoever may connect can open them and say nothing: while there are as many connections as may be,
the one that is silent for longest goes, of the address that has most such connections. So who holds
silent connections keeps out nobody but itself. No call takes longer for there being many.
"""

import socket
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from proxy.relay.listener import ClientOrigin


@dataclass(slots=True, eq=False)
class SilentConnection:
    """A client's connection before its first request, also before and in its TLS handshake."""

    origin: ClientOrigin
    close: Callable[[], object]
    """Closes it at once, and gives its place up."""
    sock: socket.socket | None
    """None in a TLS handshake."""

    @property
    def has_sent(self) -> bool:
        """Whether something it sent waits to be read: then it is we who are late."""
        if self.sock is None:
            return False
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))  # of TLS any byte will do
        except OSError:  # nothing to be read, or gone
            return False


class SilentConnections:
    """All of one relay, by their addresses."""

    def __init__(self) -> None:
        # Not dicts: these are slow to find their first key once many before it were deleted.
        self._by_address: dict[str, OrderedDict[SilentConnection, None]] = {}
        self._with_count: dict[int, OrderedDict[str, None]] = {}
        """The addresses that have so many: of 10,000 connections 140 different numbers at most."""

    def __len__(self) -> int:
        return sum(count * len(addresses) for count, addresses in self._with_count.items())

    def __contains__(self, silent: SilentConnection) -> bool:
        return silent in self._by_address.get(silent.origin.ip, ())

    def add(self, silent: SilentConnection) -> None:
        """Add one that has just come."""
        address = silent.origin.ip
        of_address = self._by_address.setdefault(address, OrderedDict())
        of_address[silent] = None
        self._recount(address, len(of_address) - 1, len(of_address))

    def discard(self, silent: SilentConnection) -> bool:
        """Remove one that has sent a request, or is closed; return whether it was still here."""
        if silent not in self:
            return False
        address = silent.origin.ip
        of_address = self._by_address[address]
        del of_address[silent]
        self._recount(address, len(of_address) + 1, len(of_address))
        if not of_address:
            del self._by_address[address]
        return True

    def longest(self, address: str | None = None) -> SilentConnection | None:
        """Return that of an address which is silent for longest; None: of one that has most."""
        if address is None and self._with_count:
            address = next(iter(self._with_count[max(self._with_count)]))
        of_address = self._by_address.get(address or "")
        return next(iter(of_address)) if of_address else None

    def _recount(self, address: str, before: int, after: int) -> None:
        if before:
            del self._with_count[before][address]
            if not self._with_count[before]:
                del self._with_count[before]
        if after:
            self._with_count.setdefault(after, OrderedDict())[address] = None
