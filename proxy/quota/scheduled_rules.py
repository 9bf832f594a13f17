"""Which rules and budgets are in force at a time, and with which rates."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Self

from .entities import QuotaKind
from .rules import Budget, QuotaManagerSettings, Rule, Share, guarantee_sums_by_budget
from .schedules import Schedule


@dataclass(frozen=True, slots=True)
class ScheduledSettings:
    """Settings at a time."""

    settings: QuotaManagerSettings
    """With the rules in force, whose budgets have the rates in force."""
    scheduled: dict[str, bool]
    """Of the rules and budgets with a schedule, by their titles, whether a time of theirs is."""
    told: dict[str, str] = field(default_factory=dict)
    """Of the same, by the same, until when they are in force, or when they begin."""
    since_s: float = -math.inf
    """From this time of the Unix epoch on all that is so."""
    until_s: float = math.inf
    """And before this one."""

    @classmethod
    def at(
        cls,
        settings: QuotaManagerSettings,
        at_s: float,
        overridden: Mapping[str, Budget] = MappingProxyType({}),
    ) -> Self:
        """Return what of the settings is in force at a time of the Unix epoch.

        `overridden` has what is in the place of budgets of the file, by their names.
        """
        whens = ((title, part.when) for title, part in by_title(settings.rules).items())
        parts = {title: when for title, when in whens if when is not None}
        if not (parts or overridden):
            return cls(settings, {})
        at = datetime.fromtimestamp(at_s, UTC)
        schedules = set(parts.values())
        are_in: dict[Schedule | None, bool] = {when: when.is_in(at) for when in schedules}
        are_in[None] = True
        told = {when: when.told(at) for when in schedules}
        changes = [change for when in schedules if (change := when.next_change(at)) is not None]
        return cls(
            _in_force(settings, are_in, overridden),
            {title: are_in[when] for title, when in parts.items()},
            {title: told[when] for title, when in parts.items()},
            at_s,
            min(changes).timestamp() if changes else math.inf,
        )


def by_title(rules: Iterable[Rule]) -> dict[str, Rule]:
    """Return rules, and the budgets that they are in, by their titles."""
    found: dict[str, Rule] = {}
    for rule in rules:
        found |= {each.title: each for each in (rule, *rule.budgets_around())}
    return found


def budgets_of(rules: Iterable[Rule]) -> dict[str, Budget]:
    """Return the budgets that rules are in, by their names."""
    return {each.name: each for each in by_title(rules).values() if isinstance(each, Budget)}


def _in_force(
    settings: QuotaManagerSettings,
    are_in: Mapping[Schedule | None, bool],
    overridden: Mapping[str, Budget],
) -> QuotaManagerSettings:
    """Return settings without the rules, budgets and rates that are not in force.

    Of rules for the same clients that with a schedule goes first.
    """
    known = {**budgets_of(settings.rules), **overridden}
    budgets: dict[str, Budget] = {}

    def rates(part: Rule) -> Mapping[QuotaKind, float]:
        return part.bounds if are_in[part.when] else {}

    def is_bounded(part: Rule) -> bool:
        """Return whether a rate is in force for it, its own or of a budget that it is in."""
        return bool(rates(part)) or (
            part.share is not None and is_bounded(known[part.share.budget.name])
        )

    def shared(share: Share | None) -> Share | None:
        budget = None if share is None else budgets.get(share.budget.name)
        return replace(share, budget=budget) if share and budget else None

    chosen: dict[tuple[str, ...], Rule] = {}
    for rule in sorted(settings.rules, key=lambda each: each.when is None):
        if are_in[rule.when] and is_bounded(rule):
            chosen.setdefault((*rule.keys, *rule.keys.values()), rule)
    for each, guaranteed in guarantee_sums_by_budget(chosen.values()):
        budget = known[each.name]
        if is_bounded(budget):
            share = shared(budget.share)
            share = share and replace(share, guaranteed=guaranteed)
            budgets[budget.name] = replace(budget, bounds=rates(budget), share=share)
    by_number = sorted(chosen.values(), key=lambda each: each.number)
    shares = ((rule, shared(rule.share)) for rule in by_number)
    rules = (rule if rule.share == share else replace(rule, share=share) for rule, share in shares)
    return replace(settings, rules=tuple(rules))
