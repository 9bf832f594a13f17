"""Admit the requests of a sensor's clients, each in its turn, while what they owe allows it.

A request that is not sent on costs nobody anything. So a client that owes its quota more than a
little is not read from: reconnecting, many connections, and answers that are never read gain
nothing. What a Fetch will cost is known only with its response: until then it counts with what is
expected of it, and it is given a limit that lets a round over all connections take no longer than
`TURNS_ROUND_MS`, as Kafka limits a Fetch to its quota window (KafkaApis, `maxValueInQuotaWindow`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

from metrics.clock import MS_PER_SECOND

from .pacer import LARGE_DEBT_MS, REPAYING_SHARE, Pacer
from .turns import TurnNode, TurnPath, Turns

TURNS_ROUND_MS = 2000.0
"""Of the bound: what all Fetches that are under way or wait may bring together."""

GRANT_MS = 250.0
"""Of the bound: what a single Fetch may bring."""

BUDGET_GRANT_MS = 50.0
"""The same where clients with a budget of their own wait behind each other's."""

USEFUL_GRANT_BYTES = 64 * 1024
"""No Fetch is limited to less while a round takes at most `LONGEST_ROUND_MS`: a broker cuts off the
last record batch at the limit, and the client reads it again."""

LONGEST_ROUND_MS = 8000.0

LEAST_GRANT_BYTES = 1024
"""No Fetch is limited to less. A broker sends one record batch at least, whatever the limit."""

FEW_BATCHES = 10
"""A Fetch that is limited to fewer is limited to one: a broker cuts off the last one at any other
limit, half of it on average, and the client reads it again."""

BATCH_KNOWN_MS = 10_000.0
"""For how long the size of a record batch is taken for that of those to come."""

LEARN_EVERY_MS = 250.0
"""Between two connections that show it anew: what they leave free others take, and wait for."""

UNDER_WAY_MS = 250.0
"""Of the bound: what may be under way for a client that is not held, beyond what the formula lets
pass, so that it is not far above its bound when that shows. One Fetch may always be."""

EXPECTED_MS = 250.0
"""For how long a Fetch without a response counts: a broker that has data answers by then."""

FIRST_EXPECTED_MS = 1000.0
"""The same before any of a sensor's responses: brokers answer within `fetch.max.wait.ms`, which is
500 by default."""

UNKNOWN_RESPONSE_BYTES = 64 * 1024
"""Expected of a sensor's first Fetch: a large record batch of a producer with Kafka's defaults."""

UNKNOWN_BATCH_BYTES = 1 << 20
"""Expected of a connection's first Fetch while the formula decides: Kafka's largest record batch by
default. Else all would be under way before an answer shows that few of them are free."""

ROUND_GROWTH = 4
"""Near the bound a response that is not held may be so many times as large as its connection's last
one: those that wait in the broker for data take little of what may pass from those that get it."""

LARGEST_DECAY = 0.9
"""By how much the largest response counts less with each one that comes."""


UNKNOWN_CLIENT: TurnPath = (TurnNode(None), TurnNode(None))


@dataclass(slots=True, eq=False)
class GateWaiter:
    """One connection whose next request waits at a gate."""

    wake: Callable[[float], None]
    """Is called with the time at which to ask again, when that is known or changes."""
    gate: "Gate | None" = None
    meter: Any = None
    """The sensor, a Meter, whose gate it waits at, or waited at last."""
    client: TurnPath = UNKNOWN_CLIENT
    """Whose connection it is."""
    size: int = 0
    """Of the request that waits, or what its response is expected to be."""
    ahead_ms: float = 0.0
    """How much of the bound may be owed when its turn has come."""
    since_ms: float | None = None
    """Since when its request waits, until the owner sets it back; None if it does not."""
    wakes_ms: float = math.inf
    """With what `wake` was called last."""
    turn: object = None
    """The turn that it was given last; see `Gate.give_turn`."""
    paid: "dict[Gate, int]" = field(default_factory=dict)
    """What the turns of a Fetch have cost, until its response is known."""

    def leave(self, now_ms: float) -> None:
        """Give the place up, if it has one."""
        if self.gate is not None:
            self.gate.leave(self, now_ms)


@dataclass(slots=True)
class FetchSizes:
    """What one connection's Fetches brought, in bytes."""

    last_bytes: int | None = None
    """The last response; None before the first, and where no quota asks."""
    is_full: bool = False
    """Whether that had most of what it might: so has the next one, whatever its limit."""
    batch_bytes: float = 0.0
    """A record batch, of several sizes one of the larger ones; 0 before one is known."""
    known_until_ms: float = -math.inf

    def learn(self, size: int, sent_ms: float) -> None:
        """Record the response to a Fetch that was limited to one record batch."""
        self.batch_bytes = max(size, self.batch_bytes * LARGEST_DECAY)
        self.known_until_ms = sent_ms + BATCH_KNOWN_MS


