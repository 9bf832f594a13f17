"""How many connections a client may have, and how fast it may open them. Sans-I/O.

As with Kafka's connection quotas (KIP-612) a connection above the rate is not refused: it waits
before its first request is taken. One above the number is closed, unless it comes from an address
with fewer than another has there: then an idle one of the address with most gives way.
"""

from bisect import bisect, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from metrics.clock import MS_PER_SECOND

from .entities import CONNECTION_RATE, MAX_CONNECTIONS, ClientIdentity
from .manager import QuotaManager
from .rules import RuleMatch

TOO_MANY = "too_many_connections_of_client"
"""Why a connection is refused, or gives way."""

AT_ONCE_MS = 1000.0
"""So much time's worth of connections may come at once; one always may."""

MAX_LOOKED_AT = 100
"""Schedules looked at for one that is over, and connections for an idle one, when room is
needed."""


class ConnectionRejected(Exception):  # noqa: N818 - named for what happened, as in the logs
    """A connection that its client may not have, or closes by what it asks for."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True, eq=False)
class ConnectionSchedule:
    """The turns of one entity's connections at one rate."""

    interval_ms: float
    due_ms: float
    """When the next connection is expected at the rate."""
    free_ms: list[float] = field(default_factory=list)
    """Turns that were given back, each a `due_ms` of before, the earliest first."""

    @property
    def ahead_ms(self) -> float:
        """How long before its turn a connection may come."""
        return max(AT_ONCE_MS - self.interval_ms, 0.0)

    def next_ms(self, now_ms: float) -> float:
        """Return the first turn that nobody has, and forget those that have come."""
        del self.free_ms[: bisect(self.free_ms, now_ms + self.ahead_ms)]
        return self.free_ms[0] if self.free_ms else max(self.due_ms, now_ms)

    def take(self, turn_ms: float) -> None:
        """Give away what `next_ms` has returned."""
        if self.free_ms:
            del self.free_ms[0]
        else:
            self.due_ms = turn_ms + self.interval_ms

    def at(self, interval_ms: float, now_ms: float) -> "ConnectionSchedule":
        """Return the schedule of another rate; a higher one makes the same connections due soon."""
        if interval_ms == self.interval_ms:
            return self
        share = min(interval_ms / self.interval_ms, 1.0)
        return ConnectionSchedule(interval_ms, now_ms + max(self.due_ms - now_ms, 0.0) * share)


@dataclass(slots=True, eq=False)
class CountedConnection:
    """One connection, as its client's quotas count it."""

    identity: ClientIdentity
    address: str
    """From where the client comes."""
    give_way: Callable[[], bool]
    """Closes the connection if it is idle, which leaves this slot; returns whether it was."""
    counted_as: str | None = None
    """The entity among whose connections it counts; None when no rule limits their number."""
    paced_as: str | None = None
    """The entity to whose rate it counts; None when no rule limits that."""
    schedule: ConnectionSchedule | None = None
    """In which its turn is at `turn_ms`, which it gives back if it leaves before."""
    turn_ms: float = 0.0


