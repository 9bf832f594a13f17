"""One document with all that the status page and `quota-proxy top` show."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from proxy import __version__
from proxy.admin.clients import Clients, Document, iso
from proxy.admin.history import History
from proxy.admin.pipelines import Pipelines
from proxy.admin.queries import Queries

NotReady = Callable[[], str | None]
"""Gives the reason why the proxy can't serve clients now, None when it can."""


@dataclass(frozen=True, slots=True)
class ListenerStatus:
    """An open listener."""

    name: str
    host: str
    port: int
    tls: bool
    connections: int
    """Client connections that are open now, to its bootstrap and broker ports together."""


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """A broker's real address."""

    node_id: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ConfigLoad:
    """One attempt to load the configuration."""

    at_s: float
    """Seconds since the epoch."""
    result: str
    """`ok`, or `failed`: then what was in force stays so."""
    message: str
    """For people; may have several lines."""


class StatusSource(Protocol):
    """What the rest of the program tells about itself. Each call is of this moment, and cheap."""

    def listeners(self) -> Sequence[ListenerStatus]:
        """Return the open listeners."""

    def brokers(self) -> Sequence[BrokerStatus]:
        """Return the brokers that are known."""

    def cluster_answers(self) -> bool:
        """Return whether the cluster answered when it was last asked."""

    def delay_queues(self) -> Mapping[str, int]:
        """Return how many responses wait, by API family."""

    def config_loads(self) -> Sequence[ConfigLoad]:
        """Return the latest loads of the configuration, the newest first; a handful."""

    def throttle_mode(self) -> str:
        """Return `delay` or `mute`."""


class Status:
    """Gathers the document.

    Args:
        source: the rest of the program.
        not_ready: says whether clients can be served.
        clients: describes the bounded clients.
        history: their last ten minutes.
        queries: describes the queries that are followed.
        pipelines: describes the pipelines.
        started_ms: when the proxy started, on the monotonic clock.

    """

    def __init__(
        self,
        source: StatusSource,
        not_ready: NotReady,
        clients: Clients,
        history: History,
        queries: Queries,
        pipelines: Pipelines,
        *,
        started_ms: float,
    ) -> None:
        self._source = source
        self._not_ready = not_ready
        self._clients = clients
        self._history = history
        self._queries = queries
        self._pipelines = pipelines
        self._started_ms = started_ms

    async def document(self, text: str, limit: int, now_ms: float, now_s: float) -> Document:
        """Return the status at a time.

        Args:
            text: as in `Clients.pressing`, like `limit`; it chooses the clients that are shown.
            limit: how many of them at most.
            now_ms: the monotonic time.
            now_s: the same time since the epoch.

        """
        source, reason = self._source, self._not_ready()
        shown = await self._clients.pressing(text, limit)
        described = await self._clients.describe(shown.rows, now_ms)
        return {
            "version": __version__,
            "at": iso(now_s),
            "uptime_s": round((now_ms - self._started_ms) / 1000.0, 1),
            "ready": reason is None,
            "not_ready_reason": reason,
            "throttle_mode": source.throttle_mode(),
            "listeners": [asdict(listener) for listener in source.listeners()],
            "cluster_answers": source.cluster_answers(),
            "brokers": [asdict(broker) for broker in source.brokers()],
            "delay_queues": dict(source.delay_queues()),
            "config_loads": [
                {"at": iso(load.at_s), "result": load.result, "message": load.message}
                for load in source.config_loads()
            ],
            "bounded": shown.total,
            "throttled": shown.throttled,
            "held": shown.held,
            "clients": [
                {**document, "history": self._history.document(row)}
                for row, document in zip(shown.rows, described, strict=True)
            ],
            **(await self._clients.unbounded(text, limit)),
            "followed": len(self._queries.documents()),
            "queries": self._queries.summaries(now_s),
            "pipelines_total": len(self._pipelines.documents()),
            "pipelines": self._pipelines.summaries(),
        }