LENT = FetchSizes(last_bytes=0)
"""Of Fetches that pass by a lease: what they bring is taken from that."""


@dataclass(slots=True, eq=False)
class InFlightFetch:
    """The response to a Fetch that is under way, as `Gate.expect` counts it."""

    gate: "Gate"
    size: int
    """As it counts until the response; so does its turn."""
    limit: int
    """What it may ask for, in bytes."""
    granted: int
    """The same; 0 if its response is held."""
    until_ms: float
    """Until when it counts at the latest."""
    sizes: FetchSizes
    """Of its connection."""
    path: TurnPath | None = None
    """Of its client, whose turn counts with what it brought; None: with its cost, if it had one."""
    outer: "InFlightFetch | None" = None
    """The same as a budget's gate counts it."""
    counted: bool = True

    def answered(self, size: int) -> None:
        """Count it no longer: the response is there, with so many bytes, and is to be charged."""
        each: InFlightFetch | None = self
        while each is not None:
            gate = each.gate
            decayed = int((gate.largest or 0) * LARGEST_DECAY)
            gate.largest = size if size > decayed else decayed
            if each.path is not None:
                gate.turns.took(each.path, size - each.size)
            each = each.outer
        if self.limit <= LEAST_GRANT_BYTES or size > 2 * self.limit:
            self.sizes.learn(size, self.until_ms - EXPECTED_MS)
        self.sizes.last_bytes, self.sizes.is_full = size, size > self.limit / 2
        self.cancel()

    def held(self, size: int, due_ms: float) -> "InFlightFetch":
        """Return what counts in its place: its response is there, and is charged when it leaves."""
        self.cancel()
        if self.path is not None:
            self.gate.turns.took(self.path, size - self.size)
        held = replace(self, size=size, until_ms=due_ms + EXPECTED_MS, counted=True)
        self.gate.count(held)
        return held

    def cancel(self) -> None:
        """Count it no longer: the response will not be charged."""
        if self.counted:
            self.counted = False
            self.gate.expected_size -= self.size
            self.gate.granted_size -= self.granted
            self.gate.under_way -= 1
        if self.outer is not None:
            self.outer.cancel()


