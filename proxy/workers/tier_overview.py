"""Describe the tier as this machine knows it: who owns what, what that carries, who is reached."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from proxy.members.member_names import machine_of
from proxy.membership.assignment import Assignment
from proxy.state import Document


def tier_overview(
    tier: str,
    machine: str,
    assignment: Assignment,
    silent: Collection[str],
    unreached: Mapping[str, str],
) -> Document:
    """Return what `GET /v1/tier` answers, of the group's newest decision.

    `silent` are machines that do not answer this one, `unreached` says of machines why clients may
    not reach them.
    """
    owners, loads = assignment.slot_map.owners, assignment.loads
    members: list[dict[str, Any]] = []
    for name in sorted(assignment.slot_map.members):
        own = [slot for slot, owner in enumerate(owners) if owner == name]
        carried = [loads[slot].share for slot in own if slot in loads]
        members.append(
            {
                "name": name,
                "machine": machine_of(name),
                "owned": len(own),
                "releasing": Counter(assignment.releasing.values())[name],
                "awaiting": Counter(assignment.targets.values())[name],
                "load": round(sum(carried), 3) if carried else None,
                "slots": own,
            }
        )
    machines = [
        {
            "name": name,
            "rules": each.rules_digest,
            "admin_url": each.admin_url,
            "answers": None if name == machine else name not in silent,
            "problem": unreached.get(name),
        }
        for name, each in sorted(assignment.machines.items())
    ]
    return {
        "name": tier,
        "machine": machine,
        "generation": assignment.generation,
        "settled": assignment.is_settled,
        "slots": len(owners),
        "members": members,
        "machines": machines,
    }
