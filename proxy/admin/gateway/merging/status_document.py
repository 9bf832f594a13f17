"""Puts the status of all members together as that of one proxy."""

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.admin.gateway.merging.lists import STATUS_TABLE
from proxy.admin.gateway.merging.member_documents import MemberDocument, OwnerOf


def merged_status(
    told: Sequence[MemberDocument],
    limit: int,
    owner_of: OwnerOf,
    not_ready: str | None = None,
    warning: str | None = None,
) -> dict[str, Any]:
    """Return `/v1/status`; the first document is of the member that writes what concerns all.

    `not_ready` and `warning` are of the gateway itself.
    """
    reasons = [f"member {each}: {why}" for each, why in _said(told, "not_ready_reason")]
    reason = not_ready or "; ".join(reasons) or None
    # Each of them is in the same cluster, so that most warnings are the same at all.
    warnings = [warning, *(each for _, each in _said(told, "warning"))]
    return {
        **STATUS_TABLE.merged(told, limit, owner_of),
        "ready": reason is None,
        "not_ready_reason": reason,
        "warning": "; ".join(dict.fromkeys(filter(None, warnings))) or None,
    }


def member_figures(told: MemberDocument, slots: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what the table of members shows of one that answered; `slots`: of its slots."""
    document = told.document
    counts = document["client_counts"]
    return {
        "name": told.member,
        "alive": True,
        "answers": True,
        "ready": document["ready"],
        "problem": document["not_ready_reason"],
        "uptime_s": document["uptime_s"],
        "connections": sum(each["connections"] for each in document["listeners"]),
        "waiting": sum(document["delay_queues"].values()),
        "clients": counts["bounded"],
        "throttled": counts["throttled"],
        "queries": document["followed"],
        **({"slots": slots} if slots is not None else {}),
    }


def _said(told: Sequence[MemberDocument], key: str) -> list[tuple[str, str]]:
    return [(each.member, each.document[key]) for each in told if each.document[key]]