@dataclass(slots=True, eq=False)
class Gate:
    """Admits requests of one sensor's clients."""

    _pacer: Pacer
    _allowance_ms: Callable[[float], float]
    """Returns what the formula lets pass."""
    turns: Turns[GateWaiter] = field(default_factory=Turns)
    has_turns: bool = False
    """Whether anybody has waited since it was opened."""
    waiting: int = 0
    """How many connections wait."""
    grant_ms: float = GRANT_MS
    """Of the bound: what a single Fetch may bring."""
    _expected: list[tuple[float, int, InFlightFetch]] = field(default_factory=list)
    """By until when they count, and in the order in which they came."""
    _numbers: Iterator[int] = field(default_factory=count)
    expected_size: int = 0
    granted_size: int = 0
    """What those may bring that pass by a lease, or whose responses are not held, but for a record
    batch of each."""
    under_way: int = 0
    largest: int | None = None
    """Of the last responses, the sizes of earlier ones less and less; None before the first."""
    _latest: object = field(default_factory=object)
    _learns_ms: float = -math.inf
    """When a connection may next show anew how large its batches are, where many fit."""

    def lets(self, waiter: GateWaiter, ahead_ms: float, now_ms: float) -> bool:
        """Return whether it is a request's turn and `ahead_ms` of the bound, or less, is owed."""
        if self.waiting and self.turns.first(now_ms) is not waiter:
            return False
        if not self.under_way and not self._pacer.is_pacing:
            return True
        return self._opens_ms(ahead_ms, now_ms) <= now_ms

    def give_turn(self, waiter: GateWaiter) -> None:
        """Have a connection finish the request that was just let through, whatever that costs.

        It is charged as its bytes come, so who only announces them holds back nobody.
        """
        self._latest = waiter.turn = object()

    def has_turn(self, waiter: GateWaiter) -> bool:
        """Return whether the last request that was let through is this connection's."""
        return waiter.turn is self._latest

    def join(
        self,
        waiter: GateWaiter,
        ahead_ms: float,
        now_ms: float,
        *,
        client: TurnPath = UNKNOWN_CLIENT,
        size: int | None = None,
    ) -> None:
        """Wait for a turn, or go on waiting; `waiter.wake` says when to ask again."""
        if waiter.gate is not self:
            waiter.gate, waiter.client, waiter.ahead_ms = self, client, ahead_ms
            waiter.size = self._unknown_size if size is None else size
            self.waiting += 1
            self.has_turns = True
            self.turns.join(waiter, client, waiter.size, now_ms)
            if waiter.since_ms is None:
                waiter.since_ms = now_ms
        waiter.wakes_ms = math.inf
        self.poke(now_ms)

    def leave(self, waiter: GateWaiter, now_ms: float, *, taken_bytes: int | None = None) -> None:
        """Give a place up: its turn has come, which costs so much, or its connection is closed."""
        if waiter.gate is self:
            self.waiting -= 1
            self.turns.leave(waiter, waiter.client, now_ms, taken_bytes)
            waiter.gate, waiter.wakes_ms = None, math.inf
            self.poke(now_ms)

    def move(self, path: TurnPath, to: TurnPath, now_ms: float) -> None:
        """Have a client's connections that wait take their turns along another path."""
        for waiter in self.turns.connections(path):
            self.turns.leave(waiter, path, now_ms)
            self.turns.join(waiter, to, waiter.size, now_ms)
            waiter.client = to
        self.poke(now_ms)

    def poke(self, now_ms: float, *, is_later: bool = False) -> None:
        """Call the first waiter's `wake` with its turn, if it is earlier, or `is_later` as well."""
        if self.waiting:
            waiter = self.turns.first(now_ms)
            assert waiter is not None
            at_ms = self._opens_ms(waiter.ahead_ms, now_ms)
            if self._expected:
                at_ms = min(at_ms, self._expected[0][0])
            at_ms = max(at_ms, now_ms)
            if at_ms < waiter.wakes_ms or (is_later and at_ms > waiter.wakes_ms):
                waiter.wakes_ms = at_ms
                waiter.wake(at_ms)

    def open(self) -> None:
        """Wake everybody who waits now: the bound may be another one."""
        turns, self.turns, self.waiting = self.turns, Turns(), 0
        self.has_turns = False
        while (waiter := turns.first(-math.inf)) is not None:
            turns.leave(waiter, waiter.client, -math.inf)
            waiter.gate = None
            waiter.wake(-math.inf)

    def grant(self, asked_bytes: int, now_ms: float, *, behind: float = 0.0) -> int:
        """Return how many bytes a Fetch may ask for: `asked_bytes` or less, above 0.

        How many connections others have makes no difference to what a client is `behind`.
        """
        if self._expected:
            self._expire(now_ms)
        pacer = self._pacer
        connections = self.under_way + self.waiting + 1
        bytes_per_ms = pacer.bound / MS_PER_SECOND
        most = max(bytes_per_ms * TURNS_ROUND_MS / connections, behind)
        most = min(most, self.most_bytes)
        if pacer.due_ms - now_ms > LARGE_DEBT_MS:
            most *= REPAYING_SHARE
        elif asked_bytes > most:
            useful_bytes = min(USEFUL_GRANT_BYTES, bytes_per_ms * LONGEST_ROUND_MS / connections)
            most = max(most, useful_bytes)
        if asked_bytes <= most:
            return asked_bytes
        return min(asked_bytes, int(max(most, LEAST_GRANT_BYTES)))

    def whole(self, granted_bytes: int, sizes: FetchSizes, now_ms: float) -> int:
        """Return `granted_bytes`, or what brings one record batch if few would fit into that.

        Not while its clients lag behind their bound.
        """
        are_many = granted_bytes >= FEW_BATCHES * sizes.batch_bytes
        learns_ms = max(sizes.known_until_ms, self._learns_ms) if sizes.batch_bytes else now_ms
        is_pacing = self._pacer.is_pacing
        if not is_pacing or self.lags(now_ms) or (are_many and now_ms < learns_ms):
            return granted_bytes
        if are_many:
            self._learns_ms = now_ms + LEARN_EVERY_MS
        return min(granted_bytes, LEAST_GRANT_BYTES)

    def lags(self, now_ms: float) -> bool:
        """Return whether less is taken than the bound allows: it is not that which makes wait."""
        pacer = self._pacer
        expected_ms = self.expected_size / pacer.bound * MS_PER_SECOND
        return pacer.is_pacing and pacer.next_ms + expected_ms < now_ms - pacer.burst_ms / 2

    def limit(self, granted_bytes: int, last_bytes: int | None, now_ms: float) -> int:
        """Return `granted_bytes`, or less near the bound, for a Fetch whose response is not held.

        What is granted and not answered may still pass. A new connection begins with a record
        batch.
        """
        pacer = self._pacer
        free_ms = UNDER_WAY_MS
        if not pacer.is_pacing:
            free_ms = max(free_ms, self._allowance_ms(now_ms))
        bytes_per_ms = pacer.bound / MS_PER_SECOND
        free = free_ms * bytes_per_ms - self.granted_size
        if free >= self.round_bytes:
            return granted_bytes
        most = min(free, ROUND_GROWTH * last_bytes if last_bytes is not None else 0)
        return min(granted_bytes, max(int(most), LEAST_GRANT_BYTES))

    def expect(
        self,
        sizes: FetchSizes,
        now_ms: float,
        granted_bytes: int,
        *,
        holds: bool,
        path: TurnPath | None = None,
        turn_bytes: int = 0,
        outer: InFlightFetch | None = None,
    ) -> InFlightFetch:
        """Count a Fetch until its response, by the size of its connection's last one, if any.

        `turn_bytes` is what its turn has cost; for `path` and `outer` see InFlightFetch.
        """
        limit, is_one_batch = max(granted_bytes, 0), granted_bytes <= LEAST_GRANT_BYTES
        expected_bytes, least_bytes = sizes.last_bytes, 0
        if not self._pacer.is_pacing:
            if expected_bytes is None:
                least_bytes = UNKNOWN_BATCH_BYTES
            elif not holds:
                least_bytes = expected_bytes
        if is_one_batch and sizes.batch_bytes:
            expected_bytes = int(sizes.batch_bytes)
        elif expected_bytes is None:
            expected_bytes = self._unknown_size
            if holds and self.largest is None and self._pacer.is_pacing:
                # By schedule from the first one on: all may bring what they are granted.
                expected_bytes = max(expected_bytes, limit)
        elif is_one_batch:
            expected_bytes = min(expected_bytes, self._unknown_size)
        else:
            most_bytes = max(limit, int(sizes.batch_bytes))
            expected_bytes = most_bytes if sizes.is_full else min(expected_bytes, most_bytes)
        counted_bytes = max(expected_bytes, least_bytes)
        counts_ms = FIRST_EXPECTED_MS if least_bytes and self.largest is None else EXPECTED_MS
        if path is not None:
            self.turns.took(path, counted_bytes - turn_bytes)
        expected = InFlightFetch(
            *(self, counted_bytes, limit, 0 if holds else limit),
            *(now_ms + counts_ms, sizes, path, outer),
        )
        self.count(expected)
        self.poke(now_ms, is_later=True)  # who is next was woken for a turn without this one
        return expected

    def count(self, fetch: InFlightFetch) -> None:
        """Count a Fetch until it is answered or cancelled, or its time is over."""
        heappush(self._expected, (fetch.until_ms, next(self._numbers), fetch))
        self.expected_size += fetch.size
        self.granted_size += fetch.granted
        self.under_way += 1

    @property
    def most_bytes(self) -> int:
        """What a single Fetch may bring."""
        return int(self.grant_ms * self._pacer.bound / MS_PER_SECOND)

    @property
    def round_bytes(self) -> int:
        """What all Fetches that are under way or wait may bring together."""
        return int(TURNS_ROUND_MS * self._pacer.bound / MS_PER_SECOND)

    @property
    def _unknown_size(self) -> int:
        """What is expected of a connection without an earlier response."""
        return UNKNOWN_RESPONSE_BYTES if self.largest is None else self.largest

    def _expire(self, now_ms: float) -> None:
        expected = self._expected
        while expected and (not expected[0][2].counted or expected[0][0] <= now_ms):
            heappop(expected)[2].cancel()

    def _opens_ms(self, ahead_ms: float, now_ms: float) -> float:
        """Return when what is owed and expected is no more than `ahead_ms`."""
        pacer = self._pacer
        if self._expected:
            self._expire(now_ms)
        expected_ms = self.expected_size / pacer.bound * MS_PER_SECOND
        if not pacer.is_pacing:
            is_little = not self.under_way or expected_ms <= UNDER_WAY_MS
            may_open = is_little or expected_ms <= self._allowance_ms(now_ms)
            return now_ms if may_open else math.inf
        if self.under_way:
            return max(pacer.next_ms, now_ms - pacer.burst_ms) + expected_ms - ahead_ms
        return pacer.next_ms - ahead_ms
