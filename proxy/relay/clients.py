"""The clients that are connected, or were lately, and their byte counters."""

from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Callable, Iterator

from metrics import BoundedLabels, CounterChild
from metrics.clock import clock_ms
from metrics.sensor import DEFAULT_EXPIRY_MS
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.relay.client_usage import ClientUsage, direction_of
from proxy.wire.apis import api_name

MAX_GONE_CLIENTS = 10_000
"""Clients that left whose byte counters are kept; of more the first to leave are dropped."""


class ClientRegistry:
    """Who uses which byte counters, those of the metric `bytes_total`.

    `new_usage` makes what further is recorded of a client; None: nothing is.
    """

    def __init__(
        self,
        bytes_total: BoundedLabels[CounterChild],
        new_usage: Callable[[], ClientUsage] | None = None,
    ) -> None:
        self._bytes_total = bytes_total
        self._new_usage = new_usage
        self.usage: dict[ClientIdentity, ClientUsage] = {}
        """Of all whose byte counters are kept."""
        self.connections: Tally[ClientIdentity] = Tally()
        """How many connections each client has; who is not connected is not in it."""
        # In the order of their leaving. Not a dict, which is slow to find its first key once many
        # before that were deleted.
        self._gone_ms: OrderedDict[ClientIdentity, float] = OrderedDict()
        # How many of both have a client id.
        self._client_ids: Tally[str | None] = Tally()

    def knows(self, client_id: str) -> bool:
        """Return whether a client with this id is connected, or was within the hour."""
        return client_id in self._client_ids

    def connected(self, identity: ClientIdentity) -> None:
        """Record that a connection uses this client's byte counters."""
        self.connections[identity] += 1
        if self._new_usage is not None:
            if identity not in self.usage:
                self.usage[identity] = self._new_usage()
            self.usage[identity].connections += 1
        if self.connections[identity] == 1 and self._gone_ms.pop(identity, None) is None:
            self._client_ids[identity.client_id] += 1

    def disconnected(self, identity: ClientIdentity) -> None:
        """Record that a connection does so no longer."""
        self.connections[identity] -= 1
        if not self.connections[identity]:
            del self.connections[identity]
            self._gone_ms[identity] = clock_ms()
            if len(self._gone_ms) > MAX_GONE_CLIENTS:
                self._forget(next(iter(self._gone_ms)))

    def would_throttle(self, identity: ClientIdentity, kind: QuotaKind) -> None:
        """Record a second in which a client exceeded a quota which is not enforced."""
        if identity in self.usage:
            self.usage[identity].would_be_s[direction_of(kind)] += 1

    def byte_counter(self, identity: ClientIdentity, api_key: int) -> CounterChild:
        """Return the child of bytes_total for a client and an API."""
        return self._bytes_total.of(
            identity.listener, identity.user or "", identity.client_id or "", api_name(api_key)
        )

    def forgetting(self, now_ms: float) -> Iterator[ClientIdentity]:
        """Drop the byte counters of clients that left an hour ago, which makes room for others.

        Yields each when that is done. Other calls may come between two steps.
        """
        while self._gone_ms:
            identity, gone_ms = next(iter(self._gone_ms.items()))
            if now_ms - gone_ms < DEFAULT_EXPIRY_MS:
                return
            self._forget(identity)
            yield identity

    def _forget(self, identity: ClientIdentity) -> None:
        del self._gone_ms[identity]
        self.usage.pop(identity, None)
        self._client_ids[identity.client_id] -= 1
        if not self._client_ids[identity.client_id]:
            del self._client_ids[identity.client_id]
        user, client_id = identity.user or "", identity.client_id or ""
        self._bytes_total.forget(listener=identity.listener, user=user, client_id=client_id)
