"""The queries that the tests run on a real Spark, and what hears of them."""

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

from proxy.spark import QuotaListener

QUERY_TIMEOUT_S = 60


class TimedListener(QuotaListener):
    """Keeps how long Spark had to wait for each callback."""

    def __init__(self, url: str, **arguments: Any) -> None:
        super().__init__(url, **arguments)
        self.took_s: list[float] = []

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        self._time(super().onQueryStarted, event)

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        self._time(super().onQueryProgress, event)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        self._time(super().onQueryIdle, event)

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        self._time(super().onQueryTerminated, event)

    def _time(self, callback: Callable[[Any], None], event: Any) -> None:
        began_s = monotonic()
        callback(event)
        self.took_s.append(monotonic() - began_s)


def write(frame: Any, name: str, checkpoint: Path, output: Path | None = None) -> DataStreamWriter:
    """Begin a query that writes JSON files to `output`, or nothing."""
    writer = frame.writeStream.queryName(name).option("checkpointLocation", str(checkpoint))
    if output is None:
        return writer.format("noop")
    return writer.format("json").option("path", str(output))


def finish(query: StreamingQuery) -> None:
    assert query.awaitTermination(QUERY_TIMEOUT_S)
