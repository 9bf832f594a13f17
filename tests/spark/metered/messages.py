"""Usage records as a member of the proxy writes them."""

import json
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession

MINUTE_MS = 60_000
FIRST = date(2026, 10, 1)
"""The first day of all that is told."""


def end_ms(day: int, minute: int = 1) -> int:
    """A time on the `day`th day after FIRST, in UTC."""
    midnight = datetime(FIRST.year, FIRST.month, FIRST.day, tzinfo=UTC) + timedelta(day)
    return int(midnight.timestamp()) * 1000 + minute * MINUTE_MS


def record(sequence: int, day: int = 0, minute: int = 1, **changes: Any) -> dict[str, Any]:
    """A record of a minute."""
    end = end_ms(day, minute)
    return {
        "schema_version": 1,
        "member": "host/0",
        "epoch": end_ms(0, 0),
        "sequence": sequence,
        "start_ms": end - MINUTE_MS,
        "end_ms": end,
        "listener": "default",
        "user": None,
        "client_id": "etl",
        "hashed": False,
        "rule": None,
        "budget": None,
        "topic": "orders",
        "direction": "read",
        "bytes": 1000,
        "requests": 1,
        "connections": 0,
        "held_seconds": 0.0,
        "would_be_seconds": 0.0,
        "sampled": False,
        "rates": {},
        "peak": 0.0,
        **changes,
    }


def as_messages(spark: SparkSession, values: Iterable[object]) -> DataFrame:
    """What Spark's Kafka source gives of these: records, or bytes, or None."""
    rows = []
    for offset, value in enumerate(values):
        body = json.dumps(value).encode() if isinstance(value, dict) else value
        ended = value.get("end_ms", 0) if isinstance(value, dict) else end_ms(0)
        written = datetime.fromtimestamp(ended / 1000, UTC)
        rows.append((body, "usage", 0, offset, written))
    schema = "value binary, topic string, partition int, offset long, timestamp timestamp"
    return spark.createDataFrame(rows, schema)
