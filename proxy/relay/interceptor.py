"""What the relay shows of the messages of some clients, and to whom: an interceptor.

The relay does not know what for. It shows the requests that the interceptor wants to see, and the
response to each: either taken whole, which may be replaced and may have to wait, or, to a Fetch,
all but the record data as it passes. Or the interceptor answers, and the broker never sees it.
"""

from collections.abc import Callable
from typing import Protocol

from proxy.quota.entities import ClientIdentity
from proxy.wire.apis import FETCH, LIST_OFFSETS, PRODUCE
from proxy.wire.fetch_response import FetchObserver
from proxy.wire.frames import RequestHead

INTERCEPTED_APIS = frozenset({PRODUCE, FETCH, LIST_OFFSETS})
"""Whose requests an interceptor may ask for."""


class NotOwnerError(Exception):
    """The client is to ask the member that owns it: here it gets no answer, and is let go."""


class InterceptedRequest:
    """A request that was shown; subclasses say what its response goes through."""

    __slots__ = ()

    takes_whole = True
    """Its response is taken into memory; if not, it answers a Fetch and is walked."""

    answer: bytes | None = None
    """The interceptor's own response, a whole frame: the request is not sent on, and the client
    gets this in its turn. None: the broker answers."""

    def sent(self, *, at_once: bool = False) -> None:
        """Record that the request was sent on, before its response is shown: what can wait.

        A Fetch may be recorded later, with others that read on, if it is not `at_once`.
        """

    def read_from(self, start: int) -> None:
        """Stand for a run of Fetches that began at this offset: it is the last one."""

    def wait_ms(self, now_ms: float) -> float:  # noqa: ARG002
        """Return for how long a whole response should still wait; 0: not at all."""
        return 0.0

    def measured(self, count: int) -> None:
        """Record how many bytes the response to a Fetch has; its record data comes later."""

    def held(self, start_ms: float, due_ms: float) -> None:
        """Record that the response to a Fetch is held from when to when."""

    def observer(self, now_ms: float) -> FetchObserver | None:  # noqa: ARG002
        """Return who is shown the response to a Fetch as it passes."""
        return None

    def response(self, version: int, frame: bytes, now_ms: float) -> bytes:  # noqa: ARG002
        """Return a whole response as the client may see it.

        Raises MalformedResponse, and NotOwnerError.
        """
        return frame


class ClientInterceptor(Protocol):
    """Who is shown the messages of one client on one connection. Times are monotonic."""

    def wants(self, api_key: int, now_ms: float) -> bool:
        """Return whether a request of this API, one of INTERCEPTED_APIS, is to be shown."""

    def request(self, head: RequestHead, frame: memoryview, now_ms: float) -> InterceptedRequest:
        """Read a request that is about to be sent on, or answer it.

        A Fetch that the lane has sent on is shown later, with its response or when Python takes it
        over. Length and correlation id in `head` are then those of an earlier one of its kind.
        Raises MalformedFrame, and NotOwnerError.
        """

    def gated(self, start_ms: float, now_ms: float) -> None:
        """Record that a Fetch request has waited at a quota's gate since `start_ms`."""

    def close(self) -> None:
        """Forget the connection."""


Interceptor = Callable[[ClientIdentity, int | None], ClientInterceptor]
"""Returns who is shown the messages of a client on a connection to a broker, by its node id; None:
to the bootstrap port."""
