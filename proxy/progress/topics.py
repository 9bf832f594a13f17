"""Names of topics that clients only name by their ids, and what waits for a name."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from proxy.wire.fetch import TopicKey

MAX_NAMES = 10_000
"""Known names; beyond, the one learned first is forgotten and has to be asked for again."""

MAX_QUEUED = 20_000
"""Replays that wait, for all ids; beyond, the oldest is lost and counted."""


@dataclass(slots=True, eq=False)
class TopicNames:
    """Topic id (16 bytes) to name, for the whole proxy.

    What is seen of a topic before its name is known waits here as a replay, so that nothing is lost
    meanwhile: a client in a fetch session does not say it again. Who is called by `on_wanted`, when
    an id becomes wanted, looks the `wanted` ids up and calls `resolved` or, when the cluster does
    not know an id either, `unresolvable`. An id that is named again later is wanted again.
    """

    on_wanted: Callable[[], None] = lambda: None
    max_names: int = MAX_NAMES
    max_queued: int = MAX_QUEUED
    lost: int = 0
    """Replays that were dropped: of ids given up, or because too many waited."""
    known: dict[bytes, str] = field(default_factory=dict)
    """Name by id; for reading."""
    queue: deque[tuple[bytes, Callable[[str], object]]] = field(default_factory=deque)
    """Replays that wait: what is called with the topic's name; for reading."""
    _waiting: Counter[bytes] = field(default_factory=Counter)
    """How many replays wait for each wanted id, never 0."""

    def name_of(self, topic: TopicKey) -> str | None:
        """Return a topic's name; None while that is not known."""
        return topic if isinstance(topic, str) else self.known.get(topic)

    def when_known(self, topic: TopicKey, call: Callable[..., object], *more: object) -> None:
        """Call with the name and more: now, or when it becomes known, in the order of the calls."""
        name = self.name_of(topic)
        if name is not None:
            call(name, *more)
            return
        assert isinstance(topic, bytes), "a name is known"
        if len(self.queue) >= self.max_queued:
            oldest_id, _ = self.queue.popleft()
            self.lost += 1
            self._waiting[oldest_id] -= 1
            if not self._waiting[oldest_id]:
                del self._waiting[oldest_id]
        self.queue.append((topic, lambda known: call(known, *more)))
        self._waiting[topic] += 1
        if self._waiting[topic] == 1:
            self.on_wanted()

    def wanted(self) -> tuple[bytes, ...]:
        """Return the ids that replays wait for."""
        return tuple(self._waiting)

    def resolved(self, names: Mapping[bytes, str]) -> None:
        """Add names, also of ids that nobody asked for, and replay what waited for them."""
        for topic_id, name in names.items():
            self.known.pop(topic_id, None)
            self.known[topic_id] = name
            if len(self.known) > self.max_names:
                del self.known[next(iter(self.known))]
        for topic_id, replay in self._take(names):
            replay(names[topic_id])

    def unresolvable(self, ids: Iterable[bytes]) -> None:
        """Remove these ids, if they are still wanted, and what waits for them."""
        self.lost += len(self._take(ids))

    def _take(self, ids: Iterable[bytes]) -> list[tuple[bytes, Callable[[str], object]]]:
        """Remove and return what waits for these ids, in order."""
        gone = {topic_id for topic_id in ids if self._waiting.pop(topic_id, 0)}
        if not gone:
            return []
        taken = [entry for entry in self.queue if entry[0] in gone]
        self.queue = deque(entry for entry in self.queue if entry[0] not in gone)
        return taken
