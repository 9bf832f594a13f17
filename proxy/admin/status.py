"""One document with all that the status page and `quota-proxy top` show."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from metrics.clock import MS_PER_SECOND
from proxy.admin.audit import AuditLog
from proxy.admin.client_documents import ClientDocuments
from proxy.admin.history import History
from proxy.admin.pipeline_documents import summaries
from proxy.admin.query_documents import QueryDocuments
from proxy.admin.request_times import without_histograms
from proxy.admin.rule_documents import throttling_document
from proxy.admin.written_values import iso, picked
from proxy.release import VERSION
from proxy.state import Document

NotReady = Callable[[], str | None]
"""Gives the reason why the proxy can't serve clients now, None when it can; or a warning."""


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


@dataclass(frozen=True, slots=True)
class CertificateStatus:
    """A certificate that the proxy shows to clients or to brokers."""

    section: str
    """Where the configuration names it."""
    file: str
    not_after_s: float
    """When it expires, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """What the rest of the program is at this moment."""

    listeners: Sequence[ListenerStatus]
    brokers: Sequence[BrokerStatus]
    cluster_answers: bool
    """Whether the cluster answered when it was last asked."""
    delay_queues: Mapping[str, int]
    """How many responses are held, by API family."""
    config_loads: Sequence[ConfigLoad]
    """The latest, the newest first; a handful."""
    throttle_mode: str
    """`delay` or `mute`."""
    certificates: Sequence[CertificateStatus] = ()
    """Those in force."""

    def document(self) -> Document:
        """Return it for JSON."""
        document = asdict(self)
        for key, time in (("config_loads", "at"), ("certificates", "not_after")):
            for each in document[key]:
                each[time] = iso(each.pop(f"{time}_s"))
        return document


@dataclass(frozen=True, slots=True)
class Status:
    """Builds the document."""

    relay: Callable[[], RelayStatus]
    not_ready: NotReady
    clients: ClientDocuments
    history: History
    queries: QueryDocuments
    audit: AuditLog
    started_ms: float
    """When the proxy started, on the monotonic clock."""
    warning: NotReady = lambda: None
    """Gives what is wrong although clients can be served."""
    request_times: Callable[[], Sequence[Document]] = tuple
    slots: Callable[[], Document] = dict  # of a member of a tier

    async def document(
        self,
        text: str,
        limit: int,
        now_ms: float,
        now_s: float,
        *,
        by_client: bool,
        histograms: bool = False,
    ) -> Document:
        """Return the status at a time: on the monotonic clock, and since the epoch.

        `text`, `limit` and `by_client` choose the clients, as in
        `ClientDocuments.closest_to_bound`; `histograms` keeps those of the request times.
        """
        reason = self.not_ready()
        found = await self.clients.closest_to_bound(text, limit, by_client=by_client)
        described = await self.clients.describe_found(found, now_ms, self.history)
        pipelines = await self.queries.pipelines()
        changes_total, changes = self.audit.documents()
        return {
            "version": VERSION,
            "at": iso(now_s),
            "uptime_s": round((now_ms - self.started_ms) / MS_PER_SECOND, 1),
            "ready": reason is None,
            "not_ready_reason": reason,
            "warning": self.warning(),
            **self.relay().document(),
            "throttling": throttling_document(self.clients.rules, now_s),
            "bounded": found.total,
            **picked(found, "throttled", "held"),
            "client_counts": asdict(found.clients),
            "clients": described,
            **(await self.clients.unbounded(text, limit)),
            "followed": len(await self.queries.documents()),
            "queries": await self.queries.summaries(now_s),
            "pipelines_total": len(pipelines),
            "pipelines": summaries(pipelines),
            "request_times": [
                each if histograms else without_histograms(each) for each in self.request_times()
            ],
            "changes_total": changes_total,
            "changes": list(changes),
            **({"slots": slots} if (slots := self.slots()) else {}),
        }
