"""What the command `check` prints of budgets: what each share of one comes to."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from proxy.quota.entities import FORESEEN_KINDS, QuotaKind
from proxy.quota.rules import Budget, Rule
from proxy.quota.shares import Claim, divide
from proxy.quota.values import SIZE_UNITS

INDENT = "  "


def explain_budgets(rules: Sequence[Rule]) -> Iterator[str]:
    """Yield the budgets of rules, and what their clients get: when all want more, and alone.

    A rule that has a share for each of its clients is taken to have one client.
    """
    parts: defaultdict[str, dict[str, Rule]] = defaultdict(dict)
    outermost: dict[str, Budget] = {}
    for rule in rules:
        part = rule
        for budget in rule.budgets_around():
            parts[budget.name].setdefault(part.title, part)
            part = budget
        if isinstance(part, Budget):
            outermost[part.name] = part
    for budget in outermost.values():
        for kind in sorted(FORESEEN_KINDS & budget.bounds.keys()):
            rate = kind.unit.format(budget.bounds[kind])
            yield f"{budget.title}: {kind} {rate} for all its clients together"
            yield from _explain_parts(budget, budget.bounds[kind], kind, parts, INDENT)


def _explain_parts(
    budget: Budget,
    rate: float,
    kind: QuotaKind,
    parts: dict[str, dict[str, Rule]],
    indent: str,
) -> Iterator[str]:
    members = [each for each in parts[budget.name].values() if each.share is not None]
    claims = [
        Claim(each.share.weight, each.share.guaranteed, each.ceilings[kind])
        for each in members
        if each.share is not None
    ]
    for each, share in zip(members, divide(rate, claims), strict=True):
        name = each.title if isinstance(each, Budget) else f"{each.title}, {each.shared_entity}"
        one = ", if it has one client" if each.is_open else ""
        alone = _rate(each.ceilings[kind])
        yield f"{indent}{name}: {_rate(share)} when all want more{one}; {alone} alone"
        if isinstance(each, Budget):
            yield from _explain_parts(each, share, kind, parts, indent + INDENT)


def _rate(rate: float) -> str:
    return f"{rate / SIZE_UNITS['MiB']:.4g}MiB per second"
