"""Keeps the state of pipelines: read at the start, written when it changes, read again at times."""

import asyncio
from collections.abc import Callable, Collection, Iterable
from itertools import chain

from structlog import get_logger

from proxy.state import Record, StateError, StateWriter, Store

from .completion_records import LEDGER_RECORDS
from .controller import FLOW_RECORDS
from .running_pipeline import RunningPipeline

REAPPLY_MS = 5_000.0
"""How often the state of the flow is read and applied again."""

_log = get_logger(__name__)


class PipelineState:
    """The records of all pipelines. Nothing is kept before `load`, nor after `close`."""

    def __init__(self, clock_ms: Callable[[], float]) -> None:
        self._clock_ms = clock_ms
        self._store: Store | None = None
        self._writer: StateWriter | None = None
        self._reapply_ms = clock_ms() + REAPPLY_MS
        self._unwritten: dict[str, Record | None] = {}
        """By key; None: to be deleted."""

    def load(self, store: Store, pipelines: Collection[RunningPipeline]) -> None:
        """Give the pipelines what an earlier process kept there; write there from now."""
        self._store, self._writer = store, StateWriter(store)
        flow, ledger = store.items(FLOW_RECORDS.prefix), store.items(LEDGER_RECORDS["root"].prefix)
        kept = tuple(chain.from_iterable(map(_prefixes, pipelines)))
        strays = [record.key for record in (*flow, *ledger) if not record.key.startswith(kept)]
        for key in strays:
            _log_refused(f"{key}: there is no such pipeline any more; deleted")
        store.put_many((), delete=strays)
        for each in pipelines:
            of_flow, of_ledger = map(_under, (flow, ledger), _prefixes(each))
            for problem in each.load(of_flow, of_ledger, self._clock_ms()):
                _log_refused(problem)

    def forget(self, pipeline: RunningPipeline) -> None:
        """Delete all records of a pipeline with the next `keep`: no other may take them up."""
        _, gone = pipeline.completion.changes()
        gone += map(pipeline.completion.records.key, pipeline.completion.records.items())
        gone += [FLOW_RECORDS.key(pipeline.name, node) for node in pipeline.graph.nodes]
        gone += [key for key in self._unwritten if key.startswith(_prefixes(pipeline))]
        self._unwritten.update(dict.fromkeys(gone))

    async def keep(self, pipelines: Iterable[RunningPipeline]) -> None:
        """Write what has changed; what can't be written is tried again."""
        for each in pipelines:
            for records, deleted in (each.flow.changes(), each.completion.changes()):
                self._unwritten.update(dict.fromkeys(deleted))
                self._unwritten.update({record.key: record for record in records})
        if self._writer is None or not self._unwritten:
            return
        writing, self._unwritten = self._unwritten, {}
        try:
            await self._writer.put_many(
                [record for record in writing.values() if record is not None],
                delete=[key for key, record in writing.items() if record is None],
            )
        except StateError as error:
            self._unwritten = writing | self._unwritten
            _log.error("state of pipelines not kept, trying again", error=str(error))

    async def reapply(self, pipelines: Iterable[RunningPipeline]) -> None:
        """Read the state of the flow again, at a fixed period."""
        if self._clock_ms() < self._reapply_ms or self._store is None:
            return
        self._reapply_ms = self._clock_ms() + REAPPLY_MS
        running = list(pipelines)  # others may come and go meanwhile
        try:
            records = await asyncio.to_thread(self._store.items, FLOW_RECORDS.prefix)
        except StateError as error:
            _log.error("state of pipelines not read", error=str(error))
            return
        for each in running:
            each.load_flow(_under(records, each.flow.prefix), self._clock_ms())

    async def close(self) -> None:
        """Keep nothing more: the store may be closed then."""
        writer, self._writer, self._store = self._writer, None, None
        if writer is not None:
            await writer.close()


def _prefixes(pipeline: RunningPipeline) -> tuple[str, str]:
    return pipeline.flow.prefix, pipeline.completion.records.prefix


def _under(records: Iterable[Record], prefix: str) -> list[Record]:
    return [record for record in records if record.key.startswith(prefix)]


def _log_refused(problem: str) -> None:
    _log.warning("state of a pipeline not taken up", problem=problem)
