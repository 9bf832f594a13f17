"""pyspark's own events, as its two ways make them: from the JVM, and from Spark Connect's JSON."""

import json
import uuid
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    SinkProgress,
    SourceProgress,
    StreamingQueryProgress,
)

TIMESTAMP = "2026-01-02T03:04:05.678Z"
DURATIONS_MS = {"triggerExecution": 1234, "addBatch": 1000}
ROWS = 4
DESCRIPTION = "KafkaV2[Subscribe[t]]"


class Run:
    """One run of a query, and the events that Spark would make of it."""

    def __init__(self, name: str | None, query_id: uuid.UUID | None = None) -> None:
        self.name = name
        self.query_id = query_id or uuid.uuid4()
        self.run_id = uuid.uuid4()

    def started(self) -> QueryStartedEvent:
        return QueryStartedEvent(self.query_id, self.run_id, self.name, TIMESTAMP)

    def idle(self) -> QueryIdleEvent:
        return QueryIdleEvent(self.query_id, self.run_id, TIMESTAMP)

    def terminated(self, exception: str | None = None) -> QueryTerminatedEvent:
        return QueryTerminatedEvent(self.query_id, self.run_id, exception, None)

    def batch(self, batch_id: int = 0) -> QueryProgressEvent:
        """Give the progress event of a batch of `ROWS` records of one partition."""
        start = json.dumps({"t": {"0": batch_id * ROWS}}) if batch_id else "None"
        end = json.dumps({"t": {"0": batch_id * ROWS + ROWS}})
        return self.progress(batch_id, source(start, end, end))

    def progress(self, batch_id: int, *sources: SourceProgress) -> QueryProgressEvent:
        return QueryProgressEvent(
            StreamingQueryProgress(
                id=self.query_id,
                runId=self.run_id,
                name=self.name,
                timestamp=TIMESTAMP,
                batchId=batch_id,
                batchDuration=1234,
                durationMs=dict(DURATIONS_MS),
                eventTime={},
                stateOperators=[],
                sources=list(sources),
                sink=SinkProgress("sink", ROWS, {}),
                numInputRows=ROWS,
                inputRowsPerSecond=1.0,
                processedRowsPerSecond=1.0,
                observedMetrics={},
            )
        )

    def connect_progress(self, batch_id: int, start: Any, end: Any) -> QueryProgressEvent:
        """Give the event as Spark Connect's client makes it of JSON."""
        progress = {
            "id": str(self.query_id),
            "runId": str(self.run_id),
            "name": self.name,
            "timestamp": TIMESTAMP,
            "batchId": batch_id,
            "batchDuration": 1234,
            "durationMs": DURATIONS_MS,
            "stateOperators": [],
            "sources": [
                {
                    "description": DESCRIPTION,
                    "startOffset": start,
                    "endOffset": end,
                    "latestOffset": end,
                    "numInputRows": ROWS,
                    "inputRowsPerSecond": 1.0,
                    "processedRowsPerSecond": 1.0,
                }
            ],
            "sink": {"description": "sink", "numOutputRows": ROWS},
        }
        return QueryProgressEvent.fromJson({"progress": progress})


def source(start: Any, end: Any, latest: Any, description: str = DESCRIPTION) -> SourceProgress:
    return SourceProgress(description, start, end, latest, ROWS, 1.0, 1.0, {})
