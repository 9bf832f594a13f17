"""Charge what a connection reads and writes of topics to the sensors of rules that name these.

How much of a Fetch response is of a topic is known when it has been walked, so that it holds what
comes next: the next response, and at the sensor's gate the next Fetch that asks for the topic.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final

from prometheus_client import Counter

from metrics.clock import clock_ms
from proxy.progress.topics import TopicNames
from proxy.quota.client_quotas import MAX_TOPICS, ClientQuotas
from proxy.quota.entities import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE, QuotaKind
from proxy.quota.gate import USEFUL_GRANT_BYTES, FetchSizes, Gate, InFlightFetch
from proxy.quota.meter import Meter
from proxy.quota.meters import ThrottleDecision, longest_throttle
from proxy.wire.fetch import NO_SESSION, FetchedPartition, TopicKey, read_fetch_request
from proxy.wire.fetch_response import FetchObserver
from proxy.wire.frames import MalformedFrame
from proxy.wire.layout import Buffer, TooManyElements

MAX_ASKED, MAX_ASKED_TOPICS = 10_000, 100
"""Partitions and topics that are kept of a fetch session. A topic is looked up for each Fetch, and
a new sensor takes some 0.1 ms. Of further topics as many are waited for at most that have sensors,
or that responses have shown: those that owe most."""

RECORDS_BYTES: Final = 5
"""Where a FetchedPartition has the bytes of its records."""


@dataclass(slots=True, eq=False)
class TopicQuotas:
    """The topics of one connection, as far as its client has rules that name any."""

    quotas: ClientQuotas
    names: TopicNames
    walks: Counter
    """Counts the responses and requests that were walked."""
    asks_count: int = 0
    """How often a Fetch was read."""
    _asked: dict[TopicKey, set[int]] = field(default_factory=dict)
    """The partitions of the fetch session."""
    _asked_count: int = 0
    _session_id: int = NO_SESSION
    """Of it, as its broker calls it."""
    _forgotten: list[tuple[TopicKey, int]] = field(default_factory=list)
    """What leaves it with the latest Fetch, if the broker takes that."""
    _is_cut: bool = False
    """Whether it is not known as a whole: then it has what its responses have shown, too."""
    _read: dict[TopicKey, None] = field(default_factory=dict)
    """The topics that these had records of, and those asked for that are not kept."""
    _guessed: list[Meter] = field(default_factory=list)
    """Where all may owe that it has, until a response has shown records."""
    _written: list[TopicKey] = field(default_factory=list)
    """The topics of the latest Produce request that it had records of."""
    _unread: Mapping[TopicKey, int] = field(default_factory=dict)
    """What it may have of others behind what was read."""
    _sizes: dict[str, FetchSizes] = field(default_factory=dict)
    """What the responses had for each sensor."""

    def asks(self, version: int, body: Buffer, now_ms: float) -> None:
        """Record what a Fetch request asks for; of one that is not there as a whole all it may.

        A session (KIP-227) has what its first request names, and what the others add to it.
        """
        self.asks_count += 1
        while self._forgotten:
            self._keep(*self._forgotten.pop())
        try:
            ask = read_fetch_request(version, body)
        except (MalformedFrame, TooManyElements):
            self._guess(now_ms)  # the broker says so, or it is too long to be kept
            return
        if ask.is_full:
            self._asked, self._asked_count, self._is_cut = {}, 0, False
            self._read, self._guessed, self._session_id = {}, [], NO_SESSION
        elif ask.session_id != self._session_id:  # begun before, or on another connection
            self._guess(now_ms)
        latest: TopicKey | None = None
        for topic, index, _ in ask.positions:
            is_full = topic not in self._asked and len(self._asked) >= MAX_ASKED_TOPICS
            if is_full or self._asked_count >= MAX_ASKED:
                self._is_cut = True
                if topic != latest:
                    self._show(topic, now_ms)
                latest = topic
                continue
            self._keep(topic, index)
        for topic, index in () if ask.is_full else ask.forgotten:
            known = self._asked.get(topic, set())
            if index in known:
                self._forgotten.append((topic, index))
                known.remove(index)
                self._asked_count -= 1
                if not known:
                    del self._asked[topic]

    def _keep(self, topic: TopicKey, index: int) -> None:
        known = self._asked.setdefault(topic, set())
        self._asked_count += index not in known
        known.add(index)

    def answered(self, session_id: int) -> None:
        """Record that the broker has taken the latest Fetch, and what it calls the session."""
        self._session_id, self._forgotten = session_id, []

    def _guess(self, now_ms: float) -> None:
        """Take all that rules bound by topic for what the session may have."""
        self._is_cut = True
        meters = self.quotas.topic_sensors(CONSUMER_BYTE_RATE)
        self._guessed = nlargest(MAX_ASKED_TOPICS, meters, lambda each: each.owed_ms(now_ms))

    def _show(self, topic: TopicKey, now_ms: float) -> None:
        """Wait for a topic, too, if it has a sensor; of too many for those that owe most."""
        if topic in self._read or self._sensor(topic) is None:
            return
        if len(self._read) >= MAX_ASKED_TOPICS:
            owed_ms = {
                each: meter.owed_ms(now_ms) for each in self._read if (meter := self._sensor(each))
            }
            self._read = dict.fromkeys(
                nlargest(MAX_ASKED_TOPICS // 2, owed_ms, owed_ms.__getitem__)
            )
        self._read[topic] = None

    def _sensor(self, topic: TopicKey) -> Meter | None:
        """Return the sensor that a topic has already."""
        name = self.names.name_of(topic)
        return None if name is None else self.quotas.topic_sensor(CONSUMER_BYTE_RATE, name)

    @property
    def _waited_for(self) -> Iterable[TopicKey]:
        """The topics that a Fetch may bring records of, as far as they are known."""
        return {**self._asked, **self._read} if self._is_cut else self._asked

    def writes(
        self, sizes: Mapping[TopicKey, int], unread_bytes: int, now_ms: float
    ) -> list[Meter]:
        """Return the sensors at whose gates a Produce request waits, of these topics.

        What will not be read may be of any other one that rules name: each has all of it.
        """
        kind = PRODUCER_BYTE_RATE
        names = self.quotas.named_topics(kind) if unread_bytes else ()
        last = self._meters(kind, list(sizes)[-1:], now_ms) if names else []  # it has that already
        others = [each for each in names if self.meter_of(kind, each, now_ms) not in last]
        self._unread = dict.fromkeys(others, unread_bytes)
        return self._meters(kind, (*self._written, *sizes, *self._unread), now_ms)

    def begin_write(self, now_ms: float) -> ThrottleDecision | None:
        """Forget which topics the latest Produce request has written to: `written` tells anew.

        Charge what will not be read of this one; return the cost.
        """
        self.walks.inc()
        self._written = []
        return self.written(self._unread, now_ms)

    def written(self, sizes: Mapping[TopicKey, int], now_ms: float) -> ThrottleDecision | None:
        """Charge a part of a Produce request, so many bytes for each topic; return the cost."""
        kind, room = PRODUCER_BYTE_RATE, MAX_TOPICS - len(self._written)
        self._written += [topic for topic, size in sizes.items() if size][:room]
        return longest_throttle([self._charge(kind, *each, now_ms) for each in sizes.items()])

    def fetched(self, now_ms: float) -> list[Meter]:
        """Return the sensors at whose gates a Fetch waits, of the topics that it asks for."""
        found = self._meters(CONSUMER_BYTE_RATE, self._waited_for, now_ms)
        return list(dict.fromkeys((*found, *self._guessed))) if self._guessed else found

    def expect(
        self, granted_bytes: int, now_ms: float, *, holds: bool, paid: dict[Gate, int]
    ) -> tuple[int, "TopicChargeObserver"]:
        """Return how many bytes a Fetch may ask for, and what counts and walks its response.

        Where it asks for other topics than bounded ones, too, it may have what a single Fetch may,
        however many wait, as it may be for the others; as much as it wants where nobody else reads
        from the bound. `paid`: see Waiter.
        """
        if len(self._sizes) >= MAX_ASKED:
            self._sizes.clear()
        found = [self.meter_of(CONSUMER_BYTE_RATE, each, now_ms) for each in self._waited_for]
        found += self._guessed
        sizes = {
            meter: self._sizes.setdefault(meter.name, FetchSizes())
            for meter in found
            if meter is not None and meter.is_enforced
        }
        are_all = all(each in sizes for each in found)
        most = [
            self.quotas.most_at(each.levels, granted_bytes, known, now_ms, holds=holds)
            if are_all
            else max(each.gate.most_bytes, USEFUL_GRANT_BYTES)
            for each, known in sizes.items()
            if are_all or not each.is_of_one_client
        ]
        if most:
            granted_bytes = min(granted_bytes, sum(most))
        fetches = {
            meter: self.quotas.expect_at(
                *(level, known, granted_bytes, now_ms), holds=holds, paid=paid
            )
            for meter, known in sizes.items()
            for level in meter.levels
        }
        return granted_bytes, TopicChargeObserver(self, fetches, is_of_one=len(found) == 1)

    def owed_ms(self, kind: QuotaKind, now_ms: float) -> float:
        """Return for how long a response is held that comes now; 0 or more."""
        is_read = kind is CONSUMER_BYTE_RATE
        meters = self.fetched(now_ms) if is_read else self._meters(kind, self._written, now_ms)
        return max((each.owed_ms(now_ms) for each in meters if each.is_enforced), default=0.0)

    def read(self, topic: TopicKey, size: int, now_ms: float) -> None:
        """Charge what a response has of a topic."""
        self._charge(CONSUMER_BYTE_RATE, topic, size, now_ms)
        if self._is_cut or topic not in self._asked:  # another connection may have added it
            self._is_cut, self._guessed = True, []
            self._show(topic, now_ms)

    def meter_of(self, kind: QuotaKind, topic: TopicKey, now_ms: float) -> Meter | None:
        """Return the sensor of a topic; None where no rule is for it, or its name is not known."""
        name = self.names.name_of(topic)
        return None if name is None else self.quotas.topic_meter(kind, name, now_ms)

    def _charge(
        self, kind: QuotaKind, topic: TopicKey, size: int, now_ms: float
    ) -> ThrottleDecision | None:
        """Charge bytes of a topic: now, or when its name is known."""
        if isinstance(topic, bytes) and topic not in self.names.known:
            self.names.when_known(topic, lambda name: self._charge(kind, name, size, clock_ms()))
            return None
        meter = self.meter_of(kind, topic, now_ms)
        return None if meter is None else self.quotas.charge_at(meter, size, now_ms)

    def _meters(self, kind: QuotaKind, topics: Iterable[TopicKey], now_ms: float) -> list[Meter]:
        """Return the sensors of topics, each once."""
        found = (self.meter_of(kind, topic, now_ms) for topic in topics)
        return list(dict.fromkeys(each for each in found if each is not None))


class TopicChargeObserver(FetchObserver):
    """A Fetch whose response is walked for the bytes of its topics."""

    __slots__ = ("_fetches", "_had", "_is_of_one", "_number", "_traffic")

    def __init__(
        self, traffic: TopicQuotas, fetches: Mapping[Meter, InFlightFetch], *, is_of_one: bool
    ) -> None:
        self._traffic = traffic
        self._number = traffic.asks_count
        self._fetches = fetches
        """What counts at the sensors' gates until the response has been walked."""
        self._had = dict.fromkeys(fetches, 0)
        self._is_of_one = is_of_one

    def cancel(self) -> None:
        """Count it no longer: there will be no response."""
        now_ms = clock_ms()
        for meter, each in self._fetches.items():
            each.cancel()
            meter.gate.poke(now_ms)

    def charge(self, frame_bytes: int, now_ms: float) -> ThrottleDecision | None:
        """Return how to hold the response for what was read before it; it counts meanwhile.

        With all that it has where that is of one topic alone, else with what was expected.
        """
        quotas = self._traffic.quotas
        charge = longest_throttle(quotas.owed_at(each, now_ms) for each in self._fetches)
        # Also one that is not held leaves later: behind others, or as its client reads.
        due_ms = now_ms if charge is None else charge.due_ms
        self._fetches = {
            meter: each.held(frame_bytes if self._is_of_one else each.size, due_ms)
            for meter, each in self._fetches.items()
        }
        return charge

    def session(self, error_code: int, session_id: int) -> None:
        """See FetchObserver."""
        # Who has sent others meanwhile may have begun another session, or joined another one.
        if not error_code and self._number == self._traffic.asks_count:
            self._traffic.answered(session_id)

    def partitions(self, topic: TopicKey, fetched: Sequence[FetchedPartition]) -> None:
        """See FetchObserver."""
        size, now_ms = sum([each[RECORDS_BYTES] for each in fetched]), clock_ms()
        if size > 0:
            meter = self._traffic.meter_of(CONSUMER_BYTE_RATE, topic, now_ms)
            if meter is not None and meter in self._fetches:
                self._fetches[meter].cancel()  # it is charged now
                self._had[meter] += size
            self._traffic.read(topic, size, now_ms)

    def ended(self) -> None:
        """See FetchObserver."""
        now_ms = clock_ms()
        self._traffic.walks.inc()
        for meter, each in self._fetches.items():
            each.answered(self._had[meter])
            meter.gate.poke(now_ms)
