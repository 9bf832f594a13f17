"""Real progress and backpressure of queries over real quotas, on virtual time."""

from collections.abc import Callable
from typing import Any

from parts.quota_world import QuotaWorld

from metrics.exposition import MetricRows, MetricTable, MetricTableCollector
from proxy.backpressure.backpressure import OF_BOUNDS, Backpressure
from proxy.progress.query import ProgressSettings, QuerySettings
from proxy.progress.query_registry import AcceptedReport, QueryRegistry
from proxy.progress.report import ALL_QUERIES, Report, ReportableQueries
from proxy.wire.layout import run_generator


class QueryWorld(QuotaWorld):
    """What a proxy knows of its queries."""

    def open_queries(
        self,
        settings: ProgressSettings,
        *,
        knows_client: Callable[[str], bool] = lambda _: True,
        on_event: Callable[[Any], object] = lambda _: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Make what a process keeps of queries, over the quotas that it has."""
        self.registry = QueryRegistry(settings, on_event, knows_client)
        self.backpressure = Backpressure(self.quotas, on_change)
        self.show((OF_BOUNDS, self.backpressure.shown))

    def show(self, *tables: tuple[MetricTable, Callable[[], MetricRows]]) -> None:
        """Let Prometheus read these."""
        self.prometheus.register(MetricTableCollector(tables, lambda: self.now_ms, 100))

    def accept_report(
        self, report: Report, scope: ReportableQueries = ALL_QUERIES
    ) -> AcceptedReport:
        accepted = run_generator(
            self.registry.accepting(report, self.now_ms, self.now_s, scope=scope)
        )
        self.backpressure.record_report(accepted, self.now_ms)
        return accepted


def configured(*names: str, **more: Any) -> ProgressSettings:
    """Return settings of queries whose client ids are their names."""
    queries = tuple(
        QuerySettings(name=name, client_id=name, commit_group=f"{name}-progress") for name in names
    )
    return ProgressSettings(queries=queries, **more)


def learn_end(
    registry: QueryRegistry, topic: str, partition: int, offset: int, now_ms: float
) -> None:
    """Have all readers of a partition know a log end that the proxy has looked up."""
    for each in registry.readers_of(topic, partition):
        each.record_lookup_end(offset, now_ms, client_saw_it=False)
