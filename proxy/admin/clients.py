"""Describes bounded clients: rate, bound, holds, and which rule it is and why."""

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from heapq import nlargest
from itertools import islice

from proxy.admin.history import share
from proxy.admin.queries import Queries
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import QuotaRow
from proxy.quota.rulebook import RuleBook, RuleEntry
from proxy.quota.rules import Rule
from proxy.quota.selector import selector

MS_PER_SECOND = 1000.0

FRESH_MS = 500.0
"""How long measured rows are shown again: with 10,000 sensors they take some 60 ms to make, and
many may be looking."""

Document = dict[str, object]


class Clients:
    """Reads the quota manager and the rule book; writes documents for JSON.

    Args:
        quotas: whose sensors are shown.
        rules: says where their rules come from.
        queries: says what is behind an adaptive bound.

    """

    def __init__(self, quotas: QuotaManager, rules: RuleBook, queries: Queries) -> None:
        self._quotas = quotas
        self._rules = rules
        self._queries = queries
        self._rows: list[QuotaRow] = []
        self._stale_ms = -math.inf

    def rows(self, now_ms: float) -> list[QuotaRow]:
        """Return a row for each sensor, measured at most `FRESH_MS` ago."""
        if now_ms >= self._stale_ms:
            self._rows = self._quotas.snapshot(now_ms)
            self._stale_ms = now_ms + FRESH_MS
        return self._rows

    def describe(self, rows: Iterable[QuotaRow], now_ms: float) -> list[Document]:
        """Return the document of each row."""
        in_force = self._in_force()
        return [{**_row(row, in_force, now_ms), **self._adaptive(row)} for row in rows]

    def explain(self, row: QuotaRow) -> list[Document]:
        """Return for each connected client the rules that were looked at, and what came of it."""
        in_force = self._in_force()
        return [
            {**_client(client), "quotas": self._considered(client, in_force)}
            for client in row.clients
        ]

    def unbounded(self, text: str, limit: int) -> Document:
        """Return how many connected clients no rule bounds, and which; arguments as `pressing`."""
        clients = self._quotas.unbounded()
        found = (client for client in clients if _names(client, text))
        return {
            "unbounded": len(clients),
            "unbounded_clients": _clients(tuple(islice(found, limit))),
        }

    def _considered(self, client: ClientIdentity, in_force: dict[str, RuleEntry]) -> list[Document]:
        considered = self._quotas.explain(client)
        return [
            {
                "quota": str(kind),
                "rules": [
                    {
                        **_rule(each.rule, in_force),
                        "bound": each.rule.bounds[kind],
                        "chosen": each.chosen,
                        "reason": each.reason,
                    }
                    for each in considered
                    if each.kind is kind
                ],
            }
            for kind in QuotaKind
        ]

    def _adaptive(self, row: QuotaRow) -> Document:
        if row.static_bound is None:
            return {"static_bound": None, "adaptive": None}
        known = self._queries.adaptive().get(row.entity, {})
        return {
            "static_bound": row.static_bound,
            "adaptive": {
                "rate_records": known.get("rate"),
                "bound": row.bound,
                "reason": row.reason,
                "bound_age_s": known.get("bound_age_s"),
            },
        }

    def _in_force(self) -> dict[str, RuleEntry]:
        return {
            selector(entry.rule.keys): entry for entry in self._rules.entries() if entry.in_force
        }


def pressing(rows: Iterable[QuotaRow], text: str, limit: int) -> list[QuotaRow]:
    """Return the rows to look at first: the throttled, then those closest to their bound.

    Args:
        rows: all of them.
        text: lower case; only rows that have it in their entity, or in the user or client id of a
            connected client. Empty: every row.
        limit: at most so many; 0 or more.

    """
    found = (row for row in rows if _mentions(row, text))
    return nlargest(limit, found, key=lambda row: (row.throttled, share(row)))


def is_held(row: QuotaRow, now_ms: float) -> bool:
    """Return whether a response of this sensor waits now."""
    return row.hold_until_ms is not None and row.hold_until_ms > now_ms


def iso(at_s: float | None) -> str | None:
    """Write a time since the epoch as ISO 8601 in UTC, to the second."""
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")


def rule_entry(entry: RuleEntry) -> Document:
    """Return a rule with where it comes from, as `GET /v1/quotas` shows it."""
    rule = entry.rule
    return {
        "selector": selector(rule.keys),
        "keys": rule.keys,
        "scope": rule.scope,
        "bounds": {str(kind): bound for kind, bound in rule.bounds.items()},
        "source": str(entry.source),
        "title": rule.title,
        "place": rule.place,
        "by": entry.by,
        "at": iso(entry.at_s),
        "in_force": entry.in_force,
    }


def _row(row: QuotaRow, in_force: dict[str, RuleEntry], now_ms: float) -> Document:
    percent = row.kind is QuotaKind.REQUEST_PERCENTAGE
    ends_ms = row.hold_until_ms if row.hold_until_ms is not None else now_ms
    return {
        "entity": row.entity,
        "quota": str(row.kind),
        "unit": "percent" if percent else "bytes_per_second",
        "rate": round(row.rate, 1),
        "bound": row.bound,
        "window_s": round(row.window_ms / MS_PER_SECOND, 3),
        "throttled": row.throttled,
        "holds": row.holds,
        "held_s": round(row.held_ms / MS_PER_SECOND, 3),
        "hold_ends_in_s": (
            round((ends_ms - now_ms) / MS_PER_SECOND, 3) if is_held(row, now_ms) else None
        ),
        "rule": _rule(row.rule, in_force),
        "client_count": row.client_count,
        "clients": _clients(row.clients),
    }


def _clients(clients: Sequence[ClientIdentity]) -> list[Document]:
    return [_client(client) for client in clients]


def _client(client: ClientIdentity) -> Document:
    return {"listener": client.listener, "user": client.user, "client_id": client.client_id}


def _rule(rule: Rule, in_force: dict[str, RuleEntry]) -> Document:
    """Name a rule; a sensor may still be under one that has gone, which has no source then."""
    name = selector(rule.keys)
    entry = in_force.get(name)
    return {
        "selector": name,
        "title": rule.title,
        "place": rule.place,
        "source": str(entry.source) if entry else None,
        "by": entry.by if entry else None,
        "at": iso(entry.at_s) if entry else None,
    }


def _mentions(row: QuotaRow, text: str) -> bool:
    return text in row.entity.lower() or any(_names(client, text) for client in row.clients)


def _names(client: ClientIdentity, text: str) -> bool:
    """Return whether a lower-case text is in the client id or the user."""
    return text in (client.client_id or "").lower() or text in (client.user or "").lower()
