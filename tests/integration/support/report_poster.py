"""Reports on a query that a test posts by itself, in place of a listener."""

import json
import urllib.error
import urllib.request
from typing import Any
from uuid import uuid4

from parts.reports import ReportingDriver, batch_document
from support.proxy_process import WAIT_S, ProxyProcess


class ReportPoster:
    """Posts reports by hand, as a listener does that may be late, or lie."""

    def __init__(self, running: ProxyProcess, topic: str, name: str) -> None:
        """They are on a topic's one partition, and a query of this name and client id."""
        self.running = running
        self.topic = topic
        self.driver = ReportingDriver(name, None, *(str(uuid4()) for _ in range(3)))

    def event(self, event: str = "progress", **fields: Any) -> dict[str, Any]:
        """Make a report that is right but for these fields."""
        return self.driver.document(event, **fields)

    def batch(
        self,
        number: int,
        start: int | None,
        end: int,
        fields: dict[str, Any] | None = None,
        rows: int = 5,
    ) -> dict[str, Any]:
        """Make a batch of the partition."""
        made = batch_document(number, start, end, self.topic, rows=rows, took_ms=100)
        return made | (fields or {})

    def post(self, report: dict[str, Any] | bytes) -> tuple[int, dict[str, Any]]:
        """Send it; return status and answer."""
        body = report if isinstance(report, bytes) else json.dumps(report).encode()
        request = urllib.request.Request(
            f"{self.running.admin_url}/v1/spark/batches",
            data=body,
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
