"""The parts of the program that the admin port shows and changes."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from prometheus_client import CollectorRegistry

from metrics.clock import clock_ms, cpu_ms
from proxy.admin.audit import AuditLog
from proxy.admin.document_models import RowContext
from proxy.admin.history import RateHistory
from proxy.admin.query_documents import QueryDocuments
from proxy.queries.queries import Queries
from proxy.quota.manager import QuotaManager
from proxy.quota.rule_registry import RuleRegistry
from proxy.relay.connection_list import ConnectionList
from proxy.slices import TimeSlicer
from proxy.state import Document
from proxy.tier.tier_member import TierMember
from proxy.usage.observed_usage import ObservedUsage

LONG_REPORTS = 16  # read or parsed at a time, of some MiB each


@dataclass(kw_only=True)
class AdminParts:
    """The parts. Whoever made `history` takes its samples, whoever made `audit` closes it."""

    metrics: CollectorRegistry
    member: str
    """The name that each sample of `metrics` is shown with."""
    readiness: Callable[[], tuple[str | None, str | None]]
    """Gives why clients can't be served now, and what is wrong although they can; None: nothing."""
    tier: TierMember | None = None
    observe: Callable[[float], Awaitable[ObservedUsage]] | None = None
    """Gives what usage records say of the last so many seconds; None: none are written."""
    quotas: QuotaManager
    rules: RuleRegistry
    relay: Callable[[], Document]
    """Gives what the status shows of listeners, brokers and the configuration."""
    history: RateHistory
    request_times: Callable[[], Sequence[Document]] = tuple
    clock_ms: Callable[[], float] = clock_ms
    """The monotonic time that `quotas` is fed with."""
    cpu_ms: Callable[[], float] = cpu_ms
    reports: Queries
    audit: AuditLog
    connections: ConnectionList
    long_reports: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(LONG_REPORTS), init=False
    )
    slices: TimeSlicer = field(default_factory=TimeSlicer, init=False)
    queries: QueryDocuments = field(init=False)

    def __post_init__(self) -> None:
        self.queries = QueryDocuments(self.reports, self.slices, self.clock_ms, self.cpu_ms)

    def now(self, adaptive: Mapping[str, Document] = MappingProxyType({})) -> RowContext:
        """Return what rows are described by now."""
        rules = self.rules.composed
        return RowContext(
            time.time(), self.clock_ms(), rules.in_force, rules.of_file.told, adaptive
        )

    def problems(self) -> tuple[str | None, str | None]:
        """Return why clients should go elsewhere, and what is wrong although they can be served."""
        tier = (None, None) if self.tier is None else (self.tier.not_ready, self.tier.warning)
        reason, warning = (
            "; ".join(filter(None, each)) or None
            for each in zip(tier, self.readiness(), strict=True)
        )
        return reason, warning
