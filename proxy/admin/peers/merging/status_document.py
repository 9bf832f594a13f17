"""Puts the status of all members together as that of one proxy."""

from typing import Any

from proxy.admin.peers.merging.lists import STATUS_TABLE
from proxy.admin.peers.merging.member_documents import MemberDocument, MemberDocuments, OwnerOf
from proxy.state import Document

OWN_SLOTS = "slots"
"""The key of what the status of one member says of its own slots."""


def merged_status(
    documents: MemberDocuments, limit: int, owner_of: OwnerOf, tier: Document | None
) -> dict[str, Any]:
    """Return `/v1/status`; the first document is the leader's, `tier` what is known of the tier."""
    reasons = [f"member {each}: {why}" for each, why in _reported(documents, "not_ready_reason")]
    # Each of them is in the same cluster, so that most warnings are the same at all.
    warnings = [part for _, text in _reported(documents, "warning") for part in text.split("; ")]
    if tier is not None:
        warnings += differing_rules(tier)
    merged = STATUS_TABLE.merged(documents, limit, owner_of)
    merged.pop(OWN_SLOTS, None)
    return {
        **merged,
        "ready": not reasons,
        "not_ready_reason": "; ".join(reasons) or None,
        "warning": "; ".join(dict.fromkeys(warnings)) or None,
        **({} if tier is None else {"tier": tier}),
    }


def member_figures(of_member: MemberDocument) -> dict[str, Any]:
    """Return what the table of members shows of one that answered."""
    document = of_member.document
    counts = document["client_counts"]
    return {
        "ready": document["ready"],
        "problem": document["not_ready_reason"],
        "uptime_s": document["uptime_s"],
        "connections": sum(each["connections"] for each in document["listeners"]),
        "waiting": sum(document["delay_queues"].values()),
        "clients": counts["bounded"],
        "throttled": counts["throttled"],
        "queries": document["followed"],
        **({OWN_SLOTS: document[OWN_SLOTS]} if document.get(OWN_SLOTS) else {}),
    }


def differing_rules(tier: Document) -> list[str]:
    """Return what is wrong where the machines do not go by the same rules."""
    known = [each for each in tier.get("machines", ()) if each.get("rules")]
    if len({each["rules"] for each in known}) <= 1:
        return []
    listed = ", ".join(f"{each['name']} by {each['rules']:.12}" for each in known)
    return [f"the machines go by different rules: {listed}; give all the same configuration"]


def _reported(documents: MemberDocuments, key: str) -> list[tuple[str, str]]:
    return [(each.member, each.document[key]) for each in documents if each.document[key]]
