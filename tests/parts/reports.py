"""The JSON of reports on Spark queries, as a driver's QuotaListener sends it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from proxy.progress.report import Report, parse_report

TIMESTAMP = "2026-01-02T03:04:05.678Z"

Offsets = int | Mapping[int, int] | None
"""By partition; a number alone is of partition 0, None says nothing of any."""


def uuid(word: str) -> str:
    """Return the UUID that stands for a word."""
    return str(UUID(bytes=word.encode().ljust(16, b"\0")[:16]))


def parsed(document: Mapping[str, Any]) -> Report:
    return parse_report(json.dumps(document).encode())


def source_document(
    topic: str, start: Offsets, end: Offsets, rows: int, latest: Offsets = None
) -> dict[str, Any]:
    """Return one of the `sources` of a batch."""
    return {
        "description": f"KafkaV2[Subscribe[{topic}]]",
        "start": _by_topic(start, topic),
        "end": _by_topic(end, topic) or {},
        "latest": _by_topic(latest, topic),
        "rows": rows,
    }


def batch_document(
    batch_id: int,
    start: Offsets,
    end: Offsets,
    topic: str = "t",
    *,
    latest: Offsets = None,
    rows: int = 0,
    source_rows: int | None = None,
    took_ms: int = 1,
    timestamp: str = TIMESTAMP,
) -> dict[str, Any]:
    """Return the `batch` of a report; its one source has all rows, unless told otherwise."""
    source_rows = rows if source_rows is None else source_rows
    return {
        "batch_id": batch_id,
        "timestamp": timestamp,
        "rows": rows,
        "durations_ms": {"triggerExecution": took_ms},
        "sources": [source_document(topic, start, end, source_rows, latest)],
    }


def _by_topic(offsets: Offsets, topic: str) -> dict[str, dict[str, int]] | None:
    if offsets is None:
        return None
    partitions = {0: offsets} if isinstance(offsets, int) else offsets
    return {topic: {str(partition): offset for partition, offset in partitions.items()}}


@dataclass
class ReportingDriver:
    """The driver of one query, which numbers its reports."""

    name: str | None = "orders"
    client_id: str | None = None
    query_id: str = uuid("query")
    run_id: str = uuid("run-1")
    sender: str = uuid("sender")
    number: int = 0

    def document(self, event: str, **more: Any) -> dict[str, Any]:
        """Return the next report; a heartbeat has no number."""
        self.number += event != "running"
        return {
            "sender": self.sender,
            "number": self.number if event != "running" else None,
            "event": event,
            "query_id": self.query_id,
            "run_id": self.run_id,
            "name": self.name,
            "client_id": self.client_id,
            "age_ms": 0.0,
            "batch": None,
            "error": None,
            **more,
        }
