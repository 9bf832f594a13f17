"""What the relay shows of the messages of some clients, and to whom: the interceptor.

The relay knows nothing of what an interceptor is for. It shows the requests of clients and APIs
that the interceptor wants to see, then the response to each: one taken whole may be replaced, and
may have to wait; of a Fetch response all but the record data is shown as it passes.
"""

from typing import Any, Protocol

from proxy.quota.entities import ClientIdentity
from proxy.wire.apis import FETCH, LIST_OFFSETS, PRODUCE
from proxy.wire.frames import RequestHead
from proxy.wire.varint import Buffer
from proxy.wire.walk import FetchObserver

INTERCEPTED_APIS = frozenset({PRODUCE, FETCH, LIST_OFFSETS})


class ClientInterceptor(Protocol):
    """Who is shown the messages of one client on one connection."""

    def wants(self, api_key: int) -> bool:
        """Return whether requests of this API are to be shown."""

    def asked(self, head: RequestHead, frame: Buffer, now_ms: float) -> Any:
        """Read a request that is about to be sent on. Raises MalformedFrame."""

    def observer(self, ask: Any, now_ms: float) -> FetchObserver:
        """Return who is to be shown the partitions of a Fetch response."""

    def read(self, count: int) -> None:
        """Record a Fetch response of so many bytes."""

    def held(self, start_ms: float, due_ms: float) -> None:
        """Record that a Fetch response is held from when to when."""

    def wait_ms(self, ask: Any, now_ms: float) -> float:
        """Return how long a response should still wait; 0: not at all."""

    def answered(self, asked: Any, version: int, frame: bytes, now_ms: float) -> bytes:
        """Return a response as the client may see it. Raises MalformedResponse."""

    def close(self) -> None:
        """Forget the connection: it is closed, or the client is intercepted no more."""


class Interceptor(Protocol):
    """Chooses whose messages are shown; asked once per client, connection and `generation`."""

    @property
    def generation(self) -> int:
        """Changes whenever `watch` may give another answer."""

    def watch(
        self, identity: ClientIdentity, node_id: int | None, present: Any, now_ms: float
    ) -> ClientInterceptor | None:
        """Return who is shown the messages of a client on a connection to a broker.

        `present` is who is now; None for `node_id` stands for a bootstrap connection.
        """
