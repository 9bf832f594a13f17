"""One document with all that the status page and `quota-proxy top` show."""

import time
from dataclasses import asdict

from metrics.clock import MS_PER_SECOND
from proxy.admin.admin_parts import AdminParts
from proxy.admin.client_documents import ClientDocuments
from proxy.admin.pipeline_documents import summaries
from proxy.admin.request_times import without_histograms
from proxy.admin.rule_documents import throttling_document
from proxy.admin.written_values import iso, picked
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

    `text`, `limit` and `by_client` choose the clients, as in `ClientDocuments.closest_to_bound`;
    `histograms` keeps those of the request times.
    """
    now_ms, now_s, queries = parts.clock_ms(), time.time(), parts.queries
    reason = parts.why_not_ready()
    found = await clients.closest_to_bound(text, limit, by_client=by_client)
    described = await clients.describe_found(found, parts.history)
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
        "throttling": throttling_document(parts.rules, now_s),
        "bounded": found.total,
        **picked(found, "throttled", "held"),
        "client_counts": asdict(found.clients),
        "clients": described,
        **(await clients.unbounded(text, limit)),
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
