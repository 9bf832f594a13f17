"""Describes budgets, and what clients have of them."""

from metrics.clock import MS_PER_SECOND
from proxy.admin.written_values import picked, rounded
from proxy.quota.budget_rows import BudgetRow
from proxy.quota.meter import BudgetPart
from proxy.state import Document

_PARTS = ("budget", "weight", "guaranteed", "ceiling", "fair_share", "borrowed", "lent")


def budget_document(row: BudgetRow) -> Document:
    """Return one rate of a budget with what its clients have of it."""
    share = row.budget.share
    return {
        "name": row.budget.name,
        "parent": None if share is None else share.budget.name,
        "quota": str(row.kind),
        "unit": row.kind.unit.name,
        "rate": round(row.rate, 1),
        "leased": rounded(row.leased),
        **picked(row, "bound", "guaranteed", "active_clients", "waiting", "enforced"),
        **picked(row, "throttled", "holds"),
        "held_s": round(row.held_ms / MS_PER_SECOND, 3),
    }


def part_document(part: BudgetPart | None) -> Document:
    """Return what a client has of a budget; of one without a budget all is None."""
    if part is None:
        return dict.fromkeys((*_PARTS, "waits_for"))
    figures = {key: rounded(getattr(part, key)) for key in ("fair_share", "borrowed", "lent")}
    return {**picked(part, *_PARTS, "waits_for"), **figures}
