"""The queries that the tests run on a real Spark, and what hears of them."""

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

from proxy.spark import QuotaListener

QUERY_TIMEOUT_S = 60


class WatchedListener(QuotaListener):
    """Tells of each callback that Spark need wait for no more."""

    def __init__(self, url: str, **arguments: Any) -> None:
        super().__init__(url, **arguments)
        self.returned: SimpleQueue[None] = SimpleQueue()

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        self._call(super().onQueryStarted, event)

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        self._call(super().onQueryProgress, event)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        self._call(super().onQueryIdle, event)

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        self._call(super().onQueryTerminated, event)

    def _call(self, callback: Callable[[Any], None], event: Any) -> None:
        callback(event)
        self.returned.put(None)


def write(frame: Any, name: str, checkpoint: Path, output: Path | None = None) -> DataStreamWriter:
    """Begin a query that writes JSON files to `output`, or nothing."""
    writer = frame.writeStream.queryName(name).option("checkpointLocation", str(checkpoint))
    if output is None:
        return writer.format("noop")
    return writer.format("json").option("path", str(output))


def finish(query: StreamingQuery) -> None:
    assert query.awaitTermination(QUERY_TIMEOUT_S)
