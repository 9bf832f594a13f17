"""A pipeline at work of whose queries and clients nothing is known."""

from prometheus_client import CollectorRegistry

from metrics import Instruments
from proxy.backpressure.backpressure import Backpressure
from proxy.pipeline.graph import PipelineGraph, PipelineSettings
from proxy.pipeline.running_pipeline import RunningPipeline
from proxy.progress.query import ProgressSettings
from proxy.progress.query_registry import QueryRegistry
from proxy.quota.manager import QuotaManager
from proxy.quota.rules import QuotaManagerSettings
from proxy.state import UnwrittenRecords


def lone_pipeline(settings: PipelineSettings, now_ms: float, now_s: float) -> RunningPipeline:
    registry = QueryRegistry(ProgressSettings(), lambda _: None, lambda _: True)
    quotas = QuotaManager(QuotaManagerSettings(), Instruments(CollectorRegistry()))
    return RunningPipeline(
        *(PipelineGraph(settings), registry, Backpressure(quotas), quotas),
        UnwrittenRecords(),
        now_ms=now_ms,
        now_s=now_s,
    )
