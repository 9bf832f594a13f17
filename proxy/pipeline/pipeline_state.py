"""Keeps the state of pipelines: read at the start, written when it changes, read again at times."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from structlog import get_logger

from proxy.state import Record, StateError, StateWriter, Store

from . import completion_records, controller
from .recovery import Recovery
from .running_pipeline import RunningPipeline

FLOW_RECORDS = f"{controller.NAMESPACE}/"
LEDGER_RECORDS = f"{completion_records.NAMESPACE}/"

_log = get_logger(__name__)


class PipelineState:
    """The records of all pipelines. Nothing is kept before `load`, nor after `close`."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._writer: StateWriter | None = None
        self._unwritten: dict[str, Record | None] = {}
        """By key; None: to be deleted."""

    def load(self, store: Store, lines: Mapping[str, RunningPipeline], now_ms: float) -> None:
        """Give the pipelines, by name, what an earlier process kept there; write there from now."""
        self._store, self._writer = store, StateWriter(store)
        flow, ledger = store.items(FLOW_RECORDS), store.items(LEDGER_RECORDS)
        kept = tuple(
            prefix
            for line in lines.values()
            for prefix in (line.flow.prefix, line.completion.prefix)
        )
        strays = [record.key for record in (*flow, *ledger) if not record.key.startswith(kept)]
        for key in strays:
            _say_refused(f"{key}: there is no such pipeline any more; deleted")
        store.put_many((), delete=strays)
        for line in lines.values():
            kept_ledger = _under(ledger, line.completion.prefix)
            if kept_ledger:
                line.recovery = Recovery(now_ms)
            problems = line.completion.load(kept_ledger, now_ms)
            problems += line.flow.load(_under(flow, line.flow.prefix), now_ms)
            for problem in problems:
                _say_refused(problem)
            line.apply(line.flow.reapply(now_ms))

    def forget(self, line: RunningPipeline) -> None:
        """Delete all records of a pipeline with the next `keep`: no other may take them up."""
        _, gone = line.completion.changes()
        gone += [record.key for record in line.completion.snapshot()]
        gone += [controller.record_key(line.name, node) for node in line.graph.nodes]
        prefixes = (line.flow.prefix, line.completion.prefix)
        gone += [key for key in self._unwritten if key.startswith(prefixes)]
        self._unwritten.update(dict.fromkeys(gone))

    async def keep(self, lines: Iterable[RunningPipeline]) -> None:
        """Write what has changed; what can't be written is tried again."""
        for line in lines:
            for records, deleted in (line.flow.changes(), line.completion.changes()):
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

    async def reapply(
        self, lines: Iterable[RunningPipeline], clock_ms: Callable[[], float]
    ) -> None:
        """Read the state of the flow again and apply it, at a fixed period."""
        now_ms = clock_ms()
        due = [line for line in lines if line.flow.reapply_due(now_ms)]
        if not due or self._store is None:
            return
        try:
            records = await asyncio.to_thread(self._store.items, FLOW_RECORDS)
        except StateError as error:
            _log.error("state of pipelines not read", error=str(error))
            records = None
        for line in due:
            if records is not None:
                line.flow.load(_under(records, line.flow.prefix), clock_ms())
            line.apply(line.flow.reapply(clock_ms()))

    async def close(self) -> None:
        """Keep nothing more: the store may be closed then."""
        writer, self._writer, self._store = self._writer, None, None
        if writer is not None:
            await writer.close()


def _under(records: Iterable[Record], prefix: str) -> list[Record]:
    return [record for record in records if record.key.startswith(prefix)]


def _say_refused(problem: str) -> None:
    _log.warning("state of a pipeline not taken up", problem=problem)
