"""Shows recorded changes, and what a rule is before and after one."""

from collections.abc import Iterator

from proxy.admin.audit import AuditLog
from proxy.admin.client_documents import iso
from proxy.quota.rule_sources import RuleEntry
from proxy.state import Document

SHOWN_CHANGES = 20
"""How many the status has."""


def change_documents(
    audit: AuditLog, text: str = "", limit: int = SHOWN_CHANGES
) -> tuple[int, Iterator[Document]]:
    """Return how many changes have `text` (lower case), and the newest of them, as documents."""
    found = list(audit.latest(text))
    return len(found), (
        {**change.model_dump(exclude={"at_s"}), "at": iso(change.at_s)} for change in found[:limit]
    )


def rule_shown(entry: RuleEntry | None) -> Document | None:
    """Return what a rule sets, in the words of the configuration; None for no rule.

    `enforce` and `until` are there where they are not what most rules have.
    """
    if entry is None:
        return None
    rule = entry.rule
    shown: dict[str, object] = {
        **{str(kind): kind.unit.format(bound) for kind, bound in rule.bounds.items()},
        "scope": rule.scope,
        "source": str(entry.source),
        "by": entry.by,
    }
    if not rule.enforce:
        shown["enforce"] = False
    if entry.until_s is not None:
        shown["until"] = iso(entry.until_s)
    return shown
