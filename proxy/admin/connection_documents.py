"""Describes the open connections: whose each is, how much it moves, and what holds it."""

import time
from collections.abc import Iterator, Mapping

from metrics.clock import MS_PER_SECOND
from proxy.admin.admin_parts import AdminParts
from proxy.admin.history import Largest
from proxy.admin.rule_documents import rule_name
from proxy.admin.written_values import iso, picked, rounded
from proxy.quota.rule_registry import RuleEntry
from proxy.relay.connection_list import ConnectionHold, ConnectionRow
from proxy.state import Document


async def connections_document(
    parts: AdminParts, text: str, limit: int, after: int | None
) -> Document:
    """Return at most `limit` open connections with `text`, in lower case, in what names them.

    Those with most traffic come first; with `after` those with higher numbers than that, in the
    order of their numbers.
    """
    found: Largest[ConnectionRow] = Largest(limit)
    counts = dict.fromkeys(("total", "held", "matching"), 0)

    def choose() -> Iterator[None]:
        for row in parts.connections.rows():
            counts["total"] += 1
            counts["held"] += row.hold is not None
            if _is_named(row, text) and (after is None or row.number > after):
                counts["matching"] += 1
                found.add(row.rate if after is None else -row.number, row)
            yield

    now_ms, now_s = parts.clock_ms(), time.time()
    await parts.slices.collect(choose())
    in_force = parts.rules.in_force()
    documents = await parts.slices.collect(
        _connection(row, in_force, now_ms, now_s) for row in found.descending()
    )
    return {**counts, "connections": documents}


def _is_named(row: ConnectionRow, text: str) -> bool:
    names = (row.client_id, row.user, row.ip, row.listener)
    return any(text in (name or "").lower() for name in names)


def _connection(
    row: ConnectionRow, in_force: Mapping[str, RuleEntry], now_ms: float, now_s: float
) -> Document:
    age_s = max(now_ms - row.began_ms, 0.0) / MS_PER_SECOND
    return {
        "id": row.number,
        "address": row.ip,
        **picked(row, "port", "listener", "user", "client_id", "node_id", "broker"),
        **picked(row, "state", "in_flight"),
        "since": iso(now_s - age_s),
        "age_s": round(age_s, 1),
        "received_rate": rounded(row.received_rate),
        "sent_rate": rounded(row.sent_rate),
        "held": None if row.hold is None else _hold(row.hold, in_force, now_ms, now_s),
    }


def _hold(
    hold: ConnectionHold, in_force: Mapping[str, RuleEntry], now_ms: float, now_s: float
) -> Document:
    until_ms = hold.until_ms
    left_s = None if until_ms is None else max(until_ms - now_ms, 0.0) / MS_PER_SECOND
    return {
        "where": hold.where,
        "quota": None if hold.kind is None else str(hold.kind),
        "entity": hold.entity,
        "rule": None if hold.rule is None else rule_name(hold.rule, in_force),
        "until": None if left_s is None else iso(now_s + left_s),
        "ends_in_s": rounded(left_s, 3),
    }
