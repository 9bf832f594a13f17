"""The quotas of one client: what the relay asks about each of its requests and responses."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from metrics.exposition import OTHER

from .entities import (
    BUSY_MS_PER_PERCENT,
    CONSUMER_BYTE_RATE,
    FORESEEN_KINDS,
    TRAFFIC_KINDS,
    ClientIdentity,
    QuotaKind,
)
from .gate import LENT, USEFUL_GRANT_BYTES, FetchSizes, Gate, GateWaiter, InFlightFetch
from .meter import ByteLease, GateHop, Meter, sensor_name
from .meters import Meters, ThrottleDecision
from .rules import RuleMatch
from .turns import TURN_BYTES, TurnNode, TurnPath, newcomer_path

SESSION_PARTS = 3
"""A hold is at most this part of a group member's session timeout: its heartbeats, which may wait
behind it, come three times in a session by default (heartbeat.interval.ms)."""

SHORTEST_SESSION_MS = 6000.0
"""No shorter one shortens holds: brokers accept none by default (group.min.session.timeout.ms)."""

MAX_TOPICS = 1000
"""So many topics of a client are known by their sensors; others are looked up again."""


@dataclass(slots=True, eq=False)
class ClientQuotas:
    """The quotas of one client, shared by its connections; made by `QuotaManager.client`."""

    sensors: Meters
    handles: dict[ClientIdentity, "ClientQuotas"]
    """Of all connected clients, from which it goes with its last connection."""
    identity: ClientIdentity
    address: str | None = None
    """From where its first connection came."""
    users: int = 0
    """How many have it from the manager and have not closed it."""
    generation: int = -1
    """The update of the rules that `matches` is of."""
    matches: dict[QuotaKind, RuleMatch] = field(default_factory=dict)
    meters: dict[QuotaKind, Meter] = field(default_factory=dict)
    """The sensors of `matches` that its latest traffic was charged to. Those that are not enforced
    have no gates, and hold nothing."""
    before: dict[QuotaKind, Meter] = field(default_factory=dict)
    """What measured its traffic until the latest update: a new sensor has not seen that."""
    longest_hold_ms: float = math.inf
    topic_kinds: frozenset[QuotaKind] = frozenset()
    """What rules bound of some topics, more than `matches` does."""
    topic_meters: dict[tuple[QuotaKind, str], Meter | None] = field(default_factory=dict)
    """The sensors of these, by topic; None: no rule is for that."""
    is_charged_first: bool = False
    """Whether one of `matches` is not of FORESEEN_KINDS, so that no frame is sent on before."""
    _key: TurnPath = field(init=False)
    _settles_ms: float = -math.inf
    """Until when it takes turns with others that are new; before its first request it has come."""

    def __post_init__(self) -> None:
        self._key = TurnNode(self.identity.user), TurnNode(self.identity.client_id)

    def has(self, kind: QuotaKind) -> bool:
        """Return whether a rule bounds this kind of the client's traffic, or of some topics."""
        return kind in self._matches_in_force() or kind in self.topic_kinds

    def walks(self, kind: QuotaKind) -> bool:
        """Return whether a rule may bound this kind of some topics alone."""
        self._matches_in_force()
        return kind in self.topic_kinds

    @property
    def charged(self) -> tuple[Meter, ...]:
        """The sensors that its latest traffic was charged to; some may be retired."""
        of_topics = (each for each in self.topic_meters.values() if each is not None)
        return (*self.meters.values(), *dict.fromkeys(of_topics))

    @property
    def is_bounded(self) -> bool:
        """Whether a rule bounds any of the client's traffic."""
        return bool(self._matches_in_force() or self.topic_kinds)

    def charge(self, kind: QuotaKind, value: float, now_ms: float) -> ThrottleDecision | None:
        """Record traffic; return how to hold the response that it belongs to, None to let it go.

        Call it once for each response, also when that will not be held. `value` is bytes, or for
        `request_percentage` the milliseconds that the upstream was busy.
        """
        meter = self._meter(kind, now_ms)
        if kind.is_time:
            value /= BUSY_MS_PER_PERCENT
        return None if meter is None else self.charge_at(meter, value, now_ms)

    def topic_meter(self, kind: QuotaKind, topic: str, now_ms: float) -> Meter | None:
        """Return the sensor of this client's traffic of a topic, None where no rule is for it."""
        if not self.walks(kind):
            return None
        key, known = (kind, topic), self.topic_meters
        if key in known and ((meter := known[key]) is None or not meter.retired):
            return meter
        match, meter = self.sensors.table.match(kind, self.identity, topic), None
        if match is not None:
            meter = self.sensors.meter(kind, match, now_ms, self.address)
            meter.used_by = self.identity
        if len(known) >= MAX_TOPICS:
            del known[next(iter(known))]
        known[key] = meter
        return meter

    def topic_sensor(self, kind: QuotaKind, topic: str) -> Meter | None:
        """Return the sensor that a topic has, or would have without room for another one."""
        table, by_name = self.sensors.table, self.sensors.by_name
        match = table.match(kind, self.identity, topic)
        if match is None:
            return None
        meter = by_name.get(sensor_name(kind, match.entity))
        return meter or by_name.get(sensor_name(kind, table.overflow_entity(kind, match)))

    def named_topics(self, kind: QuotaKind) -> tuple[str, ...]:
        """Return the topics that rules name for this client, and how those begin of prefixes."""
        rules = self.sensors.table.rules_by_topic(kind, self.identity)
        return tuple(rule.topic_or_prefix for rule in rules)

    def topic_sensors(self, kind: QuotaKind) -> list[Meter]:
        """Return the sensors of all topics that rules name for this client."""
        rules = self.sensors.table.rules_by_topic(kind, self.identity)
        names = [rule.entity(self.identity, rule.topic_or_prefix) for rule in rules]
        starts = (*names, *(f"{OTHER},{rule.shared_entity}" for rule in rules))
        return [
            each
            for each in self.sensors.iter_meters()
            if each.kind is kind and each.entity.startswith(starts) and each.rule.is_by_topic
        ]

    def charge_at(self, meter: Meter, value: float, now_ms: float) -> ThrottleDecision | None:
        """Record traffic, as `charge`, at a sensor that `topic_meter` has returned."""
        longest_ms, longest = 0.0, meter
        for each in meter.charged:
            if not each.is_enforced:
                if each.is_above(value, now_ms) and each.is_first_above(now_ms):
                    self.sensors.on_would_throttle(self.identity, each.kind)
                continue
            hold_ms = each.hold_ms(value, now_ms)
            if hold_ms > longest_ms:
                longest_ms, longest = hold_ms, each
        return self._throttle_time(longest, longest_ms, now_ms) if longest_ms else None

    def lease(self, kind: QuotaKind | None) -> ByteLease | None:
        """Return the lease that `lends` is about, None while there is none."""
        meter = None if kind is None else self.meters.get(kind)
        return None if meter is None else meter.lease

    def lends(self, kind: QuotaKind | None, waiter: GateWaiter, now_ms: float) -> bool:
        """Return whether traffic may pass for LEASE_MS without being charged one by one.

        What a rule bounds passes as far as `lease` goes, what none does without one. `waiter` is
        the connection's.
        """
        if self.is_charged_first or self.generation != self.sensors.generation:
            return False
        if kind is None:
            return True
        if kind in self.topic_kinds:
            return False
        meter = self.meters.get(kind)
        if meter is None:
            return kind not in self.matches
        return (
            not meter.retired
            and waiter.gate is None
            and waiter.since_ms is None
            and all(each.meter.gate.lets(waiter, 0.0, now_ms) for each in meter.levels)
            and self.sensors.lends(meter, now_ms)
        )

    def lend_fetches(
        self, asked_bytes: int, sizes: FetchSizes, now_ms: float, *, holds: bool
    ) -> tuple[int, InFlightFetch | None]:
        """Return how many bytes a connection's Fetches may ask for that pass by the lease; 0: none.

        And what counts meanwhile: one of each connection may bring what is lent, all together, but
        for a round where nothing that is under way can be held. There each is to have room for as
        much as the connection's last response had.
        """
        meter = self.meters.get(CONSUMER_BYTE_RATE)
        if meter is None or meter.lease is None or not meter.levels:
            return asked_bytes, None
        gates = [level.meter.gate for level in meter.levels]
        for gate in gates:
            asked_bytes = gate.grant(asked_bytes, now_ms)
        left, others = meter.lease.cells[0], max(gate.under_way for gate in gates)
        left -= 0 if holds else gates[0].round_bytes
        share = min(left // (others + 1), left - max(gate.granted_size for gate in gates))
        last_bytes = 0 if holds else sizes.last_bytes or 0
        if share < max(min(asked_bytes, USEFUL_GRANT_BYTES), last_bytes):
            return 0, None
        granted_bytes, counted = min(asked_bytes, share), None
        for gate in gates:
            counted = gate.expect(LENT, now_ms, granted_bytes, holds=False, outer=counted)
        return granted_bytes, counted

    def admit(
        self,
        kind: QuotaKind,
        waiter: GateWaiter,
        size: int | None,
        now_ms: float,
        *,
        holds: bool = False,
        came: int | None = None,
        topics: Iterable[Meter] = (),
    ) -> bool:
        """Return whether a request may be sent on; if not, `waiter` is woken when to ask again.

        Ask before the request costs anything; then charge it. `kind` bounds the request or its
        response, `waiter` is the connection's. `size` is that of a Produce request, or of the
        connection's last Fetch response, None before the first. `holds`: the response to a Fetch is
        held, so it may be asked for ahead. `came`: how much of a Produce request is there, which
        its turn costs, as what follows counts with `took`; 0: it is for more of one that was
        admitted. `topics`: the sensors of the topics that it names.
        """
        meter = self._meter(kind, now_ms)
        if now_ms >= self._settles_ms and waiter.since_ms is None and came != 0:
            self._settle(now_ms)  # with a request that begins
        is_fetched = kind is CONSUMER_BYTE_RATE
        own = levels = () if meter is None else meter.levels
        for each in topics:
            levels += each.levels
        if waiter.gate is not None and len(levels) > 1:  # where it waits, it has passed others
            waits_at = (at for at, level in enumerate(levels) if level.meter is waiter.meter)
            levels = levels[next(waits_at, 0) :]
        for level in levels:
            gate = level.meter.gate
            if came == 0 and gate.has_turn(waiter):
                continue
            ahead_ms = level.meter.ahead_ms if holds and is_fetched else 0.0
            if not gate.lets(waiter, ahead_ms, now_ms):
                if waiter.gate is not gate:
                    waiter.leave(now_ms)
                client = level.path_of(self._key) if came != 0 else self._path_at(level, waiter)
                gate.join(waiter, ahead_ms, now_ms, client=client, size=size)
                waiter.meter = level.meter
                return False
            if waiter.gate is gate:
                cost = waiter.size if came is None or level not in own else came
                if lags := gate.lags(now_ms):  # turns are scarce then, and not bytes
                    cost = max(cost, TURN_BYTES)
                gate.leave(waiter, now_ms, taken_bytes=cost)
                if is_fetched and not lags:
                    waiter.paid[gate] = cost
            if not is_fetched:
                gate.give_turn(waiter)
        if waiter.gate is not None:
            waiter.leave(now_ms)
        return True

    def _settle(self, now_ms: float) -> None:
        """Take turns by itself, as it is new no more; so does what waits."""
        before, self._settles_ms = self._key, math.inf
        self._key = before[0], before[-1]
        for meter in self.meters.values():
            levels = meter.levels
            meter.settle()
            for was, level in zip(levels, meter.levels, strict=False):
                if was.meter is level.meter:  # not where a budget has changed: it wakes all
                    level.meter.gate.move(was.path_of(before), level.path_of(self._key), now_ms)

    def _path_at(self, level: GateHop, waiter: GateWaiter) -> TurnPath:
        """Return the path to where a request began to wait: as who it did, it goes on."""
        return waiter.client if waiter.meter is level.meter else level.path_of(self._key)

    def took(self, kind: QuotaKind, size: int, waiter: GateWaiter) -> None:
        """Count more bytes of a request that has had its turn, which were charged."""
        meter = self.meters.get(kind)
        for level in () if meter is None else meter.levels:
            level.meter.gate.turns.took(self._path_at(level, waiter), size)

    def grant(
        self,
        asked_bytes: int,
        sizes: FetchSizes,
        now_ms: float,
        *,
        holds: bool,
        paid: dict[Gate, int] | None = None,
    ) -> tuple[int, InFlightFetch | None]:
        """Return how many bytes a Fetch may ask for, and what counts until its response.

        `paid`: see GateWaiter.
        """
        meter = self._meter(CONSUMER_BYTE_RATE, now_ms)
        if meter is None:
            return asked_bytes, None
        granted_bytes = self.most_at(meter.levels, asked_bytes, sizes, now_ms, holds=holds)
        expected: InFlightFetch | None = None
        for level in reversed(meter.levels):
            expected = self.expect_at(
                *(level, sizes, granted_bytes, now_ms), holds=holds, paid=paid, outer=expected
            )
        return granted_bytes, expected

    def expect_at(
        self,
        level: GateHop,
        sizes: FetchSizes,
        granted_bytes: int,
        now_ms: float,
        *,
        holds: bool,
        paid: dict[Gate, int] | None,
        outer: InFlightFetch | None = None,
    ) -> InFlightFetch:
        """Count a Fetch at a gate until its response, whose size its turn there costs in the end.

        What the turn has cost is taken out of `paid`, see GateWaiter; for `outer` see
        InFlightFetch.
        """
        gate = level.meter.gate
        cost = paid.pop(gate, None) if paid else None
        # Where there are others that take turns it counts with what it brought.
        has_turn = cost is not None and (level.tells_clients or level.path)
        return gate.expect(
            *(sizes, now_ms, granted_bytes),
            holds=holds,
            path=level.path_of(self._key) if has_turn else None,
            turn_bytes=cost or 0,
            outer=outer,
        )

    def most_at(
        self,
        levels: Iterable[GateHop],
        asked_bytes: int,
        sizes: FetchSizes,
        now_ms: float,
        *,
        holds: bool,
    ) -> int:
        """Return how many bytes a Fetch may ask for that passes these gates."""
        granted_bytes = asked_bytes
        for level in levels:
            gate, before_bytes = level.meter.gate, granted_bytes
            behind = gate.turns.behind(level.path_of(self._key)) if gate.waiting else 0.0
            granted_bytes = gate.grant(before_bytes, now_ms, behind=behind)
            if granted_bytes < before_bytes and behind < TURN_BYTES / 2:
                granted_bytes = gate.whole(granted_bytes, sizes, now_ms)
            if not holds:
                granted_bytes = gate.limit(granted_bytes, sizes.last_bytes, now_ms)
        return granted_bytes

    def owed_at(self, meter: Meter, now_ms: float) -> ThrottleDecision | None:
        """Return how to hold a response for what a sensor owes already, None to let it go."""
        owed_ms = min(meter.owed_ms(now_ms), meter.longest_hold_ms)
        return self._throttle_time(meter, owed_ms, now_ms) if meter.is_enforced else None

    def _throttle_time(
        self, meter: Meter, hold_ms: float, now_ms: float
    ) -> ThrottleDecision | None:
        delay_ms = round(min(hold_ms, self.longest_hold_ms))
        if not delay_ms:
            return None
        return ThrottleDecision(now_ms + delay_ms, delay_ms, meter)

    def owed_ms(self, kind: QuotaKind, now_ms: float) -> float:
        """Return for how long a response is held that comes now; 0 or more."""
        meter = self._meter(kind, now_ms)
        levels = () if meter is None else meter.levels
        return max((each.meter.owed_ms(now_ms) for each in levels), default=0.0)

    def next_hold_ms(self, kind: QuotaKind, now_ms: float) -> float:
        """Return for how long what is owed already would hold the next response: one hold."""
        meter = self._meter(kind, now_ms)
        return 0.0 if meter is None else min(self.owed_ms(kind, now_ms), meter.longest_hold_ms)

    def is_paced(self, kind: QuotaKind) -> bool:
        """Return whether the client is over its quota, or was until just now."""
        meter = self.meters.get(kind)
        return meter is not None and any(each.meter.pacer.is_pacing for each in meter.levels)

    def pace_immediately(self, kind: QuotaKind, now_ms: float) -> None:
        """Keep the bound by schedule for a while: others that measured the client let it pass."""
        meter = self._meter(kind, now_ms)
        if meter is not None:
            meter.share(now_ms)

    def joined(self, session_timeout_ms: float) -> None:
        """Hold no response for longer than a member of a group with this timeout may be silent."""
        longest_ms = max(session_timeout_ms, SHORTEST_SESSION_MS) / SESSION_PARTS
        self.longest_hold_ms = min(self.longest_hold_ms, longest_ms)

    def _meter(self, kind: QuotaKind, now_ms: float) -> Meter | None:
        if self.generation == self.sensors.generation:
            meter = self.meters.get(kind)
            if meter is not None and not meter.retired:
                if meter.lease is not None:
                    meter.take_back(now_ms)
                return meter
        if self._settles_ms < 0:
            self._settles_ms = self.sensors.settles_ms(self.identity, now_ms)
            user, client = self._key
            if self._settles_ms < math.inf:
                self._key = user, *newcomer_path(client, self.address)
        match = self._matches_in_force().get(kind)
        if match is None:
            return None
        before = self.before.pop(kind, None) if match.enforced else None
        known, owed = (before.charged, before.owed_alone(now_ms)) if before else ((), 0.0)
        meter = self.sensors.meter(kind, match, now_ms, self.address, paces=before is not None)
        if self._settles_ms == math.inf:
            meter.settle()
        if before and owed and meter.charged != known:
            for each in meter.charged:
                if each is before or each not in known:
                    each.inherit(owed, before.owed_ms(now_ms), now_ms)
        self.meters[kind] = meter
        meter.used_by = self.identity
        return meter

    def _matches_in_force(self) -> dict[QuotaKind, RuleMatch]:
        if self.generation != self.sensors.generation:
            self.resolve()
        return self.matches

    def close(self) -> None:
        """Give the handle back, once for each `QuotaManager.client`. Sensors stay until idle."""
        self.users -= 1
        if self.users == 0:
            self.handles.pop(self.identity, None)

    def resolve(self) -> None:
        """Find the rules that match anew."""
        self.generation = self.sensors.generation
        self.before |= {kind: each for kind, each in self.meters.items() if each.is_enforced}
        self.meters.clear()
        self.topic_meters.clear()
        table = self.sensors.table
        matches = ((kind, table.match(kind, self.identity)) for kind in TRAFFIC_KINDS)
        self.matches = {kind: match for kind, match in matches if match is not None}
        self.topic_kinds = frozenset(
            kind for kind in FORESEEN_KINDS if table.has_topics(kind, self.identity)
        )
        self.is_charged_first = not FORESEEN_KINDS.issuperset(self.matches)
