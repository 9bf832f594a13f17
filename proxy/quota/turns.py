"""Decide whose turn it is among those who wait: by user, then client id, then connection.

Each user gets an equal share, and each client id an equal one of its user's, by start-time fair
queueing (Goyal, Vin and Cheng, 1996): the next one is who had least since it began to wait. So who
wants less than its share does not wait for those that want more, however many connections they
have. Connections of one client take their turns in the order in which they came.
"""

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeAlias, TypeVar

TURN_BYTES = 64 * 1024
"""About what a turn brings. Who wants less than its share saves up so much of it, and needs not
wait until all others had their turn."""

MOST_KNOWN = 1000
"""Beside those that wait so many are remembered, who had a turn last."""

MOST_LEFT = 64
"""So many entries of those that left before their turn are kept beyond one for each that waits."""

ClientKey: TypeAlias = tuple[str | None, str | None]
"""User and client id."""

K = TypeVar("K", bound=Hashable)
W = TypeVar("W", bound=Hashable)


class FairOrder(Generic[K]):
    """The order of turns of those who wait, by what each of them had."""

    __slots__ = ("_had", "_heap", "_level", "_numbers", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[K, int] = {}
        """With the number of the entry that is valid."""
        self._heap: list[tuple[float, int, K]] = []
        """Who has the least is next; with the number of the entry."""
        self._had: dict[K, float] = {}
        """In bytes, each as if it had always wanted its share; who had a turn last is last."""
        self._level = 0.0
        """What they had whose turn was last."""
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> K:
        """The one whose turn it is; somebody must wait."""
        heap, waiting = self._heap, self._waiting
        while waiting.get(heap[0][2]) != heap[0][1]:
            heappop(heap)
        return heap[0][2]

    def join(self, key: K, size: int) -> None:
        """Begin to wait, with a request of so many bytes.

        Who is new comes later by these: a client with a name for each request would be first.
        """
        level, had = self._level, self._had.get(key)
        if had is None:
            if len(self._had) >= MOST_KNOWN + len(self._waiting):
                del self._had[next(iter(self._had))]
            self._had[key] = level
            self._enter(key, level + size)
        else:
            self._had[key] = had = max(had, level - TURN_BYTES)
            self._enter(key, had)

    def leave(self, key: K) -> None:
        """Wait no longer."""
        del self._waiting[key]
        heap = self._heap
        if len(heap) > 2 * len(self._waiting) + MOST_LEFT:
            heap[:] = [entry for entry in heap if self._waiting.get(entry[2]) == entry[1]]
            heapify(heap)

    def take(self, size: int) -> None:
        """Have the first one take its turn, which costs so many bytes; it goes on waiting."""
        key, known = self.first, self._had
        level, _, _ = heappop(self._heap)
        self._level = max(self._level, level)
        had = known.pop(key, level) + size
        known[key] = had
        self._enter(key, had)

    def took(self, key: K, size: int) -> None:
        """Count so many bytes more of one that has had a turn."""
        had = self._had.get(key)
        if had is not None:
            self._had[key] = had + size
            if key in self._waiting:
                self._enter(key, had + size)

    def is_behind(self, key: K) -> bool:
        """Return whether it gets less than its share, or wants less."""
        return self._had.get(key, self._level) < self._level - TURN_BYTES / 2

    def _enter(self, key: K, had: float) -> None:
        number = self._waiting[key] = next(self._numbers)
        heappush(self._heap, (had, number, key))


class Turns(Generic[W]):
    """All connections that wait, and the one whose turn it is."""

    __slots__ = ("_client_ids", "_connections", "_users", "first")

    def __init__(self) -> None:
        self._users: FairOrder[str | None] = FairOrder()
        self._client_ids: dict[str | None, FairOrder[str | None]] = {}
        """Of each user that waits."""
        self._connections: dict[ClientKey, OrderedDict[W, None]] = {}
        """Of each client that waits."""
        self.first: W | None = None
        """The connection whose turn it is; None when none waits."""

    def join(self, waiter: W, client: ClientKey, size: int) -> None:
        """Wait at the end of a client's line, with a request of so many bytes."""
        connections = self._connections.get(client)
        if connections is None:
            connections = self._connections[client] = OrderedDict()
            user, client_id = client
            if user not in self._client_ids:
                self._client_ids[user] = FairOrder()
                self._users.join(user, size)
            self._client_ids[user].join(client_id, size)
        connections[waiter] = None
        self._choose()

    def leave(self, waiter: W, client: ClientKey, taken_bytes: int | None = None) -> None:
        """Wait no longer; `taken_bytes` is what the turn costs if it is taken, else None."""
        user, client_id = client
        client_ids, connections = self._client_ids[user], self._connections[client]
        if taken_bytes is not None:
            self._users.take(taken_bytes)
            client_ids.take(taken_bytes)
        del connections[waiter]
        if not connections:
            del self._connections[client]
            client_ids.leave(client_id)
            if not client_ids:
                del self._client_ids[user]
                self._users.leave(user)
        self._choose()

    def took(self, client: ClientKey, size: int) -> None:
        """Count so many bytes more of a client's latest turn."""
        user, client_id = client
        self._users.took(user, size)
        if user in self._client_ids:
            self._client_ids[user].took(client_id, size)
        self._choose()

    def is_behind(self, client: ClientKey) -> bool:
        """Return whether a client gets less than its share, or wants less, while others wait."""
        user, client_id = client
        client_ids = self._client_ids.get(user)
        is_behind = client_ids is not None and client_ids.is_behind(client_id)
        return is_behind or self._users.is_behind(user)

    def _choose(self) -> None:
        if not self._connections:
            self.first = None
            return
        user = self._users.first
        client = user, self._client_ids[user].first
        self.first = next(iter(self._connections[client]))
