"""Shares the file descriptors that the system allows among clients, operators and the rest."""

import resource
import sys
from dataclasses import dataclass

from proxy.config.models import Config

FILES_PER_CLIENT = 2
"""A client's socket and the broker's."""

OTHER_FILES = 448
"""Two for each of the pipes of splice, which are at most 128; connections that are being made; 64
of brokers that are at work for clients that have left; what the proxy itself asks brokers; the
state, the log and Python's own."""

LEAST_ADMIN_SHARE = 16
"""Where descriptors are few, this part of them is for the admin port, and at least one."""


@dataclass(frozen=True, slots=True)
class DescriptorShares:
    """How many connections of clients, and to the admin port, there is room for, 1 or more each."""

    clients: int
    admin: int
    allowed: int
    """Files that the system allows."""
    needed: int
    """Files for all connections that the configuration allows."""

    @property
    def hint(self) -> str | None:
        """A line for people where the system allows too few; else None."""
        if self.needed <= self.allowed:
            return None
        return (
            f"the system allows {self.allowed} open files, enough for {self.clients} clients; fix: "
            f"raise the hard limit (ulimit -Hn, LimitNOFILE=) to {self.needed}, or lower "
            "limits.max_connections"
        )


def share_descriptors(config: Config) -> DescriptorShares:
    """Return how the files that the system allows are shared.

    So many clients are let in that there is always a file left for an operator, a broker and the
    state.
    """
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        allowed = sys.maxsize
    ranges = (listener.broker_ports for listener in config.listeners)
    ports = sum(2 + each.last - each.first if each is not None else 1 for each in ranges)
    clients, admin = config.limits.max_connections, config.admin.max_connections
    needed = ports + OTHER_FILES + admin + clients * FILES_PER_CLIENT
    admin = max(min(admin, allowed // LEAST_ADMIN_SHARE), 1)
    left = (allowed - ports - OTHER_FILES - admin) // FILES_PER_CLIENT
    return DescriptorShares(max(min(clients, left), 1), admin, allowed, needed)
