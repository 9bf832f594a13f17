"""What a member keeps of its queries, and who asks the cluster for them."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Self

from structlog import get_logger

from metrics import Instruments
from proxy.backpressure.backpressure import Backpressure
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.pipeline.graph import PipelineSettings
from proxy.pipeline.running import RunningPipelines
from proxy.progress.committer import Committer
from proxy.progress.events import ALARMS, ProgressEvent
from proxy.progress.log_ends import LogEnds
from proxy.progress.query import ProgressSettings
from proxy.progress.query_registry import QueryRegistry
from proxy.quota.manager import QuotaManager

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class QueryParts:
    """The parts that `Queries` wires; the first three have records in the state."""

    registry: QueryRegistry
    backpressure: Backpressure
    pipelines: RunningPipelines
    committer: Committer
    log_ends: LogEnds
    to_write: asyncio.Event
    """Set when there are records that are to be written at once."""

    @classmethod
    def make(
        cls,
        progress: ProgressSettings,
        pipelines: Iterable[PipelineSettings],
        quotas: QuotaManager,
        bootstrap: Bootstrap,
        instruments: Instruments,
    ) -> Self:
        """Return the parts of one member, that know of no query yet."""
        to_write = asyncio.Event()
        registry = QueryRegistry(progress, _log_event)
        backpressure = Backpressure(quotas, to_write.set)
        running = RunningPipelines(
            pipelines,
            registry,
            backpressure,
            quotas,
            instruments,
            on_change=to_write.set,
        )
        committer = Committer(registry, partial(KafkaClient, bootstrap))
        log_ends = LogEnds(registry, KafkaClient(bootstrap))
        return cls(registry, backpressure, running, committer, log_ends, to_write)


def _log_event(event: ProgressEvent) -> None:
    log = _log.warning if event.kind in ALARMS else _log.info
    about = {"query": event.query, "topic": event.topic, "partition": event.partition}
    log(event.text, kind=str(event.kind), **about)
