"""The compiled lane: what it takes and gives. What for is in `lane`."""

from array import array
from collections.abc import Callable, Sized
from typing import Any, TypeAlias

from proxy.relay.channel import Channel

_Left: TypeAlias = Callable[[bytes, bytes, int, int], None]

class Kind:
    """Requests that begin with the same bytes, and what their responses must be like.

    `renew(about, kind)` returns whether they may pass for 250 ms more; it must not run a lane.
    `observe(broker_ms, proxy_ms)` gets the times of one in 67, and of one after 250 ms. `requests`
    and `count`, of bytes, are the cells of counters, to which is added. `lease` has the bytes that
    are left, those that were taken, and until when, in ns of the monotonic clock; None: as many as
    come.
    `metered` says what is taken from it, and `response` what may be sent on, as in `lane`: any one,
    also before all of it has come, one that equals the second of a pair of `shapes` under the first
    as mask, none is due, or any one that has come whole. At
    `limit_at`, within `start`, is what a Fetch asks for at most. `rows`, if any, gets a row of
    `LaneFrameCopies` just before a response is sent on; `unshown` is the cell to which the bytes
    of its frames are added, and `began()` is called after the first. It must not run a lane. `run`
    is empty, or has the parts of a `FetchRunShape`: what reads on from the last row takes its
    place.
    """

    about: Any
    limit: int
    """Is put there; 0 leaves what the client asks for."""
    until_shown: int
    """The request that is so far from here, 1 for the next one, is left to Python; 0: none is."""

    def __init__(
        self,
        about: object,
        api: int,
        start: bytes,
        renew: Callable[[Any, Kind], bool],
        observe: Callable[[float, float], None],
        requests: array[float],
        count: array[float],
        lease: array[int] | None,
        metered: int,
        response: int,
        limit_at: int,
        shapes: list[tuple[bytes, bytes]],
        rows: list[tuple[Any, bytes, bytes, float, int, int, int, int]] | None,
        run: list[Any],
        unshown: array[int] | None,
        began: Callable[[], None] | None,
    ) -> None: ...

class Lane:
    """One connection pair, from descriptor to descriptor.

    Not more than `most` requests are in flight, with those in `before`, whose responses come first.
    Those of `kinds` pass; a request is of the first one that it begins like. What is not plain goes
    to `on_requests` or `on_responses`: what of the plain was not sent, what was read behind it, the
    error number of the read, or 0, and how much of a plain response is still to be read, of which
    the start was sent on. Of each side by TLS there is the channel, else None; what
    that raises is raised, and it must not run a lane.
    """

    active_ns: int
    """When it read something last, of the monotonic clock."""
    request_bytes: int
    response_bytes: int
    """How much to read at a time; 0: call Python when there is something to read."""

    def __init__(
        self,
        client: int,
        broker: int,
        most: int,
        given: tuple[Sized, list[Kind], _Left, _Left, *tuple[Channel | None, ...]],
    ) -> None: ...
    @property
    def waiting(self) -> int:
        """How many of its requests are in flight."""

    def requests_ready(self) -> None:
        """Read from the client once, and send on what is plain."""

    def responses_ready(self) -> None:
        """Read from the broker once, and send on what is plain."""

    def take(self, most: int) -> list[tuple[Any, int, int, float, bytes | None]]:
        """Give up the oldest in flight.

        Of each: `about`, correlation id, bytes, when it was read in ms, and a copy of one that is
        to be shown.
        """

    def close(self) -> None:
        """Give up everything, and all references."""