class ConnectionQuotas:
    """The connections of all known clients, which a rule that comes later counts, too."""

    def __init__(self, manager: QuotaManager) -> None:
        self._manager = manager
        self._slots: dict[CountedConnection, None] = {}
        self.counts: Counter[str] = Counter()
        """How many connections count for each entity whose number a rule limits."""
        self._by_address: dict[str, dict[str, dict[CountedConnection, None]]] = {}
        """Those of each entity by their addresses, in the order in which they came."""
        # Of each entity, in the order of use.
        self._schedules: OrderedDict[str, ConnectionSchedule] = OrderedDict()
        self._settled = manager.generation

    @property
    def depends_on_user(self) -> bool:
        """Whether a login can change which limits a connection has."""
        table = self._manager.table
        return any(table.depends_on_user(kind) for kind in (MAX_CONNECTIONS, CONNECTION_RATE))

    def enter(
        self,
        identity: ClientIdentity,
        before: CountedConnection | None,
        now_ms: float,
        address: str = "",
        give_way: Callable[[], bool] = lambda: False,
    ) -> tuple[CountedConnection, float]:
        """Return a connection's slot, and for how many milliseconds it is to wait.

        `before` is the slot that it had as another client: it is left unless ConnectionRejected is
        raised, and what has not changed is not counted again.
        """
        most, paced = self._matches(identity)
        slot, wait_ms = CountedConnection(identity, address, give_way), 0.0
        if most and most.enforced and not (before and before.counted_as == most.entity):
            self._check_number(most, address)
        if paced and paced.enforced and not (before and before.paced_as == paced.entity):
            wait_ms = self._pace(slot, paced, now_ms)
        if before is not None:
            self.leave(before)
        self._slots[slot] = None
        self._follow(slot, most, paced)
        return slot, wait_ms

    def still_ms(self, slot: CountedConnection, now_ms: float) -> float:
        """Return for how long a connection that waits is to wait by the rate of now."""
        _, paced = self._matches(slot.identity)
        if paced is None or not paced.enforced or slot.schedule is None:
            return 0.0
        turn = ConnectionSchedule(slot.schedule.interval_ms, slot.turn_ms)
        turn = turn.at(MS_PER_SECOND / paced.rule.bounds[CONNECTION_RATE], now_ms)
        return max(turn.due_ms - now_ms - turn.ahead_ms, 0.0)

    def leave(self, slot: CountedConnection) -> None:
        """Give a slot up: its connection is closed, or has another one."""
        if self._slots.pop(slot, slot) is None:
            self._count(slot, -1)
            if slot.schedule is not None:
                insort(slot.schedule.free_ms, slot.turn_ms)

    def settling(self) -> Iterator[None]:
        """Count connections anew after an update of the rules, in small steps; run it every second.

        None is closed: who has more than a new rule allows gets no further ones.
        """
        while (generation := self._manager.generation) != self._settled:
            for slot in tuple(self._slots):
                if slot in self._slots:
                    self._count(slot, -1)
                    self._follow(slot, *self._matches(slot.identity))
                yield
            self._settled = generation

    def _follow(
        self, slot: CountedConnection, most: RuleMatch | None, paced: RuleMatch | None
    ) -> None:
        slot.counted_as = most.entity if most is not None else None
        slot.paced_as = paced.entity if paced is not None else None
        self._count(slot, 1)

    def _matches(self, identity: ClientIdentity) -> tuple[RuleMatch | None, RuleMatch | None]:
        """Return what limits the number of a client's connections, and their rate."""
        table = self._manager.table
        return table.match(MAX_CONNECTIONS, identity), table.match(CONNECTION_RATE, identity)

    def _count(self, slot: CountedConnection, change: int) -> None:
        entity = slot.counted_as
        if entity is None:
            return
        by_address = self._by_address.setdefault(entity, {})
        crowd = by_address.setdefault(slot.address, {})
        if change > 0:
            crowd[slot] = None
        else:
            del crowd[slot]
        if not crowd:
            del by_address[slot.address]
        self.counts[entity] += change
        if not by_address:
            del self.counts[entity], self._by_address[entity]

    def _check_number(self, match: RuleMatch, address: str) -> None:
        count, bound = self.counts[match.entity], match.rule.bounds[MAX_CONNECTIONS]
        if count >= bound and not (count - 1 < bound and self._made_room(match.entity, address)):
            text = f"{match.entity} has {count} connections, {bound:.0f} are its {MAX_CONNECTIONS}"
            raise ConnectionRejected(TOO_MANY, f"{text} by {match.rule.title}")

    def _made_room(self, entity: str, address: str) -> bool:
        """Return whether a connection gave way to one from an address that has fewer then."""
        by_address = self._by_address[entity]
        crowd = max(by_address.values(), key=len)
        if len(by_address.get(address, ())) + 1 >= len(crowd):
            return False
        return any(slot.give_way() for slot in tuple(islice(crowd, MAX_LOOKED_AT)))

    def _pace(self, slot: CountedConnection, match: RuleMatch, now_ms: float) -> float:
        """Return how long a connection is to wait, and count it to the rate."""
        rate = match.rule.bounds[CONNECTION_RATE]
        interval_ms = MS_PER_SECOND / rate
        entity, schedules = self._entity_with_room(match, now_ms), self._schedules
        schedule = schedules.get(entity) or ConnectionSchedule(interval_ms, now_ms)
        schedule = schedule.at(interval_ms, now_ms)
        turn_ms = schedule.next_ms(now_ms)
        wait_ms = max(turn_ms - now_ms - schedule.ahead_ms, 0.0)
        longest_ms = self._manager.settings.max_delay_ms
        if wait_ms > longest_ms:
            wait_s = longest_ms / MS_PER_SECOND
            text = f"{entity} has connections that wait for {wait_s:g} s, for its {CONNECTION_RATE}"
            text += f" of {rate:g} per second by {match.rule.title}"
            raise ConnectionRejected(str(CONNECTION_RATE), text)
        schedule.take(turn_ms)
        schedules[entity] = schedule
        schedules.move_to_end(entity)
        slot.schedule, slot.turn_ms = schedule, turn_ms
        return wait_ms

    def _entity_with_room(self, match: RuleMatch, now_ms: float) -> str:
        """Return the match's entity, or its rule's overflow when too many others have connected."""
        schedules = self._schedules
        most = self._manager.settings.max_client_entities
        if match.entity in schedules or len(schedules) < most:
            return match.entity
        for entity in tuple(islice(schedules, MAX_LOOKED_AT)):
            if schedules[entity].due_ms <= now_ms:
                del schedules[entity]
            else:
                schedules.move_to_end(entity)  # so that others are looked at the next time
        if len(schedules) < most or not match.rule.is_open:
            return match.entity
        return self._manager.table.overflow_entity(CONNECTION_RATE, match)
