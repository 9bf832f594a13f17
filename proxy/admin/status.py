"""One document with all that the status page and `quota-proxy top` show."""

import time

from metrics.clock import MS_PER_SECOND
from proxy.admin.admin_parts import AdminParts
from proxy.admin.client_documents import ClientDocuments
from proxy.admin.pipeline_documents import summaries
from proxy.admin.request_times import without_histograms
from proxy.admin.written_values import iso
from proxy.release import VERSION
from proxy.state import Document


async def status_document(
    parts: AdminParts,
    clients: ClientDocuments,
    text: str,
    limit: int,
    *,
    by_client: bool,
    started_ms: float,
    histograms: bool,
) -> Document:
    """Return the status of a program that started at a monotonic time.

    `text`, `limit` and `by_client` choose the clients, as in `ClientDocuments.fields`;
    `histograms` keeps those of the request times.
    """
    now_ms, now_s, queries = parts.clock_ms(), time.time(), parts.queries
    reason = parts.why_not_ready()
    sensors, fields = await clients.fields(text, limit, by_client=by_client, history=parts.history)
    pipelines = await queries.pipelines()
    changes_total, changes = parts.audit.documents()
    slots = {} if parts.tier is None else parts.tier.slots()
    return {
        "version": VERSION,
        "at": iso(now_s),
        "uptime_s": round((now_ms - started_ms) / MS_PER_SECOND, 1),
        "ready": reason is None,
        "not_ready_reason": reason,
        "warning": parts.warnings(),
        **parts.relay(),
        **sensors,
        **fields,
        "followed": len(await queries.documents()),
        "queries": await queries.summaries(now_s),
        "pipelines_total": len(pipelines),
        "pipelines": summaries(pipelines),
        "request_times": [
            each if histograms else without_histograms(each) for each in parts.request_times()
        ],
        "changes_total": changes_total,
        "changes": list(changes),
        **({"slots": slots} if slots else {}),
    }
