"""Which rules and budgets are in force at a time, and with which rates."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Self

from .entities import QuotaKind
from .rules import Budget, QuotaSettings, Rule, Share, guarantees_of
from .schedules import Schedule


@dataclass(frozen=True, slots=True)
class ScheduledSettings:
    """Settings at a time."""

    settings: QuotaSettings
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
        settings: QuotaSettings,
        at_s: float,
        overridden: Mapping[str, Budget] = MappingProxyType({}),
    ) -> Self:
        """Return what of the settings is in force at a time of the Unix epoch.

        `overridden` has what is in the place of budgets of the file, by their names.
        """
        whens = ((title, part.when) for title, part in parts_of(settings.rules).items())
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
            _InForce(are_in, overridden).settings(settings),
            {title: are_in[when] for title, when in parts.items()},
            {title: told[when] for title, when in parts.items()},
            at_s,
            min(changes).timestamp() if changes else math.inf,
        )


def parts_of(rules: Iterable[Rule]) -> dict[str, Rule]:
    """Return rules, and the budgets that they are in, by their titles."""
    found: dict[str, Rule] = {}
    for rule in rules:
        found |= {each.title: each for each in (rule, *rule.budgets_around())}
    return found


def budgets_of(rules: Iterable[Rule]) -> dict[str, Budget]:
    """Return the budgets that rules are in, by their names."""
    return {each.name: each for each in parts_of(rules).values() if isinstance(each, Budget)}


@dataclass(frozen=True, slots=True)
class _InForce:
    """Leaves out what is not in force."""

    are_in: dict[Schedule | None, bool]
    overridden: Mapping[str, Budget]
    guaranteed: dict[str, float] = field(default_factory=dict)
    """To the clients of each budget in all, by its name."""
    budgets: dict[str, Budget] = field(default_factory=dict)

    def settings(self, settings: QuotaSettings) -> QuotaSettings:
        """Return settings; of rules for the same clients that with a schedule goes first."""
        chosen: dict[tuple[str, ...], Rule] = {}
        for rule in sorted(settings.rules, key=lambda each: each.when is None):
            if self.are_in[rule.when] and self._is_bounded(rule):
                chosen.setdefault((*rule.keys, *rule.keys.values()), rule)
        self.guaranteed.update(
            {each.name: guaranteed for each, guaranteed in guarantees_of(chosen.values())}
        )
        by_number = sorted(chosen.values(), key=lambda each: each.number)
        return replace(settings, rules=tuple(map(self._rule, by_number)))

    def _rates(self, part: Rule) -> Mapping[QuotaKind, float]:
        """Return the bounds in force of a rule or budget itself."""
        return part.bounds if self.are_in[part.when] else {}

    def _is_bounded(self, part: Rule) -> bool:
        """Return whether a bound is in force, its own or of a budget around it."""
        share = part.share
        if isinstance(part, Budget):
            part = self.overridden.get(part.name, part)
        return bool(self._rates(part)) or (share is not None and self._is_bounded(share.budget))

    def _rule(self, rule: Rule) -> Rule:
        share = self._share(rule.share)
        return rule if share == rule.share else replace(rule, share=share)

    def _share(self, share: Share | None) -> Share | None:
        if share is None or not self._is_bounded(share.budget):
            return None
        return replace(share, budget=self._budget(share.budget))

    def _budget(self, budget: Budget) -> Budget:
        if budget.name not in self.budgets:
            budget = self.overridden.get(budget.name, budget)
            share = self._share(budget.share)
            if share is not None:
                share = replace(share, guaranteed=self.guaranteed[budget.name])
            self.budgets[budget.name] = replace(budget, bounds=self._rates(budget), share=share)
        return self.budgets[budget.name]
